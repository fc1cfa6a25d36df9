# SPDX-License-Identifier: Apache-2.0
"""Measurement of the routes of parcels, by which exchanges choose the fastest."""

from __future__ import annotations

import numpy as np

from schedules.distribute.exchange import Exchange, LocalBuffer, Message

from .rank_timing import renewed_seconds
from .world.communicator import World
from .world.packing import ROUTES, ParcelShape, Route, always, figure_name

_ROUTE_SECONDS = 0.015  # of a route for one shape
_MOST_SEGMENTS = 1 << 16
_LEAST_PITCH = 256  # bytes from a segment to the next: none shares a cache line with another


def parcel_times(world: World) -> dict[str, float]:
    """Measure all routes for all shapes, between pairs of ranks; called by all ranks together.

    Parameters
    ----------
    world : World
        At least two ranks.

    Returns
    -------
    dict[str, float]
        Seconds by the names of figures, for :func:`.packing_of`.
    """
    return {
        figure_name(shape, route): seconds
        for shape in parcel_shapes()
        for route, seconds in _route_seconds(world, shape).items()
    }


def parcel_shapes() -> list[ParcelShape]:
    """Shapes of parcels that are measured: one region and two, in one piece each or in segments."""
    shapes = []
    for regions, sizes in ((1, range(9, 21)), (2, range(10, 21, 2))):
        for nbytes in (1 << k for k in sizes):
            pieces = [4**k for k in range(1, 9) if 2 * 4**k <= nbytes // regions]
            segments = [length for length in pieces if nbytes // length <= _MOST_SEGMENTS]
            shapes += [ParcelShape(nbytes, s, regions) for s in (*segments, nbytes // regions)]
            shapes.append(ParcelShape(nbytes // 16 * 12, 12, regions))  # pixels of three floats
    return shapes


class PairExchange:
    """An exchange of this rank with its neighbour; the last of an odd number has none.

    Each region has rows of float32, of which one side sends the first columns, and the other one
    the next.

    Parameters
    ----------
    world : World
        All ranks, which make it together.
    shape : ParcelShape
        Of what each sends.
    number : int
        Of the exchange.
    """

    def __init__(self, world: World, shape: ParcelShape, number: int = 0) -> None:
        self._world = world
        length = shape.segment // 4
        rows = shape.nbytes // shape.regions // shape.segment
        window = (rows, 2 * length if rows == 1 else max(2 * length, _LEAST_PITCH // 4))
        messages = []
        self._buffers = {}
        for name in map(str, range(shape.regions)):
            self._buffers[name] = LocalBuffer(np.zeros(window, np.float32), (0, 0))
            for low in range(0, world.size - 1, 2):
                for source, dest, begin in ((low, low + 1, 0), (low + 1, low, length)):
                    region = ((0, rows), (begin, begin + length))
                    messages.append(Message(source, dest, name, region, length))
        order = sorted(messages, key=lambda m: (m.source, m.dest, m.buffer))
        self._exchange = Exchange(number, tuple(order))
        mine = self._exchange.sent_by(world.rank)
        self._sent = [self._buffers[message.buffer].view(message.region) for message in mine]

    def renew(self) -> None:
        """Write what is sent."""
        for view in self._sent:
            np.add(view, 1, out=view)

    def start(self) -> None:
        """Begin to send and receive."""
        self._world.start(self._exchange, self._buffers)

    def finish(self) -> None:
        """Wait for both."""
        self._world.finish(self._exchange)

    def __call__(self) -> None:
        """Make the exchange."""
        self.start()
        self.finish()

    def forget(self) -> None:
        """Keep nothing of it: each further exchange of its number would be compared with it."""
        self._world.forget(self._exchange.id)


def _route_seconds(world: World, shape: ParcelShape) -> dict[Route, float]:
    """Seconds of an exchange of parcels of one shape, by each route that they can take."""
    found: dict[Route, float] = {}
    usual, meet = world.packing, PairExchange(world, ParcelShape(4, 4), len(ROUTES))
    for number, route in enumerate(ROUTES):
        if (route == "slot" and not world.has_slots(shape.nbytes)) or (
            route == "packed" and shape.segment == shape.nbytes
        ):
            continue
        world.packing = always(route)
        pair = PairExchange(world, shape, number)
        pair()
        world.packing = usual
        found[route] = renewed_seconds(world, meet, pair.renew, pair, _ROUTE_SECONDS)
        pair.forget()
    meet.forget()
    return found
