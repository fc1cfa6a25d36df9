# SPDX-License-Identifier: Apache-2.0
"""Common types of the convolution ops: reading a call back and typing its result.

A call holds ``data``, then a weight and a bias for each layer, then optionally a residual. Layouts:
``NCHW``, with weights OIHW and a bias ``[O]``; or ``NCHW{x}c``, channels in blocks of ``x`` lanes,
with the weights and biases of the table in ``schedules/compute/conv2d.py``. A packed call carries
its true channel counts as attributes, since packed shapes give only the number of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax, tirx
from tvm.ir import Op
from tvm.sym import Analyzer

from schedules.compute.conv2d import WORDS_RANK
from schedules.errors import OpError
from schedules.tir.extents import constant
from schedules.workload.conv2d import WORDS, Conv2DKernel, ConvLayer

from .elementwise import check_bytes

FLOAT_DTYPES = ("float32", "float64", "float16", "bfloat16")
_ONE_LAYER = 4
"""Most operands of one layer."""
_BLOCKED = re.compile(r"NCHW([1-9][0-9]*)c")


@dataclass(frozen=True)
class ConvOp:
    """One of the two ops."""

    name: str  # Full name of the op.
    suffixes: tuple[str, ...]  # Suffixes of the attribute names of each layer.
    channels: tuple[str, ...]
    """Attributes with the true channel counts of a packed call, from input to output."""

    @property
    def operands(self) -> int:
        """Number of operands without the residual."""
        return 1 + 2 * len(self.suffixes)

    def operand_name(self, index: int) -> str:
        """Name of operand ``index`` in messages."""
        if index in (0, self.operands):
            return "data" if index == 0 else "residual"
        return ("bias", "weight")[index % 2] + self.suffixes[(index - 1) // 2]

    def get(self) -> Op:
        """The op in TVM's registry."""
        return Op.get(self.name)


def lanes_of(layout: str, op: str) -> int:
    """Lanes of a channel block in ``layout``; 0 for plain ``NCHW``."""
    if layout == "NCHW":
        return 0
    match = _BLOCKED.fullmatch(layout)
    if not match:
        raise OpError(
            f"{op}: layout is {layout!r}; expected 'NCHW' or channel blocks such as 'NCHW16c'"
        )
    return int(match[1])


def packed_lanes(data_layout: str, out_layout: str, op: str) -> int:
    """Lanes of a packed call, 0 for a plain one; rejects layouts that do not fit together."""
    data_lanes, out_lanes = lanes_of(data_layout, op), lanes_of(out_layout, op)
    if data_lanes and not out_lanes:
        raise OpError(
            f"{op}: data_layout {data_layout!r} with out_layout {out_layout!r}; expected equal "
            "layouts, or 'NCHW' data with a packed output: pack the data or unpack the output"
        )
    return out_lanes


def tensor_type(argument: relax.Expr, name: str, op: str) -> relax.TensorType:
    """The type of an operand, which must be a tensor of known extents and element type."""
    ty = argument.ty
    known = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    if not known or ty.dtype is None:
        raise OpError(
            f"{op}: {name} is {ty}; expected a tensor of known extents and element type: "
            "normalize its producer, or bind its type with relax.match_cast"
        )
    return ty


def constant_shape(argument: relax.Expr, name: str, op: str) -> tuple[int, ...]:
    """The shape of a weight or bias, which must not be symbolic."""
    values = tensor_type(argument, name, op).shape.values
    if not all(isinstance(value, tirx.IntImm) for value in values):
        raise OpError(f"{op}: {name} has shape {list(values)}; expected constant extents")
    return tuple(int(value) for value in values)


