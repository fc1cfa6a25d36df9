# SPDX-License-Identifier: Apache-2.0
"""Convolutions that rules may change: NCHW, float, with a constant weight where it matters."""

from __future__ import annotations

import numpy as np
from tvm import relax

from ...core.constants import numbers, per_channel, shifted
from ...core.expressions import Value, op_name
from ...core.graph import Graph

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
