# SPDX-License-Identifier: Apache-2.0
"""Elementary functions as straight-line vector code.

LLVM turns ``exp`` of a vector into one call of the C library per lane, which is some twenty times
slower than computing the lanes together. :func:`vectorize_math` replaces float32 ``exp``,
``sigmoid``, ``tanh``, ``log``, ``erf`` and powers with a constant exponent in a scheduled function
by range reduction and a minimax polynomial, within a few units in the last place. Infinities and
NaN come out as they do from the C library; other types are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import ir, tirx

_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_SQRT_HALF_BITS = 0x3F3504F3
_INF = float("inf")

# Minimax polynomials, constant term first.
_EXP = (0.49999994, 0.1666652, 0.041668393, 0.008368781, 0.0013814467)
_LOG = (
    0.3333333134651184,
    -0.2500081956386566,
    0.20001226663589478,
    -0.16623356938362122,
    0.14201757311820984,
    -0.13160182535648346,
    0.1276157796382904,
    -0.07634498924016953,
)
_TANH = (-0.3333328068256378, 0.13331441581, -0.05373971537, 0.020639088, -0.0057049873)
_ERF_SMALL = (
    1.1283791065216064,
    -0.376126229763031,
    0.1128353402018547,
    -0.026851477101445198,
    0.005183523986488581,
    -0.0007964950054883957,
    7.694984378758818e-05,
)
_ERF_LARGE = (
    0.00016644797869957983,
    1.127797245979309,
    0.6369760632514954,
    0.10411367565393448,
    -0.022315211594104767,
    0.0030654899310320616,
    -0.00019821962632704526,
)


def vectorize_math(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace float32 library calls of ``func`` by vector code.

    Parameters
    ----------
    func : PrimFunc
        A function that no schedule will inline any further: the new expressions bind variables.

    Returns
    -------
    PrimFunc
        The same function when it calls none of the known functions.
    """

    def rewrite(call: ir.Call) -> ir.Expr:
        name = call.op.name if isinstance(call.op, ir.Op) else ""
        if name not in _EXPANSIONS or str(call.ty.dtype) != "float32":
            return call
        if name == "tirx.pow":
            return _power(call)
        return _EXPANSIONS[name](call.args[0])

    return tvm_ffi.structural_map(func, (ir.Call, rewrite))


def is_expensive(call: ir.Call) -> bool:
    """Whether a call takes many instructions, whichever way it is computed."""
    return isinstance(call.op, ir.Op) and call.op.name in _EXPANSIONS


def _f32(value: float) -> ir.Expr:
    return tirx.FloatImm("float32", value)


def _i32(value: int) -> ir.Expr:
    return tirx.IntImm("int32", value)


def _bind(value: ir.Expr, body: Callable[[ir.Expr], ir.Expr], dtype: str = "float32") -> ir.Expr:
    """``let v = value in body(v)``, so that a shared value is computed once."""
    var = tirx.Var("m", dtype)
    return tirx.Let(var, value, body(var))


def _horner(x: ir.Expr, coefficients: Sequence[float]) -> ir.Expr:
    result = _f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + _f32(coefficient)
    return result


def _power_of_two(exponent: ir.Expr) -> ir.Expr:
    """2**exponent for an int32 in the normal range."""
    return tirx.reinterpret("float32", tirx.shift_left(exponent + _i32(127), _i32(23)))


def _exp(x: ir.Expr) -> ir.Expr:
    """2**n * e**r with x = n*ln(2) + r; the scaling has two steps to reach subnormals and inf."""

    def scaled(clamped: ir.Expr, n: ir.Expr, exponent: ir.Expr) -> ir.Expr:
        rest = clamped - n * _f32(_LN2_HIGH) - n * _f32(_LN2_LOW)
        half = tirx.shift_right(exponent, _i32(1))
        return _bind(
            rest,
            lambda r: (
                (_horner(r, _EXP) * (r * r) + r + _f32(1))
                * _power_of_two(half)
                * _power_of_two(exponent - half)
            ),
        )

    def with_exponent(clamped: ir.Expr, bounded: ir.Expr) -> ir.Expr:
        rounded = tirx.floor(bounded * _f32(_LOG2E) + _f32(0.5))
        return _bind(
            rounded,
            lambda n: _bind(
                tirx.Cast("int32", n), lambda exponent: scaled(clamped, n, exponent), "int32"
            ),
        )

    def clamp(value: ir.Expr) -> ir.Expr:
        # The comparisons are false for NaN: `low` keeps it for the polynomial, and the exponent
        # is taken from `bounded`, where NaN has become a number.
        low = tirx.Select(value < _f32(-104), _f32(-104), value)
        return _bind(
            low,
            lambda v: _bind(
                tirx.Select(v > _f32(89), _f32(89), v),
                lambda c: with_exponent(c, tirx.Select(c > _f32(-104), c, _f32(-104))),
            ),
        )

    return _bind(x, clamp)


