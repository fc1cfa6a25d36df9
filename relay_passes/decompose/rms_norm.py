# SPDX-License-Identifier: Apache-2.0
"""Normalisation by the root of the mean square: ``x * rsqrt(mean(x * x) + epsilon) * weight``."""

from __future__ import annotations

from tvm import relax

from ..core.expressions import Value
from ..core.graph import Graph
from .moments import normalized
from .precision import extents, narrow, spread, widen

NAMES = ("relax.nn.rms_norm",)


def rms_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``rms_norm`` over ascending axes."""
    data, weight = call.args
    shape = extents(data)
    if shape is None:
        return None
    axes = [int(axis) % len(shape) for axis in call.attrs.axes]
    if axes != sorted(axes):
        return None  # the weight would have to be transposed
    wide = widen(graph, data)
    squares = graph.emit_once(relax.op.multiply(wide, wide))
    mean = graph.emit_once(relax.op.mean(squares, axes, keepdims=True))
    scale = spread(graph, widen(graph, weight), shape, axes)
    result = graph.emit(normalized(graph, wide, mean, float(call.attrs.epsilon)))
    return narrow(graph, relax.op.multiply(result, scale), data.ty.dtype)
