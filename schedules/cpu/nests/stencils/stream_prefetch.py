# SPDX-License-Identifier: Apache-2.0
"""Prefetches of what a nest reads from memory.

A core waits for few lines at a time that are on their way to its first cache, and for more that are
on their way to the second. Of the places that a filter reads, the last one in memory is new, and
the others have been read before::

    before: o[i, j * 16 + v] = a[i - 1, ...] + ...     after: prefetch(T.address_of(a[i + 1, ...]))
                 + a[i + 1, j * 16 + v]                       o[i, j * 16 + v] = ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, sym, tirx

from schedules.tir.expression_walk import loads
from schedules.tir.extents import constant
from schedules.tir.index_math import factor_of, ravel

from ..blocks import item_bytes

PREFETCH = "tvm_fusion_stream_prefetch"
"""Name of the function that prefetches a line into the second cache."""
PREFETCH_LLVM = f"""
define i32 @{PREFETCH}(ptr %at) {{
  call void @llvm.prefetch.p0(ptr %at, i32 0, i32 2, i32 1)
  ret i32 0
}}
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""
PREFETCH_OPENCL = f"""
int {PREFETCH}(const __global void* at) {{
  __builtin_prefetch(at, 0, 2);
  return 0;
}}
"""

_LEAST_AHEAD = 2048  # bytes; measured on Zen 4: 1024 and 4096 are up to a tenth slower


@dataclass(frozen=True)
class Step:
    """What a nest computes together.

    Parameters
    ----------
    lane : Var
        The iteration variable of its block along a vector.
    row : Var or None
        The one along its rows; None if there is only one.
    rows : int
        Number of its rows.
    most_ahead : int
        Bytes that the second cache may hold for later steps.
    """

    lane: ir.Var
    row: ir.Var | None
    rows: int
    most_ahead: int


def prefetches(value: ir.Expr, step: Step, axes: Sequence[tirx.IterVar]) -> list[tirx.Stmt]:
    """Make the prefetches of a vector of elements, of the next rows where the cache holds them.

    Parameters
    ----------
    value : Expr
        An element, computed from loads.
    step : Step
        What is computed together.
    axes : Sequence[IterVar]
        All iteration variables.

    Returns
    -------
    list[Stmt]
        One for each tensor of which adjacent elements are read, the distances between which are
        constant.
    """
    analyzer = sym.Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, axis.dom)
    fronts: dict[ir.Var, tuple[ir.Expr, ir.TensorLoad]] = {}
    others: set[ir.Var] = set()
    for load in loads(value):
        if not len(load.indices):  # of a single number
            continue
        dtype = str(load.indices[-1].ty.dtype)
        place = analyzer.simplify(ravel(load.indices, load.source.shape, dtype))
        if factor_of(step.lane, place) != 1:
            others.add(load.source)
            continue
        front = fronts.setdefault(load.source, (place, load))
        ahead = constant(analyzer.simplify(place - front[0]))
        if ahead is None:
            others.add(load.source)
        elif ahead > 0:
            fronts[load.source] = (place, load)
    return [
        _prefetch(load, _ahead(place, load, step))
        for buffer, (place, load) in fronts.items()
        if buffer not in others
    ]


def _ahead(place: ir.Expr, load: ir.TensorLoad, step: Step) -> int:
    """How many elements after a load its prefetch is."""
    size = item_bytes(load.source)
    rows = (factor_of(step.row, place) or 0) * step.rows if step.row is not None else 0
    return rows if _LEAST_AHEAD <= rows * size <= step.most_ahead else _LEAST_AHEAD // size


def _prefetch(load: ir.TensorLoad, ahead: int) -> tirx.Stmt:
    *outer, last = load.indices
    at = tirx.address_of(load.source[[*outer, last + tirx.const(ahead, str(last.ty.dtype))]])
    return tirx.Evaluate(tirx.call_extern("int32", PREFETCH, at))
