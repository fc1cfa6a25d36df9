# SPDX-License-Identifier: Apache-2.0
"""Stores of elements that are computed in a pass over the data."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from schedules.gpu.core.vector_loads import store_lanes
from schedules.tir.branch import when
from schedules.tir.index_math import i64

from ..plan.group import ElementOutput
from .context import ReduceContext
from .reduced_loop import LoadedVector, PutInto, Visit, as_it_is


def store_elements(
    ctx: ReduceContext,
    elements: Sequence[ElementOutput],
    m: tirx.Expr,
    put_into: PutInto = as_it_is,
    condition: tirx.Expr | None = None,
) -> Visit:
    """Function that stores the elements of a vector, whose values are the last ones of each lane.

    Parameters
    ----------
    ctx : ReduceContext
        The thread.
    elements : Sequence[ElementOutput]
        What is stored.
    m : tirx.Expr
        The row of lane 0.
    put_into : Callable
        Function that puts known results into the value of a lane.
    condition : tirx.Expr | None
        When the thread stores anything; None for always.
    """

    def visit(vector: LoadedVector) -> None:
        lanes = [vector.lane(k)[-len(elements) :] for k in range(vector.size)]
        with when(condition):
            for number, element in enumerate(elements):
                values = [put_into(lane[number], k) for k, lane in enumerate(lanes)]
                _store(ctx, element, m, vector, values)

    return visit if elements else lambda _: None


def visit_twice(first: Visit, second: Visit) -> Visit:
    """Function that visits a vector twice."""

    def visit(vector: LoadedVector) -> None:
        first(vector)
        second(vector)

    return visit


def _store(
    ctx: ReduceContext,
    element: ElementOutput,
    m: tirx.Expr,
    vector: LoadedVector,
    values: Sequence[tirx.Expr],
) -> None:
    """Store a vector of elements."""
    view, at = ctx.flat(element.output), (m, vector.stepped)
    if view is not None:
        store_lanes(values, view, element.place, at, ctx.is_y, vector.narrow)
        return
    for k, value in enumerate(values):
        lane = (m + i64(k), at[1]) if ctx.is_y else (m, at[1] + i64(k))
        ctx.write(element.output, element.place(*lane), value)
