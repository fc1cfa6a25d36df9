# SPDX-License-Identifier: Apache-2.0
"""Bits of bfloat16 as numbers of float32, and back: single ones, or vectors."""

from __future__ import annotations

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

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


def _as_type(like: tirx.Expr, dtype: str) -> str:
    """Name of the type with elements of ``dtype`` in as many lanes as ``like`` has."""
    lanes = DataType(str(like.ty.dtype)).lanes
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _number(value: int, like: tirx.Expr) -> tirx.Expr:
    lanes = DataType(str(like.ty.dtype)).lanes
    one = tirx.const(value, "uint32")
    return one if lanes == 1 else T.broadcast(one, lanes)
