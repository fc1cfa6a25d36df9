# SPDX-License-Identifier: Apache-2.0
"""Packing: the choice of the route by which all that one rank sends to another travels.

================  ==============================================================================
route             what happens
================  ==============================================================================
``"slot"``        packed into memory that both ranks share, and unpacked from there
``"packed"``      packed into one piece, which MPI sends, and unpacked from another one
``"in place"``    MPI reads and writes the regions themselves; a derived datatype describes them
================  ==============================================================================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

from schedules.cost.machine import Machine

from ...errors import InvalidInputError

Route: TypeAlias = Literal["slot", "packed", "in place"]
ROUTES: tuple[Route, ...] = get_args(Route)

SHORT_SEGMENT = 4 * 1024
"""Bytes; a copy of shorter segments is faster than MPI's own walk over them.

Measured between two ranks of one node (MPICH 5.0), packed and as datatype: 64 segments of 2 KB in
40 and 43 us, of 4 KB 59 and 51, of 16 KB 146 and 104; several regions, 2 of 512 KB in 137 and 221.
"""

LONG_SEGMENT = 16 * 1024
"""Bytes; MPI, which copies once, moves longer segments as fast as a slot does, or faster.

Measured between two ranks of one node (MPICH 5.0), by a slot and by MPI, on two cores of a Zen 4
that share a cache, and on two that do not: 64 segments of 4 KB in 44 and 64, 33 and 69 us; 16 of
16 KB 43 and 43, 132 and 60; 4 of 64 KB 42 and 37, 130 and 50 (the last two by plain stores).
"""

SHORT_MESSAGE = 4 * 1024
"""Bytes up to which MPI moves what is contiguous in less time than our handling of a slot takes.

Measured likewise: 1 KB in 3.4 and 2.3, 4.2 and 3.3 us, 4 KB 6.3 and 4.5, 5.7 and 5.1; 2 regions of
1 KB in 4.1 and 2.9 us.
"""

LONG_REGION = 32 * 1024
"""Bytes from which MPI moves a contiguous region as fast as a slot does, or faster.

Measured likewise: 16 KB in 5.6 and 6.2, 12 and 10 us, 32 KB 15 and 15, 21 and 12, 128 KB 29 and 23,
68 and 28.
"""

_TINY, _FEW = 512, 8  # bytes and segments, such as a corner's, of which a slot is no faster either
_FIGURE = "parcel_seconds"


class ParcelShape(NamedTuple):
    """Figures on which the time of a parcel depends."""

    nbytes: int  # Bytes of all its regions.
    segment: int  # Bytes of the shortest contiguous pieces of which they consist.
    regions: int = 1  # Their number.

    @property
    def is_whole(self) -> bool:
        """True if each region is one piece; of several, if they are equal."""
        return self.segment * self.regions >= self.nbytes


Packing: TypeAlias = Callable[[ParcelShape], Sequence[Route]]
"""Routes of a parcel, the fastest one first; the same on both of its ranks."""


def by_constants(shape: ParcelShape) -> Sequence[Route]:
    """Routes by constants, which were measured between two ranks of one node."""
    is_tiny = shape.nbytes <= min(_TINY, _FEW * shape.segment)
    if is_tiny or (shape.is_whole and shape.nbytes <= SHORT_MESSAGE):
        return ("in place",)
    if shape.regions > 1:
        return "slot", "packed"
    if shape.segment >= (LONG_REGION if shape.is_whole else LONG_SEGMENT):
        return ("in place",)
    return "slot", "packed" if shape.segment < SHORT_SEGMENT else "in place"


def always(route: Route) -> Packing:
    """One route wherever it can be taken."""
    routes = (route, *(other for other in ROUTES if other != route))
    return lambda shape: routes


class MeasuredPacking:
    """Routes as they were measured for the nearest shape."""

    def __init__(
        self,
        # Times of each route; without a slot between ranks that share no memory.
        seconds: Mapping[ParcelShape, Mapping[Route, float]],
    ) -> None:
        self._routes = {
            shape: tuple(sorted(times, key=lambda route: times[route]))
            for shape, times in seconds.items()
        }
        self._nearest = functools.lru_cache(self._find)

    def __call__(self, shape: ParcelShape) -> Sequence[Route]:
        """Routes of the nearest shape, the fastest one first."""
        return self._routes[self._nearest(shape)]

    def _find(self, shape: ParcelShape) -> ParcelShape:
        return min(self._routes, key=lambda other: _distance(shape, other))


def _distance(a: ParcelShape, b: ParcelShape) -> tuple[bool, bool, float]:
    """Distance of two shapes; several regions are like no one, and pieces like no segments."""
    factors = (a.nbytes / b.nbytes, a.segment / b.segment)
    other_regions = (a.regions > 1) != (b.regions > 1)
    return other_regions, a.is_whole != b.is_whole, sum(abs(math.log2(f)) for f in factors)


def figure_name(shape: ParcelShape, route: Route) -> str:
    """Name of the figure that holds the seconds of a route."""
    return ".".join((_FIGURE, route.replace(" ", "_"), *map(str, shape)))


def is_figure(name: str) -> bool:
    """Return whether a figure is one of a parcel."""
    return name.startswith(f"{_FIGURE}.")


def packing_of(machine: Machine) -> MeasuredPacking:
    """The packing of ranks that were calibrated.

    Raises ``InvalidInputError`` if there are no such figures, or one of them is of no parcel.
    """
    seconds: dict[ParcelShape, dict[Route, float]] = {}
    for name in filter(is_figure, machine.figures):
        shape, route = _parsed(name)
        seconds.setdefault(shape, {})[route] = machine[name]
    if not seconds:
        raise InvalidInputError(
            f"{machine.name!r} has no figures {_FIGURE}.*, which calibrate --network measures"
        )
    return MeasuredPacking(seconds)


def _parsed(name: str) -> tuple[ParcelShape, Route]:
    """Shape and route of a figure."""
    _, route, *numbers = name.split(".")
    route = route.replace("_", " ")
    fits = route in ROUTES and len(numbers) == 3 and all(n.isdecimal() for n in numbers)
    shape = ParcelShape(*map(int, numbers)) if fits else ParcelShape(0, 0, 0)
    if not 0 < shape.segment <= shape.nbytes or not shape.regions:
        raise InvalidInputError(
            f"figure {name!r} is of no parcel; expected {_FIGURE}, one of slot, packed and "
            "in_place, then bytes, bytes of a segment, and regions"
        )
    found: Route = next(each for each in ROUTES if each == route)
    return shape, found
