# SPDX-License-Identifier: Apache-2.0
"""TE compute of a 3x3 convolution by Winograd's algorithm, in NCHW[x]c.

With ``m x m`` outputs a tile, ``p = (m + 2)**2`` points, ``x`` lanes and ``B(C) = ceil(C / x)``::

    data, out  [N, B(C), H, W, x]          weight  [p, B(O), B(I), x, x]  (input, output lanes)

    V[point, ...] = BT d B                 d: a tile of (m + 2) x (m + 2) inputs
    M[point, ...] = sum over the input channels of weight[point, ...] * V[point, ...]
    out           = act(AT M A + bias [+ residual])

Of bytes, weights are those times four, in words of ``w`` input channels ``[p, B(O), B(I), x / w, x,
w]``, and all is int32. Of bfloat16, they are in words of two; ``V`` is rounded to bfloat16, and all
else is float32.
"""

from __future__ import annotations

import numpy as np
from tvm import te, tirx

from ..tir.float_bits import round_to_bits, widen_bits
from ..workload.conv2d import ConvLayer
from ..workload.winograd_matrices import TAPS, transforms
from .conv2d import finished


def winograd_conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    bias: te.Tensor,
    residual: te.Tensor | None,
    layer: ConvLayer,
    size: int,
    out_dtype: str | None = None,
) -> te.Tensor:
    """One 3x3 convolution: ``act(conv(data, weight) + bias [+ residual])``.

    Parameters
    ----------
    data, weight, bias : te.Tensor
        Tensors as above; the weight is transformed already, the bias is ``[B(O), x]``.
    residual : te.Tensor | None
        A tensor of the output's shape.
    layer : ConvLayer
        Attributes; padding and activation are used.
    size : int
        ``m``, one of :data:`schedules.workload.winograd_matrices.TILE_SIZES`.
    out_dtype : str | None
        ``bfloat16`` or ``float32`` where data is of bfloat16 and the bias of float32; else None.

    Returns
    -------
    te.Tensor
        The activated output.
    """
    halves = data.dtype != bias.dtype
    conv = winograd_sums(_widened(data) if halves else data, weight, layer, size, halves)

    def finish(*index: tirx.Var) -> tirx.Expr:
        value = conv(*index) + bias(index[1], index[4])
        if residual is not None:
            value = value + residual(*index).astype(bias.dtype)
        return finished(value, layer.activation, bias.dtype, out_dtype)

    return te.compute(conv.shape, finish, name="layer1")


def _widened(data: te.Tensor) -> te.Tensor:
    """Numbers of bfloat16 in float32."""
    return te.compute(data.shape, lambda *index: data(*index).astype("float32"), name="widen")


def winograd_sums(
    data: te.Tensor, weight: te.Tensor, layer: ConvLayer, size: int, rounds: bool = False
) -> te.Tensor:
    """Products ``AT M A`` of float32, or of numbers of int32 by weights in words.

    ``rounds``: ``V`` is rounded to bfloat16.
    """
    top, left, bottom, right = layer.padding
    height = data.shape[2] + top + bottom - TAPS + 1
    width = data.shape[3] + left + right - TAPS + 1
    grid = (tirx.ceildiv(height, size), tirx.ceildiv(width, size))
    values = _transform_data(data, layer, size, grid)
    products = _multiply(_rounded(values) if rounds else values, weight)
    inverse = transforms(size).inverse
    count = size + TAPS - 1
    r, c = te.reduce_axis((0, count), name="r"), te.reduce_axis((0, count), name="c")
    shape = [data.shape[0], weight.shape[1], height, width, weight.shape[4]]
    return te.compute(
        shape,
        lambda n, ob, h, w, lane: te.sum(
            _entry(inverse, h % size, r, data.dtype)
            * _entry(inverse, w % size, c, data.dtype)
            * products(n, r * count + c, ob, h // size, w // size, lane),
            axis=[r, c],
        ),
        name="inverse",
    )


def _rounded(values: te.Tensor) -> te.Tensor:
    """Numbers of float32 that are those of bfloat16."""

    def rounded(*index: tirx.Var) -> tirx.Expr:
        return widen_bits(round_to_bits(values(*index)))

    return te.compute(values.shape, rounded, name="round")


def _transform_data(
    data: te.Tensor, layer: ConvLayer, size: int, grid: tuple[tirx.Expr, tirx.Expr]
) -> te.Tensor:
    """V: the tiles of the data, which overlap, at all points."""
    count = size + TAPS - 1
    top, left = layer.padding[:2]
    batch, blocks, height, width, lanes = data.shape
    padded = te.compute(
        [batch, blocks, grid[0] * size + TAPS - 1, grid[1] * size + TAPS - 1, lanes],
        lambda n, b, h, w, lane: tirx.if_then_else(
            tirx.all(h >= top, h < height + top, w >= left, w < width + left),
            data(n, b, h - top, w - left, lane),
            tirx.const(0, data.dtype),
        ),
        name="pad1",
    )
    matrix = transforms(size).data
    r, c = te.reduce_axis((0, count), name="r"), te.reduce_axis((0, count), name="c")
    return te.compute(
        [batch, count * count, blocks, *grid, lanes],
        lambda n, point, b, tr, tc, lane: te.sum(
            _entry(matrix, point // count, r, data.dtype)
            * _entry(matrix, point % count, c, data.dtype)
            * padded(n, b, tr * size + r, tc * size + c, lane),
            axis=[r, c],
        ),
        name="transform",
    )


def _multiply(values: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """M: one matrix product for each point."""
    batch, points, _, rows, columns, lanes = values.shape
    block = te.reduce_axis((0, weight.shape[2]), name="icb")
    lane = te.reduce_axis((0, lanes), name="ici")

    def factor(point: tirx.Var, ob: tirx.Var, oi: tirx.Var) -> tirx.Expr:
        if len(weight.shape) == 5:
            return weight(point, ob, block, lane, oi)
        word = weight.shape[5]
        return weight(point, ob, block, lane // word, oi, lane % word).astype(values.dtype)

    return te.compute(
        [batch, points, weight.shape[1], rows, columns, weight.shape[4]],
        lambda n, point, ob, tr, tc, oi: te.sum(
            values(n, point, block, tr, tc, lane) * factor(point, ob, oi),
            axis=[block, lane],
        ),
        name="multiply",
    )


def _entry(matrix: np.ndarray, row: tirx.Expr, column: tirx.Expr, dtype: str) -> tirx.Expr:
    """An entry of a constant matrix at indices that are known only in the loop."""
    value = tirx.const(0, dtype)
    for (i, j), number in np.ndenumerate(matrix):
        if number:
            here = tirx.all(row == i, column == j)
            value = tirx.Select(here, tirx.const(float(number), dtype), value)
    return value
