# SPDX-License-Identifier: Apache-2.0
"""Base class of the GPU rules."""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx
from tvm.target import Target

from schedules.schedule_rule import RULE, Rule

from .bfloat16_bits import convert_by_bits
from .machine import KINDS, GPUInfo


class GPURule(Rule):
    """A schedule rule for CUDA and OpenCL; functions for other targets are left alone."""

    kinds = KINDS

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Return the function that ``kernel`` writes, bfloat16 by its bits if need be."""
        gpu = GPUInfo.from_target(target)
        kernel = self.kernel(func, gpu)
        if kernel is None:
            return None
        if not gpu.has_bfloat16:
            kernel = convert_by_bits(kernel)
        kernel = kernel.with_attr(RULE, type(self).__name__)
        return s_tir.Schedule(tvm.IRModule({"main": kernel}))

    def kernel(self, func: tirx.PrimFunc, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel of a function, or return None if the rule does not take it."""
        raise NotImplementedError
