# SPDX-License-Identifier: Apache-2.0
"""Index expressions in int64; TVM narrows them to int32 where their bounds allow."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.sym import Analyzer

from ..workload.reduce import Extent, constant, is_one

_ANALYZER = Analyzer()


def i64(value: Extent) -> tirx.Expr:
    """An int64 expression."""
    return tirx.const(value, "int64") if isinstance(value, int) else value.astype("int64")


def ravel(indices: Sequence[tirx.Expr], extents: Sequence[Extent]) -> tirx.Expr:
    """Row-major position of an element."""
    position: tirx.Expr = i64(0)
    for index, extent in zip(indices, extents, strict=True):
        position = position * i64(extent) + i64(index)
    return position


def ceildiv(value: Extent, divisor: int) -> tirx.Expr:
    """``value / divisor`` rounded up."""
    if isinstance(value, int):
        return i64(-(-value // divisor))
    return simplified((i64(value) + i64(divisor - 1)) // i64(divisor))


def simplified(expression: tirx.Expr) -> tirx.Expr:
    """The expression after TVM's simplification."""
    return _ANALYZER.simplify(expression)


def subscripts(index: tirx.Expr, extents: Sequence[Extent]) -> list[tirx.Expr]:
    """Recover subscripts from a row-major index, which is not negative.

    Division by unknown extents truncates: rounding down would test the signs.
    """
    found: list[tirx.Expr] = []
    live = [k for k, extent in enumerate(extents) if not is_one(extent)]
    for place in reversed(range(len(extents))):
        extent = i64(extents[place])
        known = constant(extents[place]) is not None
        if place not in live:
            found.append(i64(0))
        elif place == live[0]:
            found.append(index)
        else:
            found.append((tirx.floormod if known else tirx.truncmod)(index, extent))
            index = (tirx.floordiv if known else tirx.truncdiv)(index, extent)
    return found[::-1]
