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

import tvm_ffi
from tvm import ir, sym, tirx

from schedules.tir.expression_walk import loads
from schedules.tir.index_math import factor_of, ravel
from schedules.workload.reduce import constant

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
  prefetch((const __global uint*)at, 16);
  return 0;
}}
"""

_AHEAD_BYTES = 2048  # measured on Zen 4: 1024 and 4096 are up to a tenth slower


def prefetches(value: ir.Expr, lane: ir.Var, axes: Sequence[tirx.IterVar]) -> list[tirx.Stmt]:
    """Make the prefetches of a vector of elements.

    Parameters
    ----------
    value : Expr
        An element, computed from loads.
    lane : Var
        The iteration variable along the vector.
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
        dtype = str(load.indices[-1].ty.dtype)
        place = analyzer.simplify(ravel(load.indices, load.source.shape, dtype))
        if factor_of(lane, place) != 1:
            others.add(load.source)
            continue
        front = fronts.setdefault(load.source, (place, load))
        ahead = constant(analyzer.simplify(place - front[0]))
        if ahead is None:
            others.add(load.source)
        elif ahead > 0:
            fronts[load.source] = (place, load)
    return [_prefetch(load) for buffer, (_, load) in fronts.items() if buffer not in others]


def _prefetch(load: ir.TensorLoad) -> tirx.Stmt:
    *outer, last = load.indices
    elements = _AHEAD_BYTES * 8 // tvm_ffi.dtype(str(load.source.dtype)).bits
    ahead = last + tirx.const(elements, str(last.ty.dtype))
    at = tirx.address_of(load.source[[*outer, ahead]])
    return tirx.Evaluate(tirx.call_extern("int32", PREFETCH, at))
