# SPDX-License-Identifier: Apache-2.0
"""Features of learned models: how a launch of tiled work fills a GPU.

All are known for a machine that was never measured. Arguments are vectors, one entry a launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .kernel_call import element_bytes
from .machine import Machine

TILES = ((32, 32), (64, 32), (32, 128), (64, 64), (128, 64), (128, 128), (256, 128))
"""Rows and columns of the output tiles that libraries' matrix products use."""


@dataclass(frozen=True)
class Limits:
    """Limits of a machine for one dtype, as scalars or vectors."""

    multiprocessors: np.ndarray  # Count.
    peak: np.ndarray  # FLOP/s.
    bandwidth: np.ndarray  # Bytes/s of the memory.
    cache: np.ndarray  # Bytes of L2.
    clock: np.ndarray = field(default_factory=lambda: np.float64(1.0))  # Hz.
    unit: np.ndarray = field(default_factory=lambda: np.float64(0.0))
    """What multiplies matrices, see :func:`matrix_unit`."""
    floor: np.ndarray = field(default_factory=lambda: np.float64(0.0))
    """Least seconds of a launch that the harness of a kernel's data shows, 0 if not known."""

    def roofline(self, flops: np.ndarray, moved: np.ndarray) -> np.ndarray:
        """Least seconds of some floating-point operations and bytes."""
        return np.maximum(flops / self.peak, moved / self.bandwidth)

    def place(self) -> np.ndarray:
        """Logarithms to base 2 of the figures, between which distances are taken."""
        figures = (self.multiprocessors, self.peak, self.bandwidth, self.cache, self.clock)
        return np.log2(np.stack(np.broadcast_arrays(*figures), axis=-1))

    def features(self, count: int) -> list[np.ndarray]:
        """Logarithms of multiprocessors, and of peak and bandwidth of one."""
        figures = (
            self.multiprocessors,
            self.peak / self.multiprocessors,
            self.bandwidth / self.multiprocessors,
        )
        return [np.broadcast_to(np.log(figure), (count,)) for figure in figures]

    def chip(self, count: int) -> list[np.ndarray]:
        """Clock, FLOP a cycle of a multiprocessor (logarithms), and what multiplies matrices."""
        each = self.peak / self.multiprocessors / self.clock
        figures = (np.log(self.clock), np.log(each), self.unit)
        return [np.broadcast_to(figure, (count,)) for figure in figures]


UNITS = {7: 1, 8: 1, 9: 2, 10: 3, 11: 3, 12: 1}
"""Generation of the matrix unit by compute capability: fed by a warp, by a group of warps from
shared memory, and with accumulators in a memory of its own."""

OTHER_VENDOR = 4.0


def matrix_unit(machine: Machine, dtype: str) -> float:
    """What multiplies matrices: 0 the lanes, 1 to 3 one of ``UNITS``, or ``OTHER_VENDOR``."""
    if "compute_capability" not in machine.figures:
        return OTHER_VENDOR
    return float(UNITS.get(int(machine["compute_capability"]), 0)) if dtype != "float32" else 0.0


def limits(machine: Machine, dtype: str, kernel: str = "") -> Limits:
    """Limits of a machine, and the floor of a kernel's launches by its figure of the harness.

    Raises
    ------
    PredictionError
        If it has no such figure.
    """
    names = ("multiprocessors", f"peak_flops.{dtype}", "bandwidth.memory", "capacity.L2", "clock")
    figures = [machine[name] for name in names]
    floor = machine.get(f"time.{kernel}.harness", 0.0) if element_bytes(dtype) == 2 else 0.0
    return Limits(*map(np.float64, (*figures, matrix_unit(machine, dtype), floor)))


def waves(blocks: np.ndarray, block_flops: np.ndarray, seconds: np.ndarray, machine: Limits):
    """Waves of thread blocks (log), how full they are, and their time over ``seconds`` (log)."""
    rounds = blocks / machine.multiprocessors
    whole = np.ceil(rounds)
    busy = whole * machine.multiprocessors * block_flops / machine.peak
    return [np.log(rounds), rounds / whole, np.log(busy / seconds)]


def tile_features(b, m, n, k, seconds: np.ndarray, machine: Limits) -> list[np.ndarray]:
    """Waves and useful share of the padded tiles of B products M x K x N, for each of ``TILES``."""
    found = []
    for rows, columns in TILES:
        down, across = np.ceil(m / rows), np.ceil(n / columns)
        found += waves(b * down * across, 2.0 * rows * columns * k, seconds, machine)
        found.append(m * n / (down * rows * across * columns))
    return found


def divisibility(size: np.ndarray) -> np.ndarray:
    """Count of the powers of two up to 32, without 1, that divide a size."""
    return sum((size % power == 0).astype(np.float64) for power in (2, 4, 8, 16, 32))
