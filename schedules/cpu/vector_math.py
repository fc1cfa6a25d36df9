# SPDX-License-Identifier: Apache-2.0
"""Elementary functions as straight-line vector code.

LLVM turns ``exp`` of a vector into one call of the C library per lane, which is some twenty times
slower than computing the lanes together. :func:`vectorize_math` replaces float32 ``exp``,
``sigmoid``, ``tanh``, ``sinh``, ``cosh``, ``log``, ``erf`` and powers with a constant exponent in
a scheduled function by range reduction and a minimax polynomial, within a few units in the last
place. Infinities and NaN come out as they do from the C library, but for powers of minus infinity.
Other types are left alone, but for ``sinh`` and ``cosh``: LLVM has no code for vectors of those,
and they become calls of the C library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import ir, tirx

from .shared_values import store_with_bindings

_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_SQRT_HALF_BITS = 0x3F3504F3
_INF = float("inf")
_LARGEST_EXPONENT = 4

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
_SINH = (1 / 6, 1 / 120, 1 / 5040, 1 / 362880, 1 / 39916800)
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
    """Replace float32 library calls in the stores of ``func`` by vector code.

    Parameters
    ----------
    func : PrimFunc
        A function that no schedule will inline any further: the new expressions bind variables.

    Returns
    -------
    PrimFunc
        The same function when it calls none of the known functions.
    """

    def expand(store: tirx.BufferStore) -> tirx.Stmt:
        shorter = tvm_ffi.structural_map(store.value, (ir.Call, _tanh_of_log))
        value = tvm_ffi.structural_map(shorter, (ir.Call, _expand))
        return store if value.same_as(store.value) else store_with_bindings(store, value)

    return tvm_ffi.structural_map(func, (tirx.BufferStore, expand))


def _tanh_of_log(call: ir.Call) -> ir.Expr:
    """(y*y - 1) / (y*y + 1), as Mish has it; three functions in one take TVM minutes."""
    if not _is_float32(call, "tirx.tanh") or not _is_float32(call.args[0], "tirx.log"):
        return call

    def quotient(y: ir.Expr) -> ir.Expr:
        denominator = y * y + _f32(1)
        small = (y - _f32(1)) * (y + _f32(1)) / denominator
        finite = tirx.Select(y < _f32(2), small, _f32(1) - _f32(2) / denominator)
        return tirx.Select(y < _f32(0), _f32(float("nan")), finite)

    return _bind(call.args[0].args[0], quotient)


def _is_float32(expr: ir.Expr, name: str) -> bool:
    return (
        isinstance(expr, ir.Call)
        and isinstance(expr.op, ir.Op)
        and expr.op.name == name
        and str(expr.ty.dtype) == "float32"
    )


def _expand(call: ir.Call) -> ir.Expr:
    name = call.op.name if isinstance(call.op, ir.Op) else ""
    if name not in _EXPANSIONS:
        return call
    dtype = str(call.ty.dtype)
    if dtype == "float32":
        return _power(call) if name == "tirx.pow" else _EXPANSIONS[name](call.args[0])
    return _library_call(name, call.args[0], dtype) if name in _NOT_IN_LLVM else call


def _library_call(name: str, x: ir.Expr, dtype: str) -> ir.Expr:
    """A call that no vector may have; in float64, which is the type of the plain names."""
    symbol = name.removeprefix("tirx.")
    return tirx.Cast(dtype, tirx.call_pure_extern("float64", symbol, tirx.Cast("float64", x)))


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


def _sinh(x: ir.Expr) -> ir.Expr:
    def both(v: ir.Expr) -> ir.Expr:
        square = v * v
        small = v + v * square * _horner(square, _SINH)
        large = _half_sum(v, -1)
        return tirx.Select(_magnitude(v) < _f32(1), small, _with_sign(large, v))

    return _bind(x, both)


def _cosh(x: ir.Expr) -> ir.Expr:
    return _bind(x, lambda v: _half_sum(v, 1))


def _half_sum(x: ir.Expr, sign: int) -> ir.Expr:
    """(e**|x| + sign * e**-|x|) / 2 by e**|x/2|, which is finite where the result is."""
    return _bind(
        _exp(_magnitude(x) * _f32(0.5)),
        lambda e: _f32(0.5) * e * e + _f32(sign) * (_f32(0.5) / e / e),
    )


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
    """x**c for a constant c: products and square roots for quarters, else exp(c * log(x)).

    Of infinities only the positive one has the power that the C library gives it.
    """
    base, exponent = call.args
    if not isinstance(exponent, tirx.FloatImm):
        return call
    value = float(exponent.value)
    if value == 0 or not abs(value) <= _LARGEST_EXPONENT:
        return call  # a larger exponent would magnify the logarithm's rounding
    if not (4 * value).is_integer():
        return _exp(_log(base) * _f32(value))
    whole, quarters = divmod(int(4 * abs(value)), 4)
    power = _bind(base, lambda v: _product([v] * whole + _roots(v, quarters)))
    return power if value > 0 else _f32(1) / power


def _roots(x: ir.Expr, quarters: int) -> list[ir.Expr]:
    """Factors of x**(quarters / 4)."""
    root = tirx.sqrt(x)
    return [[], [tirx.sqrt(root)], [root], [root, tirx.sqrt(root)]][quarters]


def _product(factors: Sequence[ir.Expr]) -> ir.Expr:
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


_EXPANSIONS: dict[str, Callable[[ir.Expr], ir.Expr]] = {
    "tirx.exp": _exp,
    "tirx.sigmoid": _sigmoid,
    "tirx.tanh": _tanh,
    "tirx.sinh": _sinh,
    "tirx.cosh": _cosh,
    "tirx.erf": _erf,
    "tirx.log": _log,
    "tirx.pow": _log,
}
_NOT_IN_LLVM = frozenset({"tirx.sinh", "tirx.cosh"})
