# SPDX-License-Identifier: Apache-2.0
"""Parts of loops: which iterations each rank computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OpError
from .exchange import Region


def balanced(extent: int, parts: int) -> tuple[int, ...]:
    """Bounds of parts that differ by at most one iteration; empty ones if there are too many.

    Part k is ``[bounds[k], bounds[k + 1])``, with ``bounds[k] = extent * k // parts``.

    Raises
    ------
    OpError
        If there is no part.
    """
    if parts < 1:
        raise OpError(f"a loop is distributed over {parts} ranks; expected at least 1")
    return tuple(extent * k // parts for k in range(parts + 1))


def bounds_of(extent: int, sizes: Sequence[int], what: str) -> tuple[int, ...]:
    """Bounds of parts of given sizes.

    Parameters
    ----------
    extent : int
        What the sizes must sum up to.
    sizes : Sequence[int]
        Iterations of each part; 0 is an empty part.
    what : str
        What is divided, for errors.

    Raises
    ------
    OpError
        If a size is negative, or if they do not sum up to the extent.
    """
    if any(size < 0 for size in sizes):
        raise OpError(f"sizes {list(sizes)} of {what} have a negative one; expected 0 or more")
    if sum(sizes) != extent:
        raise OpError(
            f"sizes {list(sizes)} of {what} sum up to {sum(sizes)}; expected its extent {extent}"
        )
    return tuple(sum(sizes[:k]) for k in range(len(sizes) + 1))


@dataclass(frozen=True)
class Partition:
    """Parts of one loop or more; ranks form a grid with an axis for each loop.

    Parameters
    ----------
    bounds : tuple[tuple[int, ...], ...]
        For each loop the bounds of its parts, from 0 to its extent.
    """

    bounds: tuple[tuple[int, ...], ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of parts of each loop."""
        return tuple(len(bounds) - 1 for bounds in self.bounds)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.grid)

    def place(self, rank: int) -> tuple[int, ...]:
        """Coordinates of a rank in the grid, of which the last changes fastest."""
        place = []
        for parts in reversed(self.grid):
            rank, coordinate = divmod(rank, parts)
            place.append(coordinate)
        return tuple(reversed(place))

    def rows(self, rank: int) -> Region:
        """Iterations of each loop that a rank computes."""
        places = zip(self.bounds, self.place(rank), strict=True)
        return tuple((bounds[k], bounds[k + 1]) for bounds, k in places)


def grids(ranks: int, loops: int) -> list[tuple[int, ...]]:
    """Every grid of a number of ranks, for example (1, 6), (2, 3), (3, 2) and (6, 1)."""
    if loops == 1:
        return [(ranks,)]
    return [
        (parts, *rest)
        for parts in range(1, ranks + 1)
        if ranks % parts == 0
        for rest in grids(ranks // parts, loops - 1)
    ]
