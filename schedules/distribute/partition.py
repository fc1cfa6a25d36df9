# SPDX-License-Identifier: Apache-2.0
"""Parts of loops: which iterations each rank computes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ..errors import OpError
from .exchange import Region


def balanced(extent: int, parts: int) -> tuple[int, ...]:
    """Bounds of parts that differ by at most one iteration; empty ones if there are too many.

    Part k is ``[bounds[k], bounds[k + 1])``, with ``bounds[k] = extent * k // parts``.

    Raises ``OpError`` if there is no part.
    """
    if parts < 1:
        raise OpError(f"a loop is distributed over {parts} ranks; expected at least 1")
    return tuple(extent * k // parts for k in range(parts + 1))


def bounds_of(
    extent: int,  # What the sizes must sum up to.
    sizes: Sequence[int],  # Iterations of each part; 0 is an empty part.
    what: str,  # What is divided, for errors.
) -> tuple[int, ...]:
    """Bounds of parts of given sizes.

    Raises ``OpError`` if a size is negative, or if they do not sum up to the extent.
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
    """Parts of one loop or more; ranks form a grid with an axis for each loop."""

    bounds: tuple[tuple[int, ...], ...]
    """Bounds of the parts of each loop, from 0 to its extent."""

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


def even(extents: Sequence[int], grid: Sequence[int]) -> Partition:
    """Parts of loops that differ by at most one iteration, so many of each."""
    return Partition(tuple(balanced(n, parts) for n, parts in zip(extents, grid, strict=True)))


def sized(
    # ``extents``, ``names``: of the loops.
    extents: Sequence[int],
    names: Sequence[str],
    sizes: Sequence[int] | Sequence[Sequence[int]],  # Sizes of the parts, of a loop or of all.
    ranks: int | None,  # What the number of parts must be.
) -> Partition:
    """Parts of loops of given sizes.

    Raises ``OpError`` if the sizes do not fit the loops, or the ranks.
    """
    if not isinstance(sizes, Iterable):
        raise OpError(f"sizes are {sizes!r}; expected a list of integers")
    lists = [list(counts) if isinstance(counts, Iterable) else [counts] for counts in sizes]
    if not any(isinstance(counts, Iterable) for counts in sizes):
        lists = [[size for [size] in lists]]
    lists = [integers(counts, "sizes") for counts in lists]
    if len(lists) != len(extents):
        raise OpError(f"sizes are given for {len(lists)} loops; expected {len(extents)}")
    bounds = [
        bounds_of(extent, counts, f"loop {name!r}")
        for name, extent, counts in zip(names, extents, lists, strict=True)
    ]
    partition = Partition(tuple(bounds))
    if ranks not in (None, partition.ranks):
        raise OpError(f"sizes are given for {partition.ranks} ranks; expected {ranks}")
    return partition


def integers(numbers: Any, what: str) -> list[int]:
    """The numbers of a list that a user gives.

    Raises ``OpError`` if it is none, or holds anything but integers.
    """
    if not isinstance(numbers, Iterable) or isinstance(numbers, Mapping):
        raise OpError(f"{what} are {numbers!r}; expected a list of integers")
    found = list(numbers)
    for number in found:
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise OpError(f"{what} have {number!r}; expected integers")
    return list(map(int, found))


def grid_of(grid: Any, ranks: int, loops: int) -> tuple[int, ...]:
    """Given numbers of ranks along each of some loops.

    Raises ``OpError`` if they are none, or their product is not the number of ranks.
    """
    counts = list(grid) if isinstance(grid, Iterable) else [grid]
    if len(counts) != loops or not all(map(is_count, counts)) or math.prod(counts) != ranks:
        raise OpError(
            f"grid {counts} does not spread {loops} loops over {ranks} ranks; expected "
            f"{loops} positive numbers whose product is {ranks}"
        )
    return tuple(map(int, counts))


def is_count(number: object) -> bool:
    """True for a positive integer."""
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) > 0


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
