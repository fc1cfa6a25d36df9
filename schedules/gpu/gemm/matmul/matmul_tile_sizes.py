# SPDX-License-Identifier: Apache-2.0
"""Sizes of the tiles of a matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from schedules.tir.extents import Extent, constant

from ...core.machine import GPUInfo
from ...core.machine_costs import COSTS

_SYMBOLIC = 128  # assumed for a symbolic extent
# Rows, columns of a block; rows, columns of a thread.
_TILES = ((128, 128, 8, 8), (64, 128, 8, 8), (64, 64, 8, 4), (32, 64, 4, 4), (32, 32, 4, 4))
_SMALLEST = (16, 16, 4, 4)  # on any device, and for 8-byte types
_DEPTH = 16
_SIZES = (16, 32, 64, 128)
_DEPTHS = (8, 16, 32)
_MOST_THREADS = 256
_VECTOR = 4  # elements of a load


@dataclass(frozen=True)
class TileConfig:
    """Partition of a tile of the result.

    Parameters
    ----------
    rows, columns : int
        Of the tile.
    thread_rows, thread_columns : int
        Of the part that a thread holds in registers, multiples of 4.
    groups : int
        Groups of threads that share the reduced axis between them.
    depth : int
        Elements of the reduced axis that a group has in shared memory at a time.
    """

    rows: int
    columns: int
    thread_rows: int
    thread_columns: int
    groups: int
    depth: int = _DEPTH

    @property
    def group_threads(self) -> int:
        """Threads of a group."""
        return self.rows // self.thread_rows * (self.columns // self.thread_columns)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.group_threads * self.groups


def choose_tiles(
    batches: Extent, m: Extent, n: Extent, k: Extent, itemsize: int, gpu: GPUInfo
) -> TileConfig:
    """The largest tiles that occupy the GPU; the smallest ones may also share the reduction.

    Parameters
    ----------
    batches, m, n, k : Extent
        Number of products and their extents.
    itemsize : int
        Bytes of an element in shared memory.
    gpu : GPUInfo
        The GPU.
    """
    batches, m, n, k = (assumed_size(extent) for extent in (batches, m, n, k))
    fitting = [tile for tile in _TILES if _fits(tile, itemsize, gpu)] or [_SMALLEST]
    chosen = fitting[-1]
    for tile in fitting:
        wasted = _blocks(batches, m, n, tile) * tile[0] * tile[1] > 1.5 * batches * m * n
        if not wasted and _blocks(batches, m, n, tile) >= gpu.multiprocessors:
            chosen = tile
            break
    config = TileConfig(*chosen, groups=1)
    groups = 1
    blocks = _blocks(batches, m, n, chosen)
    while (
        blocks * config.group_threads * groups < 256 * gpu.multiprocessors
        and config.group_threads * groups * 2 <= min(256, gpu.max_threads)
        and k >= 4 * groups * config.depth
        and _bytes(chosen, itemsize) * groups * 2 <= gpu.shared_bytes
    ):
        groups *= 2
    return TileConfig(*chosen, groups=groups)


def all_tile_configs(k: int, itemsize: int, gpu: GPUInfo) -> Iterator[TileConfig]:
    """All tiles that a block of the device can hold, and whose threads load whole vectors.

    Parameters
    ----------
    k : int
        Length of the sums; each group has a part of them.
    itemsize : int
        Bytes of an element in shared memory.
    gpu : GPUInfo
        The GPU.
    """
    own = ((4, 4), (4, 8), (8, 4), (8, 8))
    for rows, columns, (i, j), depth, groups in product(
        _SIZES, _SIZES, own, _DEPTHS, (1, 2, 4, 8, 16)
    ):
        tile = TileConfig(rows, columns, i, j, groups, depth)
        whole = min(rows, columns) * depth % (_VECTOR * tile.group_threads) == 0
        if (
            whole
            and 2 * COSTS.warp <= tile.threads <= min(gpu.max_threads, _MOST_THREADS)
            and _stage_bytes(tile, itemsize) <= gpu.shared_bytes
            and _registers(tile, itemsize) <= COSTS.conv_registers
            and (groups == 1 or k >= 2 * groups * depth)
        ):
            yield tile


def tile_cycles(
    batches: int, m: int, n: int, k: int, itemsize: int, tile: TileConfig, gpu: GPUInfo
) -> float:
    """Predicted cycles of a multiprocessor with its share of the tiles, as for convolutions.

    Instructions, reads of shared memory and traffic of a step compete; a step takes no less than
    the latency of its loads, which other blocks of the multiprocessor hide. An estimate.
    """
    blocks = batches * -(-m // tile.rows) * -(-n // tile.columns)
    share = -(-blocks // gpu.multiprocessors)
    resident = min(
        COSTS.register_file // (_registers(tile, itemsize) * tile.threads),
        COSTS.shared_bytes // _stage_bytes(tile, itemsize),
        COSTS.multiprocessor_threads // tile.threads,
    )
    words = itemsize / 4
    reads = (tile.thread_rows + tile.thread_columns) / _VECTOR * tile.depth * words
    loads = (tile.rows + tile.columns) * tile.depth / _VECTOR / tile.group_threads
    products = tile.thread_rows * tile.thread_columns * tile.depth * words
    instructions = products + reads + 12 * loads + 10
    warps = tile.threads / COSTS.warp
    moved = (tile.rows + tile.columns) * tile.depth * tile.groups * itemsize
    busy = max(
        instructions * warps / COSTS.issue,
        reads * warps * COSTS.read_cycles,
        moved / COSTS.l2_bytes,
    )
    alone = max(busy, instructions * COSTS.warp_cycles, COSTS.step_latency)
    steps = -(-k // (tile.depth * tile.groups))
    rounds = -(-share // max(1, resident))
    return max(share * steps * busy, rounds * (steps * alone + COSTS.block_latency))


def _stage_bytes(tile: TileConfig, itemsize: int) -> int:
    """Shared memory of a block: two buffers of both factors for each group."""
    return 2 * tile.depth * (tile.rows + tile.columns + 8) * itemsize * tile.groups


def _registers(tile: TileConfig, itemsize: int) -> int:
    """An estimate of the registers of a thread."""
    own = tile.thread_rows * tile.thread_columns + tile.thread_rows + tile.thread_columns
    loaded = (tile.rows + tile.columns) * tile.depth // tile.group_threads
    return (own + loaded) * itemsize // 4 + 48


def assumed_size(extent: Extent) -> int:
    """An extent, or a guess where it is symbolic."""
    known = constant(extent)
    return _SYMBOLIC if known is None else known


def _blocks(batches: int, m: int, n: int, tile: tuple[int, int, int, int]) -> int:
    return batches * -(-m // tile[0]) * -(-n // tile[1])


def _fits(tile: tuple[int, int, int, int], itemsize: int, gpu: GPUInfo) -> bool:
    threads = tile[0] // tile[2] * (tile[1] // tile[3])
    return threads <= gpu.max_threads and _bytes(tile, itemsize) <= gpu.shared_bytes


def _bytes(tile: tuple[int, int, int, int], itemsize: int) -> int:
    """Two buffers of both factors, each row four elements longer."""
    return 2 * _DEPTH * (tile[0] + tile[1] + 8) * itemsize
