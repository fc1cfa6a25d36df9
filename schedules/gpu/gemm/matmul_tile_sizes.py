# SPDX-License-Identifier: Apache-2.0
"""Sizes of the tiles of a matrix product."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.workload.reduce import Extent, constant

from ..core.machine import GPUInfo

_SYMBOLIC = 128  # assumed for a symbolic extent
# Rows, columns of a block; rows, columns of a thread.
_TILES = ((128, 128, 8, 8), (64, 128, 8, 8), (64, 64, 8, 4), (32, 64, 4, 4), (32, 32, 4, 4))
_SMALLEST = (16, 16, 4, 4)  # on any device, and for 8-byte types
_DEPTH = 16


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
