# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmarks of PyTorch's lookups and trainings: steps, batches and states by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from examples.benchmarks import predict_lookups, predict_resharding, predict_training
from examples.benchmarks.predict_training import (
    between,
    record,
    typical_step,
    without_profiler,
)
from examples.benchmarks.prediction import rank_trainings, timed_steps, trainings
from examples.benchmarks.prediction.gloo_ranks import start_ranks
from examples.benchmarks.prediction.timed_steps import time_steps
from examples.benchmarks.prediction.trainings import TRAININGS, training_step
from schedules.cost.machine import load_machine
from tvm_fusion.prediction.api import load_traces
from tvm_fusion.prediction.timeline.execution_graph import (
    HOST,
    Collective,
    ExecutionGraph,
    Kernel,
    Launch,
    Op,
)

US = 1e-6


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests run beside each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def graph(*micros: float, names: str = "ab", events: int = 0) -> ExecutionGraph:
    """Operators ``a`` and ``b`` in turn, each a kernel of the host."""
    ops = []
    for number, time in enumerate(micros):
        kernel = Kernel(-1 - number, "k", time * US, HOST)
        name = names[number % len(names)]
        ops.append(Op(name, (Launch(kernel),), gap=None, events=(events,)))
    return ExecutionGraph(tuple(ops))


def micros(found: ExecutionGraph) -> list[float]:
    return [kernel.seconds / US for op in found.ops for kernel in op.kernels]


def test_a_typical_step_has_the_means_of_the_middle_half():
    one = graph(900, 900, 800, 800, 10, 1, 30, 5, 20, 3)
    assert micros(*typical_step([[one]], 5)) == pytest.approx([20, 3])
    two = graph(700, 700, 600, 600, 40, 9, 50, 9, 60, 9)
    assert micros(*typical_step([[one], [two]], 5)) == pytest.approx([35, 6.5])


def test_steps_of_different_operators_are_refused():
    with pytest.raises(ValueError, match="5 steps do not call the same operators"):
        typical_step([[graph(*range(10), names="aba")]], 5)
    with pytest.raises(ValueError, match="do not call the same operators"):
        typical_step([[graph(*range(11))]], 5)


def rank(number: int, *times: tuple[float, float]) -> ExecutionGraph:
    """Steps of an operator and an all-reduce that it launches."""
    ops = []
    for step, (own, reduced) in enumerate(times):
        part = Collective("all_reduce", "", step)
        kernels = (
            Kernel(-1 - step, "k", own * US, HOST),
            Kernel(1 + step, "r", reduced * US, 7, collective=part),
        )
        ops.append(Op("a", tuple(map(Launch, kernels)), after=(step,) if step else ()))
    return ExecutionGraph(tuple(ops), number, start=5.0)


def test_a_typical_step_of_ranks_has_the_least_times_of_their_collectives():
    run = [
        rank(0, (1, 1), (1, 1), (10, 50), (20, 60)),
        rank(1, (1, 1), (1, 1), (30, 40), (50, 90)),
    ]
    found = typical_step([run], 4)
    assert [micros(graph) for graph in found] == [pytest.approx(t) for t in ([15, 50], [40, 50])]
    assert [(graph.rank, graph.start) for graph in found] == [(0, 0.0), (1, 0.0)]
    # What waits is told by the second step of another run.
    other = [replace(graph, ops=tuple(replace(op, after=()) for op in graph.ops)) for graph in run]
    assert [op.after for graph in found for op in graph.ops] == [(1,), (1,)]
    assert [op.after for graph in typical_step([run], 4, other) for op in graph.ops] == [(), ()]
    with pytest.raises(ValueError, match="4 steps do not call the same operators"):
        typical_step([[run[0], rank(1, *[(1, 1)] * 5)]], 4)


def test_times_between_batches_by_hand():
    known = {2: graph(10, 4), 8: graph(40, 4), 16: graph(40, 16)}
    # One grows as the batch from 2 to 8, and not from 8 to 16; the other the other way round.
    assert micros(between(4, known)) == pytest.approx([20, 4])
    assert micros(between(11, known)) == pytest.approx([40, 4 * (11 / 8) ** 1.5])
    # Beyond the largest, from the last two; no time falls with the batch, or grows faster than
    # its power 1.5.
    assert micros(between(32, known)) == pytest.approx([40, 16 * 2**1.5])
    assert micros(between(1, {2: graph(10, 0), 4: graph(5, 8)})) == pytest.approx([10, 0])
    with pytest.raises(ValueError, match=r"\[2, 4\] do not call the same"):
        between(3, {2: graph(1, 1), 4: graph(1, 1, names="ac")})


def test_what_the_profiler_adds_is_taken_off():
    assert micros(without_profiler(graph(10, 1, events=3), 2 * US)) == pytest.approx([4, 0])


@pytest.mark.parametrize("name", TRAININGS)
def test_steps_train(name, tmp_path, monkeypatch):
    monkeypatch.setattr(predict_training, "TRACED", 3)
    monkeypatch.setattr(trainings, "ROWS", 1000)
    batch = min(TRAININGS[name][2]) // 4
    step = training_step(name, batch)
    run = record(step, tmp_path / "x.json", 0.0)
    (found,) = typical_step([run.graphs], 3)
    names = {op.name for op in found.ops}
    assert any(op.startswith("autograd::engine") for op in names)
    assert all(time > 0 for time in micros(found)) and not run.warnings


def few_steps(monkeypatch) -> None:
    monkeypatch.setattr(predict_training, "TURNS", 1)
    monkeypatch.setattr(predict_training, "TRACED", 3)
    monkeypatch.setattr(timed_steps, "WARM_UP", 1)


