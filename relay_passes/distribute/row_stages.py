# SPDX-License-Identifier: Apache-2.0
"""The bindings of a function as stages, for :mod:`schedules.distribute.rows.row_plan`.

Channels are axis 1 of a result. Each is the same sum in the same order as in the whole call, also
where a call makes some channels only, with their share of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.ir import GenericConst

from schedules.distribute.rows.row_plan import NetworkStage, StageOperand
from schedules.errors import OpError
from schedules.tir.extents import constant

from ..core.constants import tensor_constant
from ..core.expressions import op_name, operands
from ..op.conv2d import CONV2D
from ..op.conv_types import read_kernel
from ..op.winograd_conv2d import NAME as WINOGRAD
from ..op.winograd_conv2d import read_winograd
from .row_rules import AXIS, RowOp, image_shape, row_op, tensors


@dataclass(frozen=True)
class BoundStage:
    """A stage, and the binding of the function that it stands for."""

    stage: NetworkStage  # The stage.
    var: relax.Var  # Its variable: a parameter of the function, or that of a binding.
    value: relax.Expr | None  # The value bound to it; None for a parameter.
    rows: RowOp | None  # How its rows are split; None if they are not.
    channels: ChannelOp | None = None  # How its channels are split; None if they are not.


def read_row_stages(func: relax.Function) -> list[BoundStage]:
    """Stages of a function: its parameters, then its bindings in order; the last is its result.

    ``func``: in normal form. Raises OpError if a shape is symbolic, or the function branches; the
    message names the variable.
    """
    places: dict[relax.Var, int] = {}
    stages: list[BoundStage] = []

    def add(bound: BoundStage) -> None:
        places[bound.var] = len(stages)
        stages.append(bound)

    for param in func.params:
        add(_parameter(param))
    for block in func.body.blocks:
        for binding in block.bindings:
            if isinstance(binding, relax.MatchCast) or _branches(binding.value):
                raise OpError(
                    f"the model cannot be distributed: {binding.var.name!r} depends on "
                    "values or shapes that are only known at run time"
                )
            add(_bound(binding, places))
    result = func.body.body
    if not stages[-1].var.same_as(result):
        stages.append(_result(result, places))
    return stages


def _parameter(param: relax.Var) -> BoundStage:
    rows, row_bytes = _size(param)
    return BoundStage(NetworkStage(param.name, "input", rows, row_bytes), param, None, None)


def _bound(binding: relax.VarBinding, places: Mapping[relax.Var, int]) -> BoundStage:
    var, value = binding.var, binding.value
    rows, row_bytes = _size(var)
    split, channels = row_op(value), channel_op(value)
    blocks = channels.blocks if channels else 1
    name = (op_name(value) or type(value).__name__).removeprefix("relax.")
    reads = {places[operand]: None for operand in operands(value)}
    if split is None:
        read = tuple(StageOperand(place, None) for place in reads)
        fixed = _constant_bytes(value) if isinstance(value, relax.Call) else 0
        stage = NetworkStage(var.name, name, rows, row_bytes, read, 0.0, fixed, rows, blocks)
        return BoundStage(stage, var, value, None, channels)
    read = tuple(
        StageOperand(places[operand], maps)
        for operand, maps in zip(tensors(value), split.reads, strict=True)
        if isinstance(operand, relax.Var)
    )
    stage = NetworkStage(
        var.name,
        name,
        rows,
        row_bytes,
        read,
        split.flops,
        _constant_bytes(value),
        split.grain,
        blocks,
    )
    return BoundStage(stage, var, value, split, channels)


def _result(value: relax.Expr, places: Mapping[relax.Var, int]) -> BoundStage:
    """A stage for a result that is not what the last binding computes."""
    var = relax.Var("result", value.ty)
    rows, row_bytes = _size(var)
    read = tuple(StageOperand(place, None) for place in {places[o]: None for o in operands(value)})
    stage = NetworkStage("result", "result", rows, row_bytes, read, grain=rows)
    return BoundStage(stage, var, value, None)


def _branches(value: relax.Expr) -> bool:
    return isinstance(value, relax.If | relax.Function)


def _size(var: relax.Var) -> tuple[int, int]:
    """Rows of a variable, 1 if it has none, and bytes of a row."""
    shape = image_shape(var)
    rows = max(1, shape[AXIS]) if shape else 1
    return rows, _bytes(var.ty, var.name) // rows


def _bytes(ty: relax.Type, name: str) -> int:
    if isinstance(ty, relax.TupleType):
        return sum(_bytes(field, name) for field in ty.fields)
    if not isinstance(ty, relax.TensorType):
        return 0
    extents = list(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else [ty.shape]
    size = tvm.DataType(str(ty.dtype)).bits // 8
    for extent in extents:
        number = None if extent is None else constant(extent)
        if number is None:
            raise OpError(
                f"the model cannot be distributed: {name!r} is {ty}, whose size is only known at "
                "run time; give the shapes of the inputs"
            )
        size *= number
    return size


def _constant_bytes(value: relax.Expr) -> int:
    return sum(_bytes(o.ty, "a weight") for o in tensors(value) if isinstance(o, GenericConst))


_LANES = 64  # features of a block, if they divide by it: whole vectors and cache lines


@dataclass(frozen=True)
class ChannelOp:
    """A call whose channels can be split."""

    blocks: int  # Equal blocks of channels.
    rebuild: Callable[[Sequence[relax.Expr], int, int], relax.Call]
    """Function from operands and a range of blocks to their call. The first operand is whole; of
    others that are computed, it takes these blocks."""


def channel_op(value: relax.Expr) -> ChannelOp | None:
    """The channels of a call; None where they cannot be split."""
    name = op_name(value)
    if name in (CONV2D.name, WINOGRAD):
        return _convolution(value)
    return _matmul(value) if name == "relax.matmul" else None


def _convolution(call: relax.Call) -> ChannelOp | None:
    """Dense, and packed: blocks are those of the layout."""
    is_winograd = call.op.name == WINOGRAD
    kernel = read_winograd(call) if is_winograd else read_kernel(call, CONV2D)
    [layer], (weight, bias) = kernel.layers, call.args[1:3]
    constants = isinstance(weight, GenericConst) and isinstance(bias, GenericConst)
    if not constants or layer.groups > 1 or len(bias.ty.shape.values) != 2:
        return None
    blocks, lanes = (int(extent) for extent in bias.ty.shape.values)
    first = 3 + kernel.has_scale  # The scale stands before these.

    def rebuild(operands: Sequence[relax.Expr], begin: int, end: int) -> relax.Call:
        own, filters = slice(begin, end), weight.value.numpy()
        part = filters[:, own] if is_winograd else filters[own]
        parts = [
            relax.const(part),
            *(relax.const(each.value.numpy()[own]) for each in call.args[2:first]),
        ]
        channels = min(end * lanes, layer.out_channels) - begin * lanes
        attrs = dict(call.attrs.items()) | {"out_channels": channels}
        return relax.Call(call.op, [operands[0], *parts, *operands[first:]], attrs)

    return ChannelOp(blocks, rebuild)


def _matmul(call: relax.Call) -> ChannelOp | None:
    """A matrix times a constant one."""
    matrix, weight = call.args
    if not isinstance(weight, GenericConst) or isinstance(matrix, GenericConst):
        return None
    if matrix.ty.ndim != 2 or weight.ty.ndim != 2:
        return None
    features = int(weight.ty.shape.values[1])
    width = math.gcd(features, _LANES)

    def rebuild(operands: Sequence[relax.Expr], begin: int, end: int) -> relax.Call:
        part = weight.value.numpy()[:, begin * width : end * width]
        return relax.op.matmul(
            operands[0], tensor_constant(part, weight.ty.dtype), call.attrs.out_dtype
        )

    return ChannelOp(features // width, rebuild)