def _sigmoid(x: ir.Expr) -> ir.Expr:
    return _f32(1) / (_f32(1) + _exp(_f32(0) - x))


def _tanh(x: ir.Expr) -> ir.Expr:
    def both(v: ir.Expr) -> ir.Expr:
        square = v * v
        small = v + v * square * _horner(square, _TANH)
        large = _f32(1) - _f32(2) / (_exp(_magnitude(v) * _f32(2)) + _f32(1))
        return tirx.Select(_magnitude(v) < _f32(0.625), small, _with_sign(large, v))

    return _bind(x, both)


def _erf(x: ir.Expr) -> ir.Expr:
    def both(v: ir.Expr) -> ir.Expr:
        small = v * _horner(v * v, _ERF_SMALL)
        reach = tirx.Select(_magnitude(v) > _f32(4), _f32(4), _magnitude(v))
        large = _bind(reach, lambda a: _f32(1) - _exp(_f32(0) - _horner(a, _ERF_LARGE)))
        return tirx.Select(_magnitude(v) < _f32(1), small, _with_sign(large, v))

    return _bind(x, both)


def _magnitude(x: ir.Expr) -> ir.Expr:
    return tirx.abs(x)


def _with_sign(magnitude: ir.Expr, sign: ir.Expr) -> ir.Expr:
    return _bind(magnitude, lambda m: tirx.Select(sign < _f32(0), _f32(0) - m, m))


def _log(x: ir.Expr) -> ir.Expr:
    """e*ln(2) + log(m) with x = 2**e * m and m around 1."""

    def of_mantissa(f: ir.Expr, e: ir.Expr) -> ir.Expr:
        square = f * f
        tail = f * square * _horner(f, _LOG) + e * _f32(_LN2_LOW) - square * _f32(0.5)
        return f + tail + e * _f32(_LN2_HIGH)

    def of_normal(v: ir.Expr, extra: ir.Expr) -> ir.Expr:
        bits = tirx.reinterpret("int32", v)
        shifted = bits - _i32(_SQRT_HALF_BITS)
        exponent = tirx.shift_right(shifted, _i32(23))
        mantissa = tirx.reinterpret("float32", bits - tirx.shift_left(exponent, _i32(23)))
        return _bind(
            mantissa - _f32(1), lambda f: of_mantissa(f, tirx.Cast("float32", exponent) + extra)
        )

    def special(v: ir.Expr) -> ir.Expr:
        tiny = v < _f32(1.17549435e-38)
        normal = tirx.Select(tiny, v * _f32(8388608), v)
        extra = tirx.Select(tiny, _f32(-23), _f32(0))
        finite = _bind(normal, lambda n: of_normal(n, extra))
        positive = tirx.Select(tirx.all(v > _f32(0), v < _f32(_INF)), finite, v * _f32(_INF))
        return tirx.Select(v < _f32(0), _f32(float("nan")), _zero_to_minus_inf(v, positive))

    return _bind(x, special)


def _zero_to_minus_inf(x: ir.Expr, otherwise: ir.Expr) -> ir.Expr:
    return tirx.Select(x.equal(_f32(0)), _f32(-_INF), otherwise)


def _power(call: ir.Call) -> ir.Expr:
    """x**c for a constant c: products for small whole numbers, else exp(c*log(x))."""
    base, exponent = call.args
    if not isinstance(exponent, tirx.FloatImm):
        return call
    value = float(exponent.value)
    if value in (1.0, 2.0, 3.0):
        return _bind(base, lambda v: v if value == 1 else v * v if value == 2 else v * v * v)
    if value == 0.5:
        return tirx.sqrt(base)
    if value == 0.0 or value.is_integer() or not abs(value) <= 4:
        return call  # signs, or an exponent that would magnify the logarithm's rounding
    return _exp(_log(base) * _f32(value))


_EXPANSIONS: dict[str, Callable[[ir.Expr], ir.Expr]] = {
    "tirx.exp": _exp,
    "tirx.sigmoid": _sigmoid,
    "tirx.tanh": _tanh,
    "tirx.erf": _erf,
    "tirx.log": _log,
    "tirx.pow": _log,
}
