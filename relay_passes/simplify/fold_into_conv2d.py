# SPDX-License-Identifier: Apache-2.0
"""Rules that fold paddings, scales and shifts into convolutions, and order biases behind them."""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst

from ..core.constants import (
    array_of,
    broadcasts_cheaply,
    channel_constant,
    constant,
    numbers,
    per_channel,
    scaled,
    shifted,
    uniform,
)
from ..core.expressions import Value, op_name
from ..core.graph import Graph
from ..core.integer_weights import rescaled_weights
from .elementwise import is_whole, stored_integers
from .tir_patterns import zero_padding

CONV2D = "relax.nn.conv2d"


def is_plain_conv2d(call: Value) -> bool:
    """Return whether ``call`` is a convolution in NCHW and OIHW with output of its input's type."""
    if op_name(call) != CONV2D:
        return False
    attrs, data = call.attrs, call.args[0]
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)
    return layouts == ("NCHW", "OIHW", "NCHW") and call.ty.dtype == data.ty.dtype


def weight_of(call: Value) -> np.ndarray | None:
    """The constant weight of a plain convolution, in float64."""
    return numbers(call.args[1]) if is_plain_conv2d(call) else None


def with_weight(call: relax.Call, data: relax.Expr, weight: relax.Expr) -> relax.Call:
    """The same convolution of other operands."""
    return relax.Call(call.op, [data, weight], call.attrs, call.ty_args, call.span)


def with_padding(call: relax.Call, data: relax.Expr, padding: list[int]) -> relax.Call:
    """The same convolution of other data, padded by ``padding`` (top, left, bottom, right)."""
    attrs = call.attrs
    return relax.op.nn.conv2d(
        data,
        call.args[1],
        strides=list(attrs.strides),
        padding=padding,
        dilation=list(attrs.dilation),
        groups=int(attrs.groups),
        data_layout=attrs.data_layout,
        kernel_layout=attrs.kernel_layout,
        out_layout=attrs.out_layout,
        out_dtype=attrs.out_dtype,
    )


def padding_of(call: relax.Call) -> list[int]:
    """Zero padding at top, left, bottom, right."""
    return [int(extent) for extent in call.attrs.padding]


def out_channels(call: relax.Call) -> int | None:
    """Output channels of a convolution whose weight has a static shape."""
    shape = call.args[1].ty.shape
    values = getattr(shape, "values", None)
    return int(values[0]) if values is not None and hasattr(values[0], "value") else None


def is_chain(graph: Graph, expr: relax.Expr) -> bool:
    """Return whether ``expr`` is a convolution, or one plus its bias, with only one reader."""
    if not graph.has_one_use(expr):
        return False
    call = graph.definition(expr)
    match = shifted(call)
    if match is None:
        return is_plain_conv2d(call)
    data, offset = match
    conv = graph.definition(data, CONV2D)
    if conv is None or not graph.has_one_use(data) or not is_plain_conv2d(conv):
        return False
    channels = out_channels(conv)
    return channels is not None and per_channel(offset, 4, channels) is not None


def fold_pad(graph: Graph, call: relax.Expr) -> Value:
    """Folding of constant zero padding over the spatial axes into the convolution behind it.

    ::

        conv2d(pad(x, top, left, bottom, right), w, padding=p)   ->   conv2d(x, w, padding=p + pad)

    ``pad`` is ``relax.nn.pad`` or the PrimFunc that TVM's ONNX importer emits for Pad and
    ``auto_pad``. Left alone: other values and modes, negative extents, padded batches or channels,
    and a padding that anything but a convolution reads.
    """
    match = zero_padding(graph, graph.definition(call.args[0]))
    if match is None or not is_plain_conv2d(call):
        return None
    data, before, after = match
    if len(before) != 4 or any((*before[:2], *after[:2])):
        return None
    if not all(is_plain_conv2d(user) for user in graph.users(call.args[0])):
        return None
    added = (*before[2:], *after[2:])
    padding = [old + new for old, new in zip(padding_of(call), added, strict=True)]
    return with_padding(call, data, padding)


def fold_batch_norm(graph: Graph, item: relax.Expr) -> Value:
    """Batch normalisation at inference as one multiply and one add.

    ::

        y = batch_norm(x, gamma, beta, mean, var)[0]   ->   y = x * scale + shift

    with ``scale = gamma / sqrt(var + epsilon)`` and ``shift = beta - mean * scale``, computed here
    when the parameters are constants and by ops on vectors otherwise. The running statistics, items
    1 and 2, are the parameters themselves. Left alone: ``training=True`` (the op's default, which
    normalises by the batch's own statistics), unknown ranks, and constants without a finite scale
    and shift.
    """
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
    return (graph.emit(relax.op.reshape(scale, shape)), graph.emit(relax.op.reshape(shift, shape)))


