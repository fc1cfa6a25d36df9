# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation at inference as one multiply and one add.

::

    y = batch_norm(x, gamma, beta, mean, var)[0]   ->   y = x * scale + shift

with ``scale = gamma / sqrt(var + epsilon)`` and ``shift = beta - mean * scale``, computed here when
the parameters are constants and by ops on vectors otherwise. The running statistics, items 1 and 2,
are the parameters themselves. Left alone: ``training=True`` (the op's default, which normalises by
the batch's own statistics), unknown ranks, and constants without a finite scale and shift.
"""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx

from ...core.constants import array_of, channel_constant, numbers
from ...core.expressions import Value
from ...core.graph import Graph


def fold_batch_norm(graph: Graph, item: relax.Expr) -> Value:
    """Rewrite one item of a batch normalisation's result."""
    norm = graph.definition(item.tuple_value, "relax.nn.batch_norm")
    if norm is None or norm.attrs.training:
        return None
    if item.index > 0:
        return norm.args[2 + item.index]
    data = norm.args[0]
    if data.ty.ndim < 0:
        return None
    axis = int(norm.attrs.axis) % data.ty.ndim
    if all(numbers(argument) is not None for argument in norm.args[1:]):
        scale_shift = _constants(norm, axis)
    else:
        scale_shift = _vectors(graph, norm, axis)
    if scale_shift is None:
        return None
    scale, shift = scale_shift
    return relax.op.add(graph.emit(relax.op.multiply(data, scale)), shift)


def _constants(norm: relax.Call, axis: int) -> tuple[relax.Expr, relax.Expr] | None:
    gamma, beta, mean, var = (array_of(argument).astype("float64") for argument in norm.args[1:])
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = (gamma if norm.attrs.scale else 1.0) / np.sqrt(var + float(norm.attrs.epsilon))
    shift = (beta if norm.attrs.center else 0.0) - mean * scale
    ty = norm.args[0].ty
    folded = [channel_constant(value, ty.ndim, ty.dtype, axis) for value in (scale, shift)]
    return None if folded[0] is None or folded[1] is None else (folded[0], folded[1])


def _vectors(graph: Graph, norm: relax.Call, axis: int) -> tuple[relax.Expr, relax.Expr] | None:
    data, gamma, beta, mean, var = norm.args
    channels = getattr(gamma.ty.shape, "values", [None])[0]
    if not isinstance(channels, tirx.IntImm):
        return None
    dtype = str(var.ty.dtype)
    epsilon = relax.const(float(norm.attrs.epsilon), dtype)
    spread = graph.emit(relax.op.sqrt(graph.emit(relax.op.add(var, epsilon))))
    scale = graph.emit(
        relax.op.divide(gamma if norm.attrs.scale else relax.const(1.0, dtype), spread)
    )
    shift = graph.emit(relax.op.negative(graph.emit(relax.op.multiply(mean, scale))))
    if norm.attrs.center:
        shift = graph.emit(relax.op.add(beta, shift))
    shape = [1] * data.ty.ndim
    shape[axis] = int(channels)
    return (
        graph.emit(relax.op.reshape(scale, shape)),
        graph.emit(relax.op.reshape(shift, shape)),
    )
