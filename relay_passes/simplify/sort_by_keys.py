# SPDX-License-Identifier: Apache-2.0
"""Sorting of other types than int32 and int64 by keys of these.

::

    argsort(x)   ->   argsort(sort_key(x))
    sort(x)      ->   gather_elements(x, argsort(sort_key(x)))
    topk(x, k)   ->   places = topk(sort_key(x), k);  gather_elements(x, places), places
    argmax(x)    ->   argmax(sort_key(x))               of integers that no reduction of ours takes

TVM's kernels lose elements beside NaN, do not know all types, and find no place of the least number
of those without sign.
"""

from __future__ import annotations

from tvm import relax

from schedules.workload.reduce import DTYPES

from ..core.expressions import Value, op_name
from ..core.graph import Graph
from ..op.elementwise import sort_key

SORTS = ("relax.argsort", "relax.sort", "relax.topk")
PLACES = {"relax.argmax": relax.op.argmax, "relax.argmin": relax.op.argmin}


def sort_by_keys(graph: Graph, call: relax.Call) -> Value:
    """Rewrite a call that sorts numbers, or looks for the place of the largest or the least."""
    data, attrs = call.args[0], call.attrs
    ty, name = data.ty, op_name(call)
    if name in PLACES:
        if str(ty.dtype) in DTYPES:
            return None
        return PLACES[name](graph.emit(sort_key(data)), attrs.axis, bool(attrs.keepdims))
    if str(ty.dtype) in ("int32", "int64") or ty.shape is None or ty.ndim == 0:
        return None
    keys = graph.emit(sort_key(data))
    axis = int(attrs.axis)
    if name == "relax.argsort":
        return relax.op.argsort(keys, axis, bool(attrs.descending), attrs.dtype)
    if name == "relax.sort":
        order = graph.emit(relax.op.argsort(keys, axis, bool(attrs.descending), "int64"))
        return relax.op.gather_elements(data, order, axis % ty.ndim)
    kind, dtype = str(attrs.ret_type), attrs.dtype
    places = graph.emit(
        relax.op.topk(keys, int(attrs.k), axis, "indices", bool(attrs.largest), dtype)
    )
    if kind == "indices":
        return places
    values = relax.op.gather_elements(data, places, axis % ty.ndim)
    return values if kind == "values" else relax.Tuple([graph.emit(values), places])
