# SPDX-License-Identifier: Apache-2.0
"""Rows of ops: which rows of its operands a call reads, and the call that makes some rows only.

Rows are axis 2 of tensors [N, C, H, W] and [N, C, H, W, x]. A rule returns None for a call whose
rows it cannot split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import relax
from tvm.ir import Op

from schedules.distribute.rows.row_plan import Enlargement, RowMap, RowWindow
from schedules.tir.extents import constant
from schedules.workload.conv2d import Conv2DKernel

from ..core.expressions import resize_alike
from ..op.conv2d import CONV2D, FUSED_CONV2D
from ..op.conv_types import read_kernel
from ..op.quantized_conv2d import QUANTIZED_CONV2D, read_quantized
from ..op.winograd_conv2d import NAME as WINOGRAD
from ..op.winograd_conv2d import read_winograd

AXIS = 2

Maps = tuple[RowMap, ...]
Rebuild = Callable[[Sequence[relax.Expr], int, int], relax.Expr]
"""Function from operands, cut to the rows that are read, and a range of result rows to their
call."""


@dataclass(frozen=True)
class RowOp:
    """A call whose rows can be split."""

    reads: tuple[Maps | None, ...]
    """Rows that are read of each operand of :func:`tensors`; None where it is read whole."""
    rebuild: Rebuild  # The call for a range of rows.
    flops: float = 0.0  # Operations for a row.
    grain: int = 1  # Rows that are rounded together.


Rule = Callable[[relax.Call], "RowOp | None"]


def row_op(value: relax.Expr) -> RowOp | None:
    """The rows of a call; None where they cannot be split."""
    is_call = isinstance(value, relax.Call) and isinstance(value.op, Op)
    rule = _RULES.get(value.op.name) if is_call else None
    return rule(value) if rule is not None else None


def tensors(value: relax.Expr) -> list[relax.Expr]:
    """Operands of a call, those in tuples by themselves."""
    found: list[relax.Expr] = []
    for argument in value.args:
        found += argument.fields if isinstance(argument, relax.Tuple) else [argument]
    return found


def image_shape(expr: relax.Expr) -> list[int] | None:
    """Shape of a tensor with rows; None for others, and where it is symbolic."""
    ty = expr.ty
    known = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    extents = [constant(extent) for extent in ty.shape.values] if known else []
    return extents if len(extents) in (4, 5) and None not in extents else None  # type: ignore[return-value]


def _rows(expr: relax.Expr) -> int:
    shape = image_shape(expr)
    return shape[AXIS] if shape else 0


def _paddings(windows: Sequence[RowWindow], begin: int, end: int) -> list[tuple[int, int]]:
    """Rows of padding before and after each window's operand, for some rows of the last result."""
    found = []
    for window in windows:
        low, high = window.padded(begin, end)
        found.append((max(0, -low), max(0, high - window.extent)))
        begin, end = max(low, 0), min(high, window.extent)
    return found


def _all_touch(windows: Sequence[RowWindow], rows: int) -> bool:
    """True if every window reads at least one row that is not padding."""
    for window in windows:
        if window.top >= window.reach or (rows - 1) * window.stride - window.top >= window.extent:
            return False
        rows = window.extent
    return True


_READERS = {WINOGRAD: read_winograd, QUANTIZED_CONV2D.name: read_quantized}


def _convolution(call: relax.Call) -> RowOp | None:
    if call.op.name in _READERS:
        kernel, suffixes = _READERS[call.op.name](call), [""]
    else:
        op = CONV2D if call.op.name == CONV2D.name else FUSED_CONV2D
        kernel, suffixes = read_kernel(call, op), list(op.suffixes)
    rows = _rows(call)
    windows = _windows(kernel) if kernel.is_static else []
    if not windows or not _all_touch(windows, rows):
        return None

    def rebuild(operands: Sequence[relax.Expr], begin: int, end: int) -> relax.Expr:
        attrs = dict(call.attrs.items())
        paddings = reversed(_paddings(windows, begin, end))
        for suffix, (top, bottom) in zip(suffixes, paddings, strict=True):
            _, left, _, right = (int(size) for size in attrs[f"padding{suffix}"])
            attrs[f"padding{suffix}"] = [top, left, bottom, right]
        return relax.Call(call.op, operands, attrs)

    reads: list[Maps | None] = [None] * len(call.args)
    reads[0] = tuple(windows)
    if kernel.residual:
        reads[-1] = ()
    return RowOp(tuple(reads), rebuild, kernel.flops() / rows, kernel.winograd or 1)


