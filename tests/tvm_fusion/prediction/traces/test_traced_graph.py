# SPDX-License-Identifier: Apache-2.0
"""Graphs of small traces, and what is measured in them."""

from __future__ import annotations

import pytest
from small_traces import AUTOGRAD, HOST, Kineto, execution_trace, node, training_step

from tvm_fusion.prediction.timeline import execution_graph
from tvm_fusion.prediction.timeline.execution_graph import Launch, Wait
from tvm_fusion.prediction.traces.chakra import link, read_execution_trace
from tvm_fusion.prediction.traces.kineto import read_kineto
from tvm_fusion.prediction.traces.traced_graph import (
    collective_kind,
    measured_seconds,
    traced_graph,
)
from tvm_fusion.prediction.traces.traced_ops import traced_ops


def read(tmp_path, trace: Kineto, rank: int = 0):
    found = read_kineto(trace.write(tmp_path / "x.json"))
    ops = traced_ops(found)
    return found, ops, traced_graph(found, ops, rank)


@pytest.mark.parametrize("device", ["Tesla V100", "AMD Instinct MI300X"])
def test_training_step(tmp_path, device: str) -> None:
    found, ops, graph = read(tmp_path, training_step(0, 0, device))
    assert [op.name for op in graph.ops] == ["aten::linear", "MmBackward", "aten::item"]
    assert [op.thread for op in graph.ops] == [HOST, AUTOGRAD, HOST]
    assert all(op.follows for op in graph.ops)
    linear, backward, item = graph.ops
    (gemm,) = linear.kernels
    assert (gemm.name, gemm.stream, gemm.after) == ("gemm", 7, ())
    assert gemm.seconds == pytest.approx(10e-6)
    assert (gemm.call.op, dict(gemm.call.sizes)) == ("gemm", {"B": 1, "M": 32, "N": 16, "K": 64})
    (reduced,) = backward.kernels
    assert reduced.collective.kind == "all_reduce"
    assert (reduced.collective.group, reduced.collective.sequence) == ("", 0)
    assert reduced.collective.bytes == 4096
    # It waited for the matrix product, which ended before it began.
    assert reduced.after == (gemm.id,)
    copy, wait = item.steps
    assert isinstance(copy, Launch) and not copy.blocking
    assert copy.kernel.after == (reduced.id,)
    assert isinstance(wait, Wait)
    assert set(wait.after) == {reduced.id, copy.kernel.id}
    # Events inside of linear: aten::mm before the launch, none after; the calls do not count.
    assert linear.events == (1, 0)
    assert graph.start == pytest.approx(1000e-6)
    assert measured_seconds(found, ops) == pytest.approx(160e-6)


def test_blocking_copy(tmp_path) -> None:
    trace = Kineto()
    trace.op("aten::to", 0, 60)
    memcpy = ("Memcpy DtoH (Device -> Pageable)", 7, "cudaMemcpyAsync", "gpu_memcpy")
    trace.launch(10, 40, 20, 25, *memcpy, bytes=64)
    trace.op("aten::to", 100, 20)
    trace.launch(102, 5, 130, 25, *memcpy, bytes=64)
    _, _, graph = read(tmp_path, trace)
    # The second ended after its call: the host did not wait.
    assert [step.blocking for op in graph.ops for step in op.steps] == [True, False]


def test_threads_that_overlap(tmp_path) -> None:
    trace = Kineto()
    trace.op("a", 0, 50)
    trace.op("b", 20, 10, AUTOGRAD)
    trace.op("c", 60, 10)
    _, ops, graph = read(tmp_path, trace)
    assert [op.follows for op in graph.ops] == [True, False, True]
    assert [op.gap for op in ops] == [None, 0, 10]


