# SPDX-License-Identifier: Apache-2.0
"""Measurement of collectives on the ranks of a job: time by the bytes of the message."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

import numpy as np

from schedules.distribute.exchange import Exchange, LocalBuffer, Message

from ..errors import InvalidInputError
from ..machine.host_info import cpu_name
from ..prediction.collectives import Collectives, Curve
from .rank_timing import MeasuredRanks, slowest, timed
from .world.communicator import World

MESSAGES = tuple(4 << k for k in range(23))
"""Bytes: 4 bytes to 16 MB, doubled, as section 5.4.3.2 of the dissertation fits them."""

ROUNDS = 3
_SECONDS = 0.02  # of one message in a round, about

Call = Callable[[], object]


def _all_reduce(world: World, message: int) -> Call:
    data = np.zeros(message // 4, np.uint32)
    return lambda: world.all_reduce(data, "sum")


def _all_to_all(world: World, message: int) -> Call:
    data = np.zeros((world.size, message // world.size), np.uint8)
    return lambda: world.all_to_all(data)


def _all_gather(world: World, message: int) -> Call:
    data = np.zeros(message // world.size, np.uint8)
    return lambda: world.all_gather(data)


def _broadcast(world: World, message: int) -> Call:
    data = np.zeros(message, np.uint8)
    return lambda: world.broadcast(data)


def _send_recv(world: World, message: int) -> Call:
    """From each even rank to the next."""
    pairs = [
        Message(rank, rank + 1, "A", ((0, message),), True) for rank in range(0, world.size - 1, 2)
    ]
    exchange = Exchange(100 + message.bit_length(), tuple(pairs))
    buffers = {"A": LocalBuffer(np.zeros(message, np.uint8), (0,))}

    def call() -> None:
        world.start(exchange, buffers)
        world.finish(exchange)

    return call


KINDS: dict[str, Callable[[World, int], Call]] = {
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}
"""Collectives that are measured, by the kinds of :mod:`tvm_fusion.prediction.collectives`."""


def measure_collectives(
    ranks: MeasuredRanks,
    messages: tuple[int, ...] = MESSAGES,
    rounds: int = ROUNDS,
    kinds: Mapping[str, Callable[[Any, int], Call]] = KINDS,
    transport: str = "MPI",
) -> Collectives:
    """Measure a curve of each kind; called by all ranks together.

    Messages take turns in several rounds, whose median counts; the origin of a curve tells by how
    much its rounds differ.

    Parameters
    ----------
    ranks : MeasuredRanks
        At least two: a :class:`.World`, or a :class:`.ProcessGroup`.
    messages : tuple of int
        Bytes, rounded up to what divides among the ranks; the larger of what a rank puts in and
        gets out.
    rounds : int
        Number of rounds.
    kinds : mapping
        How these ranks start a collective of so many bytes.
    transport : str
        What connects them, for the origin.

    Returns
    -------
    Collectives
        On all ranks the same.

    Raises
    ------
    InvalidInputError
        If there is one rank only.
    """
    if ranks.size < 2:
        raise InvalidInputError(
            "one rank has no collectives; start at least 2 by mpiexec -n 2, or by torchrun "
            "--nproc-per-node 2"
        )
    unit = 4 * ranks.size
    sizes = sorted({-(-message // unit) * unit for message in messages})
    found = {}
    for kind, start in kinds.items():
        seconds, differ = _curve(ranks, start, sizes, rounds)
        origin = (
            f"measured by calibrate with {ranks.size} ranks on {cpu_name()}, {transport}, "
            f"{date.today().isoformat()}; rounds differ by {differ:.0%}"
        )
        points = tuple(map(float, sizes))
        found[kind, ranks.size] = Curve(kind, ranks.size, points, tuple(seconds), origin)
    return Collectives(found)


def _curve(
    ranks: MeasuredRanks, start: Callable[[Any, int], Call], sizes: list[int], rounds: int
) -> tuple[list[float], float]:
    """Median seconds of each size, and by how much its rounds differ in the median."""
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(rounds):
        for index, size in enumerate(sizes):
            times[index].append(slowest(ranks, timed(ranks, start(ranks, size), _SECONDS)))
    differ = statistics.median(max(each) / min(each) - 1 for each in times)
    return [statistics.median(each) for each in times], differ
