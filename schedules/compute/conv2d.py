# SPDX-License-Identifier: Apache-2.0
"""TE computes of one convolution and of a fused pair, in NCHW and in NCHW[x]c.

Layouts (``x`` lanes a channel block, ``B(C) = ceil(C / x)``):

========== ========================= =============================================
tensor     NCHW                      NCHW[x]c
========== ========================= =============================================
data       ``[N, C, H, W]``          ``[N, B(C), H, W, x]``
weight     ``[O, I / g, kh, kw]``    dense ``[B(O), B(I), kh, kw, x, x]`` (in, out lanes),
                                     first layer ``[B(O), I, kh, kw, 1, x]`` on NCHW data,
                                     depthwise ``[B(C), kh, kw, x]``,
                                     groups ``[B(O), I / g / d, kh, kw, d, x]`` with ``d`` the
                                     greatest common divisor of ``I / g`` and ``x``,
                                     groups of ``g`` lanes in a block ``[B(C), 1, kh, kw, g, x]``,
                                     from input lane ``i`` to output lane ``i ^ j`` at ``[j, i]``
bias       ``[O]``                   ``[B(O), x]``
========== ========================= =============================================

Convolutions of bfloat16 with biases of float32 sum up, add and activate in float32. In NCHW[x]c
their dense weights are ``[B(O), B(I), kh, kw, x / 2, x, 2]``: words of two input channels, output
lanes, the channels of a word. With groups they may be ``[B(O), I / g / d, kh, kw, d / 2, x, 2]``,
too, with ``d`` that of the data. First layers read ``[N, ceil(C / 4), H, W, 4]``, with weights
``[B(O), ceil(I / 4), kh, kw, 2, x, 2]``. Words of dense layers may have four channels, which lie in
one block, instead of two. On tensor cores of GPUs dense weights of float32 are
``[B(O), B(I), kh, kw, 1, x, x]``: words of all input lanes of a block.

Block names are fixed, because schedule rules find their stages by them: ``pad1``, ``conv1``,
``layer1`` (bias, residual, activation), and the same with 2 for the second layer.
"""

from __future__ import annotations

import math

from tvm import DataType, te, tirx

from schedules.tir.float_bits import round_to_bits

from ..workload.conv2d import Activation, ByteAddition, ConvLayer

WORDS_RANK = 7
"""Axes of a weight in words."""


def activate(value: tirx.Expr, activation: Activation, dtype: str) -> tirx.Expr:
    """Apply ``activation`` to one element, or to one vector of elements, of type ``dtype``.

    NaN stays NaN: a comparison with it is false, which leaves it where ``max`` may drop it.
    """

    def const(number: float) -> tirx.Expr:
        scalar = tirx.const(number, dtype)
        lanes = DataType(str(value.ty.dtype)).lanes
        return tirx.Broadcast(scalar, lanes) if lanes > 1 else scalar

    def at_least(element: tirx.Expr, low: float) -> tirx.Expr:
        return tirx.Select(element < const(low), const(low), element)

    def clip(element: tirx.Expr, low: float, high: float) -> tirx.Expr:
        element = at_least(element, low)
        return tirx.Select(element > const(high), const(high), element)

    if activation.kind == "none":
        return value
    if activation.kind == "relu":
        return at_least(value, 0)
    if activation.kind == "relu6":
        return clip(value, 0, 6)
    if activation.kind == "clip":
        return clip(value, activation.low, activation.high)
    if activation.kind == "round_clip":
        return clip(tirx.round(value), activation.low, activation.high)
    if activation.kind == "hardswish":
        return value * (clip(value + const(3), 0, 6) * const(1 / 6))
    if activation.kind == "gelu":
        return value * (tirx.erf(value * const(math.sqrt(0.5))) * const(0.5) + const(0.5))
    gate = tirx.sigmoid(value)
    return gate if activation.kind == "sigmoid" else value * gate


def activate_to_bytes(value: tirx.Expr, activation: Activation, dtype: str) -> tirx.Expr:
    """Apply ``round_clip`` to floats as :func:`activate` does; return the distance to its bound.

    That of NaN is 0.
    """
    lanes = DataType(str(value.ty.dtype)).lanes

    def const(number: float) -> tirx.Expr:
        scalar = tirx.const(number, dtype)
        return tirx.Broadcast(scalar, lanes) if lanes > 1 else scalar

    # From zero on: where the operands are unordered, TVM's extremes are the second.
    distance = tirx.round(value) - const(activation.low) if activation.low else tirx.round(value)
    span = activation.high - activation.low
    byte = tirx.min(tirx.max(distance, const(0)), const(span))
    word = "int32" if lanes == 1 else f"int32x{lanes}"
    return byte.astype(word).astype(word.replace("int32", "uint8"))


