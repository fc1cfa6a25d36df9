# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.quantized_conv2d``: a convolution of bytes with its epilogue.

::

    out = activation((conv(data, weight) + bias) * scale)           bias int32
    out = activation(conv(data, weight) * scale + bias)             bias float32
    out = round((activation(...) * factor + (residual + shift) * bytes_factor) / divisor)

    data [N, C, H, W] uint8    weight [O, C / groups, kh, kw] int8
    scale [O] float32           bias [O] int32 or float32
    residual [N, O, H', W'] uint8
    out [N, O, H', W'] float32, or uint8: the distances of rounded numbers to their lower bound

Sums are exact in int32, also with a bias of int32, which the caller keeps small enough; padding
consists of zero bytes. An image of up to four channels may be float32 in NCHW, also where the rest
is packed: then it is rounded to bytes first, and padded with the byte that stands for 0. Packed,
with lanes ``x`` from ``out_layout`` ``NCHW{x}c``: ``out`` is ``[N, blocks, H, W, x]``, ``scale``
and ``bias`` are ``[blocks, x]``, ``data`` alike, with lanes of its own, as 4 of an input image, the
weight is as in ``schedules/compute/quantized_conv2d.py``, of int8, or of int16 for CPUs that add
products in pairs, in words of eight for AArch64 with I8MM, and of a whole block for GPUs, and
``in_channels`` and ``out_channels`` are given. Batch, height and width may be symbolic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from math import prod
from typing import Any

import numpy as np
from tvm import relax, te

from schedules.compute import quantized_conv2d as compute
from schedules.errors import OpError
from schedules.tir.extents import constant
from schedules.workload.conv2d import (
    WORD_BYTES,
    WORDS,
    ByteAddition,
    ByteRounding,
    Conv2DKernel,
    ConvLayer,
)
from schedules.workload.winograd_matrices import TAPS, WHOLE_FACTOR, WHOLE_TILE

from .conv_call import Known, checked_attrs, legalize_kernel
from .conv_types import (
    ConvOp,
    check_channels,
    check_layer,
    check_sizes,
    constant_shape,
    kernel_output_type,
    lanes_of,
    packed_weight_shape,
    tensor_type,
    true_channels,
)
from .elementwise import check_bytes
from .register import is_typed, register_op

QUANTIZED_CONV2D = ConvOp(
    "relax.tvm_fusion.quantized_conv2d", ("",), ("in_channels", "out_channels")
)
MOST_PRODUCTS = (2**31 - 1) // (255 * 128)
"""Products of bytes whose sum an int32 holds, whatever they are."""
_NAME = QUANTIZED_CONV2D.name
_BIASES = ("int32",)  # beside float32
_OPERANDS = {"data": "uint8", "weight": "int8", "bias": "float32", "scale": "float32"}


