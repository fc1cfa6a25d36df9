# SPDX-License-Identifier: Apache-2.0
"""Sizes of the tiles of an attention on the ordinary cores."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.tir.extents import constant

from ..core.machine import GPUInfo
from ..gemm.matmul.factor_tiles import WIDTH, pitch_of
from ..gemm.matmul.matmul_tile_sizes import assumed_size
from .attention_pattern import AttentionFunction

MOST_DEPTH = 256
"""Elements of a key or a value above which a thread would hold too many sums."""
# Rows and keys of a tile; rows and keys of a thread. Smaller ones have more blocks.
_TILES = (
    (64, 32, 8, 4),
    (32, 32, 4, 2),
    (32, 16, 4, 2),
    (16, 64, 2, 4),
    (16, 32, 2, 2),
    (16, 16, 2, 2),
)
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class AttentionTile:
    """Partition of some queries and keys among the threads of a block.

    Parameters
    ----------
    rows, keys : int
        Queries of the block, and keys that it visits at a time.
    thread_rows, thread_keys : int
        Of the part of their products that a thread holds in registers.
    depth, columns : int
        Elements of a key and of a value, rounded up to what the threads load and hold.
    """

    rows: int
    keys: int
    thread_rows: int
    thread_keys: int
    depth: int
    columns: int

    @property
    def key_threads(self) -> int:
        """Threads that share a row, neighbouring lanes of a warp."""
        return self.keys // self.thread_keys

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows // self.thread_rows * self.key_threads

    @property
    def thread_columns(self) -> int:
        """Columns of the output that a thread holds in each of its rows."""
        return self.columns // self.key_threads

    @property
    def shared_bytes(self) -> int:
        """Shared memory of queries, keys, values, weights, and of threads without shuffles."""
        lines = self.depth * (pitch_of(self.rows) + pitch_of(self.keys))
        lines += self.keys * (pitch_of(self.columns) + pitch_of(self.rows))
        return (lines + self.threads * self.thread_rows) * _FLOAT


def choose_attention_tile(attention: AttentionFunction, gpu: GPUInfo) -> AttentionTile | None:
    """The largest tile that occupies the GPU, else the one with most blocks.

    None where keys or values are too long for the shared memory, or for :data:`MOST_DEPTH`.
    """
    depth, columns = constant(attention.depth), constant(attention.columns)
    if depth is None or columns is None or not 0 < max(depth, columns) <= MOST_DEPTH:
        return None
    batches, m, n = (assumed_size(e) for e in (attention.batches, attention.m, attention.n))
    tiles = (_rounded(*sizes, depth, columns) for sizes in _TILES)
    fitting = [
        tile
        for tile in tiles
        if tile.threads <= gpu.max_threads and tile.shared_bytes <= gpu.shared_bytes
    ]
    for tile in fitting:
        rows = -(-m // tile.rows) * tile.rows
        if rows <= 1.5 * m and batches * rows // tile.rows >= gpu.multiprocessors:
            return tile
    small = [tile for tile in fitting if tile.rows == min(t.rows for t in fitting)]
    return next((tile for tile in small if tile.keys < 2 * n), small[-1] if small else None)


def _rounded(
    rows: int, keys: int, thread_rows: int, thread_keys: int, depth: int, columns: int
) -> AttentionTile:
    """The tile with depth and columns rounded up, so that each thread loads whole vectors."""
    across = keys // thread_keys
    threads = rows // thread_rows * across
    columns = -(-columns // (across * WIDTH)) * across * WIDTH
    deep = max(threads * WIDTH // rows, threads * WIDTH // keys, WIDTH)
    return AttentionTile(rows, keys, thread_rows, thread_keys, -(-depth // deep) * deep, columns)
