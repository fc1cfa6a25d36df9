# SPDX-License-Identifier: Apache-2.0
"""Predictions of small traces from files to reports, what-if included."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_traces import Kineto, execution_trace, node, training_step

from schedules.cost.kernel_call import KernelCall
from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.api import load_traces, predict_traces
from tvm_fusion.prediction.collectives import Collectives, Curve
from tvm_fusion.prediction.report import write_timeline
from tvm_fusion.prediction.timeline.edits import map_kernels
from tvm_fusion.prediction.timeline.execution_graph import ExecutionGraph, Kernel, Launch, Op
from tvm_fusion.prediction.traces.kernel_calls import kernel_call
from tvm_fusion.prediction.what_if import change, device_machine, scaled


def two_ranks(folder, late: float = 40) -> None:
    for rank in range(2):
        training_step(rank, late).write(folder / f"rank{rank}.kineto.json.gz")


@pytest.fixture
def run(tmp_path):
    two_ranks(tmp_path)
    (found,) = load_traces(tmp_path)
    return found


def test_ranks_of_a_folder(run) -> None:
    assert [graph.rank for graph in run.graphs] == [0, 1]
    assert run.graphs[1].start - run.graphs[0].start == pytest.approx(40e-6)
    assert run.measured == pytest.approx([200e-6, 160e-6])
    assert not run.warnings
    prediction = predict_traces(run)
    for rank in prediction.report.ranks:
        assert rank.seconds == pytest.approx(rank.measured, rel=0.12)
    early, late = prediction.report.ranks
    assert early.idle["other rank"] > late.idle["other rank"] == 0
    assert sum(row.seconds for row in prediction.report.path) == pytest.approx(
        prediction.timeline.end - prediction.timeline.ranks[1].graph.start, rel=0.3
    )


def test_own_overheads_and_given_ones(run) -> None:
    slower = replace(run.overheads, tables=dict(run.overheads.tables), prior=0.0)
    slower.tables["t1"] = {}
    slower.tables["t1 pair"] = {}
    given = predict_traces(run, slower)
    assert given.timeline.seconds < predict_traces(run).timeline.seconds
    assert given.unknown == ()


def test_traces_without_ranks_are_runs_of_their_own(tmp_path) -> None:
    for name in ("bert.json", "vit.json"):
        training_step().write(tmp_path / name)
    assert [run.name for run in load_traces(tmp_path)] == ["bert.json", "vit.json"]
    assert [run.name for run in load_traces(tmp_path / "vit.json")] == ["vit.json"]


def test_rank_from_the_name(tmp_path) -> None:
    for rank in range(2):
        training_step().write(tmp_path / f"step_rank-{rank}.json")
    (run,) = load_traces(tmp_path)
    assert [graph.rank for graph in run.graphs] == [0, 1]


def test_missing_rank(tmp_path) -> None:
    for rank in (0, 2):
        training_step(rank).write(tmp_path / f"r{rank}.json")
    with pytest.raises(PredictionError, match="no trace of rank 1 of 3"):
        load_traces(tmp_path)


def test_one_rank_of_two(tmp_path) -> None:
    training_step(0).write(tmp_path / "r0.json")
    (run,) = load_traces(tmp_path)
    expected = "missing ranks: collectives take their measured times, waits included; the first: "
    assert run.warnings == (f"r0.json: 1 {expected}any but rank 0",)
    assert predict_traces(run).report.seconds == pytest.approx(run.measured[0], rel=0.12)


def test_rank_without_its_collective(tmp_path) -> None:
    training_step(0).write(tmp_path / "r0.json")
    lonely = Kineto(1)
    lonely.op("aten::mm", 0, 10)
    lonely.launch(2, 3, 6, 5)
    lonely.write(tmp_path / "r1.json")
    (run,) = load_traces(tmp_path)
    with pytest.raises(PredictionError, match="rank 1 lacks all_reduce number 0 of group ''"):
        predict_traces(run)


def test_execution_traces_beside(tmp_path) -> None:
    two_ranks(tmp_path)
    for rank in range(2):
        nodes = [node(3, 2, "aten::linear", "1.0.1"), node(4, 3, "aten::gone", "1.0.1")]
        execution_trace(tmp_path / f"rank{rank}.et.json", "1.0.1", nodes)
    (run,) = load_traces(tmp_path)
    assert len(run.warnings) == 2 and "aten::gone (id 4)" in run.warnings[0]


def test_execution_trace_alone(tmp_path) -> None:
    execution_trace(tmp_path / "a.et.json", "1.0.1", [node(3, 2, "x", "1.0.1")])
    with pytest.raises(PredictionError, match="no Kineto trace"):
        load_traces(tmp_path)
    training_step().write(tmp_path / "b.json")
    with pytest.raises(PredictionError, match="a.et.json: an execution trace has no times"):
        load_traces(tmp_path)


def test_other_files(tmp_path) -> None:
    with pytest.raises(PredictionError, match="no Kineto trace"):
        load_traces(tmp_path)
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(PredictionError, match="x.json: neither a Kineto trace nor"):
        load_traces(tmp_path)
    (tmp_path / "x.json").write_text("")
    with pytest.raises(PredictionError, match="the file is empty"):
        load_traces(tmp_path)


@pytest.fixture
def link(tmp_path):
    path = tmp_path / "link.txt"
    sizes = tuple(float(1 << n) for n in range(8, 24))
    times = tuple(500e-6 + size / 1e9 for size in sizes)
    Collectives({("all_reduce", 2): Curve("all_reduce", 2, sizes, times)}).save(path)
    return path


def answer(run, change: str):
    (found,) = predict_traces(run, what_if=[change]).answers
    return found


def test_what_if(run, link) -> None:
    before = predict_traces(run).timeline.seconds
    slow = answer(run, f"link={link}")
    assert slow.gain == pytest.approx(before - slow.seconds)
    # Both ranks are there at 90; then the link, the copy 2, the end of the wait 7, and T3 20.
    assert slow.seconds == pytest.approx(90e-6 + 500e-6 + 4096 / 1e9 + 29e-6, rel=0.002)
    assert (slow.critical.op, slow.critical.where) == ("MmBackward", "collective")
    # Four ranks at the bus bandwidth of two: 1.5 times the time.
    more = answer(run, f"ranks=4:{link}")
    assert more.seconds - slow.seconds == pytest.approx(0.5 * (500e-6 + 4096 / 1e9), rel=0.02)
    assert "out of range" in more.notes[0]
    assert answer(run, f"bucket=25:{link}").gain == pytest.approx(0)
    assert answer(run, "resize=aten::linear:40").gain < -100e-6
    assert answer(run, "remove=aten::linear").gain > 0
    both = answer(run, "remove=aten::linear and resize=item:2")
    assert both.seconds > answer(run, "remove=aten::linear").seconds
    for text in ("graph", "fuse=aten", "parallelize=aten"):
        assert answer(run, text).gain >= -1e-12


def test_what_if_machine_and_batch(run) -> None:
    same = answer(run, "machine=v100")
    assert same.gain == pytest.approx(0, abs=1e-12)
    assert "v100 over v100" in same.notes[0]
    larger = answer(run, "batch=64")
    assert larger.gain < 0
    assert answer(run, "batch=128").seconds > larger.seconds


def test_what_if_unequal_messages(run, tmp_path) -> None:
    """The largest message of the ranks says how long an all-to-all takes; the batch scales it."""
    sizes = tuple(float(1 << n) for n in range(8, 24))
    times = tuple(size / 1e6 for size in sizes)
    file = tmp_path / "link.txt"
    Collectives({("all_to_all", 2): Curve("all_to_all", 2, sizes, times)}).save(file)

    def unequal(kernel, op):
        part = kernel.collective
        if part is None:
            return kernel
        size = 1000.0 if kernel.seconds > 100e-6 else 3000.0
        return replace(kernel, collective=replace(part, kind="all_to_all", bytes=size))

    changed = replace(run, graphs=tuple(map_kernels(graph, unequal) for graph in run.graphs))
    once = answer(changed, f"link={file}")
    twice = answer(changed, f"batch=2 and link={file}")
    assert once.critical.seconds == pytest.approx(3e-3, rel=0.01)
    assert twice.critical.seconds == pytest.approx(6e-3, rel=0.01)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("magic", "unknown change 'magic'; expected machine, batch"),
        ("batch=0", "batch: '0' is not a positive"),
        ("batch=x", "batch: 'x' is not a positive"),
        ("fuse=(", "not a regular expression"),
        ("remove=nothing", "remove=nothing: matches no operator"),
        ("resize=linear:nan", "resize: 'nan' is not a positive"),
        ("ranks=4", "expected ranks=N:FILE"),
        ("bucket=25", "expected bucket=MB:FILE"),
        ("machine=abacus", "no machine 'abacus'"),
        ("link=absent", "cannot read 'absent'"),
    ],
)
def test_what_cannot_be_changed(run, change: str, reason: str) -> None:
    with pytest.raises(PredictionError, match=reason):
        predict_traces(run, what_if=[change])


def test_machine_of_a_device() -> None:
    assert device_machine("Tesla V100-SXM2-32GB").name == "v100"
    assert device_machine("NVIDIA RTX PRO 6000 Blackwell").name == "rtx-pro-6000"
    with pytest.raises(PredictionError, match="'NVIDIA RTX A6000' is not a known machine"):
        device_machine("NVIDIA RTX A6000")
    with pytest.raises(PredictionError, match="'Radeon' is not a known machine; known are .*v100"):
        device_machine("Radeon")


def test_traces_of_a_cpu_are_scaled_as_of_this_one(tmp_path, monkeypatch, rename_cpu) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rename_cpu("diamondrapids")
    for what in ("batch=2", "machine=znver4"):
        notes = change([], what, "").notes
        assert any("'diamondrapids': times are estimated from" in note for note in notes), what


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_chrome_trace(tmp_path, run, name: str) -> None:
    timeline = predict_traces(run).timeline
    write_timeline(timeline, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(data) if name.endswith("gz") else data)["traceEvents"]
    kinds = [event["cat"] for event in events if event["ph"] == "X"]
    assert (kinds.count("op"), kinds.count("kernel"), kinds.count("wait")) == (6, 6, 1)
    assert {event["pid"] for event in events} == {0, 1}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last == pytest.approx(timeline.seconds * 1e6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["t.png", "t.svg"])
def test_picture(tmp_path, run, name: str) -> None:
    pytest.importorskip("matplotlib")
    write_timeline(predict_traces(run).timeline, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


def test_refuses_other_pictures(tmp_path, run) -> None:
    with pytest.raises(PredictionError, match="t.txt: expected a name that ends with .json"):
        write_timeline(predict_traces(run).timeline, tmp_path / "t.txt")
    with pytest.raises(PredictionError, match="cannot write"):
        write_timeline(predict_traces(run).timeline, tmp_path / "absent" / "t.json")


def lookups_of(shape: tuple[int, ...], op: str = "aten::_embedding_bag", start: int = 0):
    """Call of a kernel that looks up 4096 rows of a table for 512 bags."""
    event = SimpleNamespace(name=op, shapes=(shape, (4096,), (512,)), types=("float",))
    return kernel_call([event], SimpleNamespace(copies=False))


def test_lookups_move_rows_and_not_tables() -> None:
    small, large = (lookups_of((rows, 64)) for rows in (10_000, 10_000_000))
    assert small.op == large.op == "embedding_bag"
    assert dict(small.sizes) == {"B": 512, "T": 1, "E": 10_000, "L": 8, "D": 64}
    assert small.moved_bytes == large.moved_bytes == 4096 * (64 * 4 + 8) + 512 * 64 * 4
    gather = lookups_of((10_000, 64), "aten::embedding")
    assert (gather.op, gather.sizes["L"]) == ("gather", 4096)
    assert lookups_of((10_000,)).op == "elementwise"
    assert scaled(gather, 2).sizes["L"] == 8192 and scaled(small, 2).sizes["B"] == 1024


def fused(*calls, device="Tesla V100-SXM2-32GB"):
    kernels = [Kernel(n, str(n), 20e-6, 0, call=call) for n, call in enumerate(calls)]
    graph = ExecutionGraph(tuple(Op("part", (Launch(kernel),)) for kernel in kernels))
    changed = change([graph], "fuse=part", device)
    (kernel,) = changed.graphs[0].kernels
    return kernel.seconds, changed.notes[0]


def test_a_run_of_embedding_bags_is_one_launch() -> None:
    seconds, note = fused(*[lookups_of((100_000, 64))] * 8)
    assert 20e-6 < seconds < 160e-6 and "embedding traffic" in note


def test_fused_elementwise_operators_keep_what_they_hand_on() -> None:
    call = KernelCall("add", {}, "float32", 1e7, 8e7, 4e7)
    seconds, note = fused(call, call, call)
    assert seconds == pytest.approx(60e-6 * 20 / 36, rel=0.1) and "streaming" in note


def test_other_kernels_take_the_sum_when_fused() -> None:
    product = KernelCall("gemm", {"M": 64, "N": 64, "K": 64}, flops=1e6)
    bag = lookups_of((100_000, 64))
    for given in ([product, product], [bag, product], [bag, None]):
        assert fused(*given) == (pytest.approx(40e-6), "fused: 1 kernels by the sum of their parts")
    assert fused(bag, bag, device="abacus")[0] == pytest.approx(40e-6)


def test_links_without_collectives(link) -> None:
    graph = ExecutionGraph((Op("x", (Launch(Kernel(0, "x", 1e-6)),)),))
    with pytest.raises(PredictionError, match="change collectives; this run has none"):
        change([graph], f"link={link}", "Tesla V100")


def test_methods_of_a_scenario(run) -> None:
    scenario = run.scenario()
    seconds = scenario.simulate().seconds
    assert scenario.resize("mm|Mm", 3.0).simulate().seconds > seconds
    assert scenario.change("graph").simulate().seconds <= seconds
    assert scenario.answer("same", seconds).gain == 0