def quantized_conv2d(
    data: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr,
    scale: relax.Expr,
    residual: relax.Expr | None = None,
    *,
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    activation: str = "none",
    low: float = 0.0,
    high: float = 0.0,
    data_layout: str = "NCHW",
    out_layout: str | None = None,
    in_channels: int | None = None,
    out_channels: int | None = None,
    out_dtype: str = "float32",
    addition: ByteAddition | None = None,
    limited: bool = False,
    shifted: bool = False,
    rounding: ByteRounding | None = None,
    winograd: int = 0,
) -> relax.Call:
    """Convolve, scale, add the bias, activate, and add a residual.

    Parameters
    ----------
    data, weight, bias, scale : relax.Expr
        Image, filters, and two numbers a channel, in the layouts of the module's docstring.
    strides, padding, dilation, groups, activation, low, high
        The layer, as :meth:`schedules.workload.conv2d.ConvLayer.to_attrs` writes it. Groups have
        multiples of four input channels.
    data_layout : str
        ``NCHW`` or ``NCHW{x}c``.
    out_layout : str | None
        ``NCHW`` or ``NCHW{x}c``; None stands for ``data_layout``.
    in_channels, out_channels : int | None
        True channel counts; given exactly where the layouts are packed.
    out_dtype : str
        ``float32``, or ``uint8`` where the activation is ``round_clip``.
    residual, addition : relax.Expr | None, ByteAddition | None
        Bytes of the output's shape, and what is done with them; neither or both.
    limited : bool
        Whether 16 bits hold the sum of any two products of neighbouring channels in a word of the
        packed weight.
    shifted : bool
        Whether the packed weight of int8 ends with what sums of signed bytes, data less 128, lack.
    rounding : ByteRounding | None
        How ``data`` is rounded to bytes, if it is of float32.
    winograd : int
        2 for packed int16 weights that are transformed for tiles of 2x2 outputs, times four.

    Returns
    -------
    relax.Call
        The call; its type is inferred when it is emitted.

    Raises
    ------
    OpError
        If operands and attributes do not fit together, or a sum may not fit in an int32.
    """
    given = {
        "strides": strides,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "activation": activation,
        "low": low,
        "high": high,
        "data_layout": out_layout or data_layout,
        "out_layout": out_layout,
        "in_channels": in_channels,
        "out_channels": out_channels,
        "out_dtype": out_dtype,
    }
    operands = [data, weight, bias, scale, *([] if residual is None else [residual])]
    attrs = checked_attrs(QUANTIZED_CONV2D, given) | {"data_layout": data_layout}
    if groups == 1:
        del attrs["groups"]
    if addition is not None:
        attrs["addition"] = [float(number) for number in astuple(addition)]
    attrs |= {name: True for name, is_so in (("limited", limited), ("shifted", shifted)) if is_so}
    if rounding is not None:
        attrs["rounding"] = list(map(float, astuple(rounding)))
    if winograd:
        attrs["winograd"] = int(winograd)
    call = relax.Call(QUANTIZED_CONV2D.get(), operands, attrs)
    if is_typed(*operands):
        _infer_type(call)
    return call


def read_quantized(call: relax.Call) -> Conv2DKernel:
    """The kernel of a call; raises OpError where its operands do not fit together."""
    layouts = str(call.attrs["data_layout"]), str(call.attrs["out_layout"])
    addition, rounding = _read_addition(call), _read_rounding(call)
    operands = _OPERANDS if addition is None else _OPERANDS | {"residual": "uint8"}
    operands = operands if rounding is None else operands | {"data": "float32"}
    check_operands(call, operands, _NAME, ("int16",) if layouts[1] != "NCHW" else ())
    extents = call.args[0].ty.shape.values
    data_lanes, lanes = (lanes_of(layout, _NAME) for layout in layouts)
    if rounding is not None:
        if data_lanes:
            raise OpError(f"{_NAME}: data to be rounded has layout {layouts[0]}; expected NCHW")
        data_lanes = WORD_BYTES * bool(lanes)
    rank = 5 if lanes and rounding is None else 4
    words = not data_lanes % WORD_BYTES and bool(data_lanes) == bool(lanes)
    if len(extents) != rank or lanes % WORD_BYTES or not words:
        raise OpError(
            f"{_NAME}: data has rank {len(extents)} with layouts {', '.join(layouts)}; expected "
            f"rank {rank}, and blocks of a multiple of {WORD_BYTES} channels, or none, in both"
        )
    layer = _read_layer(call, data_lanes, lanes)
    check_channels(extents, [layer], data_lanes if rank == 5 else 0, _NAME)
    if rounding is not None and (layer.in_channels > WORD_BYTES or layer.is_pointwise):
        raise OpError(
            f"{_NAME}: {layer} rounds its data; expected at most {WORD_BYTES} channels, and more "
            "taps than one"
        )
    batch, height, width = (constant(extents[axis]) for axis in (0, 2, 3))
    if height is not None and width is not None:
        check_sizes([layer], height, width, _NAME)
    out_dtype = str(call.attrs["out_dtype"])
    if out_dtype != "float32":
        last = layer.activation if addition is None else addition.activation
        check_bytes(last, out_dtype, _NAME)
    word = int(call.args[1].ty.shape.values[-1]) if lanes else WORDS["int8"]
    return Conv2DKernel(
        (layer,),
        *(batch, height, width, addition is not None, "uint8", *layouts),
        out_dtype=out_dtype,
        word=word,
        addition=addition,
        limited=_read_form(call, "limited"),
        shifted=_read_form(call, "shifted"),
        rounding=rounding,
        winograd=_winograd_of(call),
    )


