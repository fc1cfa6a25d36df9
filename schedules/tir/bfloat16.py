# SPDX-License-Identifier: Apache-2.0
"""Bits of bfloat16 as numbers of float32, and back: single ones, or vectors.

TVM computes expressions of bfloat16 in float32, and drops a rounding that is widened again at once;
:func:`keep_roundings` keeps it.
"""

from __future__ import annotations

import tvm_ffi
from tvm import DataType, ir, tirx
from tvm.script.ir_builder import tirx as T

from .let_bindings import share_values

_BITS = 16
_INFINITY = 0x7F800000
_QUIET = 0x0040
"""The bit that keeps NaN so when the lower ones are cut off."""


def widen_bits(bits: tirx.Expr) -> tirx.Expr:
    """The float32 of uint16 that are the bits of bfloat16."""
    words = T.Cast(_as_type(bits, "uint32"), bits)
    return T.reinterpret(_as_type(bits, "float32"), words << _number(_BITS, words))


def round_to_bits(value: tirx.Expr) -> tirx.Expr:
    """The bits, as uint16, of the bfloat16 nearest to float32: halves to even, NaN stays NaN."""
    words = T.reinterpret(_as_type(value, "uint32"), value)
    high = words >> _number(_BITS, words)
    half = (high & _number(1, words)) + _number((1 << (_BITS - 1)) - 1, words)
    rounded = (words + half) >> _number(_BITS, words)
    is_nan = (words & _number(0x7FFFFFFF, words)) > _number(_INFINITY, words)
    bits = tirx.Select(is_nan, high | _number(_QUIET, words), rounded)
    return T.Cast(_as_type(value, "uint16"), bits)


def keep_roundings(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Round to bfloat16 within expressions, too, not only where the result is stored.

    Parameters
    ----------
    func : PrimFunc
        A scheduled function.

    Returns
    -------
    PrimFunc
        The same function when there is nothing to do.
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
