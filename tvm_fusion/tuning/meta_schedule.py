# SPDX-License-Identifier: Apache-2.0
"""MetaSchedule, TVM's own tuner, on our templates: its space, and a builder that writes the nests.

>>> database = ms.tune_tir(                                  # doctest: +SKIP
...     func, target, work_dir, 64, space=search_space(target), builder=nest_builder()
... )
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from schedules import cpu
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.rule import CPUTemplate, TunableRule
from schedules.schedule_rule import schedule_function
from schedules.tuning.tunable import decisions_of, read_setting, without_decisions

from ..errors import OpError, TuningError
from .measure import library


def search_space(target: Target) -> ms.space_generator.ScheduleFn:
    """Return the space of functions whose kernels have knobs, for a CPU.

    Each template is a design of its own. Combinations that are not in its space may come up when
    decisions are changed; they are dropped.
    """

    def open_function(sch: s_tir.Schedule) -> list[s_tir.Schedule]:
        rule, _ = _rule_of(sch.mod["main"], target)
        return rule.open(sch, target)

    return ms.space_generator.ScheduleFn(
        open_function, sch_rules=[], postprocs=[_Legal(target)], mutator_probs={}
    )


def nest_builder() -> ms.builder.PyBuilder:
    """Return a builder that writes the nests of open functions, and needs no C compiler."""
    return _NestBuilder()


def close(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Write the nest of the open function ``main``.

    Raises
    ------
    OpError
        If its knobs are not in the space.
    """
    scheduled = schedule_function("main", mod["main"], target, cpu.RULES)
    return tvm.IRModule({"main": scheduled.with_attr("global_symbol", "main")})


def _spaces(func: tirx.PrimFunc, target: Target) -> dict[str, tuple[CPUTemplate, set[Any]]]:
    """Templates of an open function, by name, with their settings."""
    machine = CPUInfo.from_target(target)
    rule, workload = _rule_of(without_decisions(func), target)
    return {
        template.name: (template, set(template.space(workload, machine)))
        for template in rule.templates(workload, machine)
    }


def _rule_of(func: tirx.PrimFunc, target: Target) -> tuple[TunableRule, Any]:
    """Return the rule that takes a function, and the workload.

    Raises
    ------
    TuningError
        If no rule with knobs takes it.
    """
    for rule in cpu.RULES:
        if isinstance(rule, TunableRule):
            workload = rule.workload(func, target)
            if workload is not None:
                return rule, workload
    raise TuningError("no template takes the function; expected a convolution or a product")


@derived_object
class _Legal(ms.postproc.PyPostproc):
    """Drops settings that the template would refuse."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.spaces: dict[str, tuple[CPUTemplate, set[Any]]] = {}

    def _initialize_with_tune_context(self, context: Any) -> None:
        pass

    def apply(self, sch: s_tir.Schedule) -> bool:
        func = sch.mod["main"]
        self.spaces = self.spaces or _spaces(func, self.target)
        templates = [template for template, _ in self.spaces.values()]
        try:
            template, values = read_setting(decisions_of(func), templates)
            return template.read_knobs(values) in self.spaces[template.name][1]
        except (OpError, ValueError):
            return False

    def clone(self) -> Any:
        return _Legal(self.target)


@derived_object
class _NestBuilder(ms.builder.PyBuilder):
    """Builds libraries in this process; TVM releases Python's lock meanwhile."""

    def build(self, build_inputs: Sequence[Any]) -> list[Any]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(_build, build_inputs))


def _build(given: Any) -> ms.builder.BuilderResult:
    try:
        folder = Path(tempfile.mkdtemp(prefix="tvm-fusion-tune-"))  # MetaSchedule removes it
        path = library(close(given.mod, given.target), given.target, folder / "kernel.so")
    except Exception as error:  # TVM and LLVM raise anything
        return ms.builder.BuilderResult(None, f"{type(error).__name__}: {error}")
    return ms.builder.BuilderResult(str(path), None)
