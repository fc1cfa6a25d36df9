# SPDX-License-Identifier: Apache-2.0
"""Queries and copies of single expressions: op, operands, substitution, other arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import relax
from tvm.ir import GenericConst, Op

from schedules.tir.expression_walk import op_name as called_op

Value = Any
"""Function from a variable to the expression bound to it, or None where that is unknown."""

TUPLE_GET_ITEM = "TupleGetItem"
"""The key under which rules for ``TupleGetItem`` are filed; all others are filed by op name."""

MOVES = ("relax.reshape", "relax.permute_dims", "relax.squeeze", "relax.expand_dims")
"""Ops whose results are the elements of their first operand, each once."""

ELEMENTWISE = (
    "relax.add",
    "relax.subtract",
    "relax.multiply",
    "relax.divide",
    "relax.maximum",
    "relax.minimum",
)
"""Ops of two operands that compute element by element, and broadcast."""


def op_name(expr: Value) -> str | None:
    """Name of the op that ``expr`` calls; None when it is no call of an op."""
    return TUPLE_GET_ITEM if isinstance(expr, relax.TupleGetItem) else called_op(expr) or None


def permutation(turn: relax.Call) -> list[int]:
    """Axes of the operand of a ``permute_dims`` in the order that its result has."""
    axes, rank = turn.attrs.axes, turn.ty.ndim
    return [*range(rank)][::-1] if axes is None else [int(axis) % rank for axis in axes]


def is_claimed(func: relax.Function) -> bool:
    """True if a function belongs to another pass or to a backend."""
    return any(claim in func.attrs for claim in ("Primitive", "Composite", "Codegen"))


def is_removable(value: relax.Expr) -> bool:
    """Return whether a value outside a dataflow block may be removed when unused."""
    if isinstance(value, relax.Call):
        return isinstance(value.op, Op) and value.op.get_attr("FPurity") is True
    return isinstance(value, relax.Var | GenericConst | relax.Tuple | relax.TupleGetItem)


def operands(value: relax.Expr) -> Iterator[relax.Var]:
    """Every variable that ``value`` reads, as often as it reads it."""
    if isinstance(value, relax.Var):
        yield value
    elif isinstance(value, relax.Call):
        yield from operands(value.op) if isinstance(value.op, relax.Var) else ()
        for argument in value.args:
            yield from operands(argument)
    elif isinstance(value, relax.Tuple):
        for element in value.fields:
            yield from operands(element)
    elif isinstance(value, relax.TupleGetItem):
        yield from operands(value.tuple_value)
    elif isinstance(value, relax.If | relax.Function | relax.SeqExpr):
        yield from relax.analysis.free_vars(value)


def substitute(value: relax.Expr, old: relax.Var, new: relax.Expr) -> relax.Expr:
    """``value`` with ``new`` wherever it reads ``old``; other kinds than calls and tuples stay."""
    if isinstance(value, relax.Var):
        return new if value.same_as(old) else value
    if isinstance(value, relax.Call):
        arguments = [substitute(argument, old, new) for argument in value.args]
        return relax.Call(value.op, arguments, value.attrs, value.ty_args, value.span)
    if isinstance(value, relax.Tuple):
        return relax.Tuple([substitute(element, old, new) for element in value.fields])
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(substitute(value.tuple_value, old, new), value.index)
    return value


def resize_alike(call: relax.Call, data: relax.Expr, size: relax.Expr, layout: str) -> relax.Call:
    """Resize other data as a call of ``relax.image.resize2d`` does, to ``size`` in ``layout``."""
    attrs = call.attrs
    return relax.op.image.resize2d(
        data,
        size,
        roi=tuple(float(edge) for edge in attrs.roi),
        layout=layout,
        method=attrs.method,
        coordinate_transformation_mode=attrs.coordinate_transformation_mode,
        rounding_method=attrs.rounding_method,
        cubic_alpha=attrs.cubic_alpha,
        cubic_exclude=attrs.cubic_exclude,
        extrapolation_value=attrs.extrapolation_value,
        out_dtype=attrs.out_dtype,
    )
