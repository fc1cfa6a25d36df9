# SPDX-License-Identifier: Apache-2.0
"""Collectives of gloo in small traces: what launches them, what waits, and ranks by hand."""

from __future__ import annotations

import pytest
from small_traces import HOST, Kineto, execution_trace, node

from tvm_fusion.prediction.api import load_traces, predict_traces
from tvm_fusion.prediction.timeline.execution_graph import HOST as ON_HOST
from tvm_fusion.prediction.timeline.path import active_seconds
from tvm_fusion.prediction.traces.chakra import link, read_execution_trace
from tvm_fusion.prediction.traces.kineto import read_kineto
from tvm_fusion.prediction.traces.overheads import measure_overheads
from tvm_fusion.prediction.traces.traced_graph import traced_graph
from tvm_fusion.prediction.traces.traced_ops import traced_ops

WORKER, OTHER = 301, 302
US = 1e-6


def collective(trace: Kineto, name: str, ts: float, dur: float, tid: int = WORKER, **args) -> None:
    """Annotation of a thread of gloo."""
    trace.external += 1
    args = {"External id": trace.external, "Input type": ["float"]} | args
    trace.event("user_annotation", f"gloo:{name}", ts, dur, tid, **args)


def backward(rank: int | None = None, late: float = 0.0) -> Kineto:
    """A gradient, whose reduction runs beside the next operator, and its update.

    Rank 0 waits in the all-reduce for the one that is late.
    """
    trace = Kineto(rank, device="")
    at = late if rank else 0.0
    trace.op("AccumulateGrad", at, 100)
    bucket = {"Input Dims": [[[1024]], [], []], "Record function id": 7}
    trace.op("c10d::allreduce_", at + 40, 20, **bucket)
    start = at + 50
    reduced = {"Input Dims": [[1024]], "Record function id": 8}
    collective(trace, "all_reduce", start, 50 + late + 250 - start, **reduced)
    trace.op("aten::copy_", start + 5, 5, WORKER)
    trace.op("Relu", at + 110, 40)
    trace.op("aten::add_", late + 320, 30)
    return trace


def read(path, trace: Kineto):
    found = read_kineto(trace.write(path / "x.json"))
    ops = traced_ops(found)
    return found, ops, traced_graph(found, ops, 0)


def test_a_thread_is_a_stream_and_the_host_waits_for_it(tmp_path) -> None:
    found, ops, graph = read(tmp_path, backward())
    assert found.is_on_host and not found.problems
    assert [op.name for op in graph.ops] == ["AccumulateGrad", "Relu", "aten::add_"]
    assert {op.thread for op in graph.ops} == {HOST}
    gradient, relu, update = graph.ops
    before, launch, during, after = gradient.steps
    assert [round(step.kernel.seconds / US) for step in gradient.steps] == [40, 250, 20, 40]
    assert [step.kernel.stream for step in (before, during, after)] == [ON_HOST] * 3
    assert (launch.kernel.stream, launch.call) == (WORKER, "c10d::allreduce_")
    part = launch.kernel.collective
    assert (part.kind, part.group, part.sequence, part.bytes) == ("all_reduce", "", 0, 4096)
    # It ended at 300, between Relu and the update, 20 before that.
    assert (relu.after, update.after) == ((), (launch.kernel.id,))
    assert [op.gap for op in ops] == [None, 10, 20]
    overheads = measure_overheads(found, ops)
    assert overheads.tables["t1 pair"]["Relu -> aten::add_"].micros == 20
    assert overheads.tables["delay"]["c10d::allreduce_"].micros == 10
    assert not overheads.tables["t4"]  # the call's time is that of a kernel


def test_ranks_by_hand(tmp_path) -> None:
    for rank in (0, 1):
        backward(rank, 70).write(tmp_path / f"rank{rank}.json")
    (run,) = load_traces(tmp_path)
    assert [round(seconds / US) for seconds in run.measured] == [420, 350]
    found = predict_traces(run)
    # Rank 1 starts 70 later, and 50 after that the reduction, which takes its 250.
    assert [round(rank.end / US) for rank in found.timeline.ranks] == [420, 420]
    first, second = found.timeline.ranks
    (reduced,) = (one for one in first.kernels.values() if one.kernel.collective)
    assert [round(time / US) for time in (reduced.start, reduced.ready, reduced.end)] == [
        *(50, 120, 370)
    ]
    # Rank 0 does not count what it waits for: it is busy from 0 to 150, and from 120 on by the
    # reduction.
    assert round(active_seconds(first) / US) == 100 + 40 + 220 + 30
    assert round(active_seconds(second) / US) == 300 + 30


