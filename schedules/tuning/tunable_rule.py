# SPDX-License-Identifier: Apache-2.0
"""Base of the rules whose kernels have knobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from tvm import s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target

from schedules import attributes
from schedules.errors import OpError
from schedules.schedule_rule import KernelFacts, Rule

from .records import Key, Records, canonical
from .template import Template
from .tunable import decisions_of, read_setting, sample_knobs, without_decisions

AnyTemplate = Template[Any, Any, Any]


class TunableRule(Rule):
    """A rule whose kernels have knobs: those of a record, else the template's default.

    With ``tunable=True``, :meth:`apply` returns a schedule for each template instead, whose trace
    samples the knobs (:mod:`schedules.tuning.tunable`); the function has no nest yet. Applied to
    such a function, the rule writes the nest of its knobs.

    Parameters
    ----------
    records : Records
        Winners of tuning jobs.

    Attributes
    ----------
    template : Template
        Template of all workloads, where there is one.
    """

    template: ClassVar[AnyTemplate]

    def __init__(self, records: Records | None = None) -> None:
        self.records = records or Records()

    def machine(self, target: Target) -> Any:
        """Read the machine of a target."""
        raise NotImplementedError

    def workload(self, func: tirx.PrimFunc, target: Target) -> Any | None:
        """Return what the templates compute, or None if the rule does not know the function."""
        raise NotImplementedError

    def workload_json(self, workload: Any) -> str:
        """Write a workload, a dataclass, as JSON with sorted keys."""
        return canonical(asdict(workload))

    def templates(self, workload: Any, machine: Any) -> Sequence[AnyTemplate]:
        """Return the templates that can compute a workload, the default's first."""
        return (self.template,)

    def preferred(self, workload: Any, machine: Any) -> Sequence[AnyTemplate]:
        """Return those of the templates that records leave, the default's first."""
        return self.templates(workload, machine)

    def key(self, workload: Any, machine: Any) -> Key:
        """Return what a record of a workload must have."""
        raise NotImplementedError

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool
    ) -> s_tir.Schedule | list[s_tir.Schedule] | None:
        """Schedule ``func``, open it or close it; return None if the rule does not know it.

        Raises
        ------
        OpError
            If an open function has knobs that are not in the space.
        """
        if tunable and isinstance(func, tirx.PrimFunc) and target.kind.name in self.kinds:
            return self.open(s_tir.Schedule(without_decisions(func)), target) or None
        return super().apply(func, target, tunable)

    def take(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function, by its knobs if it is open; return None if it is of another rule."""
        if facts.target.kind.name in self.kinds and (decisions := facts.read(_decisions)):
            return self._close(without_decisions(facts.func), decisions, facts.target)
        return super().take(facts)

    def open(self, sch: s_tir.Schedule, target: Target) -> list[s_tir.Schedule]:
        """Return a copy of ``sch`` for each template, with knobs drawn from its space.

        There is none if the rule does not know its function ``main``.
        """
        workload = self.workload(sch.mod["main"], target)
        if workload is None:
            return []
        machine, text = self.machine(target), self.workload_json(workload)
        opened: list[s_tir.Schedule] = []
        for template in self.templates(workload, machine):
            opened.append(sch.copy())
            sample_knobs(opened[-1], template, text, template.space(workload, machine))
        return opened

    def _close(
        self, func: tirx.PrimFunc, decisions: Mapping[str, Any], target: Target
    ) -> s_tir.Schedule | None:
        workload = self.workload(func, target)
        if workload is None:
            return None
        machine = self.machine(target)
        template, values = read_setting(decisions, self.templates(workload, machine))
        knobs = template.read_knobs(values)
        if not template.contains(workload, knobs, machine):
            raise OpError(f"{knobs} is not in the space of {template.describe(workload)}")
        return template.write(func, workload, knobs, target)

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function with recorded knobs, else the default ones."""
        func, target = facts.func, facts.target
        workload = self.workload(func, target)
        if workload is None:
            return None
        return self.recorded(func, workload, target) or self._default(func, workload, target)

    def recorded(self, func: tirx.PrimFunc, workload: Any, target: Target) -> s_tir.Schedule | None:
        """Schedule ``func`` by the record of its workload; None if there is none."""
        found = self.find(workload, target)
        if found is None:
            return None
        template, knobs, about = found
        return template.write(func.with_attr(attributes.RECORD, about), workload, knobs, target)

    def find(self, workload: Any, target: Target) -> tuple[AnyTemplate, Any, str] | None:
        """Find the template and the knobs of a workload, and the record's text for reports."""
        if not self.records:
            return None
        machine = self.machine(target)
        templates = self.preferred(workload, machine)
        return self.records.find(self.key(workload, machine), templates, workload, machine)

    def _default(self, func: tirx.PrimFunc, workload: Any, target: Target) -> s_tir.Schedule:
        machine = self.machine(target)
        template = self.preferred(workload, machine)[0]
        return template.write(func, workload, template.default(workload, machine), target)


def _decisions(facts: KernelFacts) -> dict[str, Any]:
    return decisions_of(facts.func)


def tunable_rule_of(
    func: tirx.PrimFunc, target: Target, rules: Iterable[ScheduleRule]
) -> tuple[TunableRule, Any] | None:
    """Return the rule that schedules a function, and the workload; None if it has no knobs.

    A rule may take a function and give it none: a product of a vector is no workload of
    matrix products, nor one of the reductions that are asked later.
    """
    for rule in rules:
        if isinstance(rule, TunableRule):
            workload = rule.workload(func, target)
            if workload is not None:
                return rule, workload
        if rule.apply(func, target, False) is not None:
            return None
    return None
