# SPDX-License-Identifier: Apache-2.0
"""Base classes of the CPU rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.schedule_rule import Rule
from schedules.tuning.records import RECORD, Key, Records
from schedules.tuning.template import Template

from .machine import CPUInfo

CPUTemplate = Template[Any, Any, CPUInfo]


class CPURule(Rule):
    """A schedule rule for LLVM CPUs; functions for other targets are left alone."""

    kinds = ("llvm",)


class TunableRule(CPURule):
    """A CPU rule whose kernels have knobs: those of a record, else the template's default.

    Parameters
    ----------
    records : Records
        Winners of tuning jobs.
    """

    def __init__(self, records: Records | None = None) -> None:
        self.records = records or Records()

    def workload(self, func: tirx.PrimFunc, target: Target) -> Any | None:
        """Return what the templates compute, or None if the rule does not know the function."""
        raise NotImplementedError

    def workload_json(self, workload: Any) -> str:
        """Write a workload as JSON with sorted keys."""
        raise NotImplementedError

    def templates(self, workload: Any, cpu: CPUInfo) -> Sequence[CPUTemplate]:
        """Return the templates that can compute a workload, the default's first."""
        raise NotImplementedError

    def key(self, workload: Any, cpu: CPUInfo) -> Key:
        """Return what a record of a workload must have."""
        text = self.workload_json(workload)
        return Key(text, cpu.family, cpu.vector_bits, cpu.num_cores)

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Schedule ``func`` for a CPU target with recorded knobs, else the default ones."""
        workload = self.workload(func, target)
        if workload is None:
            return None
        cpu = CPUInfo.from_target(target)
        templates = self.templates(workload, cpu)
        if self.records:
            found = self.records.find(self.key(workload, cpu), templates, workload, cpu)
            if found is not None:
                template, knobs, about = found
                return template.write(func.with_attr(RECORD, about), workload, knobs, target)
        template = templates[0]
        return template.write(func, workload, template.default(workload, cpu), target)
