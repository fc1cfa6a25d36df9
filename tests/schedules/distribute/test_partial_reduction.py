# SPDX-License-Identifier: Apache-2.0
"""Reduced loops over ranks: the function of the parts, what they read, and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tvm
from loop_nests import argmax, larger, matmul
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from examples.stencils import function, image
from schedules.distribute.cost import Network, Work, combining
from schedules.distribute.distribute import distribute
from schedules.distribute.exchange import Gather
from schedules.distribute.localize import separate_at
from schedules.distribute.partial_reduction import partial_reduction
from schedules.errors import OpError


def column_sums(rows: int = 40, dtype: str = "float32", kind: Callable = te.sum) -> tirx.PrimFunc:
    """A reduction of each column."""
    a, k = image(rows, 8, dtype=dtype), te.reduce_axis((0, rows), "k")
    return function(a, te.compute((8,), lambda j: kind(a[k, j], axis=k), "C"))


@T.prim_func(s_tir=True)
def of_four(
    A: T.Buffer((T.int64(40), T.int64(8)), "float32"),  # noqa: N803
    C: T.Buffer((T.int64(4), T.int64(8)), "float32"),  # noqa: N803
) -> None:
    T.func_attr({"tirx.noalias": True})
    for k, j, k_1 in T.grid(T.int64(4), T.int64(8), T.int64(10)):
        with T.sblock("C"):
            vp, vj, vk = T.axis.remap("SSR", [k, j, k_1])
            with T.init():
                C[vp, vj] = T.float32(0)
            C[vp, vj] = C[vp, vj] + A[vp * T.int64(10) + vk, vj]


def test_text() -> None:
    parts = partial_reduction(column_sums(), "k", 4)
    assert parts is not None and parts.operator == "sum" and parts.bounds == (0, 10, 20, 30, 40)
    expected = of_four.without_attr("global_symbol")
    tvm.ir.assert_structural_equal(parts.func, expected)
    assert parts.of_rank(3) is parts.func


def test_parts_that_differ() -> None:
    parts = partial_reduction(column_sums(7), "k", 3)
    assert parts is not None and parts.bounds == (0, 2, 4, 7)
    assert "if_then_else" in parts.func.script()
    assert parts.of_rank(0) is parts.of_rank(1) is not parts.of_rank(2)
    assert "if_then_else" not in parts.of_rank(2).script()


def test_empty_parts_read_nothing() -> None:
    parts = partial_reduction(column_sums(1), "k", 2)
    assert parts is not None and parts.bounds == (0, 0, 1)
    assert "A[" not in parts.of_rank(0).script() and "A[" in parts.of_rank(1).script()


@pytest.mark.parametrize("sizes", [(20, 20), (0, 40), (7, 7, 0, 3, 3, 20), (1, 2, 37)])
def test_parts_of_given_sizes(sizes: tuple[int, ...]) -> None:
    plan = distribute(column_sums(), "k", sizes=sizes)
    ends = list(itertools.accumulate(sizes, initial=0))
    assert plan.reduction is not None and plan.ranks == len(sizes)
    for part, size, begin in zip(plan.parts, sizes, ends, strict=False):
        assert plan.reduction.extent(part.rank) == size
        assert part.owned["A"][0] == (begin, begin + size) or not size
        [stage] = plan.nest_of(part.rank).stages
        assert int(stage.reduced[0].dom.extent) == max(size, 1)
    assert not any(exchange.messages for exchange in plan.exchanges)


def test_other_loops_are_left_alone() -> None:
    schedule = s_tir.Schedule(column_sums())
    column, row = schedule.get_loops("C")
    for loop in ("j", 0, "other", column):
        assert partial_reduction(schedule, loop, 2) is None
    assert partial_reduction(schedule, row, 2) is not None


@pytest.mark.parametrize("ranks", [1, 3, 4, 9])
def test_no_byte_is_sent_where_ranks_own_what_they_reduce(ranks: int) -> None:
    plan = distribute(matmul(7, 5, 8), "k", ranks)
    assert not plan.exchange.messages and plan.nest.outputs[0].name == "C"
    gather = Gather("C", ranks, 7 * 5, 4)
    assert plan.gathers == (gather,) and plan.bytes == ranks * (ranks - 1) * 7 * 5 * 4
    for part in plan.parts:
        begin, end = plan.reduction.bounds[part.rank : part.rank + 2]  # type: ignore[union-attr]
        assert part.owned["A"][1] == part.owned["B"][0] == (begin, end)


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (7, 3), (8, 3)])
def test_gather(ranks: int, rounds: int) -> None:
    gather, network = Gather("C", ranks, 5, 4), Network(latency=1.0, bandwidth=20.0)
    assert gather.bytes_each == 20 * (ranks - 1) and gather.bytes == ranks * gather.bytes_each
    assert network.gather_seconds(gather) == rounds + (ranks - 1)
    moved = (ranks + 1) * 20 if ranks > 1 else 0
    assert combining(gather) == Work((ranks - 1) * 5, moved)


def test_halos_of_what_is_reduced() -> None:
    """Squares of the differences of rows: a rank reads one row of the next."""
    a, k = image(12, 5), te.reduce_axis((0, 11), "k")
    d = te.compute((11, 5), lambda i, j: a[i + 1, j] - a[i, j], "d")
    plan = distribute(
        function(a, te.compute((5,), lambda j: te.sum(d[k, j] * d[k, j], axis=k), "C")), "k", 3
    )
    assert plan.exchange.bytes(plan.itemsizes) == 2 * 5 * 4 and len(plan.exchange.messages) == 2


def pairs(choice: Callable = larger, hidden: bool = False) -> tirx.PrimFunc:
    """A choice of a row and a value in each column; both are outputs, or the row alone."""
    a, k = image(40, 8), te.reduce_axis((0, 40), "k")
    row, value = te.compute((8,), lambda j: argmax(choice)((k.var, a[k, j]), axis=k), "C")
    return function(a, row, *(() if hidden else (value,)))


@T.prim_func(s_tir=True)
def better_of_three(
    rows: T.Buffer((T.int64(3), T.int64(8)), "int32"),
    values: T.Buffer((T.int64(3), T.int64(8)), "float32"),
    row: T.Buffer((T.int64(8),), "int32"),
    value: T.Buffer((T.int64(8),), "float32"),
) -> None:
    T.func_attr({"tirx.noalias": True})
    for j, rank in T.grid(T.int64(8), T.int64(3)):
        with T.sblock("C"):
            vj, vk = T.axis.remap("SR", [j, rank])
            with T.init():
                row[vj] = -1
                value[vj] = T.min_value("float32")
            best_row: T.let[T.int32] = T.Cast(
                "int32",
                T.Select(
                    value[vj] >= values[vk, vj],
                    T.Cast("int64", row[vj]),
                    T.Cast("int64", rows[vk, vj]),
                ),
            )
            best: T.let[T.float32] = T.Select(
                value[vj] >= values[vk, vj], value[vj], values[vk, vj]
            )
            row[vj] = best_row
            value[vj] = best


@pytest.mark.parametrize("hidden", [False, True])
def test_selection(hidden: bool) -> None:
    """A value that is no output is gathered, too: it decides which row is taken."""
    plan = distribute(pairs(hidden=hidden), "k", 3)
    assert plan.reduction is not None and plan.reduction.operator == "selection"
    assert plan.reduction.results == (1 if hidden else 2)
    assert plan.reduction.combine is not None
    expected = better_of_three.without_attr("global_symbol")
    tvm.ir.assert_structural_equal(plan.reduction.combine, expected)
    assert [(g.elements, g.itemsize) for g in plan.gathers] == [(8, 4), (8, 4)]
    assert plan.bytes == 3 * 2 * 8 * (4 + 4) and not plan.exchange.messages


def online_softmax(x: tuple[tirx.Expr, ...], y: tuple[tirx.Expr, ...]) -> tuple[tirx.Expr, ...]:
    high = te.max(x[1], y[1])
    return tirx.Select(x[1] >= y[1], x[0], y[0]), x[1] * te.exp(x[1] - high) + y[1]


def by_sum(x: tuple[tirx.Expr, ...], y: tuple[tirx.Expr, ...]) -> tuple[tirx.Expr, ...]:
    """No choice that parts could make, too."""
    return tirx.Select(x[1] + y[1] > 0, x[0], y[0]), tirx.Select(x[1] + y[1] > 0, x[1], y[1])


def by_twice(x: tuple[tirx.Expr, ...], y: tuple[tirx.Expr, ...]) -> tuple[tirx.Expr, ...]:
    return tirx.Select(x[1] > y[1], x[0], y[0]), tirx.Select(x[1] > y[1], x[1], 2.0 * y[1])


def by_another_input() -> tirx.PrimFunc:
    a, b, k = image(40, 8), image(40, name="B"), te.reduce_axis((0, 40), "k")

    def choice(x: tuple[tirx.Expr, ...], y: tuple[tirx.Expr, ...]) -> tuple[tirx.Expr, ...]:
        holds = tirx.all(x[1] > y[1], b[k] > 0)
        return tirx.Select(holds, x[0], y[0]), tirx.Select(holds, x[1], y[1])

    return function(
        a, b, *te.compute((8,), lambda j: argmax(choice)((k.var, a[k, j]), axis=k), "C")
    )


def odd(init: int) -> Callable:
    """Return a reduction that parts cannot share."""
    if init:
        return te.comm_reducer(lambda x, y: x + y, lambda t: tirx.const(init, t), "sum")
    return te.comm_reducer(lambda x, y: 2 * x + y, lambda t: tirx.const(0, t), "odd")


def two(of: Callable[[te.Tensor], te.Tensor], both: bool) -> tirx.PrimFunc:
    """Sums, and what reads them."""
    a, k = image(6, 8), te.reduce_axis((0, 6), "k")
    c = te.compute((8,), lambda j: te.sum(a[k, j], axis=k), "C")
    return function(*((a, c, of(c)) if both else (a, of(c))))


def doubled(c: te.Tensor) -> te.Tensor:
    return te.compute((8,), lambda j: c[j] * 2.0, "D")


@pytest.mark.parametrize(
    ("func", "options", "reason"),
    [
        (column_sums(kind=odd(0)), {}, "'k' of block 'C' is a reduction whose parts cannot be"),
        (column_sums(kind=odd(5)), {}, "each begun with the value that changes nothing"),
        (column_sums(), {"sizes": [20, 21]}, "of loop 'k' sum up to 41; expected its extent 40"),
        (column_sums(), {"sizes": [40], "ranks": 2}, "sizes are given for 1 ranks; expected 2"),
        (column_sums(), {"sizes": [[40], [8]]}, "sizes are given for 2 loops; expected 1"),
        (column_sums(), {"grid": [2]}, "leave out grid= and repeat="),
        (column_sums(), {"repeat": "A"}, "write it into the input before the next call"),
        (column_sums(), {"loop": ["j", "k"]}, "is a reduction, which can only be distributed, and"),
        (column_sums(), {"ranks": None}, "neither the number of ranks nor the sizes"),
        (
            pairs(online_softmax),
            {},
            r"or give each rank its part .* distributed.reduce",
        ),
        (pairs(by_sum), {}, "a choice by comparisons, such as argmax; or give"),
        (pairs(by_twice), {}, "a choice by comparisons, such as argmax; or give"),
        (by_another_input(), {}, "a choice by comparisons, such as argmax; or give"),
        (two(doubled, both=True), {}, "distributed where its result is the only output, and no"),
        (two(doubled, both=False), {}, "'D', which computes an output, has no loop 'k'; it has j"),
    ],
)
def test_refused(func: tirx.PrimFunc, options: Mapping[str, Any], reason: str) -> None:
    given = {"loop": "k", "ranks": 2, **options}
    with pytest.raises(OpError, match=reason):
        distribute(func, **given)


def test_no_cuts() -> None:
    with pytest.raises(OpError, match="is a reduction, which can only be distributed, and alone"):
        separate_at(column_sums(), "k", [20])


def test_symbolic_reductions() -> None:
    n = te.var("n", "int64")
    a, k = te.placeholder((n, 8), "float32", "A"), te.reduce_axis((0, n), "k")
    func = te.create_prim_func([a, te.compute((8,), lambda j: te.sum(a[k, j], axis=k), "C")])
    with pytest.raises(OpError, match="has the symbolic shape"):
        distribute(func, "k", 2)
