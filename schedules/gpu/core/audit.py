# SPDX-License-Identifier: Apache-2.0
"""Rules that note their names in what they schedule."""

from __future__ import annotations

from collections.abc import Iterable

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target

from .kernel_function import RULE


class Recorded(ScheduleRule):
    """A rule that records its name in the functions that it schedules."""

    def __init__(self, rule: ScheduleRule):
        self.rule = rule

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool
    ) -> s_tir.Schedule | list[s_tir.Schedule] | None:
        """Apply the rule."""
        found = self.rule.apply(func, target, tunable)
        if found is None:
            return None
        schedules = found if isinstance(found, list) else [found]
        return [self._note(schedule) for schedule in schedules]

    def _note(self, schedule: s_tir.Schedule) -> s_tir.Schedule:
        main = schedule.mod["main"]
        if RULE in main.attrs:
            return schedule
        module = type(self.rule).__module__
        origin = "dlight." if module.startswith("tvm.") else ""
        main = main.with_attr(RULE, f"{origin}{type(self.rule).__name__}")
        return s_tir.Schedule(tvm.IRModule({"main": main}))


def recorded(rules: Iterable[ScheduleRule]) -> list[ScheduleRule]:
    """The rules, each noting its name in the attribute ``tvm_fusion.rule`` of its functions."""
    return [Recorded(rule) for rule in rules]