def finished(
    value: tirx.Expr, activation: Activation, dtype: str, out_dtype: str | None
) -> tirx.Expr:
    """Apply ``activation`` to numbers of ``dtype``, as elements of an output of ``out_dtype``.

    Those of bfloat16 in a vector are their bits.
    """
    if out_dtype == "uint8":
        return activate_to_bytes(value, activation, dtype)
    value = activate(value, activation, dtype)
    if out_dtype != "bfloat16":
        return value
    bits = round_to_bits(value)
    is_vector = DataType(str(value.ty.dtype)).lanes > 1
    return bits if is_vector else tirx.reinterpret("bfloat16", bits)


def scaled_sum(total: tirx.Expr, bias: tirx.Expr, scale: tirx.Expr) -> tirx.Expr:
    """The float32 of a sum of bytes: a bias of int32 joins the sum, one of float32 the product."""
    if bias.ty.dtype == total.ty.dtype:
        return (total + bias).astype(scale.ty.dtype) * scale
    return total.astype(scale.ty.dtype) * scale + bias


def add_bytes(
    value: tirx.Expr, activation: Activation, added: tirx.Expr, addition: ByteAddition
) -> tirx.Expr:
    """Apply ``activation`` to float32 and add bytes; the sum has to be rounded yet."""
    dtype = value.ty.dtype
    lanes = DataType(str(dtype)).lanes

    def const(number: float) -> tirx.Expr:
        scalar = tirx.const(number, "float32")
        return tirx.Broadcast(scalar, lanes) if lanes > 1 else scalar

    numbers = added.astype(dtype)
    if addition.shift:
        numbers = numbers + const(addition.shift)
    products = [
        activate(value, activation, "float32") * const(addition.factor),
        numbers * const(addition.bytes_factor),
    ]
    first, second = reversed(products) if addition.bytes_first else products
    return (first + second) / const(addition.divisor)


def conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    bias: te.Tensor,
    residual: te.Tensor | None,
    layer: ConvLayer,
    data_layout: str = "NCHW",
    out_layout: str = "NCHW",
    out_dtype: str | None = None,
    scale: te.Tensor | None = None,
) -> te.Tensor:
    """One convolution: ``act(conv(data, weight) [* scale] + bias [+ residual])``.

    Parameters
    ----------
    data, weight, bias : te.Tensor
        Tensors in the layouts of the table in this module's docstring.
    residual : te.Tensor | None
        A tensor of the output's shape.
    layer : ConvLayer
        Attributes; its channel counts are the true ones, without padding lanes.
    data_layout, out_layout : str
        ``NCHW`` or ``NCHW{x}c``.
    out_dtype : str | None
        ``uint8`` for the distances of the rounded output to its lower bound; ``bfloat16`` or
        ``float32`` where sums are of another type than the data; else None.
    scale : te.Tensor | None
        Factors of the sums, like ``bias``, for weights of int8.

    Returns
    -------
    te.Tensor
        The activated output in ``out_layout``.
    """
    layouts = data_layout, out_layout
    return _layer(data, weight, bias, residual, layer, *layouts, "1", out_dtype, scale)


def fused_conv2d(
    data: te.Tensor,
    weight1: te.Tensor,
    bias1: te.Tensor,
    weight2: te.Tensor,
    bias2: te.Tensor,
    residual: te.Tensor | None,
    layer1: ConvLayer,
    layer2: ConvLayer,
    data_layout: str = "NCHW",
    out_layout: str = "NCHW",
) -> te.Tensor:
    """Two convolutions: ``act2(conv2(act1(conv1(data) + bias1)) + bias2 [+ residual])``.

    The intermediate has the layout of the output. Parameters are those of :func:`conv2d`,
    numbered by layer.
    """
    mid = _layer(data, weight1, bias1, None, layer1, data_layout, out_layout, "1")
    return _layer(mid, weight2, bias2, residual, layer2, out_layout, out_layout, "2")


