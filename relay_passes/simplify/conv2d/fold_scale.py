# SPDX-License-Identifier: Apache-2.0
"""Folding of multiplications by constants into the weight of the convolution in front of them.

::

    conv2d(x, w) * s           ->   conv2d(x, w * s)        s: one number a channel
    (conv2d(x, w) + c) * s     ->   conv2d(x, w) * s + c * s
    (x * t) * s                ->   x * (t * s)
    (x * t + c) * s            ->   (x * t) * s + c * s

A division by a constant is a multiplication here. Each step needs the value in between to have
no other reader. Left alone: constants whose product would have more elements than either, and
products that are not finite.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ...core.constants import broadcasts_cheaply, constant, per_channel, scaled, shifted
from ...core.expressions import Value
from ...core.graph import Graph
from .conv2d_operands import weight_of, with_weight


def fold_scale(graph: Graph, call: relax.Expr) -> Value:
    """Move the constant factor of ``call`` one step forward."""
    match = scaled(call)
    if match is None or not graph.has_one_use(match[0]):
        return None
    data, factor = match
    producer = graph.definition(data)
    if producer is None:
        return None
    for step in (_into_weight, _into_factor, _past_offset):
        answer = step(graph, producer, factor)
        if answer is not None:
            return answer
    return None


def _into_weight(_: Graph, producer: relax.Expr, factor: np.ndarray) -> Value:
    weight = weight_of(producer)
    if weight is None:
        return None
    channels = per_channel(factor, 4, weight.shape[0])
    if channels is None:
        return None
    folded = constant(weight * channels[:, None, None, None], producer.ty.dtype)
    return None if folded is None else with_weight(producer, producer.args[0], folded)


def _into_factor(_: Graph, producer: relax.Expr, factor: np.ndarray) -> Value:
    match = scaled(producer)
    if match is None or not broadcasts_cheaply(match[1], factor):
        return None
    product = constant(match[1] * factor, producer.ty.dtype)
    return None if product is None else relax.op.multiply(match[0], product)


def _past_offset(graph: Graph, producer: relax.Expr, factor: np.ndarray) -> Value:
    match = shifted(producer)
    if match is None or not graph.has_one_use(match[0]):
        return None
    data, offset = match
    inner = graph.definition(data)
    if weight_of(inner) is None and scaled(inner) is None:
        return None
    if not broadcasts_cheaply(offset, factor):
        return None
    scale = constant(factor, producer.ty.dtype)
    moved = constant(offset * factor, producer.ty.dtype)
    if scale is None or moved is None:
        return None
    return relax.op.add(graph.emit(relax.op.multiply(data, scale)), moved)
