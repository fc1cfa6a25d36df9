# SPDX-License-Identifier: Apache-2.0
"""Measurement of what connects the ranks of a job: the figures of :class:`.Network`, and others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np

from schedules.cost.machine import Figure, Machine
from schedules.distribute.exchange import Exchange, LocalBuffer, Message
from tvm_fusion.errors import InvalidInputError
from tvm_fusion.machine.host import cpu_name
from tvm_fusion.paths import written_aside

from .world.communicator import World
from .world.packing import ROUTES, ParcelShape, Route, always, figure_name
from .world.timing import renewed_seconds, slowest, timed

SIZES = tuple(8 << k for k in range(0, 22, 3))
"""Bytes of the messages that are measured: 8 bytes to 16 MB."""

_OVERLAP_BYTES = 4 << 20


_ROUTE_SECONDS = 0.015  # Seconds of a route for one shape.
_MOST_SEGMENTS = 1 << 16
_LEAST_PITCH = 256  # bytes from a segment to the next: none shares a cache line with another


def parcel_times(
    world: World,  # World of at least two ranks.
) -> dict[str, float]:
    """Measure all routes for all shapes, between pairs of ranks; called by all ranks together.

    Returns seconds by the names of figures, for :func:`.packing_of`.
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
    """

    def __init__(
        self,
        world: World,  # All ranks, which make it together.
        shape: ParcelShape,  # What each rank sends.
        number: int = 0,  # Number of the exchange.
    ) -> None:
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
    seconds: dict[Route, float] = {}
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
        seconds[route] = renewed_seconds(world, meet, pair.renew, pair, _ROUTE_SECONDS)
        pair.forget()
    meet.forget()
    return seconds


def calibrate(world: World) -> Machine:
    """Measure exchanges between pairs of ranks, all pairs at once; called by all ranks together.

    Parameters
    ----------
    world : World
        At least two ranks; the last of an odd number only waits.

    Returns
    -------
    Machine
        On all ranks the same figures, for :func:`.network_of`: ``network.latency`` (seconds) and
        ``network.bandwidth`` (bytes/s each way), fitted to ``exchange_seconds.<bytes>`` (seconds of
        sending and receiving so many bytes); and ``network.progress``, the share of an exchange
        that passes while both ranks compute, left out where that is nothing. And those of
        :func:`.packing_of`, for shapes of 512 bytes to 1 MB, and of :func:`processor_of`.

    Raises
    ------
    InvalidInputError
        If there is one rank only.
    """
    from .rank_rates import rank_rates  # This imports TVM, which ranks do not need otherwise.

    if world.size < 2:
        raise InvalidInputError("one rank exchanges nothing; start at least 2 by mpiexec -n 2")
    seconds = [slowest(world, _exchange_seconds(world, size)) for size in SIZES]
    latency, bandwidth = fit(SIZES, seconds)
    figures = {f"exchange_seconds.{size}": s for size, s in zip(SIZES, seconds, strict=True)}
    figures |= {"network.latency": latency, "network.bandwidth": bandwidth}
    progress = -slowest(world, -_progress(world))
    if progress > 0:
        figures["network.progress"] = progress
    figures |= parcel_times(world) | rank_rates(world)
    title = f"{world.size} ranks on {cpu_name()}"
    origin = f"measured by calibrate with {world.size} ranks, {date.today().isoformat()}"
    named = {name: Figure(float(value), origin) for name, value in figures.items()}
    return Machine(f"ranks-{world.size}", "cpu", title, named)


def write_machine(machine: Machine, path: Path) -> None:
    """Write a machine's file, aside first.

    Raises ``ArtifactError`` if it cannot be written.
    """
    with written_aside(path) as aside:
        aside.write_text(json.dumps(machine.to_json(), indent=2) + "\n")


def fit(
    sizes: Sequence[int],  # Bytes of some messages.
    seconds: Sequence[float],
) -> tuple[float, float]:
    """Latency and bandwidth of ``seconds = latency + size / bandwidth``, by least squares.

    Relative errors count, so that short messages do as much as long ones.
    """
    times = np.array(seconds)
    rows = np.stack([1 / times, np.array(sizes) / times], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    return max(latency, 1e-9), 1 / max(slope, 1e-15)


def _exchange_seconds(world: World, size: int) -> float:
    pair = PairExchange(world, ParcelShape(size, size))
    seconds = timed(world, pair)
    pair.forget()
    return seconds


def _progress(world: World) -> float:
    """Share of an exchange, or of a computation as long, that is hidden by the other."""
    pair = PairExchange(world, ParcelShape(_OVERLAP_BYTES, _OVERLAP_BYTES))
    alone = slowest(world, timed(world, pair))
    numbers = np.linspace(0, 1, 1024)  # The first cache holds them, so that cores alone compute.

    def compute(steps: int) -> None:
        for _ in range(steps):
            np.sin(numbers, out=numbers)

    step = slowest(world, timed(world, lambda: compute(16))) / 16
    steps = max(1, round(alone / step))
    computing = slowest(world, timed(world, lambda: compute(steps)))

    def compute_beside() -> None:
        pair.start()
        compute(steps)
        pair.finish()

    together = slowest(world, timed(world, compute_beside))
    return (alone + computing - together) / min(alone, computing)
