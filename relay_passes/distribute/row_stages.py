# SPDX-License-Identifier: Apache-2.0
"""The bindings of a function as stages, for :mod:`schedules.distribute.rows.row_plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.ir import GenericConst

from schedules.distribute.rows.row_plan import NetworkStage, StageOperand
from schedules.errors import OpError
from schedules.workload.reduce import constant

from ..core.expressions import op_name, operands
from .channel_rules import ChannelOp, channel_op
from .row_rules import AXIS, RowOp, image_shape, row_op, tensors


@dataclass(frozen=True)
class BoundStage:
    """A stage, and the binding of the function that it stands for.

    Parameters
    ----------
    stage : NetworkStage
        The stage.
    var : relax.Var
        Its variable: a parameter of the function, or that of a binding.
    value : relax.Expr | None
        The value bound to it; None for a parameter.
    rows : RowOp | None
        How its rows are split; None if they are not.
    channels : ChannelOp | None
        How its channels are split; None if they are not.
    """

    stage: NetworkStage
    var: relax.Var
    value: relax.Expr | None
    rows: RowOp | None
    channels: ChannelOp | None = None


def read_stages(func: relax.Function) -> list[BoundStage]:
    """Stages of a function: its parameters, then its bindings in order; the last is its result.

    Parameters
    ----------
    func : relax.Function
        In normal form.

    Raises
    ------
    OpError
        If a shape is symbolic, or the function branches; the message names the variable.
    """
    places: dict[relax.Var, int] = {}
    found: list[BoundStage] = []

    def add(bound: BoundStage) -> None:
        places[bound.var] = len(found)
        found.append(bound)

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
    if not found[-1].var.same_as(result):
        found.append(_result(result, places))
    return found


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
