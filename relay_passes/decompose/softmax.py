# SPDX-License-Identifier: Apache-2.0
"""Softmax and its logarithm.

::

    m = R.max(x, axis, keepdims=True); d = R.subtract(x, m); e = R.exp(d)
    s = R.sum(e, axis, keepdims=True)

    softmax(x)       ->   R.divide(e, s)
    log_softmax(x)   ->   R.subtract(d, R.log(s))

A row of -inf gives NaN, because its differences from its maximum are NaN.
"""

from __future__ import annotations

from tvm import relax

from ..core.expressions import Value
from ..core.graph import Graph
from .precision import extents, narrow, widen

NAMES = ("relax.nn.softmax", "relax.nn.log_softmax")


def softmax(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``softmax`` or ``log_softmax`` of known extents."""
    data = call.args[0]
    shape = extents(data)
    if shape is None:
        return None
    axis = int(call.attrs.axis) % len(shape)
    wide = widen(graph, data)
    largest = graph.emit_once(relax.op.max(wide, axis, keepdims=True))
    difference = graph.emit_once(relax.op.subtract(wide, largest))
    exponential = graph.emit_once(relax.op.exp(difference))
    total = graph.emit_once(relax.op.sum(exponential, axis, keepdims=True))
    if call.op.name == "relax.nn.softmax":
        result = relax.op.divide(exponential, total)
    else:
        result = relax.op.subtract(difference, graph.emit_once(relax.op.log(total)))
    return narrow(graph, result, data.ty.dtype)
