# SPDX-License-Identifier: Apache-2.0
"""Base classes of the GPU rules and of their templates."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, TypeVar

import tvm
from tvm import s_tir, tirx
from tvm.target import Target

from schedules import attributes
from schedules.schedule_rule import KernelFacts, Rule
from schedules.tir.float_bits import keep_nan
from schedules.tuning.records import Key
from schedules.tuning.template import Template
from schedules.tuning.tunable_rule import TunableRule

from .bfloat16_bits import convert_by_bits
from .machine import KINDS, GPUInfo

Workload = TypeVar("Workload")
Knobs = TypeVar("Knobs")


class GPURule(Rule):
    """A schedule rule for CUDA and OpenCL; functions for other targets are left alone."""

    kinds = KINDS

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Return the function that ``kernel`` writes, bfloat16 by its bits if need be."""
        gpu = GPUInfo.from_target(facts.target)
        kernel = self.kernel(facts, gpu)
        return None if kernel is None else _finished(kernel, gpu, type(self).__name__)

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel of a function, or return None if the rule does not take it."""
        raise NotImplementedError


class GPUTemplate(Template[Workload, Knobs, GPUInfo]):
    """One family of GPU kernels with knobs.

    Attributes
    ----------
    rule : str
        Name of the rule that it belongs to.
    """

    rule: ClassVar[str]

    def write(
        self, func: tirx.PrimFunc, workload: Workload, knobs: Knobs, target: Target
    ) -> s_tir.Schedule:
        """Write the kernel of a setting, bfloat16 by its bits if need be."""
        gpu = GPUInfo.from_target(target)
        return _finished(self.kernel(func, workload, knobs, gpu), gpu, self.rule)

    def least_blocks(self, workload: Workload, knobs: Knobs, gpu: GPUInfo) -> int:
        """Return the blocks for which the compiler must find registers, at least; 0 for any number.

        Of the defaults it spills at most a few words, outside of the loops, but of some settings
        more, to fit more blocks than they ask for.
        """
        return int(knobs != self.default(workload, gpu))

    @abstractmethod
    def kernel(
        self, func: tirx.PrimFunc, workload: Workload, knobs: Knobs, gpu: GPUInfo
    ) -> tirx.PrimFunc:
        """Write the kernel of a setting."""


class TunableGPURule(TunableRule, GPURule):
    """A GPU rule whose kernels have knobs; functions of symbolic extents get default ones."""

    def machine(self, target: Target) -> GPUInfo:
        """Read the GPU of a target."""
        return GPUInfo.from_target(target)

    def key(self, workload: Any, machine: GPUInfo) -> Key:
        """Return what a record of a workload must have: lanes of a warp count as a vector."""
        text = self.workload_json(workload)
        return Key(text, machine.name, machine.warp_bits, machine.multiprocessors)

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function with recorded knobs, else as ``kernel`` does."""
        workload = self.workload(facts.func, facts.target) if self.records else None
        recorded = None if workload is None else self.recorded(facts.func, workload, facts.target)
        return recorded or GPURule.schedule(self, facts)


def _finished(kernel: tirx.PrimFunc, gpu: GPUInfo, rule: str) -> s_tir.Schedule:
    kernel = keep_nan(kernel.without_attr(attributes.CONSTANTS), "local")  # rules alone read it
    if not gpu.has_bfloat16:
        kernel = convert_by_bits(kernel)
    named = kernel if attributes.RULE in kernel.attrs else kernel.with_attr(attributes.RULE, rule)
    mod = tvm.IRModule({"main": named})
    # TVM's lowering does the same, but after passes whose time grows with accesses times lets.
    return s_tir.Schedule(s_tir.transform.StmtSimplify()(mod))