def _layer(
    data: te.Tensor,
    weight: te.Tensor,
    bias: te.Tensor,
    residual: te.Tensor | None,
    layer: ConvLayer,
    data_layout: str,
    out_layout: str,
    suffix: str,
    out_dtype: str | None = None,
    scale: te.Tensor | None = None,
) -> te.Tensor:
    image, sums = padded(data, layer, suffix), str(bias.dtype)
    if out_layout == "NCHW":
        conv = _conv_plain(image, weight, layer, suffix, sums)
    elif data_layout == "NCHW":
        conv = _conv_first(image, weight, layer, suffix)
    elif layer.is_depthwise:
        conv = _conv_depthwise(image, weight, layer, suffix, sums)
    elif len(weight.shape) == WORDS_RANK:
        conv = _conv_words(image, weight, layer, suffix, sums)
    elif layer.group_lanes(int(weight.shape[-1])):
        conv = _conv_narrow(image, weight, layer, suffix, sums)
    else:
        conv = _conv_packed(image, weight, layer, suffix, sums)

    def finish(*index: tirx.Var) -> tirx.Expr:
        channel = index[1:2] if len(index) == 4 else (index[1], index[4])
        if scale is None:
            value = conv(*index) + bias(*channel)
        elif data.dtype == "uint8":
            value = (conv(*index) + bias(*channel)) * scale(*channel)
        else:
            value = conv(*index) * scale(*channel) + bias(*channel)
        if residual is not None:
            value = value + residual(*index).astype(bias.dtype)
        return finished(value, layer.activation, bias.dtype, out_dtype)

    return te.compute(conv.shape, finish, name=f"layer{suffix}")


def padded(data: te.Tensor, layer: ConvLayer, suffix: str, zero: int = 0) -> te.Tensor:
    """The data with the zeros, or what stands for them, around it that the layer reads."""
    top, left, bottom, right = layer.padding
    if not any(layer.padding):
        return data
    height, width = data.shape[2], data.shape[3]
    shape = [*data.shape]
    shape[2], shape[3] = height + top + bottom, width + left + right

    def read(*index: tirx.Var) -> tirx.Expr:
        n, c, h, w, *lane = index
        inside = tirx.all(h >= top, h < height + top, w >= left, w < width + left)
        outside = tirx.const(zero, data.dtype)
        return tirx.if_then_else(inside, data(n, c, h - top, w - left, *lane), outside)

    return te.compute(shape, read, name=f"pad{suffix}")


def out_space(image: te.Tensor, layer: ConvLayer) -> list[tirx.Expr]:
    """Height and width of the output for padded data."""
    return [
        (image.shape[2 + i] - (layer.kernel[i] - 1) * layer.dilation[i] - 1) // layer.strides[i] + 1
        for i in range(2)
    ]


def taps(layer: ConvLayer) -> tuple[tirx.IterVar, tirx.IterVar]:
    """Axes over the rows and columns of the kernel."""
    return (
        te.reduce_axis((0, layer.kernel[0]), name="kh"),
        te.reduce_axis((0, layer.kernel[1]), name="kw"),
    )


def source_pixel(
    layer: ConvLayer, h: tirx.Expr, w: tirx.Expr, kh, kw
) -> tuple[tirx.Expr, tirx.Expr]:
    """Row and column of the padded data that a tap of an output pixel reads."""
    return (
        h * layer.strides[0] + kh * layer.dilation[0],
        w * layer.strides[1] + kw * layer.dilation[1],
    )


