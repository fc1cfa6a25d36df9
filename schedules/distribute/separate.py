# SPDX-License-Identifier: Apache-2.0
"""Separation of a loop into parts that are scheduled, and compiled, each for itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

from tvm import s_tir, tirx

from ..errors import OpError
from .exchange import Region
from .localize import LocalFunction, localize, scalar_arguments
from .loop_nest import read_loop_nest, shape_of


@dataclass(frozen=True)
class Piece:
    """Range of a loop by itself.

    Parameters
    ----------
    rows : tuple[int, int]
        Begin and end of the loop.
    function : LocalFunction
        Its function, not yet scheduled. It takes the whole function's parameters, of which it
        writes its own range, then ``scalars``.
    scalars : tuple[int, ...]
        Values of the function's scalars for this range.
    """

    rows: tuple[int, int]
    function: LocalFunction
    scalars: tuple[int, ...]


def separate_at(
    source: tirx.PrimFunc | s_tir.Schedule,
    loop: str | int | s_tir.schedule.LoopRV,
    points: Sequence[int],
) -> tuple[Piece, ...]:
    """Cut a loop at some points.

    Parameters
    ----------
    source : tirx.PrimFunc or s_tir.Schedule
        The function, or a schedule of which it is the ``main``, before its loops are split.
    loop : str, int or LoopRV
        A loop of the block that computes the output.
    points : Sequence[int]
        Where to cut: ascending, each inside the loop.

    Returns
    -------
    tuple[Piece, ...]
        In order; pieces of the same extents have equal functions.

    Raises
    ------
    OpError
        If a point is outside the loop, or the points do not ascend.
    """
    nest = read_loop_nest(source, [loop])
    extent = nest.extents[0]
    points = list(points) if isinstance(points, Iterable) else [points]
    bounds = [0, *points, extent]
    if not all(isinstance(point, Integral) for point in points) or any(
        begin >= end for begin, end in zip(bounds, bounds[1:], strict=False)
    ):
        raise OpError(
            f"points {points} do not cut the loop {nest.loop_names[0]!r}: expected "
            f"ascending integers from 1 to {extent - 1}"
        )
    windows: dict[str, Region] = {
        buffer.name: tuple((0, n) for n in shape_of(buffer)) for buffer in nest.func.params
    }
    pieces = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        rows = ((begin, end),)
        function = localize(nest, rows, windows)
        pieces.append(Piece((begin, end), function, scalar_arguments(nest, rows, windows)))
    return tuple(pieces)
