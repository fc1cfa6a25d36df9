# SPDX-License-Identifier: Apache-2.0
"""Ranges of what is computed from integers of few bits, and the limits that they make needless.

A level of 8 bits is at most 255, and so is a weighted mean of some; a conversion back cuts off what
is behind the point::

    before: T.Cast("uint8", T.max(T.min(0.3 * a[i] + 0.7 * b[i] + 0.5, 255.0), 0.0))
    after:  T.Cast("uint8", 0.3 * a[i] + 0.7 * b[i] + 0.5)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, tirx

_MOST_BITS = 16  # which floats hold exactly
_ROUNDED = 1e-5  # more than the relative error of some hundred operations


@dataclass(frozen=True)
class Range:
    """Least and largest value, but for the rounding of floats."""

    least: float
    most: float

    def __add__(self, other: Range) -> Range:
        return Range(self.least + other.least, self.most + other.most)

    def __sub__(self, other: Range) -> Range:
        return Range(self.least - other.most, self.most - other.least)

    def __mul__(self, other: Range) -> Range:
        ends = [a * b for a in (self.least, self.most) for b in (other.least, other.most)]
        return _ANY if any(map(math.isnan, ends)) else Range(min(ends), max(ends))


_ANY = Range(-math.inf, math.inf)


def drop_limits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Drop the limits of values that are converted to integers and are within these anyway.

    Parameters
    ----------
    func : PrimFunc
        A scheduled function.

    Returns
    -------
    PrimFunc
        The same function if there are none.
    """

    def rewrite(block: s_tir.SBlock) -> s_tir.SBlock:
        return tvm_ffi.structural_map(block, (tirx.Cast, _unlimited))

    return tvm_ffi.structural_map(func, (s_tir.SBlock, rewrite))


def range_of(value: ir.Expr) -> Range:
    """Range of an expression; all numbers where nothing is known of it, NaN apart."""
    if isinstance(value, tirx.FloatImm | tirx.IntImm):
        return Range(float(value.value), float(value.value))
    if isinstance(value, tirx.Cast) and _is_float(value):
        return _of_type(str(value.value.ty.dtype))
    if not _is_float(value):
        return _ANY
    if isinstance(value, tirx.Add):
        return range_of(value.a) + range_of(value.b)
    if isinstance(value, tirx.Sub):
        return range_of(value.a) - range_of(value.b)
    if isinstance(value, tirx.Mul):
        return range_of(value.a) * range_of(value.b)
    if isinstance(value, tirx.Min | tirx.Max):
        a, b = range_of(value.a), range_of(value.b)
        pick = min if isinstance(value, tirx.Min) else max
        return Range(pick(a.least, b.least), pick(a.most, b.most))
    return _ANY


def _of_type(dtype: str) -> Range:
    kind = tvm_ffi.dtype(dtype)
    if not dtype.startswith(("int", "uint")) or kind.bits > _MOST_BITS:
        return _ANY
    if dtype.startswith("uint"):
        return Range(0.0, 2.0**kind.bits - 1)
    return Range(-(2.0 ** (kind.bits - 1)), 2.0 ** (kind.bits - 1) - 1)


def _is_float(value: ir.Expr) -> bool:
    return str(value.ty.dtype).startswith("float")


def _unlimited(cast: tirx.Cast) -> tirx.Cast:
    """A conversion to an integer without limits that change nothing."""
    dtype = str(cast.ty.dtype)
    kept = _of_type(dtype)
    if kept == _ANY or not _is_float(cast.value):
        return cast
    value = _without(cast.value, kept)
    return cast if value.same_as(cast.value) else tirx.Cast(dtype, value)


def _without(value: ir.Expr, kept: Range) -> ir.Expr:
    """A value without limits of ``kept``, one within another."""
    if not isinstance(value, tirx.Min | tirx.Max):
        return value
    inner = _without(value.a, kept)
    if _is_needless(value, kept):
        return inner
    return value if inner.same_as(value.a) else type(value)(inner, value.b)


def _is_needless(limit: tirx.Min | tirx.Max, kept: Range) -> bool:
    """Return whether a limit, the type's own, is beyond what a conversion of the rest gives."""
    inner, bound = range_of(limit.a), range_of(limit.b)
    if isinstance(limit, tirx.Max):
        least = inner.least - _ROUNDED * abs(inner.least)
        return bound == Range(kept.least, kept.least) and least > kept.least - 1
    most = inner.most + _ROUNDED * abs(inner.most)
    return bound == Range(kept.most, kept.most) and most < kept.most + 1
