# SPDX-License-Identifier: Apache-2.0
"""Knobs of convolutions in tile registers, their search space, and the cycles that they take.

With products of ``M`` pixel tiles by ``N`` channel tiles, a core of the busiest share takes

    T = max(products, traffic) + epilogue + borders + fork

    products = tiles x steps x max(rows, 9)
    traffic  = bytes of the tiles that are loaded, over the bytes a cycle of where they lie
    epilogue = what is left of it where products hide it
    borders  = the padded copy of the image, written and read once

The figures are those of two cores of Emerald Rapids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from schedules.workload.conv2d import ITEM_BYTES, Conv2DKernel

from ..core.machine import CPUInfo
from ..core.tile_unit import TILE_ROWS, TILE_WORDS
from .conv2d_knobs import shares

LEAST_ROWS = 9  # a product of fewer takes as long
SUMS = 4  # tiles of sums that the registers hold beside the factors
SHAPES = ((1, 4), (2, 2), (1, 2), (2, 1), (1, 1))
UNROLLED = (1, 4)
_WORD = 4
_BYTES_PER_CYCLE = (128.0, 48.0, 10.0, 5.7)  # tiles from L1, L2, L3 and memory
_STORED = 1.05  # a row of sums from a tile to the L1
_FINISHED = 2.7  # a row of sums from there to the output
_GROUP = 40.0  # loops, addresses and zeros of a group of tiles
_HIDDEN = 0.6  # share of an epilogue that products beside it hide


@dataclass(frozen=True)
class TileConv2DKnobs:
    """Knobs of the template.

    Parameters
    ----------
    rows : int
        Pixels of a tile, at most 16.
    pixel_tiles, channel_tiles : int
        Tiles of pixels and of 16 output channels whose products are summed at a time: at most four
        products.
    unit_chunks, block_chunks : int
        Parallel pieces of the pixels and of the channels.
    unrolled : int
        Steps of the reduction in a body of its loop, at most four.
    interleaved : bool
        Whether the sums of a group of tiles become output between the products of the next group.
    """

    rows: int
    pixel_tiles: int
    channel_tiles: int
    unit_chunks: int
    block_chunks: int
    unrolled: int
    interleaved: bool


@dataclass(frozen=True)
class TileGeometry:
    """Tiles that a convolution is cut into.

    Parameters
    ----------
    lines, width : int
        Rows of pixels that tiles do not cross, and pixels of each: one line of all pixels where the
        kernel is one pixel.
    depth : int
        Words of a row of a tile of pixels.
    steps : int
        Tiles of pixels that are summed up for an output.
    columns : int
        Tiles that a row of the kernel is cut into: one, where its pixels fill one.
    channel_tiles : int
        Tiles of 16 output channels.
    """

    lines: int
    width: int
    depth: int
    steps: int
    columns: int
    channel_tiles: int

    @classmethod
    def of(cls, kernel: Conv2DKernel) -> TileGeometry:
        """Read a convolution of words."""
        (layer,) = kernel.layers
        words = lanes_of(kernel.data_layout) // kernel.word
        lines, width = layer.output_size(int(kernel.height or 1), int(kernel.width or 1))
        if layer.is_pointwise:
            lines, width = 1, lines * width * (int(kernel.batch or 1) if kernel.is_matrix else 1)
        columns = layer.kernel[1]
        if columns * words <= TILE_WORDS and layer.dilation[1] == 1 and not kernel.is_matrix:
            words, columns = columns * words, 1
        blocks = -(-layer.in_channels // lanes_of(kernel.data_layout))
        out_blocks = -(-layer.out_channels // kernel.lanes)
        return cls(
            *(lines, width, words, blocks * layer.kernel[0] * columns, columns),
            out_blocks * (kernel.lanes // TILE_WORDS),
        )

    def tiles_of_line(self, rows: int) -> int:
        """Tiles of a line."""
        return -(-self.width // rows)

    def groups(self, knobs: TileConv2DKnobs) -> tuple[int, int]:
        """Groups of tiles of pixels, and of channels."""
        units = self.lines * self.tiles_of_line(knobs.rows)
        return -(-units // knobs.pixel_tiles), -(-self.channel_tiles // knobs.channel_tiles)


def lanes_of(layout: str) -> int:
    """Channels of a block in a layout ``NCHW{x}c``; 1 in ``NCHW``."""
    return int(layout[len("NCHW") : -1] or 1)


def tile_conv2d_space(kernel: Conv2DKernel, cpu: CPUInfo) -> Iterator[TileConv2DKnobs]:
    """All settings that the cost model compares."""
    found = TileGeometry.of(kernel)
    least = -(-found.width // TILE_ROWS)
    rows = sorted({-(-found.width // count) for count in range(least, least + 3)}, reverse=True)
    for size in rows:
        units = found.lines * found.tiles_of_line(size)
        for pixels, channels in SHAPES:
            if pixels > units or channels > found.channel_tiles:
                continue
            groups = -(-units // pixels), -(-found.channel_tiles // channels)
            for pieces in shares(1 if kernel.is_matrix else kernel.batch or 1, cpu.num_cores):
                if pieces[0] > groups[0] or pieces[1] > groups[1]:
                    continue
                for unrolled in UNROLLED:
                    for interleaved in (True, False):
                        yield TileConv2DKnobs(
                            *(size, pixels, channels, *pieces, unrolled, interleaved)
                        )


def tile_cycles(kernel: Conv2DKernel, knobs: TileConv2DKnobs, cpu: CPUInfo) -> float:
    """Predict the clock cycles of a kernel: those of its busiest core."""
    found = TileGeometry.of(kernel)
    pieces = knobs.unit_chunks * knobs.block_chunks
    images = 1 if kernel.is_matrix else kernel.batch or 1
    rounds = -(-images * pieces // cpu.num_cores)
    pixel_groups, channel_groups = found.groups(knobs)
    here = -(-pixel_groups // knobs.unit_chunks), -(-channel_groups // knobs.block_chunks)
    groups = here[0] * here[1]
    products = knobs.pixel_tiles * knobs.channel_tiles
    busy = groups * found.steps * products * max(knobs.rows, LEAST_ROWS)
    traffic = _traffic(found, knobs, here, cpu)
    ending = groups * products * knobs.rows * (_STORED + _FINISHED)
    if knobs.interleaved:
        ending -= _HIDDEN * min(ending, busy)
    loops = groups * (_GROUP + found.steps / knobs.unrolled)
    copied = 0.0
    if any(kernel.layers[0].padding):
        height, width = int(kernel.height or 1), int(kernel.width or 1)
        blocks = found.steps // (kernel.layers[0].kernel[0] * found.columns)
        bytes_ = blocks * height * width * lanes_of(kernel.data_layout) * ITEM_BYTES[kernel.dtype]
        copied = 2 * bytes_ / _BYTES_PER_CYCLE[1] / knobs.unit_chunks
    fork = cpu.costs.fork if images * pieces > 1 else 0.0
    return rounds * (max(busy, traffic) + ending + loops + copied) + fork


def _traffic(
    found: TileGeometry, knobs: TileConv2DKnobs, here: tuple[int, int], cpu: CPUInfo
) -> float:
    """Cycles of loading tiles: of pixels for each group of channels, and of channels."""
    row = found.depth * _WORD
    pixels = here[0] * knobs.pixel_tiles * knobs.rows * found.steps * row
    weights = found.steps * knobs.channel_tiles * found.depth * TILE_WORDS * _WORD
    first = weights * here[1] / _BYTES_PER_CYCLE[2]
    again = weights * here[1] * (here[0] - 1) / _per_cycle(weights, cpu)
    return first + again + pixels * here[1] / _per_cycle(pixels, cpu)


def _per_cycle(size: float, cpu: CPUInfo) -> float:
    """Bytes a cycle of tiles that so many bytes are read in turn from."""
    levels = zip((cpu.l1d_bytes, cpu.l2_bytes, cpu.l3_bytes), _BYTES_PER_CYCLE, strict=False)
    share = cpu.costs.cache_share
    return next((rate for capacity, rate in levels if size <= share * capacity), 5.7)


@lru_cache(maxsize=4096)
def default_tile_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> TileConv2DKnobs:
    """Return the cheapest setting; the first of equals."""
    return min(tile_conv2d_space(kernel, cpu), key=lambda knobs: tile_cycles(kernel, knobs, cpu))