def _windows(kernel: Conv2DKernel) -> list[RowWindow]:
    """Windows of the layers, from the last to the first."""
    height, width = kernel.height or 0, kernel.width or 0
    found = []
    for layer in kernel.layers:
        reach = (layer.kernel[0] - 1) * layer.dilation[0] + 1
        found.append(RowWindow(height, layer.strides[0], reach, layer.padding[0]))
        height, width = layer.output_size(height, width)
    return found[::-1]


def _explicit_padding(call: relax.Call) -> RowOp | None:
    """Constant rows and columns around an image.

    Each part reads as many rows before its own as there are rows of padding, so that also a part
    within the padding reads one.
    """
    widths, shape = [int(width) for width in call.attrs.pad_width], image_shape(call.args[0])
    result = image_shape(call)
    if shape is None or result is None or str(call.attrs.pad_mode) != "constant":
        return None
    top, bottom = widths[2 * AXIS : 2 * AXIS + 2]
    extent = shape[AXIS]
    window = RowWindow(extent, 1, top + bottom + 1, top + bottom)

    def rebuild(operands: Sequence[relax.Expr], begin: int, end: int) -> relax.Expr:
        first = max(begin - top - bottom, 0)  # row of the operand
        low, high = max(begin - top, 0), min(end - top, extent)
        parts = list(widths)
        parts[2 * AXIS] = max(0, min(top, end) - begin)
        parts[2 * AXIS + 1] = end - begin - parts[2 * AXIS] - max(0, high - low)
        value = float(call.attrs.pad_value)
        if high <= low:
            extents = [*result[:AXIS], end - begin, *result[AXIS + 1 :]]
            dtype = str(call.ty.dtype)
            return relax.op.full(extents, relax.const(value, dtype), dtype)
        data = operands[0]
        if (first, min(end, extent)) != (low, high):
            data = relax.op.strided_slice(data, [AXIS], [low - first], [high - first])
        return relax.op.nn.pad(data, parts, "constant", value)

    return RowOp(((window,),), rebuild)


_POOLS = {
    "relax.nn.avg_pool2d": relax.op.nn.avg_pool2d,
    "relax.nn.max_pool2d": relax.op.nn.max_pool2d,
}


def _pooling(call: relax.Call) -> RowOp | None:
    attrs, shape, result = call.attrs, image_shape(call.args[0]), image_shape(call)
    counts_padding = bool(attrs.ceil_mode and attrs.count_include_pad)
    if shape is None or result is None or counts_padding or str(attrs.layout)[:4] != "NCHW":
        return None
    top, left, _, right = (int(size) for size in attrs.padding)
    reach_h, reach_w = (
        (int(attrs.pool_size[i]) - 1) * int(attrs.dilation[i]) + 1 for i in range(2)
    )
    window = RowWindow(shape[2], int(attrs.strides[0]), reach_h, top)
    if not _all_touch([window], result[2]):
        return None
    # Padding instead of rounding up.
    right = max(right, (result[3] - 1) * int(attrs.strides[1]) + reach_w - shape[3] - left)

    def rebuild(operands: Sequence[relax.Expr], begin: int, end: int) -> relax.Expr:
        [(before, after)] = _paddings([window], begin, end)
        return _POOLS[call.op.name](
            operands[0],
            pool_size=attrs.pool_size,
            strides=attrs.strides,
            padding=[before, left, after, right],
            dilation=attrs.dilation,
            ceil_mode=False,
            count_include_pad=attrs.count_include_pad,
            layout=attrs.layout,
            out_layout=attrs.out_layout,
        )

    return RowOp(((window,),), rebuild)


