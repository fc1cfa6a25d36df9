# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmarks of PyTorch's lookups and trainings: steps, batches and states by hand."""

import math
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from examples.benchmarks import predict_lookups, predict_training
from examples.benchmarks.predict_training import (
    between,
    record,
    time_steps,
    typical_step,
    without_profiler,
)
from examples.benchmarks.prediction import trainings
from examples.benchmarks.prediction.trainings import TRAININGS, training_step
from schedules.cost.machine import load_machine
from tvm_fusion.bench.exchange_probe import ExchangeProbe
from tvm_fusion.compiler.targets.target import resolve
from tvm_fusion.prediction.machines import NATIVE
from tvm_fusion.prediction.timeline.execution_graph import HOST, ExecutionGraph, Kernel, Launch, Op

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
    assert micros(typical_step([one], 5)) == pytest.approx([20, 3])
    two = graph(700, 700, 600, 600, 40, 9, 50, 9, 60, 9)
    assert micros(typical_step([one, two], 5)) == pytest.approx([35, 6.5])


def test_steps_of_different_operators_are_refused():
    with pytest.raises(ValueError, match="5 steps do not call the same operators"):
        typical_step([graph(*range(10), names="aba")], 5)
    with pytest.raises(ValueError, match="do not call the same operators"):
        typical_step([graph(*range(11))], 5)


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
    found = typical_step(run.graphs[:1], 3)
    names = {op.name for op in found.ops}
    assert any(op.startswith("autograd::engine") for op in names)
    assert all(time > 0 for time in micros(found)) and not run.warnings


def test_two_trainings_predict_each_other(monkeypatch, tmp_path):
    for name, count in (("TURNS", 1), ("TRACED", 3), ("WARM_UP", 1)):
        monkeypatch.setattr(predict_training, name, count)
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
    assert time_steps(lambda: calls.append(1), 3) >= 0
    assert len(calls) == predict_training.WARM_UP + 3


def test_a_launch_counts_if_the_cores_exchange_as_before():
    assert predict_lookups.is_steady({"exchange": [2e-11, 2.9e-11]})
    assert not predict_lookups.is_steady({"exchange": [3.1e-11, 2e-11]})
    machine = load_machine("znver4")
    beside = predict_lookups.machine_beside({"exchange": [1e-11, 3e-11]}, machine)
    assert beside["bandwidth.exchange"] == pytest.approx(5e10)
    assert replace(beside, figures=machine.figures) == machine


def test_a_launch_has_a_time_of_each_batch_and_table(monkeypatch):
    monkeypatch.setattr(predict_lookups, "ROUNDS", 2)
    with torch.no_grad():
        arena = torch.zeros(predict_lookups.ARENA // 4)
        probe = ExchangeProbe(resolve(NATIVE, cores=2), predict_lookups.THREADS)
        found = predict_lookups.measure(arena, 1, probe)
    tables = len(predict_lookups.draw(1).rows)
    for direction in predict_lookups.DIRECTIONS:
        halves = found[direction]
        assert len(halves) == 2 and all(len(half) == predict_lookups.BATCHES for half in halves)
        assert all(len(batch) == tables for half in halves for batch in half)
        assert all(time > 0 for half in halves for batch in half for time in batch)
    assert len(found["exchange"]) == 2 and min(found["exchange"]) > 0