def read_kernel(call: relax.Call, op: ConvOp) -> Conv2DKernel:
    """The kernel of a call; raises OpError where its operands do not fit together."""
    count = op.operands + has_scale(call, op)
    if len(call.args) not in (count, count + 1):
        raise OpError(
            f"{op.name}: {len(call.args)} operands; expected {count}, and optionally a residual"
        )
    layouts = str(call.attrs["data_layout"]), str(call.attrs["out_layout"])
    lanes = packed_lanes(*layouts, op.name)
    data = tensor_type(call.args[0], "data", op.name)
    rank = 5 if lanes and layouts[0] != "NCHW" else 4
    if len(data.shape.values) != rank:
        raise OpError(
            f"{op.name}: data has rank {len(data.shape.values)}; expected {rank} ({layouts[0]})"
        )
    names = [op.operand_name(index) for index in range(len(call.args) - count + op.operands)]
    names[op.operands : op.operands] = ["scale"] * (count - op.operands)
    sums = check_dtypes(call, names, op.name)
    _check_word_layout(_has_words(call, op, 0), layouts, sums, op.name)
    layers = tuple(_read_layer(call, op, index, lanes) for index in range(len(op.suffixes)))
    data_lanes = lanes_of(layouts[0], op.name)
    check_channels(data.shape.values, layers, data_lanes, op.name)
    batch, height, width = (constant(data.shape.values[axis]) for axis in (0, 2, 3))
    if height is not None and width is not None:
        check_sizes(layers, height, width, op.name)
    residual = len(call.args) > count
    dtype = str(tensor_type(call.args[2], op.operand_name(2), op.name).dtype)
    dtype = dtype if sums is None else str(data.dtype)
    kernel = Conv2DKernel(layers, batch, height, width, residual, dtype, *layouts)
    if count > op.operands:
        _check_scale(call, layers[0], lanes, op.name)
    if str(call.args[1].ty.dtype) == "int8":
        kernel = replace(kernel, weight_dtype="int8")
    if str(data.dtype) != dtype:
        _check_bytes_in(layers, count > op.operands, op.name)
        kernel = replace(kernel, data_dtype=str(data.dtype))
    out_dtype = str(call.attrs["out_dtype"]) if "out_dtype" in call.attrs.keys() else None
    if sums is not None:
        word = int(call.args[1].ty.shape.values[-1]) if lanes and _has_words(call, op, 0) else 1
        kernel = with_sums(replace(kernel, word=word), call, sums, op.name)
    elif out_dtype is not None:
        check_bytes(layers[-1].activation, out_dtype, op.name)
        kernel = replace(kernel, out_dtype=out_dtype)
    return kernel


def with_sums(kernel: Conv2DKernel, call: relax.Call, sums: str, op: str) -> Conv2DKernel:
    """The kernel of a call whose sums are of another type than its data."""
    out_dtype = str(call.attrs["out_dtype"]) if "out_dtype" in call.attrs.keys() else kernel.dtype
    if out_dtype not in (kernel.dtype, sums):
        raise OpError(f"{op}: out_dtype is {out_dtype!r}; expected {kernel.dtype!r} or {sums!r}")
    is_wide = kernel.residual and str(call.args[-1].ty.dtype) == sums
    residual = sums if is_wide else None
    return replace(kernel, sums=sums, out_dtype=out_dtype, residual_dtype=residual)


def _has_words(call: relax.Call, op: ConvOp, index: int) -> bool:
    """Return whether a packed weight has words: a dense one, or with groups one of rank 7.

    Those of one type with the sums are as long as a block.
    """
    is_dense = int(call.attrs["groups" + op.suffixes[index]]) == 1
    has_rank = call.args[1 + 2 * index].ty.ndim == WORDS_RANK
    if _sums_of(call) is None:
        return is_dense and has_rank and str(call.attrs["data_layout"]) != "NCHW"
    return is_dense or has_rank


def has_scale(call: relax.Call, op: ConvOp) -> bool:
    """Return whether a call of one layer has data of bytes or a weight of int8, and a scale."""
    if len(op.suffixes) > 1 or len(call.args) <= op.operands:
        return False
    dtypes = (str(tensor_type(each, "operand", op.name).dtype) for each in call.args[:2])
    return next(dtypes) == "uint8" or next(dtypes) == "int8"


