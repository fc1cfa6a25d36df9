# SPDX-License-Identifier: Apache-2.0
"""Logarithm of a sum of exponentials, as TVM's ONNX importer emits ReduceLogSumExp.

::

    log(sum(exp(x - m))) + m   with   m = max(x)

where ``m`` becomes 0 if it is infinite: else rows of -inf and rows with inf would give NaN.
"""

from __future__ import annotations

from tvm import relax

from ..core.expressions import Value
from ..core.graph import Graph
from .precision import extents, narrow, number, widen

NAMES = ("relax.add",)


def log_sum_exp(graph: Graph, add: relax.Call) -> Value:
    """Rewrite the last addition of the pattern."""
    logarithm = graph.definition(add.args[0], "relax.log")
    largest = graph.definition(add.args[1], "relax.max")
    if logarithm is None or largest is None:
        return None
    data, total = largest.args[0], graph.definition(logarithm.args[0], "relax.sum")
    exponential = None if total is None else graph.definition(total.args[0], "relax.exp")
    if exponential is None or extents(data) is None:
        return None
    difference = graph.definition(exponential.args[0], "relax.subtract")
    if difference is None or not difference.args[0].same_as(data):
        return None
    if not difference.args[1].same_as(add.args[1]) or not _same_axes(total, largest):
        return None
    axes = largest.attrs.axis
    wide = widen(graph, data)
    largest = graph.emit(relax.op.max(wide, axes, keepdims=True))
    is_infinite = graph.emit(relax.op.isinf(largest))
    shift = graph.emit(relax.op.where(is_infinite, number(0, wide), largest))
    exponential = graph.emit(relax.op.exp(graph.emit(relax.op.subtract(wide, shift))))
    logarithm = graph.emit(relax.op.log(graph.emit(relax.op.sum(exponential, axes, keepdims=True))))
    return narrow(graph, relax.op.add(logarithm, shift), data.ty.dtype)


def _same_axes(first: relax.Call, second: relax.Call) -> bool:
    """Return whether two reductions keep the same axes."""
    axes = [None if r.attrs.axis is None else list(r.attrs.axis) for r in (first, second)]
    return axes[0] == axes[1] and bool(first.attrs.keepdims) and bool(second.attrs.keepdims)
