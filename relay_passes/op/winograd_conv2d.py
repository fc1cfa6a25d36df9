# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.winograd_conv2d``: a packed 3x3 convolution by Winograd's algorithm.

::

    out = activation(conv(data, kernel) + bias [+ residual])       stride 1, no dilation, one group

    data [N, B(I), H, W, x]   bias [B(O), x]   residual, out [N, B(O), H', W', x]
    weight [(m + 2)**2, B(O), B(I), x, x]      G kernel GT at every point, input before output lanes
    B(C) = ceil(C / x)   H' = H + top + bottom - 2, and W' alike

``m`` is the height and width of an output tile. The largest error in float32 on random data of 16
to 512 channels, against float64 and relative to the largest output, is 2e-7 to 8e-7 for m = 2 and
9e-7 to 4e-6 for m = 4; that of the direct op, which adds nine times as many products in a row, is
5e-7 to 4e-6. An infinity or NaN in the data makes all outputs of the tiles that read it NaN. Batch,
height and width may be symbolic.

Data may be of bfloat16 with a bias of float32. The weight then has words of two input channels,
``[(m + 2)**2, B(O), B(I), x / 2, x, 2]``, transformed data is rounded to bfloat16, all else is
float32, and the output is of ``out_dtype``. On random data of 64 and 256 channels the error, root
mean square, is 1.7 to 2 times that of the direct op for m = 2, and 5 times for m = 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import relax, te
from tvm.ir import Op

from schedules.compute.winograd_conv2d import winograd_conv2d as compute
from schedules.errors import OpError
from schedules.tir.extents import constant
from schedules.workload.conv2d import WORDS, Activation, Conv2DKernel, ConvLayer
from schedules.workload.winograd_matrices import TAPS, TILE_SIZES

from .conv_call import Known, integers, legalize_kernel
from .conv_types import (
    check_channels,
    check_dtypes,
    check_layer,
    check_sizes,
    constant_shape,
    kernel_output_type,
    lanes_of,
    tensor_type,
    with_sums,
)
from .register import is_typed, register_op

NAME = "relax.tvm_fusion.winograd_conv2d"
_OPERANDS = ("data", "weight", "bias", "residual")


def winograd_conv2d(
    data: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr,
    residual: relax.Expr | None = None,
    *,
    tile: int,
    padding: Sequence[int] = (0, 0, 0, 0),
    activation: str = "none",
    low: float = 0.0,
    high: float = 0.0,
    layout: str,
    in_channels: int,
    out_channels: int,
    out_dtype: str | None = None,
) -> relax.Call:
    """Convolve, add bias and residual, and activate.

    Parameters
    ----------
    data, weight, bias : relax.Expr
        Image, transformed filters (:func:`schedules.workload.winograd_matrices.transform_weight`),
        and one number a channel.
    residual : relax.Expr | None
        A tensor of the output's shape, added before the activation.
    tile : int
        ``m``, 2 or 4.
    padding, activation, low, high
        The layer, as :meth:`schedules.workload.conv2d.ConvLayer.to_attrs` writes it.
    layout : str
        ``NCHW{x}c``.
    in_channels, out_channels : int
        True channel counts.
    out_dtype : str | None
        Type of the output, for data of bfloat16 with a bias of float32: one of both types, by
        default the former.

    Returns
    -------
    relax.Call
        The call; its type is inferred when it is emitted.
    """
    ended = Activation(str(activation), float(low), float(high))
    attrs = {
        "padding": integers(padding, "padding", NAME),
        "activation": ended.kind,
        "low": ended.low,
        "high": ended.high,
        "layout": str(layout),
    }
    attrs |= {} if out_dtype is None else {"out_dtype": str(out_dtype)}
    counts = {"tile": tile, "in_channels": in_channels, "out_channels": out_channels}
    attrs |= {name: integers([value], name, NAME)[0] for name, value in counts.items()}
    operands = [data, weight, bias, *([] if residual is None else [residual])]
    call = relax.Call(Op.get(NAME), operands, attrs)
    if is_typed(*operands):
        kernel_output_type(call, read_winograd(call), NAME)
    return call


