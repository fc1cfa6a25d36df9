# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation: ``(x - mean) * rsqrt(variance + epsilon) * gamma + beta`` over ``axes``."""

from __future__ import annotations

from tvm import relax

from ..core.expressions import Value
from ..core.graph import Graph
from .moments import emit_moments, normalized, scale_and_shift
from .precision import extents, narrow, spread, widen

NAMES = ("relax.nn.layer_norm",)


def layer_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``layer_norm`` over ascending axes."""
    data, gamma, beta = call.args
    shape = extents(data)
    if shape is None:
        return None
    axes = [int(axis) % len(shape) for axis in call.attrs.axes]
    if axes != sorted(axes):
        return None  # gamma and beta would have to be transposed
    wide = widen(graph, data)
    moments = emit_moments(graph, wide, axes)
    result = normalized(
        graph, moments.difference, graph.emit_once(moments.variance), float(call.attrs.epsilon)
    )
    weights = [
        spread(graph, widen(graph, weight), shape, axes) if is_used else None
        for weight, is_used in ((gamma, call.attrs.scale), (beta, call.attrs.center))
    ]
    return narrow(graph, scale_and_shift(graph, result, *weights), data.ty.dtype)
