# SPDX-License-Identifier: Apache-2.0
"""Knobs of pairs of convolutions in tile registers, their search space, and the cycles they take.

A task computes some rows of the first layer, which stay in its caches, and of them those of the
second, a 1x1 layer. With the terms of :mod:`.tile_conv2d_knobs`, of a first layer in vectors with
its own cost model, the busiest core takes

    T = rounds x (rows of both layers + data + shapes of both layers' tiles) + weights + fork

Compared with two kernels, the intermediate is neither written for another core nor read from one,
and one region of parallel tasks is left. All cores read all weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from schedules.workload.conv2d import ITEM_BYTES, Activation, Conv2DKernel

from ..core.machine import CPUInfo
from ..core.tile_unit import TILE_ROWS
from .conv2d_knobs import in_vectors
from .cost_model import default_conv2d_knobs, estimate
from .tile_conv2d_knobs import (
    FORK,
    SHAPES,
    UNROLLED,
    TileConv2DKnobs,
    TileGeometry,
    default_tile_knobs,
    fits_tiles,
    load_rate,
    takes_tiles,
    task_cycles,
    tile_cycles,
)

_STEPS = (1, 2, 3, 4, 7, 14, 28)  # tasks of a core and an image
_SHAPES = 190.0  # loading the shapes of tiles


@dataclass(frozen=True)
class TilePairKnobs:
    """Knobs of the template.

    Parameters
    ----------
    height : int
        Rows of a task.
    pixels1, pixel_tiles1, channel_tiles1 : int
        Knobs of the first layer, as in :class:`.TileConv2DKnobs`; of one in vectors the pixels in
        registers, and one each.
    pixels2, pixel_tiles2, channel_tiles2 : int
        Knobs of the second layer.
    interleaved : bool
        Whether tiles of both layers are interleaved, as in :class:`.TileConv2DKnobs`.
    """

    height: int
    pixels1: int
    pixel_tiles1: int
    channel_tiles1: int
    pixels2: int
    pixel_tiles2: int
    channel_tiles2: int
    interleaved: bool = True

    @property
    def layers(self) -> tuple[TileConv2DKnobs, TileConv2DKnobs]:
        """Settings of both layers, in a task."""
        first = self.pixels1, self.pixel_tiles1, self.channel_tiles1
        second = self.pixels2, self.pixel_tiles2, self.channel_tiles2
        one, two = (
            TileConv2DKnobs(*tiles, 1, 1, UNROLLED[-1], self.interleaved)
            for tiles in (first, second)
        )
        return one, two


def takes_pair(kernel: Conv2DKernel, cpu: CPUInfo) -> bool:
    """Return whether a pair fits tile registers: a 1x1 layer after a dense or depthwise one."""
    if kernel.mid_layout is None or kernel.rounding is not None:
        return False
    first, second = kernel.apart()
    fits_first = first.layers[0].is_depthwise or fits_tiles(first, cpu)
    is_known = None not in (kernel.height, kernel.width)
    is_image = prod((second.height or 1, second.width or 1)) > 1
    fits = fits_first and fits_tiles(second, cpu) and second.layers[0].is_pointwise
    return is_known and is_image and fits


def rows_of(kernel: Conv2DKernel, height: int) -> Conv2DKernel:
    """A layer of a pair on as many rows as some rows of its output read."""
    (layer,) = kernel.layers
    reach = (layer.kernel[0] - 1) * layer.dilation[0] + 1
    inside = (height - 1) * layer.strides[0] + reach - layer.padding[0] - layer.padding[2]
    return replace(kernel, batch=1, height=max(1, inside))


def tile_pair_space(kernel: Conv2DKernel, cpu: CPUInfo) -> Iterator[TilePairKnobs]:
    """All settings that the cost model compares."""
    first, second = kernel.apart()
    for height in _heights(kernel, cpu):
        tiles = _tiles(first, height, cpu), _tiles(second, height, cpu)
        for (one, two), interleaved in product(product(*tiles), (True, False)):
            yield TilePairKnobs(height, *one, *two, interleaved)


def _heights(kernel: Conv2DKernel, cpu: CPUInfo) -> list[int]:
    """Rows of a task, which give different numbers of tasks."""
    _, second = kernel.apart()
    rows = int(second.height or 1)
    found = {-(-rows // (steps * cores)) for steps, cores in product(_STEPS, (1, cpu.num_cores))}
    return sorted(found, reverse=True)


def _tiles(kernel: Conv2DKernel, height: int, cpu: CPUInfo) -> list[tuple[int, int, int]]:
    """Pixels of a tile, and tiles of pixels and of channels, of a layer on some rows."""
    if kernel.layers[0].is_depthwise:
        vectors = in_vectors(kernel, cpu)
        return [(default_conv2d_knobs(vectors, cpu).pixels, 1, 1)]
    found = TileGeometry.of(rows_of(kernel, height))
    pixels = -(-found.width // -(-found.width // TILE_ROWS))
    units = found.lines * found.tiles_of_line(pixels)
    return [(pixels, *s) for s in SHAPES if s[0] <= units and s[1] <= found.channel_tiles]


def tile_pair_cycles(kernel: Conv2DKernel, knobs: TilePairKnobs, cpu: CPUInfo) -> float:
    """Predict the clock cycles of a pair: those of its busiest core."""
    first, second = kernel.apart()
    one, two = knobs.layers
    pieces = -(-int(second.height or 1) // knobs.height)
    tasks = (kernel.batch or 1) * pieces
    item, channels = ITEM_BYTES[kernel.dtype], second.layers[0].in_channels
    mid = knobs.height * int(second.width or 1) * channels * item
    sizes = [layer.weight_elements() * item for layer in kernel.layers]
    last = task_cycles(rows_of(second, knobs.height), two, cpu)
    piece_cycles, weights = last.busy + _SHAPES, last.weights
    if first.layers[0].is_depthwise:
        piece_cycles += _vector_cycles(first, cpu) / pieces
    else:
        start = task_cycles(rows_of(first, knobs.height), one, cpu)
        piece_cycles += start.busy + start.data + _SHAPES
        weights += start.weights
    rounds = -(-tasks // cpu.num_cores)
    again = (rounds - 1) * sum(sizes) / load_rate(sum(sizes) + mid, cpu)
    return rounds * piece_cycles + weights + again + (FORK if tasks > 1 else 0.0)


def _vector_cycles(kernel: Conv2DKernel, cpu: CPUInfo) -> float:
    """Cycles that one core takes for an image of a layer in vectors."""
    alone, vectors = replace(cpu, num_cores=1), replace(in_vectors(kernel, cpu), batch=1)
    found = estimate(vectors, default_conv2d_knobs(vectors, alone), alone)
    return found.cycles - found.fork


def separate_cycles(kernel: Conv2DKernel, cpu: CPUInfo) -> tuple[float, float]:
    """Predict the clock cycles of both layers of a pair as two kernels."""
    first, second = kernel.apart()
    last = tile_cycles(second, default_tile_knobs(second, cpu), cpu)
    if takes_tiles(first, cpu):
        return tile_cycles(first, default_tile_knobs(first, cpu), cpu), last
    vectors = in_vectors(first, cpu)
    return estimate(vectors, default_conv2d_knobs(vectors, cpu), cpu).cycles, last


def default_pair_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> TilePairKnobs:
    """Return the cheapest setting; the first of equals."""
    layers = tuple(replace(layer, activation=Activation()) for layer in kernel.layers)
    return _cheapest(replace(kernel, layers=layers, addition=None), cpu)


@lru_cache(maxsize=1024)
def _cheapest(kernel: Conv2DKernel, cpu: CPUInfo) -> TilePairKnobs:
    """The cheapest setting of a pair, whatever its ends; interleaved as all such."""
    settings = (knobs for knobs in tile_pair_space(kernel, cpu) if knobs.interleaved)
    return min(settings, key=lambda knobs: tile_pair_cycles(kernel, knobs, cpu))
