# SPDX-License-Identifier: Apache-2.0
"""Stores of elements that are computed in a pass over the data."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from schedules.gpu.core.lane_run import LaneRun
from schedules.gpu.core.vector_loads import hold, store_vector
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


def both(first: Visit, second: Visit) -> Visit:
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
    """Store a vector of elements, as one if they are neighbours in the output."""

    def place(at_m: tirx.Expr, at_n: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
        return element.place(at_m + k, at_n) if ctx.is_y else element.place(at_m, at_n + k)

    view, zero, n = ctx.flat(element.output), i64(0), vector.stepped
    run = LaneRun(len(values))
    kind = run.kind(*(place(*run.place(ctx.is_y), k) for k in (zero, run.lane)))
    if view is not None and len(values) > 1 and kind == "vector":
        store_vector(hold(values, view.dtype), view, vector.narrow(element.place(m, n)))
        return
    for k, value in enumerate(values):
        ctx.write(element.output, vector.narrow(place(m, n, i64(k))), value)
