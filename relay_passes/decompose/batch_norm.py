# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation in training, which also updates the running statistics.

::

    batch_norm(x, gamma, beta, running_mean, running_variance, training=True)
    ->
    ((x - mean) * rsqrt(variance + epsilon) * gamma + beta,
     (1 - momentum) * running_mean + momentum * mean,
     (1 - momentum) * running_variance + momentum * variance)

with mean and variance over all axes but the channel axis.
"""

from __future__ import annotations

from tvm import relax

from ..core.expressions import Value
from ..core.graph import Graph
from .moments import emit_moments, normalized, scale_and_shift
from .precision import extents, narrow, number, spread, widen

NAMES = ("relax.nn.batch_norm",)


def batch_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``batch_norm`` with ``training=True``; the other form holds no reduction."""
    data, gamma, beta, *running = call.args
    attrs = call.attrs
    shape = extents(data)
    if shape is None or not attrs.training or len(shape) < 2:
        return None
    channel = int(attrs.axis) % len(shape)
    wide = widen(graph, data)
    moments = emit_moments(graph, wide, [axis for axis in range(len(shape)) if axis != channel])
    variance = graph.emit_once(moments.variance)
    weights = [
        spread(graph, widen(graph, weight), shape, [channel]) if is_used else None
        for weight, is_used in ((gamma, attrs.scale), (beta, attrs.center))
    ]
    result = normalized(graph, moments.difference, variance, float(attrs.epsilon))
    result = scale_and_shift(graph, result, *weights)
    results = [narrow(graph, result, data.ty.dtype)]
    for old, new in zip(running, (moments.mean, variance), strict=True):
        results.append(_updated(graph, old, new, float(attrs.momentum)))
    return relax.Tuple([graph.emit(each) for each in results])


def tuple_field(graph: Graph, item: relax.TupleGetItem) -> Value:
    """The field itself, where the tuple is constructed here."""
    made = graph.definition(item.tuple_value)
    return made.fields[item.index] if isinstance(made, relax.Tuple) else None


def _updated(graph: Graph, old: relax.Expr, new: relax.Expr, momentum: float) -> relax.Expr:
    """``(1 - momentum) * old + momentum * new`` in the shape and type of ``old``."""
    wide = widen(graph, old)
    new = graph.emit(relax.op.reshape(new, old.ty.shape))
    kept = graph.emit(relax.op.multiply(number(1 - momentum, wide), wide))
    added = graph.emit(relax.op.multiply(number(momentum, wide), new))
    return narrow(graph, relax.op.add(kept, added), old.ty.dtype)
