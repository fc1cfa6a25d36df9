# SPDX-License-Identifier: Apache-2.0
"""MetaSchedule, TVM's own tuner, on our templates: its space, and a builder that writes the nests.

>>> database = ms.tune_tir(                                  # doctest: +SKIP
...     func, target, work_dir, 64, space=search_space(target), builder=nest_builder()
... )
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import s_tir, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from schedules import attributes, cpu
from schedules.schedule_rule import schedule_function
from schedules.tuning.tunable import decisions_of, read_setting, without_decisions
from schedules.tuning.tunable_rule import AnyTemplate, TunableRule, tunable_rule_of

from ..errors import OpError, TuningError
from ..machine.host import physical_cores
from .measure import library


def search_space(target: Target) -> ms.space_generator.ScheduleFn:
    """Return the space of functions whose kernels have knobs, for a CPU.

    Each template is a design of its own. The evolutionary search changes one knob at a time;
    combinations that are not in the space are dropped.
    """

    def open_function(sch: s_tir.Schedule) -> list[s_tir.Schedule]:
        rule, _ = _rule_of(sch.mod["main"], target)
        return rule.open(sch, target)

    return ms.space_generator.ScheduleFn(
        open_function,
        sch_rules=[],
        postprocs=[_Legal(target)],
        mutator_probs={_OtherValue(): 1.0},
    )


def nest_builder() -> ms.builder.PyBuilder:
    """Return a builder that writes the nests of open functions, and needs no C compiler."""
    return _LinkedBuilder(close)


def stock_builder() -> ms.builder.PyBuilder:
    """Return a builder of TVM's own schedules that needs no C compiler."""
    return _LinkedBuilder(lambda mod, target: mod)


def knob_features() -> ms.feature_extractor.PyFeatureExtractor:
    """Return the knobs as features of a cost model; loops of an open function tell it nothing."""
    return _KnobFeatures()


def close(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Write the nest of the open function ``main``.

    Raises
    ------
    OpError
        If its knobs are not in the space.
    """
    scheduled = schedule_function("main", mod["main"], target, cpu.RULES)
    return tvm.IRModule({"main": scheduled.with_attr("global_symbol", "main")})


def _spaces(func: tirx.PrimFunc, target: Target) -> dict[str, tuple[AnyTemplate, set[Any]]]:
    """Templates of an open function, by name, with their settings."""
    rule, workload = _rule_of(without_decisions(func), target)
    machine = rule.machine(target)
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
    found = tunable_rule_of(func, target, cpu.RULES)
    if found is None:
        raise TuningError(
            "no template takes the function; expected a convolution, a product or a reduction"
        )
    return found


@derived_object
class _Legal(ms.postproc.PyPostproc):
    """Drops settings that the template would refuse."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.spaces: dict[str, tuple[AnyTemplate, set[Any]]] = {}

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
class _OtherValue(ms.mutator.PyMutator):
    """Draws one decision of a trace anew; MetaSchedule's own mutators leave knobs alone."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def _initialize_with_tune_context(self, context: Any) -> None:
        pass

    def apply(self, trace: Any, _: Any) -> Any:
        sampled = [inst for inst in trace.insts if inst.kind.name == "SampleCategorical"]
        inst = self.random.choice(sampled)
        chosen = self.random.randrange(len(inst.attrs[0]))
        return trace.with_decision(inst, chosen, remove_postproc=True)

    def clone(self) -> Any:
        return _OtherValue(self.random.randrange(1 << 30))


@derived_object
class _KnobFeatures(ms.feature_extractor.PyFeatureExtractor):
    """One row a candidate: the numbers of its knobs, and -1 for those of other templates."""

    def extract_from(self, context: Any, candidates: Sequence[Any]) -> list[Any]:
        tensors = []
        for candidate in candidates:
            decisions = decisions_of(candidate.sch.mod["main"])
            row = [
                decisions[attributes.KNOB + knob]
                if template.name == decisions[attributes.TEMPLATE]
                else -1
                for template in cpu.TEMPLATES.values()
                for knob in template.knob_kinds()
            ]
            tensors.append(tvm.runtime.tensor(np.array([row], dtype="float32")))
        return tensors


@derived_object
class _LinkedBuilder(ms.builder.PyBuilder):
    """Builds libraries in this process; TVM releases Python's lock meanwhile."""

    def __init__(self, written: Callable[[tvm.IRModule, Target], tvm.IRModule]) -> None:
        super().__init__()
        self.written = written

    def build(self, build_inputs: Sequence[Any]) -> list[Any]:
        with ThreadPoolExecutor(physical_cores()) as pool:
            return list(pool.map(lambda given: _build(given, self.written), build_inputs))


def _build(
    given: Any, written: Callable[[tvm.IRModule, Target], tvm.IRModule]
) -> ms.builder.BuilderResult:
    try:
        folder = Path(tempfile.mkdtemp(prefix="tvm-fusion-tune-"))  # MetaSchedule removes it
        path = library(written(given.mod, given.target), given.target, folder / "kernel.so")
    except Exception as error:  # TVM and LLVM raise anything
        return ms.builder.BuilderResult(None, f"{type(error).__name__}: {error}")
    return ms.builder.BuilderResult(str(path), None)
