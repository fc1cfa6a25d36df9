# SPDX-License-Identifier: Apache-2.0
"""Overheads of small traces against numbers worked by hand; microseconds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_traces import Kineto, training_step

from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.timeline.execution_graph import Op
from tvm_fusion.prediction.traces.kineto import read_kineto
from tvm_fusion.prediction.traces.overheads import (
    Mean,
    Overheads,
    ProfilerCost,
    load_overheads,
    measure_overheads,
)
from tvm_fusion.prediction.traces.traced_ops import traced_ops


def measure(tmp_path, trace: Kineto, cost: ProfilerCost | None = None) -> Overheads:
    found = read_kineto(trace.write(tmp_path / "x.json"))
    return measure_overheads(found, traced_ops(found), cost)


def sums(overheads: Overheads) -> dict:
    return {
        (table, name): (entry.count, entry.micros)
        for table, entries in overheads.tables.items()
        for name, entry in entries.items()
    }


def two_launches() -> Kineto:
    """T2 4, T4 5, T5 3, T4 5, T3 3; after 10 an op of 6; after 20 a synchronisation."""
    trace = Kineto()
    trace.op("a", 0, 20)
    trace.launch(4, 5, 10, 3)
    trace.launch(12, 5, 18, 100)
    trace.op("b", 30, 6)
    trace.op("c", 56, 70)
    trace.call("cudaStreamSynchronize", 60, 62)
    return trace


def test_t1_to_t5(tmp_path) -> None:
    assert sums(measure(tmp_path, two_launches())) == {
        ("t1 pair", "a -> b"): (1, 10),
        ("t1 pair", "b -> c"): (1, 20),
        ("t1", "b"): (1, 10),
        ("t1", "c"): (1, 20),
        ("t2", "a"): (1, 4),
        ("t2", "c"): (1, 4),
        ("t3", "a"): (1, 3),
        ("t3", "c"): (1, 4),
        ("t4", "cudaLaunchKernel"): (2, 10),
        # Time from the end of the kernel, 118, to the end of the call, 122.
        ("t4", "cudaStreamSynchronize"): (1, 4),
        ("t5", "a"): (1, 3),
        ("whole", "b"): (1, 6),
        # The second kernel found its stream idle, too: 13 before 12 it was not.
        ("delay", "cudaLaunchKernel"): (1, 6),
    }


def test_cost_of_the_profiler(tmp_path) -> None:
    plain = sums(measure(tmp_path, two_launches()))
    less = sums(measure(tmp_path, two_launches(), ProfilerCost(1, 2)))
    assert less["t1", "b"] == (1, 9)
    assert less["t4", "cudaLaunchKernel"] == (2, 6)
    assert less["delay", "cudaLaunchKernel"] == (1, 5)
    assert less["whole", "b"] == plain["whole", "b"]  # no event inside it
    assert less["t4", "cudaStreamSynchronize"] == (1, 4)  # it launched nothing
    gone = sums(measure(tmp_path, two_launches(), ProfilerCost(100, 100)))
    assert gone["t1", "b"] == (1, 0)


def test_work_of_the_host_does_not_count(tmp_path) -> None:
    trace = Kineto()
    trace.op("a", 0, 5)
    trace.op("b", 1100, 2000)
    assert sums(measure(tmp_path, trace)) == {("whole", "a"): (1, 5)}


def test_tail_is_kept(tmp_path) -> None:
    trace = Kineto()
    for at in range(20):
        trace.op("a", 100 * at, 800 if at == 19 else 5)
    mean = (19 * 5 + 800) / 20
    assert measure(tmp_path, trace).whole(Op("a")) == pytest.approx(mean * 1e-6)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 500)), min_size=2, max_size=30),
    st.integers(1, 29),
)
def test_line_is_the_least_squares_one(points, split) -> None:
    whole, first, second = Mean(), Mean(), Mean()
    for index, (events, micros) in enumerate(points):
        whole.add(micros, events)
        (first if index < split else second).add(micros, events)
    first.merge(second)
    assert first.line() == pytest.approx(whole.line())
    x, y = np.array(points, float).T
    if np.ptp(x) == 0:
        assert whole.line() == (pytest.approx(y.mean()), 0)
        return
    slope, base = np.polyfit(x, y, 1)
    if slope > 1e-6 and base > 1e-6:
        assert whole.line() == pytest.approx((base, slope), rel=1e-6, abs=1e-6)
    else:
        assert min(whole.line()) >= 0


def test_unknown_operator_takes_the_line() -> None:
    overheads = Overheads()
    for events in range(5):
        overheads.add("t2", f"op{events}", 4 + 3 * events, events)
    op = Op("new", (), events=(10,))
    assert overheads.t2(op) == pytest.approx(34e-6)
    assert overheads.unknown(["new", "op1"]) == ["new"]


def test_operators_and_pairs_take_more() -> None:
    overheads = Overheads(prior=0)
    for name, micros in (("a", 10), ("b", 10), ("b", 30)):
        overheads.add("t1", name, micros)
    overheads.add("t1 pair", "x -> b", 10)
    overheads.add("t1 pair", "y -> b", 30)
    assert overheads.t1("y", Op("b")) == pytest.approx(30e-6)
    assert overheads.t1("z", Op("b")) == pytest.approx(20e-6)
    assert overheads.t1("z", Op("c")) == pytest.approx(50e-6 / 3)
    # A prior of 2 gives a half of what b takes more than all, 3.3, and a third of the pair.
    shared = Overheads(overheads.tables, prior=2.0)
    base = 50 / 3 + (20 - 50 / 3) / 2
    assert shared.t1("z", Op("b")) == pytest.approx(base * 1e-6)
    assert shared.t1("y", Op("b")) == pytest.approx((base + (30 - base) / 3) * 1e-6)


def test_delay_of_an_unknown_call_is_half_of_t4() -> None:
    overheads = Overheads()
    overheads.add("t4", "cudaLaunchKernel", 8)
    assert overheads.delay("cudaLaunchKernel") == pytest.approx(4e-6)


def test_saved_and_loaded(tmp_path) -> None:
    overheads = measure(tmp_path, training_step(0))
    overheads.save(tmp_path / "o.json")
    assert load_overheads(tmp_path / "o.json") == overheads
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_merged_are_those_of_both(tmp_path) -> None:
    first, second = measure(tmp_path, two_launches()), measure(tmp_path, training_step(0))
    merged = first.merge([second])
    assert merged.origins == ["x.json", "x.json"]
    counts = {key: count for key, (count, _) in sums(merged).items()}
    for key in sums(first) | sums(second):
        parts = [sums(one).get(key, (0, 0))[0] for one in (first, second)]
        assert counts[key] == sum(parts)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("[1]", "expected a file of overheads"),
        ('{"format": "other"}', "expected a file of overheads"),
        ('{"format": "tvm-fusion overheads 1", "tables": {}}', "no table 't1 pair'"),
    ],
)
def test_other_files(tmp_path, text: str, reason: str) -> None:
    path = tmp_path / "o.json"
    path.write_text(text)
    with pytest.raises(PredictionError, match=f"o.json: {reason}"):
        load_overheads(path)


@pytest.mark.parametrize("entry", [[1, 2], [0, 1, 1, 1, 1], [1, -1, 0, 0, 0], [1, "x", 0, 0, 0]])
def test_broken_entries(tmp_path, entry) -> None:
    path = tmp_path / "o.json"
    measure(tmp_path, two_launches()).save(path)
    data = json.loads(path.read_text())
    data["tables"]["t2"]["a"] = entry
    path.write_text(json.dumps(data))
    with pytest.raises(PredictionError, match="t2 of 'a' is .*expected count, micros, events"):
        load_overheads(path)


@pytest.mark.parametrize("part", ["origins", "tables"])
def test_parts_of_another_kind(tmp_path, part: str) -> None:
    path = tmp_path / "o.json"
    measure(tmp_path, two_launches()).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: True}))
    with pytest.raises(PredictionError, match=r"o.json: expected a list of 'origins' and an obj"):
        load_overheads(path)


def test_infinite_entry_and_absent_files(tmp_path) -> None:
    path = tmp_path / "o.json"
    measure(tmp_path, two_launches()).save(path)
    path.write_text(path.read_text().replace("4.0", "Infinity", 1))
    with pytest.raises(PredictionError, match="expected count"):
        load_overheads(path)
    with pytest.raises(PredictionError, match="cannot read"):
        load_overheads(tmp_path / "absent")
    with pytest.raises(PredictionError, match="cannot write"):
        Overheads().save(tmp_path / "absent" / "o.json")
