# SPDX-License-Identifier: Apache-2.0
"""Small expressions of float32 and int32, or of vectors of them, for elementary functions.

Expressions that cancel near one are rewritten to keep their digits: ``log(1 + y)`` and ``exp(x) -
1`` lose all digits of small ``y`` and ``x``: they make Softplus and Mish wrong by percents from ``x
= -12`` downwards, and Elu near zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import ir, tirx

from .expression_walk import op_name


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


EXP_POLYNOMIAL = (0.49999994, 0.1666652, 0.041668393, 0.008368781, 0.0013814467)
"""(e**r - 1 - r) / r**2 up to ``EXP_REACH``, constant term first."""

EXP_REACH = 0.34657359
"""Half of ln(2)."""


def keep_digits(
    value: ir.Expr,  # Any expression.
) -> ir.Expr:
    """Rewrite expressions that cancel near one.

    ::

        log(1 + y)                      log1p(y)
        exp(x) - 1, 1 - exp(x)          a polynomial where x is small
        tanh(log(y))                    a quotient, as Mish has it with y = 1 + exp(x)

    Returns the same expression where nothing cancels. The logarithm in every float type, the others
    in float32.
    """
    shorter = tvm_ffi.structural_map(value, (ir.Call, _tanh_of_log))
    rules = ((ir.Call, _log_of_sum), (tirx.Add, _sum), (tirx.Sub, _difference))
    return tvm_ffi.structural_map(shorter, rules)


def _tanh_of_log(call: ir.Call) -> ir.Expr:
    """The quotient n / (n + 2) for n = y*y - 1, which saves the logarithm as well."""
    if not _is_call(call, "tirx.tanh", "float32"):
        return call
    logarithm = call.args[0]
    if not _is_call(logarithm, "tirx.log", "float32"):
        return call

    def quotient(small: ir.Expr, n: ir.Expr) -> ir.Expr:
        finite = select(small < f32(1), n / (n + f32(2)), f32(1) - f32(2) / (n + f32(2)))
        return select(small < f32(-1), f32(float("nan")), finite)

    y = logarithm.args[0]
    beyond_one = _beyond_one(y)
    return bind(
        y - f32(1) if beyond_one is None else beyond_one,
        lambda small: bind(small * (small + f32(2)), lambda n: quotient(small, n)),
    )


def _log_of_sum(call: ir.Call) -> ir.Expr:
    if not _is_call(call, "tirx.log", "float"):
        return call
    beyond_one = _beyond_one(call.args[0])
    return call if beyond_one is None else tirx.log1p(beyond_one)


def _sum(expr: tirx.Add) -> ir.Expr:
    if _is_exp(expr.a) and _is_constant(expr.b, -1):
        return _exp_minus_one(expr.a, 1)
    return expr


def _difference(expr: tirx.Sub) -> ir.Expr:
    if _is_exp(expr.a) and _is_constant(expr.b, 1):
        return _exp_minus_one(expr.a, 1)
    if _is_exp(expr.b) and _is_constant(expr.a, 1):
        return _exp_minus_one(expr.b, -1)
    return expr


def _exp_minus_one(exp: ir.Call, sign: int) -> ir.Expr:
    """``sign`` times e**x - 1."""

    def near_and_far(x: ir.Expr) -> ir.Expr:
        near = x + x * x * horner(x, EXP_POLYNOMIAL)
        far = tirx.exp(x) - f32(1)
        chosen = select(magnitude(x) < f32(EXP_REACH), near, far)
        return chosen if sign > 0 else f32(0) - chosen

    return bind(exp.args[0], near_and_far)


def _beyond_one(expr: ir.Expr) -> ir.Expr | None:
    """The term that is added to one; None if ``expr`` is no such sum."""
    if isinstance(expr, tirx.Add):
        for one, other in ((expr.a, expr.b), (expr.b, expr.a)):
            if _is_constant(one, 1):
                return other
    return None


def _is_constant(expr: ir.Expr, value: float) -> bool:
    return isinstance(expr, tirx.FloatImm) and float(expr.value) == value


def _is_exp(expr: ir.Expr) -> bool:
    return _is_call(expr, "tirx.exp", "float32")


def _is_call(expr: ir.Expr, name: str, dtype: str) -> bool:
    """Return whether ``expr`` calls an intrinsic with a result type that begins with ``dtype``."""
    return op_name(expr) == name and str(expr.ty.dtype).startswith(dtype)