def _check_scale(call: relax.Call, layer: ConvLayer, lanes: int, op: str) -> None:
    shape, expected = (constant_shape(call.args[at], "scale", op) for at in (3, 2))
    if str(call.args[1].ty.dtype) != "int8" and shape == expected:
        return
    if not lanes or layer.group_lanes(lanes) or shape != expected:
        raise OpError(
            f"{op}: a weight of int8 with a scale of shape {shape} for {layer}; expected a packed "
            f"layer that reads whole blocks, and a scale of shape {expected}"
        )


def _check_word_layout(
    has_words: bool, layouts: tuple[str, str], sums: str | None, op: str
) -> None:
    """Reject packed layouts that only bfloat16 with sums of float32 has, and those it lacks."""
    data_lanes, lanes = (lanes_of(layout, op) for layout in layouts)
    if data_lanes == lanes and (sums is None or lanes % WORDS["bfloat16"] == 0):
        return
    if sums is None and data_lanes == 0:
        return
    if sums is not None and data_lanes and has_words and not data_lanes % WORDS["bfloat16"]:
        return
    raise OpError(
        f"{op}: data_layout {layouts[0]!r} with out_layout {layouts[1]!r}; expected equal layouts "
        "of even blocks, or other even blocks in the data, for a dense layer of bfloat16 with a "
        "bias of float32, and else equal layouts, or 'NCHW' data with a packed output"
    )


def _check_bytes_in(layers: Sequence[ConvLayer], is_scaled: bool, op: str) -> None:
    if len(layers) > 1 or not layers[0].is_depthwise:
        raise OpError(
            f"{op}: data of uint8 for {' and '.join(map(str, layers))}; expected one depthwise "
            "layer: use relax.tvm_fusion.quantized_conv2d, or cast the data with relax.astype"
        )
    if not is_scaled:
        raise OpError(f"{op}: data of uint8 without a scale; expected one after the bias, like it")


def output_type(call: relax.Call, op: ConvOp) -> relax.TensorType:
    """The type of a call's result."""
    return kernel_output_type(call, read_kernel(call, op), op.name)


