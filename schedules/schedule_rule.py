# SPDX-License-Identifier: Apache-2.0
"""Base of all schedule rules, and the one place where a function is given to them in turn.

A rule returns None for what is not its own: its guards decide that, and no exception does. What it
raises is a defect, and never hidden (:func:`schedule_function`).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from tvm import s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target

from schedules import attributes

from .errors import CompilationError, SlowPathWarning, TVMFusionError, reason

STRICT = "TVM_FUSION_STRICT"
"""Environment variable; unless it is empty or 0, a rule that fails stops the compilation."""

_LONGEST_REASON = 300

Finding = TypeVar("Finding")


class KernelFacts:
    """A function that rules are asked about in turn, and what they have read of it.

    Parameters
    ----------
    func : tirx.PrimFunc
        The function; no rule changes it.
    target : Target
        What it is scheduled for.
    """

    def __init__(self, func: tirx.PrimFunc, target: Target) -> None:
        self.func, self.target = func, target
        self._findings: dict[Callable[[KernelFacts], Any], Any] = {}

    def read(self, reader: Callable[[KernelFacts], Finding]) -> Finding:
        """Return what ``reader`` finds, for which it is called once, whichever rules ask.

        They share it: a rule that changes it makes a copy.
        """
        if reader not in self._findings:
            self._findings[reader] = reader(self)
        return self._findings[reader]


class Rule(ScheduleRule):
    """A schedule rule for the targets of some kinds.

    Attributes
    ----------
    kinds : tuple of str
        The kinds; functions for other targets are left alone.
    """

    kinds: ClassVar[tuple[str, ...]] = ()

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool
    ) -> s_tir.Schedule | list[s_tir.Schedule] | None:
        """Schedule ``func``, or return None if the rule does not know it."""
        return self.take(KernelFacts(func, target)) if isinstance(func, tirx.PrimFunc) else None

    def take(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function by itself, or return None if the rule does not know it."""
        return self.schedule(facts) if facts.target.kind.name in self.kinds else None

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function for a target of these kinds, or return None; it stays as it is."""
        raise NotImplementedError


def schedule_function(
    name: str, func: tirx.PrimFunc, target: Target, rules: Sequence[ScheduleRule]
) -> tirx.PrimFunc:
    """Schedule a function by the first rule that takes it.

    An error of ours passes, with the kernel's name. A rule that raises anything else is passed over
    with a :class:`SlowPathWarning`, or, where the environment variable ``TVM_FUSION_STRICT`` is
    set, stops the compilation.

    Parameters
    ----------
    name : str
        The function's name in its module.
    func : tirx.PrimFunc
        The function; it is not changed.
    target : Target
        What it is scheduled for.
    rules : Sequence[ScheduleRule]
        Ours and TVM's, in the order in which they are asked.

    Returns
    -------
    tirx.PrimFunc
        The scheduled function with the rule's name in ``RULE``, or ``func`` if no rule takes it;
        with the rules that failed in ``FAILED``, if there are any.

    Raises
    ------
    CompilationError
        If a rule fails and ``TVM_FUSION_STRICT`` is set.
    """
    failed: dict[str, str] = {}
    facts = KernelFacts(func, target)
    for rule in rules:
        try:
            is_ours = isinstance(rule, Rule)
            result = rule.take(facts) if is_ours else rule.apply(func, target, False)
        except TVMFusionError as error:
            error.args = (f"{error}, in the kernel {name!r}",)
            raise  # tells the user what to do
        except Exception as error:  # a defect may show as anything
            failed[rule_name(rule)] = _reason(error)
            _report(name, rule_name(rule), error)
            continue
        if result is not None:
            schedule = result[0] if isinstance(result, list) else result
            scheduled = schedule.mod["main"].with_attr("tirx.is_scheduled", True)
            if attributes.RULE not in scheduled.attrs:
                scheduled = scheduled.with_attr(attributes.RULE, rule_name(rule))
            return _with_failed(scheduled, failed)
    return _with_failed(func, failed)


def rule_name(rule: ScheduleRule) -> str:
    """Return the name of a rule; those of TVM begin with ``dlight.``."""
    origin = "dlight." if type(rule).__module__.startswith("tvm.") else ""
    return f"{origin}{type(rule).__name__}"


def failed_rules(func: tirx.PrimFunc) -> dict[str, str]:
    """Return which rules failed on a function, and why."""
    text = func.attrs.get(attributes.FAILED_RULES) if func.attrs else None
    return {} if text is None else json.loads(str(text))


def _with_failed(func: tirx.PrimFunc, failed: Mapping[str, str]) -> tirx.PrimFunc:
    return func.with_attr(attributes.FAILED_RULES, json.dumps(failed)) if failed else func


def _report(name: str, rule: str, error: Exception) -> None:
    """Warn of a rule that failed, or raise if that is wanted."""
    told = f"the schedule rule {rule} failed on the kernel {name!r}: {_reason(error)}"
    if os.environ.get(STRICT, "0") not in ("", "0"):
        raise CompilationError(told) from error
    text = f"{told}; it is compiled without this rule, and may be slow: please report the model"
    warnings.warn(text, SlowPathWarning, stacklevel=3)


def _reason(error: Exception) -> str:
    """Return an exception in one line, with its kind."""
    kind = type(error).__name__
    text = reason(error, _LONGEST_REASON).removeprefix(f"{kind}: ")
    return kind if text == kind else f"{kind}: {text}"
