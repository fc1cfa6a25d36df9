# SPDX-License-Identifier: Apache-2.0
"""Small expressions of float32 and int32, or of vectors of them, for elementary functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import ir, tirx


def f32(value: float) -> ir.Expr:
    """A float32 constant."""
    return tirx.FloatImm("float32", value)


def i32(value: int) -> ir.Expr:
    """An int32 constant."""
    return tirx.IntImm("int32", value)


def lanes_of(expr: ir.Expr) -> int:
    """Number of elements of the expression; 1 unless it is a vector."""
    return int(expr.ty.dtype.lanes)


def select(condition: ir.Expr, yes: ir.Expr, no: ir.Expr) -> ir.Expr:
    """An element of ``yes`` where the condition holds, else of ``no``; constants are broadcast."""
    lanes = lanes_of(condition)
    return tirx.Select(condition, *(_with_lanes(branch, lanes) for branch in (yes, no)))


def cast(dtype: str, expr: ir.Expr) -> ir.Expr:
    """The expression with elements of another type."""
    return tirx.Cast(_vector_type(dtype, lanes_of(expr)), expr)


def reinterpret(dtype: str, expr: ir.Expr) -> ir.Expr:
    """The bits of each element as another type."""
    return tirx.reinterpret(_vector_type(dtype, lanes_of(expr)), expr)


def bind(value: ir.Expr, body: Callable[[ir.Expr], ir.Expr]) -> ir.Expr:
    """``let v = value in body(v)``, so that a shared value is computed once."""
    var = tirx.Var("m", str(value.ty.dtype))
    return tirx.Let(var, value, body(var))


def horner(x: ir.Expr, coefficients: Sequence[float]) -> ir.Expr:
    """The polynomial with these coefficients, constant term first."""
    result = f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + f32(coefficient)
    return result


def shift_left(expr: ir.Expr, bits: int) -> ir.Expr:
    """The integers times two to the power of ``bits``."""
    return tirx.shift_left(expr, _with_lanes(i32(bits), lanes_of(expr)))


def shift_right(expr: ir.Expr, bits: int) -> ir.Expr:
    """The integers divided by two to the power of ``bits``, rounded down."""
    return tirx.shift_right(expr, _with_lanes(i32(bits), lanes_of(expr)))


def power_of_two(exponent: ir.Expr) -> ir.Expr:
    """2**exponent for an int32 in the normal range."""
    return reinterpret("float32", shift_left(exponent + i32(127), 23))


def magnitude(x: ir.Expr) -> ir.Expr:
    """The absolute value; NaN stays NaN."""
    return tirx.abs(x)


def with_sign(value: ir.Expr, sign: ir.Expr) -> ir.Expr:
    """A ``value`` that is not negative, with the sign of ``sign``; zero counts as positive."""
    return bind(value, lambda m: select(sign < f32(0), f32(0) - m, m))


def _with_lanes(expr: ir.Expr, lanes: int) -> ir.Expr:
    return tirx.Broadcast(expr, lanes) if lanes > 1 and lanes_of(expr) == 1 else expr


def _vector_type(dtype: str, lanes: int) -> str:
    return f"{dtype}x{lanes}" if lanes > 1 else dtype