def kernel_output_type(call: relax.Call, kernel: Conv2DKernel, op: str) -> relax.TensorType:
    """The type of the result of a call that computes ``kernel``; its residual is checked."""
    data = call.args[0].ty
    batch, _, height, width = data.shape.values[:4]
    for layer in kernel.layers:
        height, width = _output_extent(height, layer, 0), _output_extent(width, layer, 1)
    channels = kernel.layers[-1].out_channels
    lanes = lanes_of(kernel.out_layout, op)
    shape = [batch, -(-channels // lanes) if lanes else channels, height, width]
    shape += [lanes] if lanes else []
    result = relax.TensorType(shape, kernel.out_dtype or kernel.dtype, data.vdevice)
    if kernel.residual:
        residual = tensor_type(call.args[-1], "residual", op)
        if not _same_shape(residual.shape.values, result.shape.values):
            raise OpError(
                f"{op}: residual has shape {list(residual.shape.values)}; expected the "
                f"output's, {list(result.shape.values)}"
            )
    return result


def _read_layer(call: relax.Call, op: ConvOp, index: int, lanes: int) -> ConvLayer:
    """Layer ``index`` of a call, checked against its weight and bias."""
    suffix = op.suffixes[index]
    weight = constant_shape(call.args[1 + 2 * index], "weight" + suffix, op.name)
    bias = constant_shape(call.args[2 + 2 * index], "bias" + suffix, op.name)
    has_words = _has_words(call, op, index)
    if len(weight) not in ((4, 7 if has_words else 6) if lanes else (4,)):
        raise OpError(
            f"{op.name}: weight{suffix} has rank {len(weight)}; expected "
            + (f"4 (depthwise) or {7 if has_words else 6}" if lanes else "4 (OIHW)")
        )
    plain_data = lanes > 0 and index == 0 and call.attrs["data_layout"] == "NCHW"
    if lanes:
        in_channels, out_channels = true_channels(call.attrs, op, index)
        kernel = weight[1:3] if len(weight) == 4 else weight[2:4]
    else:
        groups = int(call.attrs["groups" + suffix])
        in_channels, out_channels, kernel = weight[1] * groups, weight[0], weight[2:4]
    layer = ConvLayer.from_attrs(
        call.attrs, in_channels, out_channels, (kernel[0], kernel[1]), suffix
    )
    check_layer(layer, suffix, op.name)
    if lanes:
        check_packable(layer, lanes, plain_data, suffix, op.name)
    data_lanes = lanes_of(str(call.attrs["data_layout"]), op.name) if has_words else None
    word = lanes if _sums_of(call) is None else WORDS["bfloat16"]
    if has_words and layer.groups == 1 and word == WORDS["bfloat16"] and weight[-1] == 2 * word:
        word = weight[-1]
    check_parameters(layer, weight, bias, lanes, plain_data, suffix, op.name, data_lanes, word)
    return layer


def true_channels(attrs: Any, op: ConvOp, index: int) -> tuple[int, int]:
    """Input and output channels of a layer of a packed call."""
    names = op.channels[index : index + 2]
    if any(name not in attrs.keys() for name in op.channels):
        raise OpError(
            f"{op.name}: a packed call without {' or '.join(op.channels)}; expected the true "
            "channel counts as attributes"
        )
    return int(attrs[names[0]]), int(attrs[names[1]])


def _sums_of(call: relax.Call) -> str | None:
    """Type of the bias, where data is of bfloat16 and that is another type."""
    dtypes = [str(call.args[index].ty.dtype) for index in (0, 2)]
    return "float32" if dtypes == ["bfloat16", "float32"] else None


def check_dtypes(call: relax.Call, names: Sequence[str], op: str) -> str | None:
    """Reject operands, called ``names``, that are not of one floating-point type.

    Data may be bytes among operands of float32. A single layer of bfloat16 may have a bias of
    float32, the type of its sums, which is returned.
    """
    dtypes = [
        str(tensor_type(argument, name, op).dtype)
        for name, argument in zip(names, call.args, strict=True)
    ]
    if dtypes[0] == "uint8" and dtypes[1] == "float32":
        dtypes = dtypes[1:]
    if dtypes[1] == "int8" and names[3:4] == ["scale"]:
        del dtypes[1]
    sums = _sums_of(call) if len(call.args) <= _ONE_LAYER else None
    if sums is not None and dtypes[1] == "bfloat16" and {*dtypes[3:]} <= {"bfloat16", sums}:
        return sums
    if dtypes[0] not in FLOAT_DTYPES or len(set(dtypes)) > 1:
        raise OpError(
            f"{op}: operands have element types {', '.join(dtypes)}; expected one of "
            f"{', '.join(FLOAT_DTYPES)} for all: cast them with relax.astype"
        )
    return None


def check_channels(
    data: Sequence[tirx.Expr], layers: Sequence[ConvLayer], lanes: int, op: str
) -> None:
    """Reject data that do not fit the first layer, and a first that does not fit the second."""
    channels = layers[0].in_channels
    expected = [-(-channels // lanes), lanes] if lanes else [channels]
    found = [constant(data[axis]) for axis in ((1, 4) if lanes else (1,))]
    if found != expected:
        raise OpError(
            f"{op}: data has shape {list(data)}; expected {expected[0]} at axis 1"
            + (f" and {lanes} at axis 4" if lanes else "")
            + f" for {channels} input channels"
        )
    for first, second in zip(layers, layers[1:], strict=False):
        if first.out_channels != second.in_channels:
            raise OpError(
                f"{op}: layer 1 has {first.out_channels} output channels and layer 2 "
                f"{second.in_channels} input channels; expected the same number"
            )


def _output_extent(extent: tirx.Expr, layer: ConvLayer, axis: int) -> tirx.Expr:
    """Extent of a layer's output along ``axis`` (0 height, 1 width), simplified."""
    padding = layer.padding[axis] + layer.padding[axis + 2]
    reach = (layer.kernel[axis] - 1) * layer.dilation[axis] + 1
    moves = tirx.floordiv(extent + padding - reach, layer.strides[axis])
    return Analyzer().simplify(moves + 1)


def _same_shape(left: Sequence[tirx.Expr], right: Sequence[tirx.Expr]) -> bool:
    """Return whether two shapes are provably equal."""
    analyzer = Analyzer()
    return len(left) == len(right) and all(
        analyzer.can_prove_equal(a, b) for a, b in zip(left, right, strict=True)
    )


def check_layer(layer: ConvLayer, suffix: str, op: str) -> None:
    """Reject a layer whose numbers make no convolution."""
    for what, count, values, least in (
        ("strides", 2, layer.strides, 1),
        ("padding", 4, layer.padding, 0),
        ("dilation", 2, layer.dilation, 1),
    ):
        if len(values) != count or min(values) < least:
            raise OpError(
                f"{op}: {what}{suffix} is {tuple(values)}; expected {count} integers >= {least}"
            )
    channels = (layer.in_channels, layer.out_channels)
    if layer.groups < 1 or any(count % layer.groups for count in channels):
        raise OpError(
            f"{op}: groups{suffix} is {layer.groups} for {channels[0]} input and {channels[1]} "
            "output channels; expected a divisor of both"
        )
    if min(*layer.kernel, *channels) < 1:
        raise OpError(
            f"{op}: weight{suffix} has kernel {layer.kernel} for {channels[0]} to {channels[1]} "
            "channels; expected every extent to be at least 1"
        )


def check_packable(layer: ConvLayer, lanes: int, plain_data: bool, suffix: str, op: str) -> None:
    """Reject a layer that has no packed form."""
    if plain_data and layer.groups > 1:
        raise OpError(
            f"{op}: groups{suffix} is {layer.groups} on NCHW data, which has no form in blocks of "
            f"{lanes}; pack the data, or keep this convolution in NCHW"
        )


def packed_weight_shape(
    layer: ConvLayer,
    lanes: int,
    plain_data: bool,
    data_lanes: int | None = None,
    word: int = WORDS["bfloat16"],
) -> tuple[int, ...]:
    """Shape of the packed weight of ``layer``.

    ``plain_data`` for a first layer on NCHW data; with ``data_lanes`` in words of some channels.
    """
    out_blocks = -(-layer.out_channels // lanes)
    if layer.is_depthwise:
        return (out_blocks, *layer.kernel, lanes)
    per_group = layer.in_channels // layer.groups
    if data_lanes is not None:
        step = max(layer.input_step(data_lanes), word)
        words = (step // word, lanes, word)
        return (out_blocks, -(-per_group // step), *layer.kernel, *words)
    if layer.group_lanes(lanes):
        return (out_blocks, 1, *layer.kernel, per_group, lanes)
    if plain_data:
        return (out_blocks, per_group, *layer.kernel, 1, lanes)
    step = layer.input_step(lanes)
    return (out_blocks, -(-per_group // step), *layer.kernel, step, lanes)


def check_parameters(
    layer: ConvLayer,
    weight: Sequence[int],
    bias: Sequence[int],
    lanes: int,
    plain_data: bool,
    suffix: str,
    op: str,
    data_lanes: int | None = None,
    word: int = WORDS["bfloat16"],
) -> None:
    """Reject a weight or bias whose shape does not match ``layer``."""
    if lanes:
        expected_weight = packed_weight_shape(layer, lanes, plain_data, data_lanes, word)
        expected_bias: tuple[int, ...] = (-(-layer.out_channels // lanes), lanes)
    else:
        per_group = layer.in_channels // layer.groups
        expected_weight = (layer.out_channels, per_group, *layer.kernel)
        expected_bias = (layer.out_channels,)
    for name, found, expected in (
        ("weight", tuple(weight), expected_weight),
        ("bias", tuple(bias), expected_bias),
    ):
        if found != expected:
            raise OpError(f"{op}: {name}{suffix} has shape {found}; expected {expected}")


def check_sizes(layers: Sequence[ConvLayer], height: int, width: int, op: str) -> None:
    """Reject an input on which a kernel does not fit once."""
    for layer in layers:
        size = layer.output_size(height, width)
        if min(size) < 1:
            raise OpError(
                f"{op}: {layer} leaves an output of {size[0]}x{size[1]} for an input of "
                f"{height}x{width}; expected the padded input to hold the kernel at least once"
            )
        height, width = size
