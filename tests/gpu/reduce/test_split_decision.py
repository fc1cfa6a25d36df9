# SPDX-License-Identifier: Apache-2.0
"""Splits and finishes by a machine: estimates against machine code, choices, and what is kept."""

from __future__ import annotations

import functools
import json
import statistics
from dataclasses import replace
from typing import Any

import pytest
from tvm.target import Target

from examples.benchmarks.predict_gpu import MACHINES, OUTPUT
from examples.benchmarks.reduction_cases import BYTES, Case, all_cases
from schedules.cost.decisions import deciding_for, predict, recorded
from schedules.cost.machine import Figure, Machine, load_machine
from schedules.errors import PredictionError
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.reduce.plan.configure import choose_config
from schedules.gpu.reduce.plan.group_workload import (
    GroupWorkload,
    ReductionWorkload,
    StageWorkload,
)
from schedules.gpu.reduce.plan.sister_space import LEAST_GAIN, is_sister_setting, streaming_call
from schedules.workload.reduce import CanonicalLoops

STORED: dict[str, Any] = json.loads(OUTPUT.read_text())
CASES = {case.name: case for case in all_cases()}
H100 = load_machine("h100")


def workload(case: Case, finish: str = "auto") -> GroupWorkload:
    """The group of a case whose reductions share their loops."""
    found, sources = [], set()
    for reduction in case.reductions:
        runs = case.loops(reduction).runs
        axes = tuple(axis for axis, (kind, _) in enumerate(runs) if kind == "R")
        loops = CanonicalLoops(tuple(int(str(extent)) for _, extent in runs), axes)
        one = replace(case.workload(reduction, finish), axes=axes, keepdims=False)
        found.append(ReductionWorkload(one, loops))
        named = {int(step.split()[1]) for step in reduction.steps if step[:3] in ("add", "mul")}
        sources |= {reduction.source} | named
    sizes = (BYTES[case.dtype],) * len(sources)
    return GroupWorkload((StageWorkload(tuple(found), 0),), sizes, sizes)


def one_row(elements: int, finish: str = "auto") -> GroupWorkload:
    case = replace(CASES["paper4/16226304"], shape=(elements,))
    return workload(case, finish)


@functools.lru_cache
def gpu(arch: str) -> GPUInfo:
    return GPUInfo.from_target(Target({"kind": "cuda", "arch": arch}, host="llvm"))


def blocks(group: GroupWorkload, config: Any) -> int:
    return -(-int(group.outputs) // config.tile_outputs) * config.splits


def test_estimates_are_close_to_those_by_machine_code() -> None:
    """The latter are from the listing of the same kernel, by the same formula."""
    errors = []
    for name, stored in STORED.items():
        group = workload(CASES[name])
        for machine, found in stored["machines"].items():
            config = choose_config(group, gpu(MACHINES[machine][0]))
            estimate = predict(streaming_call(group, config), load_machine(machine))
            launches = (config.finish == "atomic") * load_machine(machine)["launch_floor"]
            seconds = estimate.seconds - launches
            errors.append(abs(seconds / found["predicted"]["seconds"] - 1))
    assert statistics.median(errors) < 0.05
    assert sum(error < 0.1 for error in errors) >= 0.75 * len(errors)


def test_without_a_machine_the_grids_are_those_of_before() -> None:
    with recorded() as comparisons:
        for name, stored in STORED.items():
            group = workload(CASES[name])
            for machine, found in stored["machines"].items():
                config = choose_config(group, gpu(MACHINES[machine][0]))
                grid = blocks(group, config), config.threads
                assert grid == (found["kernel"]["blocks"], found["kernel"]["threads"]), name
    assert not comparisons


def test_choices_gain_enough_and_are_legal_settings_of_the_same_block() -> None:
    changed = 0
    for name in ("paper2/6", "paper2/8", "paper4/1024x131072", "operator/max x bool", "odd/all",
                 "grid/x float32 16x4098", "grid/y bfloat16 2048x768"):  # fmt: skip
        group = workload(CASES[name])
        default = choose_config(group, gpu("sm_90"))
        with deciding_for(H100), recorded() as comparisons:
            chosen = choose_config(group, gpu("sm_90"))
        [found] = comparisons
        assert found.subject == group.title and found.chosen in found.seconds
        *others, last = found.seconds.values()
        assert found.gain == pytest.approx(last / min(others) - 1)
        assert (chosen != default) == (found.gain >= LEAST_GAIN)
        assert found.decision == ("split" if chosen.finish == default.finish else "finish") or (
            chosen == default
        )
        assert replace(chosen, splits=1, finish="one_block") == replace(
            default, splits=1, finish="one_block"
        )
        changed += chosen != default
        assert chosen == default or is_sister_setting(group, chosen, gpu("sm_90"))
    assert 2 <= changed < 7


def test_slower_meetings_of_blocks_make_a_machine_prefer_one_block() -> None:
    group = one_row(1 << 16)
    choices = []
    for trip in (1e-9, 1e-5):
        with deciding_for(changed_machine(**{"latency.L2": trip})):
            choices.append(choose_config(group, gpu("sm_80")).finish)
    assert choices == ["last_block", "one_block"]


def changed_machine(**figures: float) -> Machine:
    more = {name: Figure(value, "test") for name, value in figures.items()}
    return replace(H100, figures={**H100.figures, **more})


def test_what_the_finish_promises_is_kept() -> None:
    with deciding_for(changed_machine(**{"latency.L2": 1e-5})):
        assert choose_config(one_row(1 << 24, "one_block"), gpu("sm_80")).finish == "one_block"
        assert choose_config(one_row(1 << 24, "atomic"), gpu("sm_90")).finish != "last_block"
    for elements in (1 << 14, 1 << 20):
        with deciding_for(H100):
            found = choose_config(one_row(elements), gpu("sm_90"), has_workspace=False)
        assert found.finish in ("one_block", "cluster")


def test_more_data_is_never_faster() -> None:
    for finish, splits in (("one_block", 1), ("last_block", 64), ("cluster", 8), ("atomic", 16)):
        times = []
        for power in range(16, 27):
            group = one_row(1 << power)
            block = choose_config(group, gpu("sm_90"))
            call = streaming_call(group, replace(block, splits=splits, finish=finish))
            times.append(predict(call, H100).seconds)
        assert times == sorted(times), finish


def test_a_missing_figure_is_named() -> None:
    figures = {name: one for name, one in H100.figures.items() if name != "latency.L2"}
    with deciding_for(replace(H100, figures=figures)):
        with pytest.raises(PredictionError, match=r"'h100' has no figure 'latency\.L2'"):
            choose_config(one_row(1 << 20), gpu("sm_90"))
