# SPDX-License-Identifier: Apache-2.0
"""Elementary functions as straight-line vector code.

LLVM turns ``exp`` of a vector into one call of the C library per lane, which is some twenty times
slower than computing the lanes together. :func:`vectorize_math` replaces ``exp``, ``sigmoid``,
``tanh``, ``sinh``, ``cosh``, ``atanh``, ``log``, ``log1p``, ``erf`` and powers with a constant
exponent, of float32 or of vectors of it, in a scheduled function by range reduction and a minimax
polynomial, within a few units in the last place. Infinities and NaN give the results of the C
library, except for powers of minus infinity. Other types are left alone, except for ``sinh``,
``cosh`` and ``log1p``: LLVM has no vector code for them, and they become calls of the C library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import ir, tirx

from .expression_walk import nodes, op_name
from .float_bits import isnan_by_bits
from .let_bindings import share_values
from .math_expressions import (
    EXP_POLYNOMIAL,
    bind,
    cast,
    f32,
    horner,
    i32,
    keep_digits,
    magnitude,
    power_of_two,
    reinterpret,
    select,
    shift_left,
    shift_right,
    with_sign,
)

_SCALARIZED = ("tirx.isnan", "tirx.nearbyint")
_LN2 = 0.6931471805599453
_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_SQRT_HALF_BITS = 0x3F3504F3
_INF = float("inf")
_NAN = float("nan")
_LARGEST_EXPONENT = 4
_LEADING_BITS = 12

# Minimax polynomials, constant term first.
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
_ERF_ABOVE = (
    0.6582211852073669,
    0.10831429809331894,
    0.028426239266991615,
    0.0018329392187297344,
    7.724655006313697e-05,
    -1.1798924788308796e-06,
    1.2902819257476494e-08,
)
_ERF_BELOW = (
    0.5833333134651184,
    0.29043489694595337,
    0.06367368251085281,
    0.007687288802117109,
    0.00048603786854073405,
)
_ERF_REACH = 3.9
"""Argument from which on the quotient is above 1, so that the clipped quotient is 1 exactly."""


def vectorize_math(
    func: tirx.PrimFunc,  # A function after all inlining: the new expressions bind variables.
) -> tirx.PrimFunc:
    """Replace float32 library calls in the stores of ``func`` by vector code.

    Returns the same function when it calls none of the known functions, ``isnan`` or ``nearbyint``.
    """
    if any(op_name(call) in _SCALARIZED for call in nodes(func.body, ir.Call)):
        func = func.with_body(tvm_ffi.structural_map(func.body, (ir.Call, _for_vectors)))
    if not is_expensive(func.body):
        return func
    return share_values(func, _vectorized)


def _vectorized(value: ir.Expr) -> ir.Expr:
    # Most values of an unrolled kernel are products and sums, and rewriting takes longer than this.
    if not is_expensive(value):
        return value
    return tvm_ffi.structural_map(keep_digits(value), (ir.Call, _expand))


def _for_vectors(call: ir.Call) -> ir.Expr:
    """A call that TVM 0.27 leaves to each lane, in operations that vectors have."""
    if op_name(call) == "tirx.nearbyint":
        return tirx.round(call.args[0])  # the same on CPUs: halves are rounded to even
    return isnan_by_bits(call)


def _expand(call: ir.Call) -> ir.Expr:
    name = op_name(call)
    if name not in _EXPANSIONS:
        return call
    dtype = str(call.ty.dtype)
    if dtype.startswith("float32"):
        expanded = _EXPANSIONS[name](*call.args)
        return call if expanded is None else expanded
    return _library_call(name, call.args[0], dtype) if name in _NOT_IN_LLVM else call


def _library_call(name: str, x: ir.Expr, dtype: str) -> ir.Expr:
    """A library call, which no vector may contain; in float64, the type of the plain names."""
    symbol = name.removeprefix("tirx.")
    return tirx.Cast(dtype, tirx.call_pure_extern("float64", symbol, tirx.Cast("float64", x)))


def is_expensive(tree: ir.Expr | tirx.Stmt) -> bool:
    """Return whether a call takes many instructions, whichever way it is computed."""
    return any(op_name(call) in _EXPANSIONS for call in nodes(tree, ir.Call))


def _exp(x: ir.Expr) -> ir.Expr:
    """2**n * e**r with x = n*ln(2) + r; 0 below the logarithm of half the least number.

    Products that underflow take Intel's CPUs a hundred cycles, as those of masked scores would.
    """

    def with_exponent(clamped: ir.Expr, bounded: ir.Expr) -> ir.Expr:
        rounded = tirx.floor(bounded * f32(_LOG2E) + f32(0.5))
        return bind(
            rounded,
            lambda n: bind(
                clamped - n * f32(_LN2_HIGH) - n * f32(_LN2_LOW),
                lambda r: bind(cast("int32", n), lambda k: _scaled_exp(r, k)),
            ),
        )

    def clamp(value: ir.Expr) -> ir.Expr:
        # The comparisons are false for NaN: it reaches the polynomial, but not the exponent. What
        # the polynomial makes of numbers without an exponent is not read.
        found = bind(
            select(value > f32(89), f32(89), value),
            lambda c: with_exponent(c, select(c > f32(-104), c, f32(0))),
        )
        return select(value <= f32(-104), f32(0), found)

    return bind(x, clamp)


def _scaled_exp(r: ir.Expr, exponent: ir.Expr) -> ir.Expr:
    """2**exponent * e**r for a small r; in two steps, to reach subnormals and infinity."""
    half = shift_right(exponent, 1)
    mantissa = horner(r, EXP_POLYNOMIAL) * (r * r) + r + f32(1)
    return mantissa * power_of_two(half) * power_of_two(exponent - half)


def _sigmoid(x: ir.Expr) -> ir.Expr:
    return f32(1) / (f32(1) + _exp(f32(0) - x))


def _tanh(x: ir.Expr) -> ir.Expr:
    def near_and_far(v: ir.Expr) -> ir.Expr:
        square = v * v
        small = v + v * square * horner(square, _TANH)
        large = f32(1) - f32(2) / (_exp(magnitude(v) * f32(2)) + f32(1))
        return select(magnitude(v) < f32(0.625), small, with_sign(large, v))

    return bind(x, near_and_far)


def _sinh(x: ir.Expr) -> ir.Expr:
    def near_and_far(v: ir.Expr) -> ir.Expr:
        square = v * v
        small = v + v * square * horner(square, _SINH)
        large = _half_sum(v, -1)
        return select(magnitude(v) < f32(1), small, with_sign(large, v))

    return bind(x, near_and_far)


def _cosh(x: ir.Expr) -> ir.Expr:
    return bind(x, lambda v: _half_sum(v, 1))


def _half_sum(x: ir.Expr, sign: int) -> ir.Expr:
    """(e**|x| + sign * e**-|x|) / 2 by e**|x/2|, which is finite where the result is."""
    return bind(
        _exp(magnitude(x) * f32(0.5)),
        lambda e: f32(0.5) * e * e + f32(sign) * (f32(0.5) / e / e),
    )


def _erf(x: ir.Expr) -> ir.Expr:
    """The error function as one quotient of polynomials, without a branch."""

    def within(v: ir.Expr) -> ir.Expr:
        quotient = bind(
            v * v, lambda square: v * horner(square, _ERF_ABOVE) / horner(square, _ERF_BELOW)
        )
        return bind(quotient, lambda q: _clamp(q, 1))

    return bind(x, lambda v: bind(_clamp(v, _ERF_REACH), within))


def _clamp(x: ir.Expr, most: float) -> ir.Expr:
    """The nearest number of at most this magnitude; NaN stays."""
    return select(x > f32(most), f32(most), select(x < f32(-most), f32(-most), x))


def _log(x: ir.Expr) -> ir.Expr:
    return bind(x, lambda v: _log_of(v, None))


def _log1p(x: ir.Expr) -> ir.Expr:
    return bind(x, lambda small: bind(f32(1) + small, lambda v: _log_of(v, small)))


def _log_of(x: ir.Expr, beyond_one: ir.Expr | None) -> ir.Expr:
    """The logarithm of x; ``beyond_one`` is x - 1 where that is known."""

    def sum_of(f: ir.Expr, e: ir.Expr) -> ir.Expr:
        return f + (_log_tail(f) + e * f32(_LN2_LOW)) + e * f32(_LN2_HIGH)

    finite = _split(x, sum_of, beyond_one)
    positive = select(tirx.all(x > f32(0), x < f32(_INF)), finite, x * f32(_INF))
    return select(x < f32(0), f32(_NAN), _at_zero(x, f32(-_INF), positive))


def _split(
    x: ir.Expr, body: Callable[[ir.Expr, ir.Expr], ir.Expr], beyond_one: ir.Expr | None = None
) -> ir.Expr:
    """``body(f, e)`` with x = 2**e * (1 + f) and 1 + f around 1, for a positive finite x."""

    def of_normal(normal: ir.Expr, extra: ir.Expr) -> ir.Expr:
        bits = reinterpret("int32", normal)
        shifted = bits - i32(_SQRT_HALF_BITS)
        exponent = shift_right(shifted, 23)
        f = reinterpret("float32", bits - shift_left(exponent, 23)) - f32(1)
        if beyond_one is not None:
            f = select(exponent.equal(i32(0)), beyond_one, f)
        e = cast("float32", exponent) + extra
        return bind(f, lambda f: bind(e, lambda e: body(f, e)))

    tiny = x < f32(1.17549435e-38)
    normal = select(tiny, x * f32(8388608), x)
    return bind(normal, lambda n: of_normal(n, select(tiny, f32(-23), f32(0))))


def _log_tail(f: ir.Expr) -> ir.Expr:
    """The value log(1 + f) - f."""
    square = f * f
    return f * square * horner(f, _LOG) - square * f32(0.5)


def _atanh(x: ir.Expr) -> ir.Expr:
    def of_magnitude(a: ir.Expr) -> ir.Expr:
        return f32(0.5) * _log1p(f32(2) * a / (f32(1) - a))

    return bind(x, lambda v: with_sign(bind(magnitude(v), of_magnitude), v))


def _at_zero(x: ir.Expr, value: ir.Expr, otherwise: ir.Expr) -> ir.Expr:
    return select(x.equal(f32(0)), value, otherwise)


def _power(base: ir.Expr, exponent: ir.Expr) -> ir.Expr | None:
    """x**c for a constant c: products and square roots for quarters, else 2**(c * log2(x)).

    Of the infinities, only the positive one gives the result of the C library.
    """
    if not isinstance(exponent, tirx.FloatImm):
        return None
    value = float(exponent.value)
    if value == 0 or not abs(value) <= _LARGEST_EXPONENT:
        return None  # a larger exponent would magnify the logarithm's rounding
    if not (4 * value).is_integer():
        return bind(base, lambda v: _any_power(v, value))
    whole, quarters = divmod(int(4 * abs(value)), 4)
    power = bind(base, lambda v: _product([v] * whole + _roots(v, quarters)))
    return power if value > 0 else f32(1) / power


def _any_power(x: ir.Expr, c: float) -> ir.Expr:
    """2**n * e**r with c * log2(x) = n + r / ln(2).

    The whole exponent of x times the leading bits of c is exact, so that the error is relative to
    the rest, a few units, and not to c * log2(x), which may be hundreds.
    """
    leading = math.ldexp(round(math.ldexp(c, _LEADING_BITS)), -_LEADING_BITS)

    def of_parts(f: ir.Expr, e: ir.Expr) -> ir.Expr:
        rest = e * f32(c - leading) + (f + _log_tail(f)) * f32(c * _LOG2E)
        return bind(e * f32(leading), lambda exact: bind(rest, lambda t: of_sum(exact, t)))

    def of_sum(exact: ir.Expr, rest: ir.Expr) -> ir.Expr:
        return bind(
            tirx.floor(exact + rest + f32(0.5)),
            lambda n: bind(((exact - n) + rest) * f32(_LN2), lambda r: scaled(n, r)),
        )

    def scaled(n: ir.Expr, r: ir.Expr) -> ir.Expr:
        bounded = select(n < f32(-252), f32(-252), select(n > f32(254), f32(254), n))
        return bind(cast("int32", bounded), lambda k: _scaled_exp(r, k))

    zero, infinity = (f32(0), f32(_INF)) if c > 0 else (f32(_INF), f32(0))
    finite = select(x < f32(_INF), _split(x, of_parts), infinity)
    positive = select(tirx.isnan(x), x, _at_zero(x, zero, finite))
    return select(x < f32(0), f32(_NAN), positive)


def _roots(x: ir.Expr, quarters: int) -> list[ir.Expr]:
    """Factors of x**(quarters / 4)."""
    root = tirx.sqrt(x)
    return [[], [tirx.sqrt(root)], [root], [root, tirx.sqrt(root)]][quarters]


def _product(factors: Sequence[ir.Expr]) -> ir.Expr:
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


_EXPANSIONS: dict[str, Callable[..., ir.Expr | None]] = {
    "tirx.exp": _exp,
    "tirx.sigmoid": _sigmoid,
    "tirx.tanh": _tanh,
    "tirx.sinh": _sinh,
    "tirx.cosh": _cosh,
    "tirx.erf": _erf,
    "tirx.log": _log,
    "tirx.log1p": _log1p,
    "tirx.atanh": _atanh,
    "tirx.pow": _power,
}
_NOT_IN_LLVM = frozenset({"tirx.sinh", "tirx.cosh", "tirx.log1p"})