def test_host_work_is_no_overhead(tmp_path) -> None:
    trace = Kineto()
    trace.op("a", 0, 50)
    trace.op("b", 3000, 50)
    trace.op("c", 3100, 4000)
    trace.launch(6000, 10, 6010, 5)
    _, _, graph = read(tmp_path, trace)
    assert [op.gap for op in graph.ops] == [0, pytest.approx(2950e-6), None]
    work, _, rest = graph.ops[2].steps
    assert work.kernel.stream == rest.kernel.stream == execution_graph.HOST
    assert work.kernel.seconds == pytest.approx(2900e-6)
    assert rest.kernel.seconds == pytest.approx(1090e-6)


def test_run_on_the_cpu(tmp_path) -> None:
    trace = Kineto(device="")
    trace.op("aten::mm", 0, 50)
    trace.op("aten::inner", 10, 5)
    _, _, graph = read(tmp_path, trace)
    (op,) = graph.ops
    (kernel,) = op.kernels
    assert (kernel.stream, kernel.seconds) == (execution_graph.HOST, pytest.approx(50e-6))


def test_calls_outside_of_operators(tmp_path) -> None:
    trace = Kineto()
    trace.op("a", 0, 10)
    trace.launch(20, 5, 26, 100, call="cuLaunchKernel")
    trace.call("cudaEventRecord", 30, 1)
    trace.call("cudaDeviceSynchronize", 40, 90)
    _, _, graph = read(tmp_path, trace)
    assert [op.name for op in graph.ops] == ["a", "cuLaunchKernel", "cudaDeviceSynchronize"]


def test_launches_without_kernel_are_counted(tmp_path) -> None:
    trace = Kineto()
    trace.op("a", 0, 30)
    trace.launch(2, 5, 8, 3)
    trace.call("cudaLaunchKernel", 10, 5)
    found, _, graph = read(tmp_path, trace)
    expected = "1 launches without their kernel; the first: cudaLaunchKernel at 10 us"
    assert expected in found.warnings()[0]
    assert len(list(graph.kernels)) == 1


def test_kernels_launched_before_the_trace(tmp_path) -> None:
    trace = Kineto()
    trace.op("a", 0, 30)
    trace.event("kernel", "early", -20, 50, 7, stream=7, correlation=999)
    trace.launch(2, 5, 31, 3)
    _, _, graph = read(tmp_path, trace)
    (queued,) = graph.queued
    assert (queued.id, queued.seconds) == (999, pytest.approx(30e-6))


def test_first_reader_waits_for_a_collective(tmp_path) -> None:
    """The tensors of the execution trace show the dependences where streams have no events."""
    trace = Kineto()
    names = {"c10d::allreduce_": 0, "aten::other": 40, "aten::relu": 80, "aten::again": 120}
    collective = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 16}
    for name, at in names.items():
        trace.op(name, at, 20, **(collective if at == 0 else {}))
        reduces = name.startswith("c10d")
        trace.launch(at + 5, 5, at + 10, 12, "ncclKernel" if reduces else "k", 9 if reduces else 7)
    buffer = [1, 77, 0, 16, 4, "cuda:0"]
    other = [2, 78, 0, 16, 4, "cuda:0"]
    operands = {"c10d::allreduce_": buffer, "aten::other": other}
    nodes = [
        node(3 + at, 2, name, "1.0.1", inputs=[operands.get(name, buffer)], outputs=[buffer])
        for at, name in enumerate(names)
    ]
    path = execution_trace(tmp_path / "x.et.json", "1.0.1", nodes)
    found = read_kineto(trace.write(tmp_path / "x.json"))
    link(read_execution_trace(path), found)
    graph = traced_graph(found, traced_ops(found), 0)
    reduced, _, relu, _ = (next(op.kernels) for op in graph.ops)
    after = [next(op.kernels).after for op in graph.ops]
    assert after == [(), (), (reduced.id,), ()]
    assert relu.name == "k"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce", "all_reduce"),
        ("nccl:all_to_all", "all_to_all"),
        ("all_to_allv", "all_to_all"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("_allgather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("broadcast", "broadcast"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8", "send"),
        ("recv", "recv"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert collective_kind(name) == kind