def _conv_plain(
    data: te.Tensor, weight: te.Tensor, layer: ConvLayer, suffix: str, sums: str
) -> te.Tensor:
    kh, kw = taps(layer)
    group_in = layer.in_channels // layer.groups
    group_out = layer.out_channels // layer.groups
    ic = te.reduce_axis((0, group_in), name="ic")

    def value(n, o, h, w):
        channel = ic if layer.groups == 1 else (o // group_out) * group_in + ic
        return te.sum(
            data(n, channel, *source_pixel(layer, h, w, kh, kw)).astype(sums)
            * weight(o, ic, kh, kw).astype(sums),
            axis=[ic, kh, kw],
        )

    shape = [data.shape[0], layer.out_channels, *out_space(data, layer)]
    return te.compute(shape, value, name=f"conv{suffix}")


def _conv_first(data: te.Tensor, weight: te.Tensor, layer: ConvLayer, suffix: str) -> te.Tensor:
    kh, kw = taps(layer)
    ic = te.reduce_axis((0, layer.in_channels), name="ic")
    shape = [data.shape[0], weight.shape[0], *out_space(data, layer), weight.shape[5]]
    return te.compute(
        shape,
        lambda n, ob, h, w, oi: te.sum(
            data(n, ic, *source_pixel(layer, h, w, kh, kw))
            * weight(ob, ic, kh, kw, 0, oi).astype(data.dtype),
            axis=[ic, kh, kw],
        ),
        name=f"conv{suffix}",
    )


def _conv_depthwise(
    data: te.Tensor, weight: te.Tensor, layer: ConvLayer, suffix: str, sums: str
) -> te.Tensor:
    kh, kw = taps(layer)
    shape = [data.shape[0], data.shape[1], *out_space(data, layer), data.shape[4]]
    return te.compute(
        shape,
        lambda n, cb, h, w, ci: te.sum(
            data(n, cb, *source_pixel(layer, h, w, kh, kw), ci).astype(sums)
            * weight(cb, kh, kw, ci).astype(sums),
            axis=[kh, kw],
        ),
        name=f"conv{suffix}",
    )


def _conv_narrow(
    data: te.Tensor, weight: te.Tensor, layer: ConvLayer, suffix: str, sums: str
) -> te.Tensor:
    kh, kw = taps(layer)
    width = int(weight.shape[4])
    ic = te.reduce_axis((0, width), name="ic")

    def value(n, cb, h, w, oi):
        lane = oi // width * width + ic
        source = data(n, cb, *source_pixel(layer, h, w, kh, kw), lane).astype(sums)
        factor = weight(cb, 0, kh, kw, oi ^ lane, lane).astype(sums)
        return te.sum(source * factor, axis=[ic, kh, kw])

    shape = [data.shape[0], data.shape[1], *out_space(data, layer), data.shape[4]]
    return te.compute(shape, value, name=f"conv{suffix}")


def _conv_words(
    data: te.Tensor, weight: te.Tensor, layer: ConvLayer, suffix: str, sums: str
) -> te.Tensor:
    kh, kw = taps(layer)
    lanes, word = int(data.shape[4]), int(weight.shape[6])
    step = int(weight.shape[4]) * word
    ic = te.reduce_axis((0, int(weight.shape[1]) * step), name="ic")
    shape = [data.shape[0], weight.shape[0], *out_space(data, layer), weight.shape[5]]

    def value(n, ob, h, w, oi):
        channel, part, inside = ic, ic // step, ic % step
        if layer.groups > 1:
            group = (ob * weight.shape[5] + oi) // (layer.out_channels // layer.groups)
            group = tirx.min(group, layer.groups - 1)  # also of lanes past the last channel
            channel = group * (layer.in_channels // layer.groups) + ic
        pixel = source_pixel(layer, h, w, kh, kw)
        source = data(n, channel // lanes, *pixel, channel % lanes).astype(sums)
        factor = weight(ob, part, kh, kw, inside // word, oi, inside % word).astype(sums)
        return te.sum(source * factor, axis=[ic, kh, kw])

    return te.compute(shape, value, name=f"conv{suffix}")


def _conv_packed(
    data: te.Tensor, weight: te.Tensor, layer: ConvLayer, suffix: str, sums: str
) -> te.Tensor:
    kh, kw = taps(layer)
    parts, step, lanes = (int(weight.shape[axis]) for axis in (1, 4, 5))
    group_in, group_out = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    icb = te.reduce_axis((0, parts), name="icb")
    ici = te.reduce_axis((0, step), name="ici")
    shape = [data.shape[0], weight.shape[0], *out_space(data, layer), weight.shape[5]]

    def value(n, ob, h, w, oi):
        block, lane = icb, ici
        if layer.groups > 1:
            group = (ob * lanes + oi) // group_out
            if layer.out_channels % lanes:
                group = tirx.min(group, layer.groups - 1)
            channel = group * group_in + icb * step + ici
            block, lane = channel // lanes, channel % lanes
        return te.sum(
            data(n, block, *source_pixel(layer, h, w, kh, kw), lane).astype(sums)
            * weight(ob, icb, kh, kw, ici, oi).astype(sums),
            axis=[icb, kh, kw, ici],
        )

    return te.compute(shape, value, name=f"conv{suffix}")
