# SPDX-License-Identifier: Apache-2.0
"""Floats by their bits: bfloat16, ``isnan``, and minima and maxima that keep NaN.

TVM computes expressions of bfloat16 in float32, and drops a rounding that is widened again at once;
:func:`keep_roundings` keeps it.

TVM's ``max(x, y)`` is ``x > y ? x : y``, which is ``y`` where ``x`` is NaN: a ReLU would make zero
of it, and a model that has diverged would look healthy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import tvm_ffi
from tvm import DataType, ir, tirx
from tvm.script.ir_builder import tirx as T

from .expression_walk import loads, nodes, op_name
from .let_bindings import share_values

_HALF_BITS = 16
_INFINITY = 0x7F800000
_QUIET = 0x0040
"""The bit that keeps NaN so when the lower ones are cut off."""


def widen_bits(bits: tirx.Expr) -> tirx.Expr:
    """The float32 of uint16 that are the bits of bfloat16."""
    words = T.Cast(_as_type(bits, "uint32"), bits)
    return T.reinterpret(_as_type(bits, "float32"), words << _number(_HALF_BITS, words))


def round_to_bits(value: tirx.Expr) -> tirx.Expr:
    """The bits, as uint16, of the bfloat16 nearest to float32: halves to even, NaN stays NaN."""
    words = T.reinterpret(_as_type(value, "uint32"), value)
    high = words >> _number(_HALF_BITS, words)
    half = (high & _number(1, words)) + _number((1 << (_HALF_BITS - 1)) - 1, words)
    rounded = (words + half) >> _number(_HALF_BITS, words)
    is_nan = (words & _number(0x7FFFFFFF, words)) > _number(_INFINITY, words)
    bits = tirx.Select(is_nan, high | _number(_QUIET, words), rounded)
    return T.Cast(_as_type(value, "uint16"), bits)


def keep_roundings(
    func: tirx.PrimFunc,  # A scheduled function.
) -> tirx.PrimFunc:
    """Round to bfloat16 within expressions, too, not only where the result is stored.

    Returns the same function when there is nothing to do.
    """
    return share_values(func, _with_roundings)


def _with_roundings(value: ir.Expr) -> ir.Expr:
    if isinstance(value, tirx.Cast) and str(value.ty.dtype) == "bfloat16":  # rounded when stored
        inner = _with_roundings(value.value)
        return value if inner.same_as(value.value) else tirx.Cast(value.ty.dtype, inner)
    return tvm_ffi.structural_map(value, (tirx.Cast, _rounded))


def _rounded(cast: tirx.Cast) -> ir.Expr:
    """The float32 of a bfloat16 that a float32 is rounded to."""
    inner = cast.value
    if str(cast.ty.dtype) != "float32" or not isinstance(inner, tirx.Cast):
        return cast
    if (str(inner.ty.dtype), str(inner.value.ty.dtype)) != ("bfloat16", "float32"):
        return cast
    number = tirx.Var("unrounded", "float32")
    return tirx.Let(number, inner.value, widen_bits(round_to_bits(number)))


def _as_type(like: tirx.Expr, dtype: str) -> str:
    """Name of the type with elements of ``dtype`` in as many lanes as ``like`` has."""
    lanes = DataType(str(like.ty.dtype)).lanes
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _number(value: int, like: tirx.Expr) -> tirx.Expr:
    lanes = DataType(str(like.ty.dtype)).lanes
    one = tirx.const(value, "uint32")
    return one if lanes == 1 else T.broadcast(one, lanes)


_MOST_REPEATED = 3
"""Choices in a value that is written twice; a chain of bounds would double it at each."""


def keep_nan(
    func: tirx.PrimFunc,  # A function, scheduled or not.
    scope: str = "global",  # Scope of buffers for values that are written twice.
) -> tirx.PrimFunc:
    """Make float minima and maxima of a constant and anything, or of two loads, propagate NaN.

    Reductions and larger expressions on both sides are left alone: there it would be too slow.

    Returns the same function when there is nothing to do.
    """

    def rewrite(store: tirx.BufferStore) -> tirx.BufferStore:
        if not _is_float(store.value) or _accumulates(store):
            return store
        value = tvm_ffi.structural_map(store.value, ((tirx.Max, _maximum), (tirx.Min, _minimum)))
        same = value.same_as(store.value)
        return store if same else tirx.BufferStore(store.buffer, value, store.indices)

    done = tvm_ffi.structural_map(func, (tirx.BufferStore, rewrite))
    return done if done.same_as(func) else share_values(done, _renewed, scope)


def _is_float(expr: ir.Expr) -> bool:
    return "float" in str(expr.ty.dtype)


def _accumulates(store: tirx.BufferStore) -> bool:
    return any(load.source.same_as(store.buffer) for load in loads(store.value))


def _maximum(expr: tirx.Max) -> ir.Expr:
    return _choose(expr, operator.gt)


def _minimum(expr: tirx.Min) -> ir.Expr:
    return _choose(expr, operator.lt)


def _choose(expr: tirx.Max | tirx.Min, wins: Callable[[ir.Expr, ir.Expr], ir.Expr]) -> ir.Expr:
    """Put the operand that may be NaN into the branch of a false comparison, as with NaN."""
    if not _is_float(expr):
        return expr
    if _is_constant(expr.a):
        return _unless_wins(expr.a, expr.b, wins)
    if _is_constant(expr.b):
        return _unless_wins(expr.b, expr.a, wins)
    if isinstance(expr.a, ir.TensorLoad) and isinstance(expr.b, ir.TensorLoad):
        tested = expr.a.astype("float32") if "bfloat16" in str(expr.ty.dtype) else expr.a
        other = tirx.Select(tirx.isnan(tested), expr.a, expr.b)
        return tirx.Select(wins(expr.a, expr.b), expr.a, other)
    return expr


def _unless_wins(
    limit: ir.Expr, value: ir.Expr, wins: Callable[[ir.Expr, ir.Expr], ir.Expr]
) -> ir.Expr:
    """Return ``value`` unless ``limit`` wins, with a name for a value that holds many choices."""
    if len(nodes(value, tirx.Select)) <= _MOST_REPEATED:
        return tirx.Select(wins(limit, value), limit, value)
    named = tirx.Var("value", value.ty)
    return tirx.Let(named, value, tirx.Select(wins(limit, named), limit, named))


def _renewed(value: ir.Expr) -> ir.Expr:
    return tvm_ffi.structural_map(
        value, ((tirx.Let, lambda let: tirx.Let(let.var, let.value, let.body)),)
    )


def _is_constant(expr: ir.Expr) -> bool:
    return isinstance(expr.value if isinstance(expr, tirx.Broadcast) else expr, tirx.FloatImm)


def nan_by_bits(value: ir.Expr) -> ir.Expr:
    """Write ``isnan(x)`` by the bits of ``x``, in operations that vectors have.

    TVM 0.27 scalarizes vectors for the call itself, and those of a bound value to a single lane.
    """
    return tvm_ffi.structural_map(value, (ir.Call, isnan_by_bits))


def isnan_by_bits(call: ir.Call) -> ir.Expr:
    """The same call unless it is one of ``isnan``."""
    if op_name(call) != "tirx.isnan":
        return call
    [number] = call.args
    if str(number.ty.dtype) not in _BITS:  # 16 bits
        number = number.astype("float32")
    bits = _BITS[str(number.ty.dtype)]
    integer = tirx.reinterpret(bits.dtype, number)
    magnitude = tirx.bitwise_and(integer, tirx.const(bits.magnitude, bits.dtype))
    return magnitude > tirx.const(bits.infinity, bits.dtype)


@dataclass(frozen=True)
class _Bits:
    """Integer type of a float's bits, all of them but the sign, and those of infinity."""

    dtype: str
    magnitude: int
    infinity: int


_BITS = {
    "float32": _Bits("int32", 0x7FFFFFFF, 0x7F800000),
    "float64": _Bits("int64", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}
