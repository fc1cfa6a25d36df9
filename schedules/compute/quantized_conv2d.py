# SPDX-License-Identifier: Apache-2.0
"""TE compute of a convolution of bytes, in NCHW and in NCHW[x]c.

========== ======================= ======================================================
tensor     NCHW                    NCHW[x]c
========== ======================= ======================================================
data       ``[N, C, H, W]``        ``[N, B(C), H, W, x]`` or ``[N, ceil(C / 4), H, W, 4]``, uint8
weight     ``[O, I, kh, kw]``      ``[B(O), ceil(I / d), kh, kw, d / w, x, w]``, ``I`` those of a
                                   group, and ``d`` x or with groups ``gcd(I, x)``, or
                                   ``[B(O), ceil(I / 4), kh, kw, 4 / w, x, w]``: words of input
                                   channels, output lanes, the ``w`` channels of a word: 4 of
                                   int8 or 2 of int16, or 8 of int8 with a ``d`` of at least
                                   8; int8 in NCHW; or those of
                                   :mod:`.winograd_conv2d`
bias       ``[O]``                 ``[B(O), x]``, int32, or float32
scale      ``[O]``                 ``[B(O), x]``, float32
========== ======================= ======================================================

Data that is rounded first is ``[N, C, H, W]``, float32, in both. Shifted weights are for kernels
that multiply signed bytes, data less 128: they have a block of input channels more, whose first
word is the int32 that is 128 times the sum of the weights of each tap and output lane.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import te, tirx

from ..workload.conv2d import WORD_BYTES, ByteAddition, ByteRounding, ConvLayer
from .conv2d import (
    activate_to_bytes,
    add_bytes,
    finished,
    out_space,
    padded,
    scaled_sum,
    source_pixel,
    taps,
)
from .pack import pack
from .winograd_conv2d import winograd_sums


def quantized_conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    bias: te.Tensor,
    scale: te.Tensor,
    layer: ConvLayer,
    out_dtype: str,
    residual: te.Tensor | None = None,
    addition: ByteAddition | None = None,
    rounding: ByteRounding | None = None,
    winograd: int = 0,
) -> te.Tensor:
    """One convolution with sums of int32.

    It is ``act((conv(data, weight) + bias) * scale)`` with a bias of int32, else
    ``act(conv(data, weight) * scale + bias)``.

    Parameters
    ----------
    data, weight, bias, scale : te.Tensor
        In the layouts of the table in this module's docstring.
    layer : ConvLayer
        Attributes; its channel counts are the true ones.
    out_dtype : str
        ``float32``, or ``uint8`` for the distances of the rounded output to its lower bound.
    residual : te.Tensor | None
        Bytes of the output's shape, if there is an ``addition``.
    addition : ByteAddition | None
        What is done with them after the activation.
    rounding : ByteRounding | None
        How floats of the data become bytes, if they are not yet.
    winograd : int
        Height and width of a tile of Winograd's algorithm, for which the weights are transformed.

    Returns
    -------
    te.Tensor
        The activated output in the layout of the data.
    """
    added = None if residual is None or addition is None else (residual, addition)
    if rounding is not None:
        data, layer = _rounded(data, layer, rounding, packed=len(weight.shape) == 7)
    if winograd:
        wide = te.compute(data.shape, lambda *index: data(*index).astype("int32"), name="wide")
        fourfold = winograd_sums(wide, weight, layer, winograd)
        sums = te.compute(fourfold.shape, lambda *index: fourfold(*index) >> 2, name="quarter")
    else:
        sums = _sums(data, weight, layer, "1")
    return _finish(sums, scale, bias, layer, out_dtype, "1", added)


def fused_quantized_conv2d(
    data: te.Tensor,
    weight1: te.Tensor,
    bias1: te.Tensor,
    scale1: te.Tensor,
    weight2: te.Tensor,
    bias2: te.Tensor,
    scale2: te.Tensor,
    layer1: ConvLayer,
    layer2: ConvLayer,
    out_dtype: str,
    residual: te.Tensor | None = None,
    addition: ByteAddition | None = None,
) -> te.Tensor:
    """Two convolutions of bytes, the first of which gives bytes.

    Parameters are those of :func:`quantized_conv2d`, numbered by layer.
    """
    mid = _finish(_sums(data, weight1, layer1, "1"), scale1, bias1, layer1, "uint8", "1")
    added = None if residual is None or addition is None else (residual, addition)
    sums = _sums(mid, weight2, layer2, "2")
    return _finish(sums, scale2, bias2, layer2, out_dtype, "2", added)


def _rounded(
    data: te.Tensor, layer: ConvLayer, rounding: ByteRounding, packed: bool
) -> tuple[te.Tensor, ConvLayer]:
    """The bytes of an image with all that the layer pads, and the layer without padding."""

    def byte(*index: tirx.Var) -> tirx.Expr:
        quotient = data(*index) / tirx.const(rounding.divisor, "float32")
        return activate_to_bytes(quotient, rounding.activation, "float32")

    image = te.compute(data.shape, byte, name="rounded")
    image = padded(image, layer, "1", rounding.zero)
    layer = replace(layer, padding=(0, 0, 0, 0))
    return (pack(image, WORD_BYTES) if packed else image), layer


def _sums(data: te.Tensor, weight: te.Tensor, layer: ConvLayer, suffix: str) -> te.Tensor:
    image = padded(data, layer, suffix)
    packed = len(data.shape) == 5
    kh, kw = taps(layer)
    group_in, group_out = (
        count // layer.groups for count in (layer.in_channels, layer.out_channels)
    )
    if layer.groups > 1:
        channels = group_in
    else:
        channels = data.shape[1] * data.shape[4] if packed else data.shape[1]
    ic = te.reduce_axis((0, channels), name="ic")
    space = out_space(image, layer)
    shape = [data.shape[0], weight.shape[0], *space, *([weight.shape[5]] if packed else [])]

    def product(n, o, h, w, *lane):
        pixel, source = source_pixel(layer, h, w, kh, kw), ic
        if layer.groups > 1:
            channel = o * weight.shape[5] + lane[0] if packed else o
            group = tirx.min(channel // group_out, layer.groups - 1)  # also of lanes past the last
            source = group * group_in + ic
        if packed:
            step = weight.shape[4] * weight.shape[6]
            block, channel = ic // step, ic % step
            word, part = channel // weight.shape[6], channel % weight.shape[6]
            left = image(n, source // data.shape[4], *pixel, source % data.shape[4])
            factors = left, weight(o, block, kh, kw, word, *lane, part)
        else:
            factors = image(n, source, *pixel), weight(o, ic, kh, kw)
        left, right = (factor.astype("int32") for factor in factors)
        return te.sum(left * right, axis=[ic, kh, kw])

    return te.compute(shape, product, name=f"conv{suffix}")


def _finish(
    conv: te.Tensor,
    scale: te.Tensor,
    bias: te.Tensor,
    layer: ConvLayer,
    out_dtype: str,
    suffix: str,
    added: tuple[te.Tensor, ByteAddition] | None = None,
) -> te.Tensor:
    def finish(*index: tirx.Var) -> tirx.Expr:
        channel = (index[1], *index[4:])
        value = scaled_sum(conv(*index), bias(*channel), scale(*channel))
        activation = layer.activation
        if added is not None:
            residual, addition = added
            value = add_bytes(value, activation, residual(*index), addition)
            activation = addition.activation
        return finished(value, activation, "float32", out_dtype)

    return te.compute(conv.shape, finish, name=f"layer{suffix}")
