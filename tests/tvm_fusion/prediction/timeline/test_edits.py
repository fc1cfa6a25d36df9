# SPDX-License-Identifier: Apache-2.0
"""Edits of graphs: what is left, what waits for what, and times worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_graphs import US, RoundCosts, all_reduce, graph, launch, op

from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.timeline.edits import (
    fuse,
    insert,
    launch_graphs,
    named,
    parallelize,
    rebucket,
    remove,
    replace,
    resize,
    retime,
)
from tvm_fusion.prediction.timeline.execution_graph import HOST, Wait
from tvm_fusion.prediction.timeline.timelines import simulate

COSTS = RoundCosts()
CHAIN = graph(
    op(launch(1, 10), name="a"),
    op(launch(2, 20, after=(1,)), name="b"),
    op(launch(3, 30, 1, after=(2,)), name="c"),
    op(Wait((2, 3)), name="w"),
)


def micros(*graphs) -> float:
    return round(simulate(graphs, COSTS).seconds / US, 3)


def names(found) -> list[str]:
    return [one.name for one in found.ops]


def after(found) -> dict[int, tuple[int, ...]]:
    return {kernel.id: kernel.after for kernel in found.kernels}


def total(kernels) -> float:
    return sum(kernel.seconds for kernel in kernels)


def test_insert() -> None:
    found = insert(CHAIN, 1, op(name="new"))
    assert names(found) == ["a", "new", "b", "c", "w"]
    assert names(CHAIN) == ["a", "b", "c", "w"]
    assert micros(found) == micros(CHAIN) + 17
    with pytest.raises(PredictionError, match="no place 9 among 4"):
        insert(CHAIN, 9, op())
    with pytest.raises(PredictionError, match="two kernels 1"):
        insert(CHAIN, 1, op(launch(1, 1)))


def test_remove() -> None:
    found = remove(CHAIN, named("b"))
    assert names(found) == ["a", "c", "w"]
    # What waited for b waits for a, as b did.
    assert after(found) == {1: (), 3: (1,)}
    assert set(found.ops[-1].steps[0].after) == {1, 3}


def test_replace() -> None:
    found = replace(CHAIN, named("^b$"), lambda old: (op(name="x"), op(*old.steps, name="y")))
    assert names(found) == ["a", "x", "y", "c", "w"]
    assert micros(found) == micros(CHAIN) + 17


def test_resize_and_retime() -> None:
    found = resize(CHAIN, named("c"), 4)
    assert [round(kernel.seconds / US) for kernel in found.kernels] == [10, 20, 120]
    twice = retime(CHAIN, lambda kernel: 2 * kernel.seconds)
    assert [round(kernel.seconds / US) for kernel in twice.kernels] == [20, 40, 60]
    on_host = graph(op(launch(1, 10, HOST)))
    assert retime(on_host, lambda kernel: 0.0) == on_host
    with pytest.raises(PredictionError, match="factor -1"):
        resize(CHAIN, named("c"), -1)


def test_fuse() -> None:
    found = fuse(CHAIN, named("a|b"), total)
    assert names(found) == ["a", "c", "w"]
    assert [round(kernel.seconds / US) for kernel in found.kernels] == [30, 30]
    # The fused kernel keeps the last id; it waits for none of its own parts.
    assert after(found) == {2: (), 3: (2,)}
    # One operator less, one gap of kernels less, and what waits for it starts later.
    assert micros(found) == 17 + 30 + 30 + 7


def test_fuse_stops_at_waits_and_collectives() -> None:
    ops = [
        op(launch(1, 5)),
        op(Wait((1,))),
        op(launch(2, 5)),
        op(launch(3, 5, collective=all_reduce(0))),
        op(launch(4, 5)),
        op(launch(5, 5), thread=1),
    ]
    found = fuse(graph(*ops), named("op"), total)
    assert found.ops == graph(*ops).ops


def test_parallelize() -> None:
    ops = [op(launch(n, 100), name="p" if 1 < n < 5 else "q") for n in range(1, 6)]
    found = parallelize(graph(*ops), named("p"))
    assert [kernel.stream for kernel in found.kernels] == [0, 0, 1, 2, 0]
    # Each branch waits for what came before, the next kernel for all.
    assert after(found) == {1: (), 2: (), 3: (1,), 4: (1,), 5: (2, 3, 4)}
    assert micros(graph(*ops)) == 17 + 5 * 100 + 4
    assert micros(found) < 17 + 3 * 100 + 50


def test_launch_graphs() -> None:
    ops = [op(launch(1, 5)), op(), op(launch(2, 5)), op(Wait()), op(launch(3, 5))]
    found = launch_graphs(graph(*ops))
    assert names(found) == ["graph launch", "op", "op"]
    assert found.ops[0].graph and not found.ops[2].graph
    # 22 of the launch; the kernels end at 17 + 5 + 1 + 5 = 28; the wait starts at 37.
    assert micros(found) == 22 + 22 + 17 + 5


def test_buckets() -> None:
    def rank(number: int):
        ops = [
            step
            for n in range(3)
            for step in (
                op(launch(10 + n, 50)),
                op(launch(n, 100, 1, after=(10 + n,), collective=all_reduce(n)), name="reduce"),
            )
        ]
        return graph(*ops, op(launch(99, 5, after=(0, 1, 2)), name="step"), rank=number)

    ranks = [rank(0), rank(1)]
    merged = rebucket(ranks, 8192, lambda kernel, size: size / 4096 * 80 * US)
    for found in merged:
        parts = {kernel.id: kernel.collective for kernel in found.kernels if kernel.collective}
        # Two of 4096 bytes fit into a bucket; the first goes with the second.
        assert {id_: part.bytes for id_, part in parts.items()} == {1: 8192, 2: 4096}
        assert after(found)[99] == (1, 2)
    # Kernels end at 67, 118, 169; the merged all-reduce takes 160 from 118, the next 100.
    assert micros(*merged) == 118 + 160 + 1 + 100 + 5
    assert rebucket(ranks, 4096, lambda kernel, size: 0.0) == ranks


def test_broken_pattern() -> None:
    with pytest.raises(PredictionError, match="not a regular expression"):
        named("(")


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=8)


@given(NAMES, st.integers(1, 60))
def test_less_is_never_slower(letters, length) -> None:
    ops = [op(launch(n, length, n % 2), name=name) for n, name in enumerate(letters)]
    whole = graph(*ops, op(Wait(), name="w"))
    before = micros(whole)
    assert micros(remove(whole, named("a"))) <= before
    assert micros(resize(whole, named("b"), 0.5)) <= before
    assert micros(launch_graphs(whole)) <= before
    one_stream = graph(*(op(launch(n, length), name=name) for n, name in enumerate(letters)))
    assert micros(fuse(one_stream, named("[ab]"), total)) <= micros(one_stream)
    assert micros(parallelize(one_stream, named("a"))) <= micros(one_stream)


def test_operators_that_wait_keep_their_wait() -> None:
    chain = graph(
        op(launch(1, 10), name="a"),
        op(launch(2, 20), name="b", after=(1,)),
        op(launch(3, 30), name="c"),
    )
    assert [one.after for one in fuse(chain, named("[abc]"), total).ops] == [(), (1,), ()]
    assert names(launch_graphs(chain)) == ["a", "b", "c"]
    assert [one.after for one in remove(chain, named("a")).ops] == [(), ()]
