# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of convolutions on a GPU, chosen from the workload and the device.

The choice is an estimate and has been measured on no GPU. Every tile of a small set is rated by a
model of one multiprocessor with its share of the blocks, and the fastest is taken:

- instructions: four warps issue in each cycle; for a quad, a thread needs ``16 x blocks x pixels``
  multiply-adds and ``pixels + 4 blocks`` reads of 16 bytes from shared memory, each of which keeps
  it busy for ``read_cycles``, so that large register tiles win where there is enough work for all
  multiprocessors;
- latency: a warp issues in every second cycle at best, and a step takes no less than
  ``step_latency`` cycles, as its barrier waits for data from the second-level cache; blocks that
  share a multiprocessor hide each other's latency;
- traffic: both operands of every step come from the second-level cache.

Small images have few tiles. Smaller tiles then occupy more multiprocessors, and parts let more
threads of a block share the reduction of a tile, until traffic or latency is the limit. Long
reductions of few tiles are split among blocks, at the cost of a second, small kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from .implicit_gemm import ConvShape

SPLITS = (1, 2, 4, 8, 16)
MOST_PRODUCTS = 512  # multiply-adds of a thread and step: they are unrolled, in up to four places
MOST_TURNS = 6  # loads of 16 bytes of a thread and step


@dataclass(frozen=True)
class ConvTile:
    """Partition of a tile of the output among the threads of a block.

    Parameters
    ----------
    blocks, pixels : int
        Blocks of four channels, and pixels, of the tile.
    thread_blocks, thread_pixels : int
        Those of a thread.
    quads : int
        Steps of four of the sums that are in shared memory at once.
    parts : int
        Teams of threads that share the quads of each step among them.
    splits : int
        Blocks that share the steps among them; a second kernel adds up their results.
    """

    blocks: int
    pixels: int
    thread_blocks: int
    thread_pixels: int
    quads: int
    parts: int = 1
    splits: int = 1

    @property
    def block_threads(self) -> int:
        """Threads along the channels."""
        return self.blocks // self.thread_blocks

    @property
    def pixel_threads(self) -> int:
        """Threads along the pixels."""
        return self.pixels // self.thread_pixels

    @cached_property
    def threads(self) -> int:
        """Threads of a block."""
        return self.parts * self.block_threads * self.pixel_threads

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a block: two steps of both operands, and the sums of all parts."""
        staged = 2 * 16 * (self.blocks * (4 * self.quads + 1) + self.pixels * self.quads)
        return staged + (16 * self.parts * self.blocks * self.pixels if self.parts > 1 else 0)

    @cached_property
    def products(self) -> int:
        """Multiply-adds of a thread and step."""
        return 16 * self.thread_blocks * self.thread_pixels * (self.quads // self.parts)

    @cached_property
    def weight_turns(self) -> int:
        """Loads of weights of a thread and step."""
        return -(-self.blocks * 4 * self.quads // self.threads)

    @cached_property
    def data_turns(self) -> int:
        """Loads of data of a thread and step."""
        return -(-self.pixels * self.quads // self.threads)

    @cached_property
    def registers(self) -> int:
        """An estimate of the registers of a thread."""
        sums = 4 * self.thread_blocks * self.thread_pixels
        loaded = self.weight_turns + self.data_turns
        return sums + 4 * (self.thread_blocks + self.thread_pixels + loaded) + 48


@dataclass(frozen=True)
class ProductExtents:
    """Extents of a product of matrices.

    Parameters
    ----------
    groups : int
        Independent products of these extents.
    blocks, pixels, quads : int
        Blocks of four rows, columns, and steps of four of the sums.
    may_split : bool
        Whether the memory for the results of several splits is of a known size.
    """

    groups: int
    blocks: int
    pixels: int
    quads: int
    may_split: bool = True

    @classmethod
    def of(cls, shape: ConvShape) -> ProductExtents:
        """The product that a convolution is; a symbolic batch counts as one image."""
        pixels, known = shape.images * shape.out_pixels, isinstance(shape.batch, int)
        return cls(shape.groups, shape.out_blocks, pixels, shape.quads, known)


@functools.lru_cache(maxsize=256)
def choose_tile(product: ProductExtents, gpu: GPUInfo) -> ConvTile | None:
    """The tile with the least :func:`estimate`; None if none fits the device.

    Parameters
    ----------
    product : ProductExtents
        Extents of the convolution.
    gpu : GPUInfo
        The device.
    """
    tiles = fitting_tiles(product, gpu)
    return min(tiles, key=lambda tile: estimate(product, tile, gpu), default=None)


def fitting_tiles(product: ProductExtents, gpu: GPUInfo) -> list[ConvTile]:
    """All tiles that fit the device, with as many splits as the sums are long enough for."""
    return [
        tile
        for tile in _split_tiles()
        if tile.splits == 1 or (product.may_split and 2 * tile.splits * tile.quads <= product.quads)
        if fits(tile, gpu)
    ]


def fits(tile: ConvTile, gpu: GPUInfo) -> bool:
    """Return whether a block of the device can hold a tile."""
    return tile.threads <= gpu.max_threads and tile.shared_bytes <= gpu.shared_bytes


def estimate(product: ProductExtents, tile: ConvTile, gpu: GPUInfo) -> float:
    """Predicted cycles of the kernel with a tile; see the module's docstring."""
    down, across = -(-product.blocks // tile.blocks), -(-product.pixels // tile.pixels)
    share = -(-product.groups * down * across * tile.splits // gpu.multiprocessors)
    resident = min(
        COSTS.register_file // (tile.registers * tile.threads),
        COSTS.shared_bytes // tile.shared_bytes,
        COSTS.multiprocessor_threads // tile.threads,
    )
    rounds = -(-share // max(1, resident))
    steps = -(-product.quads // (tile.quads * tile.splits))
    busy = step_cycles(tile)
    alone = max(busy, step_instructions(tile) * COSTS.warp_cycles, COSTS.step_latency)
    cycles = max(share * steps * busy, rounds * (steps * alone + COSTS.block_latency))
    return cycles + _adding_cycles(product, tile, gpu)


def _adding_cycles(product: ProductExtents, tile: ConvTile, gpu: GPUInfo) -> float:
    """Predicted cycles of the kernel that adds up the splits, and of writing them."""
    if tile.splits == 1:
        return 0.0
    moved = 2.0 * 16 * tile.splits * product.groups * product.blocks * product.pixels
    return COSTS.launch + COSTS.block_latency + moved / (COSTS.l2_bytes * gpu.multiprocessors)


def step_cycles(tile: ConvTile) -> float:
    """Cycles of one step of a block in the busiest unit of the multiprocessor."""
    warps = -(-tile.threads // COSTS.warp)
    issue = step_instructions(tile) * warps / COSTS.issue
    return max(
        issue, step_reads(tile) * warps * COSTS.read_cycles, step_bytes(tile) / COSTS.l2_bytes
    )


def step_instructions(tile: ConvTile) -> float:
    """Instructions of a thread in one step."""
    loads = 10 * tile.weight_turns + 20 * tile.data_turns
    return tile.products + step_reads(tile) + loads + 10


def step_reads(tile: ConvTile) -> int:
    """Reads of 16 bytes of a thread from shared memory in one step."""
    return (tile.thread_pixels + 4 * tile.thread_blocks) * (tile.quads // tile.parts)


def step_bytes(tile: ConvTile) -> float:
    """Bytes of both operands of one step."""
    return 16.0 * tile.quads * (4 * tile.blocks + tile.pixels)


@functools.cache
def all_tiles() -> tuple[ConvTile, ...]:
    """All candidate tiles."""
    return tuple(_enumerate())


@functools.cache
def _split_tiles() -> tuple[ConvTile, ...]:
    """The candidates with every number of splits, cached."""
    return tuple(replace(tile, splits=splits) for tile in all_tiles() for splits in SPLITS)


def _enumerate() -> Iterator[ConvTile]:
    for blocks, pixels in itertools.product((1, 2, 4, 8, 16, 32), (16, 32, 64, 128)):
        for own in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8)):
            for quads, parts in itertools.product((2, 4, 8, 16), (1, 2, 4, 8)):
                if own[0] > blocks or quads % parts:
                    continue
                tile = ConvTile(blocks, pixels, *own, quads, parts)
                small = tile.registers <= COSTS.conv_registers and tile.products <= MOST_PRODUCTS
                small = small and tile.weight_turns + tile.data_turns <= MOST_TURNS
                if small and 2 * COSTS.warp <= tile.threads <= 256:
                    yield tile
