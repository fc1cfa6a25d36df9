# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of fused pairs of convolutions on a GPU.

As in :mod:`schedules.gpu.gemm.conv_tiles` the choice is an estimate, and has been measured on no
GPU. A block has a rectangle of output pixels, and processes the channels between the layers in
chunks: a chunk of the first layer, with the halo that the second one sees, then its products with
the second layer's weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..gemm.conv_tiles import (
    MOST_PRODUCTS,
    ConvTile,
    step_bytes,
    step_instructions,
    step_reads,
)
from ..gemm.implicit_gemm import ConvShape
from .depthwise_column import HELD_TAPS

MOST_FIRST_PIXELS = 12  # Pixels of a thread in a dense first layer.
MOST_FIRST_COLUMNS = 12  # Columns of a thread in a depthwise one, unrolled; 16 may spill.


@dataclass(frozen=True)
class FusedTile:
    """Partition of a pair among threads.

    Parameters
    ----------
    height, width : int
        Rectangle of output pixels.
    blocks : int
        Blocks of four output channels.
    thread_blocks, thread_pixels : int
        Blocks and pixels of a thread in the second layer.
    quads : int
        Steps of four of the second layer's sums whose weights are in shared memory at once.
    chunk : int
        Blocks of four channels between the layers that are in shared memory at once.
    first_blocks : int
        Blocks of a thread in a dense first layer.
    first_quads : int
        Quads of a dense first layer.
    rows : int
        Outputs of a thread in a column, in a depthwise first layer.
    """

    height: int
    width: int
    blocks: int
    thread_blocks: int
    thread_pixels: int
    quads: int
    chunk: int
    first_blocks: int = 1
    first_quads: int = 2
    rows: int = 2

    @cached_property
    def second(self) -> ConvTile:
        """The tile of the second layer."""
        pixels = self.height * self.width
        own = self.thread_blocks, self.thread_pixels
        return ConvTile(self.blocks, pixels, *own, self.quads)

    @cached_property
    def threads(self) -> int:
        """Threads of a block."""
        return self.second.threads

    def first(self, pixels: int) -> ConvTile:
        """The tile of a dense first layer, of ``pixels`` at least."""
        across = self.threads * self.first_blocks // self.chunk
        own = -(-pixels // across)
        return ConvTile(self.chunk, across * own, self.first_blocks, own, self.first_quads)


@dataclass(frozen=True)
class ConvPair:
    """Two layers of which the second reads the first."""

    first: ConvShape
    second: ConvShape

    def mid_size(self, tile: FusedTile) -> tuple[int, int]:
        """Height and width of the part of the first layer that a block computes."""
        layer = self.second.layer
        height, width = (
            (extent - 1) * layer.strides[axis] + (layer.kernel[axis] - 1) * layer.dilation[axis] + 1
            for axis, extent in enumerate((tile.height, tile.width))
        )
        return height, width

    def mid_pixels(self, tile: FusedTile) -> int:
        """Pixels of the first layer that a block computes."""
        height, width = self.mid_size(tile)
        return height * width

    def chunks(self, tile: FusedTile) -> int:
        """Chunks of the channels between the layers."""
        return -(-self.first.out_blocks // tile.chunk)

    def shared_bytes(self, tile: FusedTile) -> int:
        """Shared memory of a block."""
        pixels = self.mid_pixels(tile)
        size = tile.chunk * pixels + 2 * tile.blocks * (4 * tile.quads + 1)
        if not self.first.layer.is_depthwise:
            first = tile.first(pixels)
            size += 2 * (first.blocks * (4 * first.quads + 1) + first.pixels * first.quads)
        return 16 * size

    def registers(self, tile: FusedTile) -> int:
        """An estimate of the registers of a thread."""
        second = tile.second
        kept = 4 * (second.thread_blocks * second.thread_pixels + second.weight_turns)
        adds = 4 * (second.thread_blocks + second.thread_pixels)
        if self.first.layer.is_depthwise:
            held = self.first.taps if self.first.taps <= HELD_TAPS else 1
            adds = max(adds, 4 * (tile.rows + self.first.layer.kernel[1] + held))
        else:
            adds = max(adds, tile.first(self.mid_pixels(tile)).registers - 48)
        return kept + adds + second.thread_pixels + 60

    def columns(self, tile: FusedTile) -> int:
        """Columns of a thread in a depthwise first layer."""
        height, width = self.mid_size(tile)
        return -(-tile.chunk * -(-height // tile.rows) * width // tile.threads)

    def fits(self, tile: FusedTile, gpu: GPUInfo) -> bool:
        """Return whether a block of the device can hold a tile."""
        if tile.threads > gpu.max_threads or self.shared_bytes(tile) > gpu.shared_bytes:
            return False
        if self.first.layer.is_depthwise:
            small = self.columns(tile) <= MOST_FIRST_COLUMNS
            return small and self.registers(tile) <= COSTS.fused_registers
        if tile.first_blocks > tile.chunk or tile.threads * tile.first_blocks % tile.chunk:
            return False
        first = tile.first(self.mid_pixels(tile))
        small = first.thread_pixels <= MOST_FIRST_PIXELS and first.products <= MOST_PRODUCTS
        return (
            small
            and first.threads == tile.threads
            and self.registers(tile) <= COSTS.fused_registers
        )


@functools.lru_cache(maxsize=256)
def choose_fused_tile(pair: ConvPair, gpu: GPUInfo) -> FusedTile | None:
    """The tile with the least :func:`estimate_fused`; None if none fits."""
    tiles = fitting_fused_tiles(pair, gpu)
    return min(tiles, key=lambda tile: estimate_fused(pair, tile, gpu), default=None)


def fitting_fused_tiles(pair: ConvPair, gpu: GPUInfo) -> list[FusedTile]:
    """All tiles that fit the device."""
    return [tile for tile in _all_tiles(pair.first.layer.is_depthwise) if pair.fits(tile, gpu)]


def estimate_fused(pair: ConvPair, tile: FusedTile, gpu: GPUInfo) -> float:
    """Predicted cycles of the kernel with a tile."""
    height, width = pair.second.out_size
    tiles = pair.second.images * -(-height // tile.height) * -(-width // tile.width)
    share = -(-tiles * -(-pair.second.out_blocks // tile.blocks) // gpu.multiprocessors)
    resident = min(
        COSTS.register_file // (pair.registers(tile) * tile.threads),
        COSTS.shared_bytes // pair.shared_bytes(tile),
        COSTS.multiprocessor_threads // tile.threads,
    )
    rounds = -(-share // max(1, resident))
    first, first_reads, first_bytes, first_latency = _first_cost(pair, tile)
    second = tile.second
    steps = tile.chunk * pair.second.taps // tile.quads
    instructions = first + steps * step_instructions(second)
    moved = first_bytes + steps * 64.0 * second.blocks * second.quads
    latency = first_latency + steps * COSTS.step_latency / 4  # only weights, which are loaded ahead
    warps = -(-tile.threads // COSTS.warp)
    reads = (first_reads + steps * step_reads(second)) * warps * COSTS.read_cycles
    busy = max(instructions * warps / COSTS.issue, reads, moved / COSTS.l2_bytes)
    alone = max(busy, instructions * COSTS.warp_cycles, latency)
    chunks = pair.chunks(tile)
    return max(share * chunks * busy, rounds * (chunks * alone + COSTS.block_latency))


def _first_cost(pair: ConvPair, tile: FusedTile) -> tuple[float, float, float, float]:
    """Instructions and reads of a thread, bytes and latency of one chunk of the first layer."""
    height, width = pair.mid_size(tile)
    layer, shape = pair.first.layer, pair.first
    if not layer.is_depthwise:
        first = tile.first(height * width)
        steps = -(-shape.quads // first.quads)
        counted = steps * step_instructions(first), steps * step_reads(first)
        return *counted, steps * step_bytes(first), steps * COSTS.step_latency
    columns = pair.columns(tile)
    seen = (tile.rows - 1) * layer.strides[0] + (layer.kernel[0] - 1) * layer.dilation[0] + 1
    loads = seen * layer.kernel[1]
    each = 8.0 * loads + 2 * shape.taps + 4 * tile.rows * shape.taps + 40
    read = height * layer.strides[0] * width * layer.strides[1]
    return columns * each, 0.0, 16.0 * tile.chunk * read, columns * COSTS.step_latency


@functools.cache
def _all_tiles(depthwise: bool) -> tuple[FusedTile, ...]:
    """All candidate tiles for a depthwise or dense first layer."""
    return tuple(_enumerate(depthwise))


def _enumerate(depthwise: bool) -> Iterator[FusedTile]:
    firsts = (
        [(1, 2, rows) for rows in (1, 2, 4)]
        if depthwise
        else list(itertools.product((1, 2), (2, 4), (1,)))
    )
    sizes = ((2, 8), (4, 4), (4, 8), (8, 8), (4, 16), (8, 16))
    own = ((1, 1), (1, 2), (1, 4), (2, 4), (2, 8))
    shapes = itertools.product(sizes, (2, 4, 8, 16, 32), own, (4, 8, 16), (2, 4, 8), firsts)
    for size, blocks, (thread_blocks, thread_pixels), chunk, quads, first in shapes:
        tile = FusedTile(*size, blocks, thread_blocks, thread_pixels, quads, chunk, *first)
        fit = thread_blocks <= blocks and quads <= chunk and tile.second.products <= MOST_PRODUCTS
        if fit and 2 * COSTS.warp <= tile.threads <= 256 and tile.second.weight_turns <= 6:
            yield tile
