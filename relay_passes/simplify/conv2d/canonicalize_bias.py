# SPDX-License-Identifier: Apache-2.0
"""Normal form of additions after a convolution: first the bias, then the residual.

::

    (x + c) + d                ->   x + (c + d)                constants c, d
    c + conv2d(...)            ->   conv2d(...) + c            c shaped [1, C, 1, 1]
    (conv2d(...) + r) + c      ->   (conv2d(...) + c) + r      r any tensor, c one number a channel
    r + (conv2d(...) + c)      ->   (conv2d(...) + c) + r      r not such a chain itself

Each step needs the value in between to have no other reader. Subtracting a constant is adding its
negative. Left alone: constants that vary in space, residuals that broadcast, and large constants
that cancel, by which ``(x + c) - c`` rounds ``x``.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from ...core.constants import broadcasts_cheaply, channel_constant, constant, per_channel, shifted
from ...core.expressions import Value, op_name
from ...core.graph import Graph
from .conv2d_operands import is_chain, is_plain_conv2d, out_channels

ROUNDING = 1024.0
"""Ratio of a constant to the sum of both, and to 1, beyond which it is there to round."""


def canonicalize_bias(graph: Graph, call: relax.Expr) -> Value:
    """Bring the addition or subtraction ``call`` one step closer to the normal form."""
    match = shifted(call)
    if match is None:
        return _chain_first(graph, call)
    data, offset = match
    if not graph.has_one_use(data):
        return None
    producer = graph.definition(data)
    if producer is None:
        return None
    merged = _merge(graph, producer, offset)
    if merged is None:
        merged = _before_residual(graph, producer, offset)
    return _as_bias(call, data, producer, offset) if merged is None else merged


def _merge(graph: Graph, producer: relax.Expr, offset: np.ndarray) -> Value:
    match = shifted(producer)
    if match is None or not broadcasts_cheaply(match[1], offset):
        return None
    both = match[1] + offset
    if (abs(offset) > ROUNDING * np.maximum(abs(both), 1)).any() and not is_chain(graph, match[0]):
        return None
    total = constant(both, producer.ty.dtype)
    return None if total is None else relax.op.add(match[0], total)


def _before_residual(graph: Graph, producer: relax.Expr, offset: np.ndarray) -> Value:
    operands = _residual_operands(graph, producer)
    if operands is None or not is_chain(graph, operands[0]):
        return None
    chain, residual = operands
    extent = producer.ty.shape.values[1] if producer.ty.shape is not None else None
    channels = per_channel(offset, 4, int(getattr(extent, "value", 0)))
    if channels is None or channels.size == 0:
        return None
    bias = channel_constant(channels, 4, producer.ty.dtype)
    return None if bias is None else relax.op.add(graph.emit(relax.op.add(chain, bias)), residual)


def _chain_first(graph: Graph, call: relax.Expr) -> Value:
    operands = _residual_operands(graph, call)
    if operands is None or operands[0].same_as(call.args[0]) or not is_chain(graph, operands[0]):
        return None
    return relax.op.add(*operands)


def _residual_operands(graph: Graph, call: relax.Expr) -> tuple[relax.Expr, relax.Expr] | None:
    """The chain and the other operand of an addition of two tensors of one type."""
    if op_name(call) != "relax.add" or any(isinstance(arg, GenericConst) for arg in call.args):
        return None
    lhs, rhs = call.args
    if not (lhs.ty.is_base_of(rhs.ty) and rhs.ty.is_base_of(lhs.ty)):
        return None
    return (rhs, lhs) if is_chain(graph, rhs) and not is_chain(graph, lhs) else (lhs, rhs)


def _as_bias(call: relax.Expr, data: relax.Expr, producer: relax.Expr, offset: np.ndarray) -> Value:
    channels = out_channels(producer) if is_plain_conv2d(producer) else None
    if channels is None:
        return None
    values = per_channel(offset, 4, channels)
    is_normal = call.args[0].same_as(data) and offset.shape == (1, channels, 1, 1)
    if values is None or (is_normal and call.op.name == "relax.add"):
        return None
    bias = channel_constant(values, 4, call.ty.dtype)
    return None if bias is None else relax.op.add(data, bias)
