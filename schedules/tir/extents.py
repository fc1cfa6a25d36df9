# SPDX-License-Identifier: Apache-2.0
"""Extents of loops and axes, which are numbers or expressions of open sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from tvm import tirx

Extent: TypeAlias = "int | tirx.Expr"


def unravel(
    index: tirx.Expr, extents: Sequence[Extent], is_natural: bool = False
) -> list[tirx.Expr]:
    """Recover subscripts from a row-major index by division and modulo.

    An index that is not negative is divided towards zero by extents that are not known: rounding
    down would test the signs.
    """
    from tvm import tirx  # descriptions of workloads are read without a compiler, too

    subscripts: list[tirx.Expr] = []
    rest = index
    live = [i for i, extent in enumerate(extents) if not is_one(extent)]
    for position in reversed(range(len(extents))):
        extent = extents[position]
        if position not in live:
            subscripts.append(tirx.const(0, index.ty.dtype))
        elif position == live[0]:
            subscripts.append(rest)  # the outermost one needs no modulo
        else:
            truncates = is_natural and constant(extent) is None
            subscripts.append((tirx.truncmod if truncates else tirx.floormod)(rest, extent))
            rest = (tirx.truncdiv if truncates else tirx.floordiv)(rest, extent)
    return subscripts[::-1]


def is_one(extent: Extent) -> bool:
    """Return whether an extent is the constant 1."""
    return constant(extent) == 1


def constant(extent: Extent) -> int | None:
    """An extent as an integer; None where it is symbolic."""
    value = extent if isinstance(extent, int) else getattr(extent, "value", None)
    return value if isinstance(value, int) else None


def extent_of(extent: Extent) -> Extent:
    """An extent as an integer where it is one."""
    known = constant(extent)
    return extent if known is None else known


def size_of(extents: Iterable[Extent]) -> Extent:
    """Number of elements of a shape."""
    return math.prod(map(extent_of, extents))
