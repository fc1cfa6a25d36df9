# SPDX-License-Identifier: Apache-2.0
"""Base classes of the CPU rules."""

from __future__ import annotations

from typing import Any

from tvm.target import Target

from schedules.schedule_rule import Rule
from schedules.tuning.records import Key
from schedules.tuning.template import Template
from schedules.tuning.tunable_rule import TunableRule

from .machine import CPUInfo

CPUTemplate = Template[Any, Any, CPUInfo]


class CPURule(Rule):
    """A schedule rule for LLVM CPUs; functions for other targets are left alone."""

    kinds = ("llvm",)


class TunableCPURule(TunableRule, CPURule):
    """A CPU rule whose kernels have knobs."""

    def machine(self, target: Target) -> CPUInfo:
        """Read the CPU of a target."""
        return CPUInfo.from_target(target)

    def key(self, workload: Any, machine: CPUInfo) -> Key:
        """Return what a record of a workload must have."""
        text = self.workload_json(workload)
        return Key(text, machine.name, machine.vector_bits, machine.num_cores)
