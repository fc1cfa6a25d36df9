# SPDX-License-Identifier: Apache-2.0
"""Base classes of the CPU rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.errors import OpError
from schedules.schedule_rule import Rule
from schedules.tuning.records import RECORD, Key, Records
from schedules.tuning.template import Template
from schedules.tuning.tunable import decisions_of, read_setting, sample_knobs, without_decisions

from .machine import CPUInfo

CPUTemplate = Template[Any, Any, CPUInfo]


class CPURule(Rule):
    """A schedule rule for LLVM CPUs; functions for other targets are left alone."""

    kinds = ("llvm",)


class TunableRule(CPURule):
    """A CPU rule whose kernels have knobs: those of a record, else the template's default.

    With ``tunable=True``, :meth:`apply` returns a schedule for each template instead, whose trace
    samples the knobs (:mod:`schedules.tuning.tunable`); the function has no nest yet. Applied to
    such a function, the rule writes the nest of its knobs.

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

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool
    ) -> s_tir.Schedule | list[s_tir.Schedule] | None:
        """Schedule ``func``, open it or close it; return None if the rule does not know it.

        Raises
        ------
        OpError
            If an open function has knobs that are not in the space.
        """
        if isinstance(func, tirx.PrimFunc) and target.kind.name in self.kinds:
            if tunable:
                return self.open(s_tir.Schedule(without_decisions(func)), target) or None
            decisions = decisions_of(func)
            if decisions:
                return self._close(without_decisions(func), decisions, target)
        return super().apply(func, target, tunable)

    def open(self, sch: s_tir.Schedule, target: Target) -> list[s_tir.Schedule]:
        """Return a copy of ``sch`` for each template, with knobs drawn from its space.

        There is none if the rule does not know its function ``main``.
        """
        workload = self.workload(sch.mod["main"], target)
        if workload is None:
            return []
        cpu, text = CPUInfo.from_target(target), self.workload_json(workload)
        opened: list[s_tir.Schedule] = []
        for template in self.templates(workload, cpu):
            opened.append(sch.copy())
            sample_knobs(opened[-1], template, text, template.space(workload, cpu))
        return opened

    def _close(
        self, func: tirx.PrimFunc, decisions: Mapping[str, Any], target: Target
    ) -> s_tir.Schedule | None:
        workload = self.workload(func, target)
        if workload is None:
            return None
        cpu = CPUInfo.from_target(target)
        template, values = read_setting(decisions, self.templates(workload, cpu))
        knobs = template.read_knobs(values)
        if not template.contains(workload, knobs, cpu):
            raise OpError(f"{knobs} is not in the space of {template.describe(workload)}")
        return template.write(func, workload, knobs, target)

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
