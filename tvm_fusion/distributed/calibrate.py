# SPDX-License-Identifier: Apache-2.0
"""Measurement of what connects the ranks of a job: the figures of :class:`.Network`, and others."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from schedules.cost.machine import Figure, Machine

from ..errors import InvalidInputError
from ..machine.host_info import cpu_name
from ..written_aside import written_aside
from .parcel_times import PairExchange, parcel_times
from .rank_timing import slowest, timed
from .world.communicator import World
from .world.packing import ParcelShape

if TYPE_CHECKING:
    from schedules.distribute.cost import Network, Processor

SIZES = tuple(8 << k for k in range(0, 22, 3))
"""Bytes of the messages that are measured: 8 bytes to 16 MB."""

_OVERLAP_BYTES = 4 << 20


def calibrate(world: World) -> Machine:
    """Measure exchanges between pairs of ranks, all pairs at once; called by all ranks together.

    Parameters
    ----------
    world : World
        At least two ranks; the last of an odd number only waits.

    Returns
    -------
    Machine
        On all ranks the same figures, for :func:`network_of`: ``network.latency`` (seconds) and
        ``network.bandwidth`` (bytes/s each way), fitted to ``exchange_seconds.<bytes>`` (seconds of
        sending and receiving so many bytes); and ``network.progress``, the share of an exchange
        that passes while both ranks compute, left out where that is nothing. And those of
        :func:`.packing_of`, for shapes of 512 bytes to 1 MB, and of :func:`processor_of`.

    Raises
    ------
    InvalidInputError
        If there is one rank only.
    """
    from .rank_rates import rank_rates  # with TVM, which ranks do not need otherwise

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


def network_of(machine: Machine) -> Network:
    """The network of a machine that was calibrated; shared if all of its ranks were on one node.

    Raises
    ------
    PredictionError
        If it has no such figures.
    """
    from schedules.distribute.cost import Network  # with TVM, which the ranks do not need

    figures = machine["network.latency"], machine["network.bandwidth"]
    progress = min(machine.get("network.progress", 0.0), 1.0)
    return Network(*figures, progress, machine.get("node.ranks", 0.0) >= ranks_of(machine))


def ranks_of(machine: Machine) -> int:
    """Ranks with which a machine was calibrated, 0 if none."""
    found = re.fullmatch(r"ranks-(\d+)", machine.name)
    return int(found[1]) if found else 0


def processor_of(machine: Machine) -> Processor:
    """The processor of each rank of a machine that was calibrated.

    Raises
    ------
    PredictionError
        If it has no such figures.
    """
    from schedules.distribute.cost import Processor

    return Processor(
        machine["rank.rate"],
        machine["rank.bandwidth"],
        node_bandwidth=machine["node.bandwidth"],
        node_ranks=int(machine["node.ranks"]),
    )


def write_machine(machine: Machine, path: Path) -> None:
    """Write a machine's file, aside first.

    Raises
    ------
    ArtifactError
        If it cannot be written.
    """
    with written_aside(path) as aside:
        aside.write_text(json.dumps(machine.to_json(), indent=2) + "\n")


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and bandwidth of ``seconds = latency + size / bandwidth``, by least squares.

    Relative errors count, so that short messages do as much as long ones.

    Parameters
    ----------
    sizes : Sequence[int]
        Bytes of some messages.
    seconds : Sequence[float]
        Their times.
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
    numbers = np.linspace(0, 1, 1024)  # in the first cache, so that cores alone compute

    def compute(steps: int) -> None:
        for _ in range(steps):
            np.sin(numbers, out=numbers)

    step = slowest(world, timed(world, lambda: compute(16))) / 16
    steps = max(1, round(alone / step))
    computing = slowest(world, timed(world, lambda: compute(steps)))

    def both() -> None:
        pair.start()
        compute(steps)
        pair.finish()

    together = slowest(world, timed(world, both))
    return (alone + computing - together) / min(alone, computing)