@pytest.mark.slow
def test_two_trainings_predict_each_other(monkeypatch, tmp_path):
    few_steps(monkeypatch)
    small = {name: (*TRAININGS[name][:2], (2, 4, 8)) for name in ("mlp", "cnn")}
    monkeypatch.setattr(predict_training, "TRAININGS", small)
    monkeypatch.setattr(trainings, "TRAININGS", small)
    monkeypatch.setattr(predict_training, "event_cost", lambda: 0.5 * US)
    results = predict_training.results_of(predict_training.measure(list(small), 1, tmp_path))
    assert len(results["cases"]) == 6 and results["cases"][0] == "mlp 2"
    for by in ("own_trace", "other_batches"):
        assert all(0 < time < math.inf for time in results["predicted_ms"][by])
        alone = results["predicted_ms"]["operators_alone"]
        if by == "own_trace":
            assert all(map(float.__lt__, alone, results["predicted_ms"][by]))


def test_a_step_is_timed_after_others():
    calls = []
    times = time_steps(lambda: calls.append(1), 3)
    assert len(times) == 3 and min(times) >= 0
    assert len(calls) == timed_steps.WARM_UP + 3


def test_a_launch_counts_if_the_cores_exchange_as_before():
    assert predict_lookups.is_steady({"exchange": [2e-11, 2.9e-11]})
    assert not predict_lookups.is_steady({"exchange": [3.1e-11, 2e-11]})
    machine = load_machine("znver4")
    beside = predict_lookups.machine_beside({"exchange": [1e-11, 3e-11]}, machine)
    assert beside["bandwidth.exchange"] == pytest.approx(5e10)
    assert replace(beside, figures=machine.figures) == machine


def test_lookups_with_and_without_the_data_on_the_same_launches(monkeypatch):
    monkeypatch.setattr(predict_lookups, "TREES", 3)
    random = np.random.default_rng(0)
    count = 60
    sizes = np.stack([2.0 ** random.integers(4, 12, count) for _ in range(4)], axis=1)
    seconds = {"forward": random.uniform(1e-5, 1e-3, count)}
    rows = predict_lookups.Rows(
        by_data=sizes,
        by_sizes=sizes,
        usual=sizes,
        base={"forward": 0.5 * seconds["forward"]},
        usual_base=seconds,
        measured=seconds,
        halves={"forward": np.stack([seconds["forward"]] * 2, axis=1)},
        launch=np.arange(count) // 2,
        held=np.arange(count) < 40,
        sizes=sizes,
    )
    found = predict_lookups.compared(rows, "forward", seconds["forward"], seconds["forward"])
    assert found["by_the_data"] == {"gmae": 0.04, "mape": 0.0, "count": 20}
    assert found["by_traffic"]["mape"] == 50
    assert found["by_sizes_alone"]["mape"] > 1 and found["without_the_data"]["mape"] > 1
    large = (sizes[:40, 0] >= 128) & (sizes[:40, 3] >= 8)
    expected = int((large[::2] & large[1::2]).sum())
    assert 0 < found["by_the_data_of_the_sources_sizes"]["count"] == expected < 20


@pytest.mark.slow
def test_a_launch_has_a_time_of_each_batch_and_table(monkeypatch):
    monkeypatch.setattr(predict_lookups, "ROUNDS", 2)
    with torch.no_grad():
        arena = torch.zeros(predict_lookups.ARENA // 4)
        found = predict_lookups.measure(arena, 1)
    tables = len(predict_lookups.draw(1).rows)
    for direction in predict_lookups.DIRECTIONS:
        halves = found[direction]
        assert len(halves) == 2 and all(len(half) == predict_lookups.BATCHES for half in halves)
        assert all(len(batch) == tables for half in halves for batch in half)
        assert all(time > 0 for half in halves for batch in half for time in batch)
    assert len(found["exchange"]) == 2 and min(found["exchange"]) > 0


@pytest.mark.slow
def test_two_ranks_predict_each_others_trainings(monkeypatch, tmp_path):
    monkeypatch.setattr(predict_training, "TURNS", 1)
    results = predict_training.results_of(
        predict_training.measure_ranks(["mlp", "dlrm"], 2, tmp_path)
    )
    assert len(results["cases"]) == 8
    (run,) = load_traces(tmp_path / "dlrm-128.structure")
    assert not run.warnings and len(run.graphs) == 2
    for found in run.graphs:
        kinds = {kernel.collective.kind for kernel in found.kernels if kernel.collective}
        assert kinds >= {"all_to_all", "all_reduce"}
        launched = [kernel.id for kernel in found.kernels if kernel.collective]
        assert sorted(id_ for op in found.ops for id_ in op.after) == launched
    for by in ("own_trace", "other_batches"):
        assert all(0 < time < math.inf for time in results["predicted_ms"][by])


@pytest.mark.slow
def test_other_shardings_of_a_trace(tmp_path):
    start_ranks(predict_resharding.MODULE, tmp_path, ["--tasks", "1", "--rounds", "1"])
    results, tasks = predict_resharding.compared(tmp_path)
    assert results["shardings"] == len(tasks["0"]["measured"]) == 4
    assert all(0 < ratio < math.inf for ratio in tasks["0"]["predicted"].values())


@pytest.mark.slow
def test_a_rank_that_fails_is_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"ranks ended with \[2, 2\]"):
        rank_trainings.run_ranks(tmp_path, ["none"], 1, 1)