def test_an_early_end_is_waited_for_where_the_result_is_read(tmp_path) -> None:
    trace = Kineto(device="")
    trace.op("c10d::allreduce_", 0, 20, **{"Record function id": 3})
    collective(trace, "all_reduce", 10, 35, **{"Record function id": 4, "Input Dims": [[8]]})
    trace.op("Relu", 40, 10, **{"Record function id": 5})
    trace.op("aten::as_strided", 60, 10, **{"Record function id": 6})
    path = trace.write(tmp_path / "x.json")
    tensor, others = [11, 5, 0, 8, 4, "cpu"], [12, 9, 0, 8, 4, "cpu"]
    nodes = [
        node(3, 2, "c10d::allreduce_", "1.1.1", inputs=[[tensor], "<Object>"]),
        node(4, 3, "gloo:all_reduce", "1.1.1", inputs=[tensor]),
        node(5, 2, "Relu", "1.1.1", inputs=[others]),
        node(6, 2, "aten::as_strided", "1.1.1", inputs=[tensor]),
    ]
    found = read_kineto(path)
    execution = execution_trace(tmp_path / "x.et.json", "1.1.1-chakra.0.0.4", nodes)
    link(read_execution_trace(execution), found)
    ops = traced_ops(found)
    assert not found.problems
    assert [len(op.awaited) for op in ops] == [0, 0, 1]
    assert [op.gap for op in ops] == [None, 20, 10]


def test_threads_that_begin_out_of_order(tmp_path) -> None:
    trace = Kineto(device="")
    for number, name in enumerate(("c10d::allreduce_", "c10d::allreduce_", "c10d::barrier")):
        trace.op(name, 10 * number, 5, **{"Record function id": 2 * number + 1})
    for number, (start, size, thread) in enumerate([(60, 8, WORKER), (30, 16, OTHER)]):
        ids = {"Record function id": 2 * number + 2, "Input Dims": [[size]]}
        collective(trace, "all_reduce", start, 9, thread, **ids)
    collective(trace, "barrier", 50, 9, OTHER, **{"Record function id": 6})
    _, _, graph = read(tmp_path, trace)
    parts = [kernel.collective for kernel in graph.kernels if kernel.collective]
    assert [(part.kind, part.sequence, part.bytes) for part in parts] == [
        ("all_reduce", 0, 32),
        ("all_reduce", 1, 64),
        ("barrier", 2, 0),
    ]


@pytest.mark.parametrize(
    ("call", "dims", "name", "own", "expected"),
    [
        ("c10d::allgather_", [[], [[3, 5]]], "all_gather", [[3, 5]], 4 * 15 * 4),
        ("c10d::_allgather_base_", [[60], [15]], "_all_gather_base", [[15]], 4 * 15 * 4),
        ("c10d::alltoall_base_", [[7, 4], [2, 4]], "all_to_all", [[2, 4]], 7 * 4 * 4),
        ("c10d::alltoall_base_", [[1], [2, 4]], "all_to_all", [[2, 4]], 2 * 4 * 4),
        ("c10d::reduce_scatter_", [[[5]], []], "reduce_scatter", [[5], [5]], 10 * 4),
    ],
)
def test_bytes_of_messages(tmp_path, call, dims, name, own, expected) -> None:
    trace = Kineto(0, world=4, device="")
    trace.op(call, 0, 10, **{"Input Dims": dims})
    collective(trace, name, 5, 10, **{"Input Dims": own})
    _, _, graph = read(tmp_path, trace)
    (part,) = (kernel.collective for kernel in graph.kernels if kernel.collective)
    assert (part.kind, part.bytes) == (name.removeprefix("_").removesuffix("_base"), expected)


def test_a_collective_without_its_operator_is_counted(tmp_path) -> None:
    trace = Kineto(device="")
    trace.op("aten::add", 0, 10)
    collective(trace, "broadcast", 5, 3)
    found, _, graph = read(tmp_path, trace)
    assert not any(kernel.collective for kernel in graph.kernels)
    assert found.warnings() == [
        "x.json: 1 collectives of gloo without the operator that calls them; the first: "
        "gloo:broadcast at 5 us"
    ]