def _winograd_of(call: relax.Call) -> int:
    return int(call.attrs["winograd"]) if "winograd" in call.attrs.keys() else 0


def _read_form(call: relax.Call, name: str) -> bool:
    """Return whether the weight has a form that only packed ones of int8 have."""
    if name not in call.attrs.keys() or not call.attrs[name]:
        return False
    if str(call.args[1].ty.dtype) != "int8" or str(call.attrs["out_layout"]) == "NCHW":
        raise OpError(f"{_NAME}: {name} is True; expected a packed weight of int8")
    return True


def _read_addition(call: relax.Call) -> ByteAddition | None:
    if "addition" not in call.attrs.keys():
        return None
    factor, bytes_factor, shift, divisor, low, high, first = map(float, call.attrs["addition"])
    return ByteAddition(factor, bytes_factor, shift, divisor, low, high, bool(first))


def _read_rounding(call: relax.Call) -> ByteRounding | None:
    if "rounding" not in call.attrs.keys():
        return None
    return ByteRounding(*map(float, call.attrs["rounding"]))


def _read_layer(call: relax.Call, data_lanes: int, lanes: int) -> ConvLayer:
    weight, tile = constant_shape(call.args[1], "weight", _NAME), _winograd_of(call)
    if tile:
        return _read_transformed(call, weight, tile, (data_lanes, lanes))
    if len(weight) != (7 if lanes else 4):
        raise OpError(f"{_NAME}: weight has rank {len(weight)}; expected {7 if lanes else 4}")
    attrs = {"groups": 1} | dict(call.attrs.items())
    groups = int(attrs["groups"])
    if lanes:
        channels = int(call.attrs["in_channels"]), int(call.attrs["out_channels"])
    else:
        channels = weight[1] * groups, weight[0]
    layer = ConvLayer.from_attrs(attrs, *channels, (weight[2], weight[3]))
    check_layer(layer, "", _NAME)
    own = layer.in_channels // groups
    if groups > 1 and (own % WORD_BYTES or data_lanes != lanes):
        raise OpError(
            f"{_NAME}: {layer} has {own} input channels a group, and data in blocks of "
            f"{data_lanes}; expected multiples of {WORD_BYTES}, and the output's blocks of {lanes}"
        )
    expected: tuple[int, ...] = (layer.out_channels, own, *layer.kernel)
    numbers: tuple[int, ...] = expected[:1]
    if lanes:
        step, out_blocks = layer.input_step(data_lanes), -(-layer.out_channels // lanes)
        word = step if weight[-1] == step else WORDS[str(call.args[1].ty.dtype)]
        has_form = any(_read_form(call, name) for name in ("limited", "shifted"))
        if word == WORD_BYTES and weight[-1] == 2 * word and groups == 1 and not has_form:
            word, step = weight[-1], max(step, weight[-1])
        blocks = -(-own // step) + _read_form(call, "shifted")
        expected = (out_blocks, blocks, *layer.kernel, step // word, lanes, word)
        numbers = (out_blocks, lanes)
    _check_shapes(call, expected, numbers)
    check_products(layer, _NAME)
    return layer


def _read_transformed(
    call: relax.Call, weight: tuple[int, ...], tile: int, blocks: tuple[int, int]
) -> ConvLayer:
    """The layer of a call by Winograd's algorithm."""
    given, lanes = {"groups": 1} | dict(call.attrs.items()), blocks[1]
    is_packed = lanes == blocks[0] > 0 and "rounding" not in given
    if tile != WHOLE_TILE or str(call.args[1].ty.dtype) != "int16" or not is_packed:
        raise OpError(
            f"{_NAME}: winograd is {tile} with weights of {call.args[1].ty.dtype}; expected "
            f"{WHOLE_TILE}, int16, and data in the blocks of the output"
        )
    channels = int(given["in_channels"]), int(given["out_channels"])
    layer = ConvLayer.from_attrs(given, *channels, (TAPS, TAPS))
    check_layer(layer, "", _NAME)
    if not layer.suits_winograd:
        raise OpError(f"{_NAME}: {layer} by Winograd's algorithm; expected stride 1 and one group")
    in_blocks, out_blocks = (-(-count // lanes) for count in channels)
    word = WORDS["int16"]
    points = (tile + TAPS - 1) ** 2
    _check_shapes(
        call, (points, out_blocks, in_blocks, lanes // word, lanes, word), (out_blocks, lanes)
    )
    check_products(layer, _NAME, MOST_PRODUCTS // WHOLE_FACTOR)
    return layer


def _check_shapes(call: relax.Call, weight: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    shapes = {"weight": weight, "bias": numbers, "scale": numbers}
    for argument, (name, shape) in zip(call.args[1:4], shapes.items(), strict=True):
        if constant_shape(argument, name, _NAME) != shape:
            raise OpError(f"{_NAME}: {name} has shape {argument.ty.shape}; expected {shape}")


def fits_pairs(weights: np.ndarray) -> bool:
    """Return whether 16 bits hold the sums of two products of uint8 by neighbours in words.

    ``weights``: int8, with neighbouring input channels, in words, along the last axis.
    """
    pairs = weights.reshape(-1, 2).astype("int16")
    most = np.maximum(pairs, 0).sum(axis=1).max(initial=0)
    least = np.minimum(pairs, 0).sum(axis=1).min(initial=0)
    return bool(255 * most < 2**15 and 255 * -least <= 2**15)


def check_operands(
    call: relax.Call, dtypes: Mapping[str, str], op: str, others: Sequence[str] = ()
) -> None:
    """Check the number of a call's operands, and their types by name; else OpError.

    A weight may be of ``others``, too, a bias of int32.
    """
    if len(call.args) != len(dtypes):
        raise OpError(f"{op}: {len(call.args)} operands; expected {', '.join(dtypes)}")
    for argument, (name, dtype) in zip(call.args, dtypes.items(), strict=True):
        allowed = (dtype, *(others if name == "weight" else _BIASES if "bias" in name else ()))
        if str(tensor_type(argument, name, op).dtype) not in allowed:
            raise OpError(
                f"{op}: {name} is of {argument.ty.dtype}; expected {' or '.join(allowed)}"
            )


def check_products(layer: ConvLayer, op: str, most: int = MOST_PRODUCTS) -> None:
    """Check that an int32 holds each sum of a layer; else OpError."""
    own = layer.in_channels // layer.groups
    if own * prod(layer.kernel) > most:
        raise OpError(
            f"{op}: {layer} has {own} x {prod(layer.kernel)} products a sum; "
            f"expected at most {most}"
        )


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    return kernel_output_type(call, read_quantized(call), _NAME)


def compute_layer(
    kernel: Conv2DKernel, operands: Sequence[te.Tensor], residual: te.Tensor | None
) -> te.Tensor:
    """The computation of a kernel of one layer."""
    data, weight, bias, scale = operands
    layer, out_dtype = kernel.layers[0], str(kernel.out_dtype)
    added = residual, kernel.addition
    how = *added, kernel.rounding, kernel.winograd
    return compute.quantized_conv2d(data, weight, bias, scale, layer, out_dtype, *how)


def legalize(
    builder: relax.BlockBuilder, call: relax.Call, known: Known | None = None
) -> relax.Expr:
    """Replace a call, as :func:`.conv_call.legalize_kernel` does."""
    return legalize_kernel(builder, call, _NAME, read_quantized(call), compute_layer, known)


register_op(
    _NAME, "Convolution of bytes, scale, bias and activation in one.", _infer_type, legalize
)


FUSED_QUANTIZED_CONV2D = ConvOp(
    "relax.tvm_fusion.fused_quantized_conv2d",
    ("1", "2"),
    ("in_channels", "mid_channels", "out_channels"),
)
_FUSED_NAME = FUSED_QUANTIZED_CONV2D.name
_FIXED = {"groups1": 1, "groups2": 1}
_PARAMETERS = {"weight": "int8", "bias": "float32", "scale": "float32"}


def fused_quantized_conv2d(
    data: relax.Expr,
    weight1: relax.Expr,
    bias1: relax.Expr,
    scale1: relax.Expr,
    weight2: relax.Expr,
    bias2: relax.Expr,
    scale2: relax.Expr,
    residual: relax.Expr | None = None,
    *,
    strides1: Sequence[int] = (1, 1),
    padding1: Sequence[int] = (0, 0, 0, 0),
    dilation1: Sequence[int] = (1, 1),
    activation1: str = "round_clip",
    low1: float = 0.0,
    high1: float = 255.0,
    strides2: Sequence[int] = (1, 1),
    padding2: Sequence[int] = (0, 0, 0, 0),
    dilation2: Sequence[int] = (1, 1),
    activation2: str = "none",
    low2: float = 0.0,
    high2: float = 0.0,
    data_layout: str = "NCHW",
    out_layout: str | None = None,
    in_channels: int | None = None,
    mid_channels: int | None = None,
    out_channels: int | None = None,
    out_dtype: str = "float32",
    addition: ByteAddition | None = None,
) -> relax.Call:
    """Convolve bytes twice, rounding to bytes in between.

    ::

        mid = activation1(conv1(data, weight1) * scale1 + bias1)       uint8, rounded
        out = activation2(conv2(mid, weight2) * scale2 + bias2)        float32, or rounded to uint8

    Data, weights, biases, scales and residual are those of ``relax.tvm_fusion.quantized_conv2d``,
    and so are sums, padding and the bytes of a layer. In blocks of ``x`` channels weights are in
    words of a whole block, as for GPUs, and so is ``mid``. Batch, height and width may be symbolic.

    Parameters
    ----------
    data, weight1, bias1, scale1, weight2, bias2, scale2 : relax.Expr
        Image, and filters and two numbers a channel of both layers.
    strides1, padding1, dilation1, activation1, low1, high1
        The first layer, as :meth:`schedules.workload.conv2d.ConvLayer.to_attrs` writes it; its
        activation is ``round_clip``.
    strides2, padding2, dilation2, activation2, low2, high2
        The second layer.
    data_layout, out_layout : str | None
        The same choice of ``NCHW`` or ``NCHW{x}c``; None stands for ``data_layout``.
    in_channels, mid_channels, out_channels : int | None
        True channel counts; given exactly where the layouts are packed.
    out_dtype : str
        ``float32``, or ``uint8`` where the second activation is ``round_clip``.
    residual, addition : relax.Expr | None, ByteAddition | None
        Bytes of the output's shape, and what is done with them; neither or both.

    Returns
    -------
    relax.Call
        The call; its type is inferred when it is emitted.

    Raises
    ------
    OpError
        If operands and attributes do not fit together, or a sum may not fit in an int32.
    """
    given = _FIXED | {
        "strides1": strides1,
        "padding1": padding1,
        "dilation1": dilation1,
        "activation1": activation1,
        "low1": low1,
        "high1": high1,
        "strides2": strides2,
        "padding2": padding2,
        "dilation2": dilation2,
        "activation2": activation2,
        "low2": low2,
        "high2": high2,
        "data_layout": data_layout,
        "out_layout": out_layout,
        "in_channels": in_channels,
        "mid_channels": mid_channels,
        "out_channels": out_channels,
        "out_dtype": out_dtype,
    }
    operands = [data, weight1, bias1, scale1, weight2, bias2, scale2]
    operands += [] if residual is None else [residual]
    checked = checked_attrs(FUSED_QUANTIZED_CONV2D, given)
    attrs = {name: value for name, value in checked.items() if name not in _FIXED}
    if addition is not None:
        attrs["addition"] = [float(number) for number in astuple(addition)]
    call = relax.Call(FUSED_QUANTIZED_CONV2D.get(), operands, attrs)
    if is_typed(*operands):
        _infer_fused_type(call)
    return call


def read_fused_quantized(call: relax.Call) -> Conv2DKernel:
    """The kernel of a call; raises OpError where its operands do not fit together."""
    names, addition = {"data": "uint8"}, _read_addition(call)
    names |= {f"{name}{i}": dtype for i in (1, 2) for name, dtype in _PARAMETERS.items()}
    names |= {} if addition is None else {"residual": "uint8"}
    check_operands(call, names, _FUSED_NAME)
    layouts = str(call.attrs["data_layout"]), str(call.attrs["out_layout"])
    lanes, extents = lanes_of(layouts[1], _FUSED_NAME), call.args[0].ty.shape.values
    rank = 5 if lanes else 4
    if len(extents) != rank or layouts[0] != layouts[1]:
        raise OpError(
            f"{_FUSED_NAME}: data has rank {len(extents)} with layouts {', '.join(layouts)}; "
            f"expected rank {rank}, and equal layouts"
        )
    layers = _read_fused_layer(call, 0, lanes), _read_fused_layer(call, 1, lanes)
    check_channels(extents, layers, lanes, _FUSED_NAME)
    batch, height, width = (constant(extents[axis]) for axis in (0, 2, 3))
    if height is not None and width is not None:
        check_sizes(layers, height, width, _FUSED_NAME)
    out_dtype = str(call.attrs["out_dtype"])
    check_bytes(layers[0].activation, "uint8", _FUSED_NAME)
    if out_dtype != "float32":
        last = layers[1].activation if addition is None else addition.activation
        check_bytes(last, out_dtype, _FUSED_NAME)
    return Conv2DKernel(
        layers,
        *(batch, height, width, addition is not None, "uint8", *layouts),
        out_dtype=out_dtype,
        word=lanes or WORD_BYTES,
        addition=addition,
    )


def _read_fused_layer(call: relax.Call, index: int, lanes: int) -> ConvLayer:
    """The layer with a number, checked against its weight, bias and scale."""
    suffix, place = FUSED_QUANTIZED_CONV2D.suffixes[index], 1 + 3 * index
    weight = constant_shape(call.args[place], "weight" + suffix, _FUSED_NAME)
    if len(weight) != (7 if lanes else 4):
        expected = "7 (words of a block)" if lanes else "4 (OIHW)"
        raise OpError(f"{_FUSED_NAME}: weight{suffix} has rank {len(weight)}; expected {expected}")
    channels = (weight[1], weight[0])
    if lanes:
        channels = true_channels(call.attrs, FUSED_QUANTIZED_CONV2D, index)
    attrs = dict(call.attrs.items()) | _FIXED
    layer = ConvLayer.from_attrs(attrs, *channels, (weight[2], weight[3]), suffix)
    check_layer(layer, suffix, _FUSED_NAME)
    shape, numbers = weight, weight[:1]
    if lanes:
        shape = packed_weight_shape(layer, lanes, False, lanes, lanes)
        numbers = (shape[0], lanes)
    shapes = {"weight": shape, "bias": numbers, "scale": numbers}
    for argument, (name, wanted) in zip(call.args[place:], shapes.items(), strict=False):
        found = constant_shape(argument, name + suffix, _FUSED_NAME)
        if found != wanted:
            raise OpError(f"{_FUSED_NAME}: {name}{suffix} has shape {found}; expected {wanted}")
    check_products(layer, _FUSED_NAME)
    return layer


def _infer_fused_type(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    return kernel_output_type(call, read_fused_quantized(call), _FUSED_NAME)


def _compute_fused(
    kernel: Conv2DKernel, operands: Sequence[te.Tensor], residual: te.Tensor | None
) -> te.Tensor:
    stored = str(kernel.out_dtype), residual, kernel.addition
    arguments: list[Any] = [*operands, *kernel.layers, *stored]
    return compute.fused_quantized_conv2d(*arguments)


def legalize_fused_quantized(
    builder: relax.BlockBuilder, call: relax.Call, known: Known | None = None
) -> relax.Expr:
    """Replace a call, as :func:`.conv_call.legalize_kernel` does."""
    return legalize_kernel(
        builder, call, _FUSED_NAME, read_fused_quantized(call), _compute_fused, known
    )


register_op(
    _FUSED_NAME, "Two convolutions of bytes in one.", _infer_fused_type, legalize_fused_quantized
)
