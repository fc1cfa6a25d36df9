# SPDX-License-Identifier: Apache-2.0
"""Tables of small runs, shared out in another way: times and messages by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_traces import Kineto

from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import load_machine
from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.api import load_traces, predict_traces
from tvm_fusion.prediction.collectives import Collectives, Curve
from tvm_fusion.prediction.resharding import reshard
from tvm_fusion.prediction.timeline.edits import map_kernels
from tvm_fusion.prediction.timeline.execution_graph import (
    HOST,
    Collective,
    ExecutionGraph,
    Kernel,
    Launch,
    Op,
)
from tvm_fusion.prediction.traces.kernel_calls import kernel_call
from tvm_fusion.prediction.what_if import change

BAGS, LOOKUPS = 8, 5
US = 1e-6


def lookup(rows: int, width: int, count: int = 1) -> KernelCall:
    sizes = {"B": BAGS, "T": count, "E": rows, "L": LOOKUPS, "D": width}
    return KernelCall("embedding_bag", sizes, flops=BAGS * count * LOOKUPS * width, name="aten::x")


def message(kind: str, sequence: int, size: float) -> Collective:
    return Collective(kind, "", sequence, (), size)


def rank(number: int, tables: dict[KernelCall, float], results: float) -> ExecutionGraph:
    """A step of a rank: lookups, exchange, its gradient, gradients and updates of the tables."""
    add = [KernelCall("add", {}, written_bytes=4.0 * c.size("E") * c.size("D")) for c in tables]
    backward = "autograd::engine::evaluate_function: EmbeddingBagBackward0"
    steps: list[tuple[str, Kernel]] = [
        *(
            ("aten::embedding_bag", Kernel(n, "lookup", tables[call], HOST, call=call))
            for n, call in enumerate(tables)
        ),
        ("exchange", Kernel(10, "a2a", 40 * US, 1, (), message("all_to_all", 0, results))),
        ("mlp", Kernel(11, "mlp", 7 * US, HOST)),
        ("exchange", Kernel(12, "a2a", 40 * US, 1, (), message("all_to_all", 1, results))),
        ("reduce", Kernel(13, "reduce", 50 * US, 1, (), message("all_reduce", 2, results))),
        *((backward, Kernel(20 + n, "gradient", 9 * US, HOST)) for n in range(len(tables))),
        *(
            ("aten::add_", Kernel(30 + n, "add", 3 * US, HOST, call=call))
            for n, call in enumerate(add)
        ),
        ("aten::add_", Kernel(40, "add", 3 * US, HOST, call=KernelCall("add", {}))),
    ]
    return ExecutionGraph(tuple(Op(name, (Launch(kernel),)) for name, kernel in steps), number)


def two_ranks() -> list[ExecutionGraph]:
    """Tables of 100, 200 and 300 rows; rank 0 has the first two, 30 and 10 us."""
    first = {lookup(100, 64): 30 * US, lookup(200, 64): 10 * US}
    # Rank 0 sends 128 columns of 8 bags; rank 1 gets 192 of its 4.
    return [rank(0, first, 8 * 128 * 4), rank(1, {lookup(300, 64): 20 * US}, 4 * 192 * 4)]


def micros(graph: ExecutionGraph) -> dict[int, float]:
    return {kernel.id: round(kernel.seconds / US, 3) for kernel in graph.kernels}


def test_tables_take_their_times_along() -> None:
    # Tables move by rows, the largest first: 300 | 200 100, so that both ranks change.
    (first, second), notes = reshard(two_ranks(), "size_greedy", None)
    before = [micros(graph) for graph in two_ranks()]
    assert micros(first) == before[0] | {0: 15, 1: 5, 20: 4.5, 21: 4.5, 30: 1.5, 31: 1.5}
    assert micros(second) == before[1] | {0: 40, 20: 18, 30: 6}
    assert notes == ("lookups as measured, exchanges in proportion to their bytes",)


def test_gradients_and_updates_take_their_own_times_along() -> None:
    def slower(kernel: Kernel, _: Op) -> Kernel:
        return replace(kernel, seconds=2 * kernel.seconds) if kernel.id == 20 else kernel

    graphs = two_ranks()
    # Gradients come in reverse: the first one is of the second table, of 200 rows.
    graphs[0] = map_kernels(graphs[0], slower)
    (first, second), _ = reshard(graphs, "size_greedy", None)
    assert micros(first)[30] == pytest.approx(3 * 12 / 33, abs=1e-3)
    assert micros(second)[30] == pytest.approx(3 * 33 / 12, abs=1e-3)
    assert micros(first)[0] == 15  # lookups as before
    # Updates of which one cannot tell the table: all of backward as the lookups.
    other = [replace(op, name="x") if op.name == "aten::add_" else op for op in graphs[0].ops]
    graphs[0] = replace(graphs[0], ops=tuple(other))
    (first, _), _ = reshard(graphs, "size_greedy", None)
    assert micros(first)[21] == 4.5


def test_a_longer_message_takes_longer() -> None:
    graphs = [rank(0, {lookup(100, 64): US}, 2048), rank(1, {lookup(200, 64): US}, 2048)]
    (first, second), _ = reshard(graphs, "random", None)  # both go to rank 1
    assert micros(first)[10] == micros(second)[12] == 80
    part = next(k.collective for k in second.kernels if k.id == 10)
    assert part is not None and part.bytes == 4096
    assert micros(first)[13] == 50  # the all-reduce is of dense layers
    assert micros(first)[0] == 0 and micros(second)[0] == 2
    sizes, times = (1024.0, 2048.0, 4096.0, 8192.0), (1.0, 2.0, 3.0, 4.0)
    curves = Collectives({("all_to_all", 2): Curve("all_to_all", 2, sizes, times)})
    (first, _), notes = reshard(graphs, "random", None, curves)
    ratio = curves.predict("all_to_all", 2, 4096).seconds
    ratio /= curves.predict("all_to_all", 2, 2048).seconds
    assert micros(first)[10] == pytest.approx(40 * ratio, abs=1e-2)
    assert notes[0].endswith("exchanges as measured")


def test_lookups_in_one_launch_follow_their_model() -> None:
    graphs = [
        rank(0, {lookup(10**6, 64, 3): 30 * US}, 8 * 192 * 4),
        rank(1, {lookup(10**4, 64): 10 * US}, 4 * 256 * 4),
    ]
    (first, second), notes = reshard(graphs, "naive", load_machine("v100"))
    assert 10 < micros(first)[0] <= 30 and 10 <= micros(second)[0] < 20
    assert notes[0].startswith("lookups by their model on v100")
    assert notes[1] == "tables of one launch are taken as alike"
    large = [
        rank(0, {lookup(10**9, 64): US}, 2048),
        rank(1, {lookup(10**8, 64): US}, 2048),
    ]
    _, notes = reshard(large, "naive", load_machine("v100"))
    assert notes == ("the tables are shared out in this way",)
    _, notes = reshard(large, "random", load_machine("v100"))
    assert notes[-1] == "281.6 GB of tables do not fit on rank 1"


def test_several_steps_are_one_sharding() -> None:
    twice = []
    for graph in two_ranks():
        later = [
            Op(op.name, (Launch(Kernel(k.id + 100, k.name, k.seconds, k.stream, call=k.call)),))
            for op in graph.ops
            for k in op.kernels
        ]
        twice.append(ExecutionGraph((*graph.ops, *later), graph.rank))
    (first, _), _ = reshard(twice, "size_greedy", None)
    assert micros(first)[0] == micros(first)[100] == 15


@pytest.mark.parametrize(
    ("graphs", "name", "reason"),
    [
        (two_ranks(), "magic", "sharding=magic: expected one of naive, random, size_greedy, .*"),
        (two_ranks()[:1], "naive", "sharding shares tables out among ranks; this run has one"),
        ([rank(n, {}, 0) for n in (0, 1)], "naive", "no embedding tables that its ranks share out"),
        (
            [rank(0, {lookup(9, 64): US}, 2048), rank(1, {}, 1024)],
            "naive",
            "rank 1 holds no tables",
        ),
        (
            [rank(n, {lookup(9, 64): US}, 1000) for n in (0, 1)],  # Its size is another.
            "naive",
            "no embedding tables that its ranks share out",
        ),
    ],
)
def test_what_has_no_tables_to_share_out(graphs, name: str, reason: str) -> None:
    with pytest.raises(PredictionError, match=reason):
        change(graphs, f"sharding={name}", "")


def test_lookups_in_several_tables_at_once() -> None:
    shapes = ((0,), (48_000,), (0,), (0, 0), (3,), (3,), (4,), (), (), (4,), (), (768,), (385,))
    types = ("Tensor(float)",) * 4 + ("Tensor(int)", "Tensor(long int)", "Tensor(int)")
    values = ("",) * 7 + (48, 16, "", 26, "", "", "")
    name = "fbgemm::split_embedding_codegen_lookup_adagrad_function"
    event = SimpleNamespace(name=name, shapes=shapes, types=types, values=values)
    call = kernel_call([event], SimpleNamespace(copies=False))
    assert call is not None and call.op == "embedding_bag"
    assert dict(call.sizes) == {"B": 128, "T": 3, "E": 1000, "L": 2, "D": 16}
    assert (call.read_bytes, call.written_bytes) == (768 * (64 + 8), 128 * 48 * 4)
    unknown = SimpleNamespace(name=name, shapes=shapes, types=types, values=())
    other = kernel_call([unknown], SimpleNamespace(copies=False))
    assert other is not None and other.op == "elementwise"
    damaged = SimpleNamespace(name=name, shapes=(1, *shapes[1:6], 2, *shapes[7:]), types=types)
    damaged.values = values
    other = kernel_call([damaged], SimpleNamespace(copies=False))
    assert other is not None and other.op == "elementwise"


def test_traces_on_cpus(tmp_path) -> None:
    """Rank 0 gets a second table, of 50 us; rank 1, whose lookups are the longer ones, loses it."""
    for number in (0, 1):
        trace = Kineto(number, device="")
        tables = {"Input type": ["float", "long int", "long int"]}
        for n in range(1 + number):
            rows = 1000 * (1 + number)
            dims = {"Input Dims": [[rows, 16], [20], [4]]}
            trace.op("aten::embedding_bag", 100 * n, 50, **tables, **dims)
        dims = {"Input Dims": [[96], [96]], "Record function id": 1}
        trace.op("c10d::alltoall_base_", 300, 20, **dims)
        size = [[4 * 16 * (1 + number)]]
        worker = {"Input type": ["float"], "Input Dims": size, "Record function id": 2}
        trace.event("user_annotation", "gloo:all_to_all", 310, 50, 301, **worker)
        trace.op("aten::add", 400, 10)
        trace.write(tmp_path / f"rank{number}.json")
    (run,) = load_traces(tmp_path)
    (answer,) = predict_traces(run, what_if=["sharding=naive"]).answers
    assert answer.gain == pytest.approx(50 * US)
    assert answer.notes[0].startswith("lookups as measured")
