# SPDX-License-Identifier: Apache-2.0
"""Ops over height and width of packed tensors: pooling, reductions, resizing, padding, slices.

They treat each lane alike, so the magnitude of lanes past the last channel hardly grows.
"""

from __future__ import annotations

import math

from tvm import relax, tirx

from relay_passes.core.expressions import resize_alike
from relay_passes.op.channels import unpack

from .packing_state import Packed, Result, Rule, Scope

_POOLS = {
    "relax.nn.avg_pool2d": relax.op.nn.avg_pool2d,
    "relax.nn.max_pool2d": relax.op.nn.max_pool2d,
}
_REDUCTIONS = {
    "relax.max": relax.op.max,
    "relax.mean": relax.op.mean,
    "relax.min": relax.op.min,
    "relax.sum": relax.op.sum,
}
# Weights of bicubic interpolation may be negative; their magnitudes add up to less than this.
_RESIZE_GROWTH = 4.0


def pack_pool(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Pool windows of the packed tensor."""
    call = binding.value
    data = scope.lookup(call.args[0])
    attrs = call.attrs
    if data is None or {str(attrs.layout), str(attrs.out_layout)} != {"NCHW"}:
        return None
    pooled = _POOLS[call.op.name](
        data.expr,
        pool_size=attrs.pool_size,
        strides=attrs.strides,
        padding=attrs.padding,
        dilation=attrs.dilation,
        ceil_mode=attrs.ceil_mode,
        count_include_pad=attrs.count_include_pad,
        layout=scope.layout(data.channels),
        out_layout=scope.layout(data.channels),
    )
    return scope.result(pooled, data.channels, data.bound)


def pack_adaptive_pool(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Pool to a given size; a single pixel is a mean."""
    call = binding.value
    data = scope.lookup(call.args[0])
    attrs = call.attrs
    if data is None or {str(attrs.layout), str(attrs.out_layout)} != {"NCHW"}:
        return None
    if attrs.output_size is not None and all(int(size) == 1 for size in attrs.output_size):
        pooled = relax.op.mean(data.expr, [2, 3], True)
    else:
        layout = scope.layout(data.channels)
        pooled = relax.op.nn.adaptive_avg_pool2d(data.expr, attrs.output_size, layout, layout)
    return scope.result(pooled, data.channels, data.bound)


def pack_reduction(scope: Scope, binding: relax.VarBinding) -> Result:
    """Reduce over height, width or both; dropped axes are dropped after unpacking."""
    call = binding.value
    data = scope.lookup(call.args[0])
    if data is None or call.attrs.axis is None:
        return None
    axes = sorted({int(axis) % 4 for axis in call.attrs.axis})
    if not axes or not set(axes) <= {2, 3}:
        return None
    bound = data.bound
    if call.op.name == "relax.sum" and bound:
        extents = [call.args[0].ty.shape.values[axis] for axis in axes]
        static = all(isinstance(extent, tirx.IntImm) for extent in extents)
        bound *= math.prod(int(extent) for extent in extents) if static else math.inf
    reduced = scope.result(_REDUCTIONS[call.op.name](data.expr, axes, True), data.channels, bound)
    if reduced is None or call.attrs.keepdims:
        return reduced
    kept = scope.emit(unpack(scope.emit(reduced.expr), reduced.channels))
    return relax.op.squeeze(kept, axes)


def pack_resize(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Resize the packed image."""
    call = binding.value
    data = scope.lookup(call.args[0])
    attrs = call.attrs
    if data is None or str(attrs.layout) != "NCHW" or not scope.is_worth_packing(binding):
        return None
    resized = resize_alike(call, data.expr, call.args[1], scope.layout(data.channels))
    bound = max(data.bound * _RESIZE_GROWTH, abs(float(attrs.extrapolation_value)))
    return scope.result(resized, data.channels, bound)


def pack_padding(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Pad height and width."""
    call = binding.value
    data = scope.lookup(call.args[0])
    widths = [int(width) for width in call.attrs.pad_width]
    if data is None or len(widths) != 8 or any(widths[2:4]):
        return None
    if not scope.is_worth_packing(binding):
        return None
    value = float(call.attrs.pad_value)
    padded = relax.op.nn.pad(data.expr, [*widths, 0, 0], str(call.attrs.pad_mode), value)
    return scope.result(padded, data.channels, max(data.bound, abs(value)))


def pack_slice(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Take some images, rows or columns of the packed tensor."""
    call = binding.value
    data = scope.lookup(call.args[0])
    axes = [int(axis) % 4 for axis in call.args[1].fields] if data is not None else []
    if data is None or 1 in axes or not scope.is_worth_packing(binding):
        return None
    taken = relax.op.strided_slice(
        data.expr, axes, *call.args[2:], assume_inbound=bool(call.attrs.assume_inbound)
    )
    return scope.result(taken, data.channels, data.bound)


SPATIAL_RULES: dict[str, Rule] = {
    **dict.fromkeys(_POOLS, pack_pool),
    **dict.fromkeys(_REDUCTIONS, pack_reduction),
    "relax.image.resize2d": pack_resize,
    "relax.nn.adaptive_avg_pool2d": pack_adaptive_pool,
    "relax.nn.pad": pack_padding,
    "relax.strided_slice": pack_slice,
}
