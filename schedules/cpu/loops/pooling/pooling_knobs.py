# SPDX-License-Identifier: Apache-2.0
"""Knobs of pooling: the default ones, and all that are legal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ...core.machine import CPUInfo, vector_sizes
from ...nests.blocks import BlockFacts
from ...nests.loop_transforms import worth_threads
from .pool_nests import PoolingLoops

_PIXELS = 8
_ALL_PIXELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_GATHER = 1.0  # cycles of a lane of a strided load
_TASK = 20.0  # cycles of beginning a tile


@dataclass(frozen=True)
class PoolingWorkload:
    """Loops of a pooling.

    Parameters
    ----------
    kinds : str
        ``S`` (an output's axis) or ``R`` (of the window) for each loop.
    extents : tuple[int | None, ...]
        Iterations; None where symbolic.
    strides : tuple[int | None, ...]
        Of the data's address, along each loop; None where it is no constant.
    slide, vector : int
        As in :class:`.pool_nests.PoolingLoops`.
    item_bytes : int
        Of the widest element.
    is_guarded : bool
        Whether padding begins along the vectors.
    is_large : bool
        Whether there is enough work for threads.
    """

    kinds: str
    extents: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    slide: int
    vector: int
    item_bytes: int
    is_guarded: bool
    is_large: bool

    @classmethod
    def of(cls, facts: BlockFacts, window: PoolingLoops) -> PoolingWorkload:
        """The loops of a block, with its padding inlined."""
        return cls(
            kinds=facts.kinds,
            extents=facts.extents,
            strides=facts.loads[0].strides,
            slide=window.slide,
            vector=window.vector,
            item_bytes=facts.itemsize,
            is_guarded=window.vector in facts.guards,
            is_large=worth_threads(facts),
        )

    @classmethod
    def from_json(cls, text: str) -> PoolingWorkload:
        """Read the JSON of a workload.

        Raises
        ------
        ValueError
            If it is anything else, or an extent is symbolic.
        """
        values = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("extents", "strides")}
        found = cls(**{**values, **lists})
        axes = range(len(found.extents))
        numbers = (*found.extents, found.item_bytes)
        if not (
            all(type(number) is int and number > 0 for number in numbers)
            and len(found.kinds) == len(found.strides) == len(axes)
            and found.slide in axes
            and found.vector in axes
        ):
            raise ValueError(f"{text:.100} describes no pooling")
        return found

    @property
    def is_static(self) -> bool:
        """Return whether all extents are known."""
        return None not in self.extents

    @property
    def in_lanes(self) -> bool:
        """Return whether vectors run along an axis on which no window slides."""
        return self.slide != self.vector

    def volume(self, kind: str) -> int:
        """Product of the extents of a kind; a symbolic one counts as 64."""
        pairs = zip(self.kinds, self.extents, strict=True)
        return math.prod(extent or 64 for own, extent in pairs if own == kind)


@dataclass(frozen=True)
class PoolingKnobs:
    """Knobs of a pooling.

    Parameters
    ----------
    vector_bits : int
        Of a vector.
    pixels : int
        Outputs of a tile in registers, at most; 1 where windows slide along the vectors.
    copied : bool
        Whether windows along the vectors read a padded copy, not the data under conditions.
    threads : bool
        Whether threads share the outputs.
    """

    vector_bits: int
    pixels: int
    copied: bool
    threads: bool


def default_pooling(workload: PoolingWorkload, cpu: CPUInfo) -> PoolingKnobs:
    """Tiles that hide latency; a copy of padded data unless few vectors read padding."""
    if workload.in_lanes:
        return PoolingKnobs(cpu.vector_bits, _PIXELS, False, workload.is_large)
    lanes = max(1, cpu.vector_bits // 8 // workload.item_bytes)
    width = workload.extents[workload.vector] or 1
    few = workload.strides[workload.vector] != 1 and width >= 4 * lanes
    return PoolingKnobs(cpu.vector_bits, 1, workload.is_guarded and not few, workload.is_large)


def all_poolings(workload: PoolingWorkload, cpu: CPUInfo) -> Iterator[PoolingKnobs]:
    """Whole or half vectors, tiles of pixels or copies, with threads or without."""
    slides = int(workload.extents[workload.slide] or 1)
    pixels = [n for n in _ALL_PIXELS if n <= slides] if workload.in_lanes else [1]
    copies = (False, True) if workload.is_guarded and not workload.in_lanes else (False,)
    threads = (False, True) if cpu.num_cores > 1 else (False,)
    for setting in product(vector_sizes(cpu), pixels, copies, threads):
        yield PoolingKnobs(*setting)


def pooling_cycles(workload: PoolingWorkload, knobs: PoolingKnobs, cpu: CPUInfo) -> float:
    """Cycles of the busiest thread: loads and operations of all windows, or their latency."""
    lanes = max(1, knobs.vector_bits // 8 // workload.item_bytes)
    width, slides = (workload.extents[k] or 64 for k in (workload.vector, workload.slide))
    vectors = workload.volume("S") // width * -(-width // lanes)
    chain = 4.0 / (knobs.pixels if workload.in_lanes else 1)
    each = max(1 / cpu.costs.loads_per_cycle, chain)
    if not workload.in_lanes and workload.strides[workload.vector] != 1:
        each += _GATHER * lanes
    steps = vectors * workload.volume("R")
    if workload.in_lanes:
        steps = steps // slides * -(-slides // knobs.pixels) * min(knobs.pixels, slides)
    cores = cpu.num_cores if knobs.threads else 1
    copy = vectors * 4.0 * knobs.copied
    busy = (steps * each + copy + vectors / knobs.pixels * _TASK) / cores
    return busy + (cpu.costs.fork if knobs.threads else 0.0)
