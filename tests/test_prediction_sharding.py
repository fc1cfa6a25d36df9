# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmark of shardings: tasks, choices and losses by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from examples.benchmarks import predict_sharding
from examples.benchmarks.predict_sharding import (
    ARENA,
    MOST,
    RANKS,
    distinct,
    draw_task,
    judged,
    predicted,
    summary,
)
from schedules.cost.machine import Figure, load_machine
from tvm_fusion.prediction.collectives import Collectives, Curve
from tvm_fusion.prediction.sharding import Sharding


def sharding(name: str, ranks: tuple[int, ...], seconds: float) -> Sharding:
    return Sharding(name, ranks, seconds, 1.0, (0, 0), True)


FOUND = (
    sharding("search", (0, 1), 1e-3),
    sharding("naive", (1, 0), 2e-3),
    sharding("random", (0, 1), 1e-3),
)


def test_a_task_is_the_same_for_the_same_seed():
    first, again, other = draw_task(1), draw_task(1), draw_task(2)
    assert (first.rows, first.widths) == (again.rows, again.widths) != (other.rows, other.widths)
    for one, two in zip(first.batches[0][0], again.batches[0][0], strict=True):
        assert torch.equal(one, two)
    for launch in (first, other):
        assert 18 <= len(launch.rows) <= 34
        held = sum(4 * e * d for e, d in zip(launch.rows, launch.widths, strict=True))
        assert held <= ARENA
        for tables in launch.lookups:
            assert len({data.bags for data in tables}) == 1 and tables[0].bags % RANKS == 0
            assert sum(data.count * data.width * 4 for data in tables) < 1.5 * MOST


def test_the_choice_is_what_shard_puts_first(tmp_path):
    machine = load_machine("znver4")
    figures = {**machine.figures, "multiprocessors": Figure(1, "given")}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(replace(machine, figures=figures).to_json()))
    curve = Curve("all_to_all", 2, (4.0, 4e7), (1e-4, 1e-2))
    Collectives({("all_to_all", 2): curve}).save(path)
    found = predicted(0, path)
    times = [one.seconds for one in found]
    assert len(found) == 7 and times == sorted(times)
    assert all(len(one.ranks) == len(draw_task(0).rows) for one in found)


def test_losses_by_hand():
    assert distinct(FOUND) == [(0, 1), (1, 0)]
    # (rounds, ways, batches): way 0 takes 2 and 4, way 1 takes 1 and 3, and once 10 more.
    even = [[2e-3, 4e-3], [1e-3, 3e-3]]
    odd = [[2e-3, 4e-3], [11e-3, 13e-3]]
    times = np.array([even, odd, even, even, even])
    one = judged(FOUND, times)
    assert one["choice"] == "search" and one["loss_percent"] == pytest.approx(50)
    expected = {"search": 50, "naive": 0, "random": 50}
    assert one["loss_of_each_percent"] == pytest.approx(expected)
    assert one["measured_ms"] == pytest.approx({"search": 3, "naive": 2, "random": 3})
    # The first decile of the odd rounds of way 1 is 2 and 4, of way 0 nothing differs.
    assert one["repeat_percent"] == pytest.approx(100 * (3 / 2 - 1) / 2)
    slower = {name: 1 for name in expected}
    other = {**one, "loss_percent": 1, "loss_of_each_percent": slower, "repeat_percent": 4}
    total = summary({"0": one, "1": other})
    assert total["close_to_the_best"] == {"choice": 1, "naive": 2, "random": 1, "search": 1}
    assert total["mean_loss_percent"]["choice"] == pytest.approx(25.5)
    # Shares of both: 1 of 3, 2 of 2 and 1 of 3.
    assert total["mape_percent"] == pytest.approx(100 * (2 / 3 + 0 + 2 / 3) / 3)


@pytest.mark.slow
def test_ranks_run_all_ways_of_a_task(tmp_path):
    tasks = predict_sharding.run(1, 2, tmp_path)
    assert list(tasks) == ["0"]
    assert len(tasks["0"]["measured_ms"]) == 7
    assert min(tasks["0"]["measured_ms"].values()) > 0
    machine = load_machine(tmp_path / "machine.json")
    assert machine["multiprocessors"] == 1
