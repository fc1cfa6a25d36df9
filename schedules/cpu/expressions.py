# SPDX-License-Identifier: Apache-2.0
"""Small float32 and int32 expressions that elementary functions are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import ir, tirx


def f32(value: float) -> ir.Expr:
    """A float32 constant."""
    return tirx.FloatImm("float32", value)


def i32(value: int) -> ir.Expr:
    """An int32 constant."""
    return tirx.IntImm("int32", value)


def bind(value: ir.Expr, body: Callable[[ir.Expr], ir.Expr], dtype: str = "float32") -> ir.Expr:
    """``let v = value in body(v)``, so that a shared value is computed once."""
    var = tirx.Var("m", dtype)
    return tirx.Let(var, value, body(var))


def horner(x: ir.Expr, coefficients: Sequence[float]) -> ir.Expr:
    """The polynomial with these coefficients, constant term first."""
    result = f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + f32(coefficient)
    return result


def power_of_two(exponent: ir.Expr) -> ir.Expr:
    """2**exponent for an int32 in the normal range."""
    return tirx.reinterpret("float32", tirx.shift_left(exponent + i32(127), i32(23)))


def magnitude(x: ir.Expr) -> ir.Expr:
    """The absolute value, of NaN NaN."""
    return tirx.abs(x)


def with_sign(value: ir.Expr, sign: ir.Expr) -> ir.Expr:
    """A ``value`` that is not negative, with the sign of ``sign``; zero counts as positive."""
    return bind(value, lambda m: tirx.Select(sign < f32(0), f32(0) - m, m))