def fold_input_affine(graph: Graph, call: relax.Expr) -> Value:
    """Folding of a constant factor or offset in front of a convolution into its weight and bias.

    ::

        conv2d(x * s, w)   ->   conv2d(x, w * s)             s: one number an input channel
        conv2d(x + t, w)   ->   conv2d(x, w) + sum(w * t)    only without padding

    Padding is zero after the offset, not before it, so an offset in front of a padded convolution
    stays where it is. So does the zero point of a quantised input, whose scale is a factor. The
    factor or offset must have no other reader, unless it is the scale of a quantised tensor, and
    the weight must be constant.
    """
    producer = graph.definition(call.args[0])
    scale = scaled(producer)
    if scale is None and is_plain_conv2d(call) and isinstance(call.args[1], GenericConst):
        scale = stored_integers(graph, producer)
    if not graph.has_one_use(call.args[0]) and (scale is None or not is_whole(graph, scale[0])):
        return None
    match = shifted(producer) if scale is None else scale
    is_offset = scale is None
    if match is None or (is_offset and (any(padding_of(call)) or is_whole(graph, call.args[0]))):
        return None
    data, values = match
    weight = weight_of(call)
    if weight is None or not data.ty.is_base_of(call.args[0].ty):
        return None
    by_input = _by_input(call, weight, values)
    if by_input is None:
        return None
    if scale is not None:
        factor = uniform(values) if is_whole(graph, data) else None
        product = (
            weight * by_input if factor is None else rescaled_weights(weight, np.array(factor))
        )
        folded = constant(product, call.ty.dtype)
        return None if folded is None else with_weight(call, data, folded)
    bias = channel_constant((weight * by_input).sum(axis=(1, 2, 3)), 4, call.ty.dtype)
    if bias is None:
        return None
    return relax.op.add(graph.emit(with_weight(call, data, call.args[1])), bias)


def _by_input(call: relax.Call, weight: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """``values``, one number an input channel, shaped to match the weight [O, I / g, kh, kw]."""
    groups = int(call.attrs.groups)
    per_group = weight.shape[1]
    channels = per_channel(values, 4, per_group * groups)
    if channels is None:
        return None
    by_output = np.repeat(channels.reshape(groups, per_group), weight.shape[0] // groups, axis=0)
    return by_output[:, :, None, None]


def fold_scale(graph: Graph, call: relax.Expr) -> Value:
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


def _into_weight(graph: Graph, producer: relax.Expr, factor: np.ndarray) -> Value:
    weight = weight_of(producer)
    if weight is None:
        return None
    channels = per_channel(factor, 4, weight.shape[0])
    if channels is None:
        return None
    if is_whole(graph, producer.args[0]):
        product = rescaled_weights(weight, channels)
    else:
        product = weight * channels[:, None, None, None]
    folded = constant(product, producer.ty.dtype)
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
    product = relax.op.multiply(data, scale)
    if not np.array_equal(array_of(scale), factor) and factor.all():
        # A division has one rounding less than a product with the rounded reciprocal.
        divisor = constant(1 / factor, producer.ty.dtype)
        product = product if divisor is None else relax.op.divide(data, divisor)
    return relax.op.add(graph.emit(product), moved)


ROUNDING = 1024.0
"""Ratio of a constant to the sum of both, and to 1, beyond which it is there to round."""


def canonicalize_bias(graph: Graph, call: relax.Expr) -> Value:
    """Normal form of additions after a convolution: first the bias, then the residual.

    ::

        (x + c) + d                ->   x + (c + d)                constants c, d
        c + conv2d(...)            ->   conv2d(...) + c            c shaped [1, C, 1, 1]
        (conv2d(...) + r) + c      ->   (conv2d(...) + c) + r   r a tensor, c one number a channel
        r + (conv2d(...) + c)      ->   (conv2d(...) + c) + r      r not such a chain itself

    Each step needs the value in between to have no other reader. Subtracting a constant is adding
    its negative. Left alone: constants that vary in space, residuals that broadcast, and large
    constants that cancel, by which ``(x + c) - c`` rounds ``x``.
    """
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