def read_winograd(call: relax.Call) -> Conv2DKernel:
    """The kernel of a call; raises OpError where its operands do not fit together."""
    if len(call.args) not in (3, 4):
        raise OpError(f"{NAME}: {len(call.args)} operands; expected 3, and optionally a residual")
    tile, layout = int(call.attrs["tile"]), str(call.attrs["layout"])
    lanes = lanes_of(layout, NAME)
    if tile not in TILE_SIZES or not lanes:
        raise OpError(
            f"{NAME}: tile {tile} with layout {layout!r}; expected one of "
            f"{', '.join(map(str, TILE_SIZES))} with channel blocks such as 'NCHW16c'"
        )
    sums = check_dtypes(call, _OPERANDS[: len(call.args)], NAME)
    data = tensor_type(call.args[0], "data", NAME)
    extents = data.shape.values
    if len(extents) != 5:
        raise OpError(f"{NAME}: data has rank {len(extents)}; expected 5 ({layout})")
    layer = _layer(call)
    check_channels(extents, [layer], lanes, NAME)
    _check_parameters(call, layer, tile, lanes, 1 if sums is None else WORDS["bfloat16"])
    batch, height, width = (constant(extents[axis]) for axis in (0, 2, 3))
    if height is not None and width is not None:
        check_sizes([layer], height, width, NAME)
    residual, dtype = len(call.args) > 3, str(data.dtype)
    kernel = Conv2DKernel(
        (layer,), batch, height, width, residual, dtype, layout, layout, winograd=tile
    )
    if sums is None:
        return kernel
    return with_sums(replace(kernel, word=WORDS[dtype]), call, sums, NAME)


def _layer(call: relax.Call) -> ConvLayer:
    attrs = dict(call.attrs.items()) | {"strides": (1, 1), "dilation": (1, 1), "groups": 1}
    channels = int(attrs["in_channels"]), int(attrs["out_channels"])
    layer = ConvLayer.from_attrs(attrs, *channels, (TAPS, TAPS))
    check_layer(layer, "", NAME)
    return layer


def _check_parameters(call: relax.Call, layer: ConvLayer, tile: int, lanes: int, word: int) -> None:
    in_blocks, out_blocks = (
        -(-channels // lanes) for channels in (layer.in_channels, layer.out_channels)
    )
    square = (lanes, lanes) if word == 1 else (lanes // word, lanes, word)
    expected = {
        "weight": ((tile + TAPS - 1) ** 2, out_blocks, in_blocks, *square),
        "bias": (out_blocks, lanes),
    }
    for (name, shape), argument in zip(expected.items(), call.args[1:3], strict=True):
        found = constant_shape(argument, name, NAME)
        if found != shape:
            raise OpError(f"{NAME}: {name} has shape {found}; expected {shape}")


def _infer_type(call: relax.Call, _: relax.BlockBuilder) -> relax.TensorType:
    return kernel_output_type(call, read_winograd(call), NAME)


def _compute(
    kernel: Conv2DKernel, operands: Sequence[te.Tensor], residual: te.Tensor | None
) -> te.Tensor:
    data, weight, bias = operands
    layer, size = kernel.layers[0], kernel.winograd
    return compute(data, weight, bias, residual, layer, size, kernel.out_dtype)


def legalize(
    builder: relax.BlockBuilder, call: relax.Call, known: Known | None = None
) -> relax.Expr:
    """Replace a call, as :func:`.conv_call.legalize_kernel` does."""
    return legalize_kernel(builder, call, NAME, read_winograd(call), _compute, known)


register_op(NAME, "A 3x3 convolution by Winograd's algorithm.", _infer_type, legalize)