def _element_wise(call: relax.Call) -> RowOp | None:
    shape = image_shape(call)
    if shape is None:
        return None
    reads: list[Maps | None] = []
    for operand in call.args:
        extents = image_shape(operand)
        if isinstance(operand, relax.Var) and extents is not None and extents[2] == shape[2] > 1:
            if len(extents) != len(shape):
                return None
            reads.append(())
        elif _varies_with_rows(operand, len(shape)):
            return None
        else:
            reads.append(None)

    def rebuild(operands: Sequence[relax.Expr], begin: int, end: int) -> relax.Expr:
        return relax.Call(call.op, operands, call.attrs, call.ty_args)

    return RowOp(tuple(reads), rebuild) if () in reads else None


def _varies_with_rows(operand: relax.Expr, ndim: int) -> bool:
    """True if an operand that is read whole differs from row to row, after broadcasting."""
    if not isinstance(operand.ty, relax.TensorType):
        return False
    if not isinstance(operand.ty.shape, relax.ShapeExpr):
        return True
    extents = list(operand.ty.shape.values)
    place = AXIS - (ndim - len(extents))
    return place >= 0 and constant(extents[place]) != 1


def _channels(call: relax.Call) -> RowOp | None:
    """An op that moves channels only, perhaps to another layout."""
    if image_shape(call) is None or image_shape(call.args[0]) is None:
        return None

    def rebuild(operands: Sequence[relax.Expr], begin: int, end: int) -> relax.Expr:
        return relax.Call(call.op, operands, call.attrs, call.ty_args)

    return RowOp(((), *(None for _ in call.args[1:])), rebuild)


def _concatenation(call: relax.Call) -> RowOp | None:
    shape, axis = image_shape(call), int(call.attrs.axis)
    parts = tensors(call)
    if shape is None or axis % len(shape) == AXIS:
        return None
    if not all(isinstance(part, relax.Var) for part in parts):
        return None

    def rebuild(operands: Sequence[relax.Expr], begin: int, end: int) -> relax.Expr:
        return relax.op.concat(list(operands), axis)

    return RowOp(((),) * len(parts), rebuild)


def _enlargement(call: relax.Call) -> RowOp | None:
    attrs, shape, result = call.attrs, image_shape(call.args[0]), image_shape(call)
    if shape is None or result is None or str(attrs.layout)[:4] != "NCHW":
        return None
    factor, rest = divmod(result[2], shape[2])
    halo = _RESIZE_HALO.get((str(attrs.method), str(attrs.coordinate_transformation_mode)))
    # Positions are exact for powers of two, and so do not depend on where a part begins.
    if rest or halo is None or factor & (factor - 1):
        return None
    rows = Enlargement(shape[2], factor, halo)

    def rebuild(operands: Sequence[relax.Expr], begin: int, end: int) -> relax.Expr:
        first, height = int(rows.read(begin, end)[0]), _rows(operands[0])  # type: ignore[arg-type]
        size = relax.ShapeExpr([height * factor, result[3]])
        larger = resize_alike(call, operands[0], size, str(attrs.layout))
        begin, end = begin - first * factor, end - first * factor
        if (begin, end) == (0, height * factor):
            return larger
        return relax.op.strided_slice(larger, [AXIS], [begin], [end])

    return RowOp(((rows,), None), rebuild)


_RESIZE_HALO = {
    ("nearest_neighbor", "asymmetric"): 0,
    ("nearest_neighbor", "half_pixel"): 0,
    ("linear", "half_pixel"): 1,
    ("linear", "asymmetric"): 1,
}

_ELEMENT_WISE = (
    *("abs", "add", "astype", "clip", "divide", "erf", "exp", "maximum", "minimum", "multiply"),
    *("negative", "sigmoid", "sqrt", "square", "subtract", "tanh"),
    *("nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.relu6", "nn.silu", "nn.softplus"),
    *("tvm_fusion.hardswish", "tvm_fusion.round_clip"),
)
_CHANNELS = ("channel_norm", "channel_shuffle", "channel_slice", "pack", "unpack")

_RULES: dict[str, Rule] = {
    **dict.fromkeys((CONV2D.name, FUSED_CONV2D.name, *_READERS), _convolution),
    **dict.fromkeys(_POOLS, _pooling),
    **{f"relax.{name}": _element_wise for name in _ELEMENT_WISE},
    **{f"relax.tvm_fusion.{name}": _channels for name in _CHANNELS},
    "relax.concat": _concatenation,
    "relax.image.resize2d": _enlargement,
    "relax.nn.pad": _explicit_padding,
}
