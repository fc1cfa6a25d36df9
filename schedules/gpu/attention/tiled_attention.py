# SPDX-License-Identifier: Apache-2.0
"""Kernel of an attention on the ordinary cores, and the sizes of its tiles.

Source: T. Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning*,
2023, Algorithm 1, after T. Dao et al., *FlashAttention*, 2022. A block has some queries and visits
all keys, a tile at a time; it never stores a score::

    maximum, total, output = -inf, 0, 0
    for tile of keys:
        scores = queries * keys                               # tiles in shared memory
        logits = bias and mask of the scores; -inf past the last key
        higher = max(maximum, logits)
        weights = exp((logits - higher) * factor)             # to shared memory
        rescaling = exp((maximum - higher) * factor)
        total, output = total * rescaling + weights, output * rescaling + weights * values
        maximum = higher
    output / total

Keys of the next tile are loaded to registers while values are multiplied, values while scores are
computed. Threads of a row add their own weights, and exchange the sums at the end only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.core.intrinsics import shuffle_xor, sync
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.gemm.matmul.factor_tiles import WIDTH, FactorTiles, fetch_line, pitch_of
from schedules.gpu.gemm.matmul.matmul_pattern import divides
from schedules.gpu.gemm.matmul.matmul_tile_sizes import assumed_size
from schedules.gpu.gemm.matmul.tiled_matmul import epilogue_lanes, store_results
from schedules.gpu.pointwise.point_kernel import Views
from schedules.tir.extents import constant
from schedules.tir.index_math import i64
from schedules.tir.statements import when

from .attention_pattern import AttentionFunction
from .score_registers import fill, logit_lanes, registers, row_that_exists, store_logits

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
_FLOAT_BYTES = 4  # bytes


@dataclass(frozen=True)
class AttentionTile:
    """Partition of some queries and keys among the threads of a block."""

    rows: int
    keys: int
    """``rows`` and ``keys``: queries of the block, and keys that it visits at a time."""
    thread_rows: int
    thread_keys: int
    """``thread_rows`` and ``thread_keys``: of the part of their products that a thread holds in
    registers."""
    depth: int
    columns: int
    """``depth`` and ``columns``: elements of a key and of a value, rounded up to what the threads
    load and hold."""

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
        return (lines + self.threads * self.thread_rows) * _FLOAT_BYTES


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


_FLOAT = "float32"


def write_attention(
    attention: AttentionFunction, tile: AttentionTile, gpu: GPUInfo, views: Views, block: tirx.Expr
) -> None:
    """Emit the body of a block: the queries with the number ``block``, counted over the batch."""
    batch, first = attention.place(block, tile.rows)
    with T.launch_thread("threadIdx.x", i64(tile.threads)) as thread:
        _ThreadPart(attention, tile, gpu, views, batch, first, thread).write()


class _ThreadPart:
    """One thread's part of a block."""

    def __init__(
        self,
        attention: AttentionFunction,
        tile: AttentionTile,
        gpu: GPUInfo,
        views: Views,
        batch: Sequence[tirx.Expr],
        first: tirx.Expr,
        thread: tirx.Expr,
    ):
        self.attention, self.tile, self.gpu, self.views = attention, tile, gpu, views
        self.batch, self.first, self.thread = batch, first, thread
        self.unit_row = T.bind(thread // i64(tile.key_threads))
        self.unit = T.bind(thread % i64(tile.key_threads))
        self.query, self.key, self.value = (
            FactorTiles.allocate(operand, rows, depth, tile.threads, _FLOAT)
            for operand, rows, depth in (
                (attention.query, tile.rows, tile.depth),
                (attention.key, tile.keys, tile.depth),
                (attention.value, tile.columns, tile.keys),
            )
        )
        size = tile.keys * pitch_of(tile.rows)
        self.weights = T.alloc_buffer((size,), _FLOAT, scope="shared")
        self.scores = registers(tile.thread_rows * tile.thread_keys)
        self.output = registers(tile.thread_rows * tile.thread_columns)
        self.maximum, self.total = (registers(tile.thread_rows) for _ in range(2))
        self.left = registers(tile.thread_rows)
        self.keys, self.columns = registers(tile.thread_keys), registers(tile.thread_columns)
        self.scratch = None
        if gpu.warp_size < tile.key_threads:
            size = tile.threads * tile.thread_rows
            self.scratch = T.alloc_buffer((size,), _FLOAT, scope="shared")

    def write(self) -> None:
        self._begin()
        tiles = T.bind(self.attention.tiles(self.first, self.tile.rows, self.tile.keys))
        with T.serial(i64(0), tiles) as number:
            first = T.bind(number * i64(self.tile.keys))
            follows = number + i64(1) < tiles
            self._load(self.value, i64(0), first)
            self._multiply_keys()
            self._weigh(first)
            self._keep(self.value)
            with when(follows):
                self._load(self.key, first + i64(self.tile.keys), i64(0))
            sync()
            self._multiply_values()
            with when(follows):
                self._keep(self.key)
            sync()
        self._finish()

    def _begin(self) -> None:
        fill(self.output, 0.0)
        fill(self.total, 0.0)
        fill(self.maximum, float("-inf"))
        self._load(self.query, self.first, i64(0))
        self._keep(self.query)
        self._load(self.key, i64(0), i64(0))
        self._keep(self.key)
        sync()

    def _load(self, factor: FactorTiles, row: tirx.Expr, depth: tirx.Expr) -> None:
        factor.load(self.views, self.batch, row, depth, self.thread)

    def _keep(self, factor: FactorTiles) -> None:
        factor.keep(0, i64(0), self.thread)

    def _multiply_keys(self) -> None:
        fill(self.scores, 0.0)
        with T.serial(0, self.tile.depth) as k:
            line = k.astype("int64")
            self.query.fetch(0, self.left, line * i64(self.query.pitch), self.unit_row)
            self.key.fetch(0, self.keys, line * i64(self.key.pitch), self.unit)
            _add_products(self.scores, self.left, self.keys)

    def _multiply_values(self) -> None:
        pitch = i64(pitch_of(self.tile.rows))
        with T.serial(0, self.tile.keys) as k:
            line = k.astype("int64")
            fetch_line(self.weights, self.tile.rows, self.left, line * pitch, self.unit_row)
            self.value.fetch(0, self.columns, line * i64(self.value.pitch), self.unit)
            _add_products(self.output, self.left, self.columns)

    def _row(self, i: int) -> tirx.Expr:
        """Row in the tile of one of the thread's rows, as they are fetched."""
        width = min(WIDTH, self.tile.thread_rows)
        apart = self.tile.rows // (self.tile.thread_rows // width)
        return self.unit_row * i64(width) + i64(i // width * apart + i % width)

    def _weigh(self, first: tirx.Expr) -> None:
        """Turn scores into weights; rescale what was summed up with an earlier maximum."""
        rows, across = self.tile.thread_rows, self.tile.thread_keys
        for i in range(rows):
            self._logits(i, first)
        higher = registers(rows)
        for i in range(rows):
            T.buffer_store(higher, self.scores[i * across], [i])
            for j in range(1, across):
                T.buffer_store(higher, tirx.max(higher[i], self.scores[i * across + j]), [i])
        self._over_row(higher, tirx.max)
        for i in range(rows):
            self._rescale(i, higher)
        self._store_weights()

    def _logits(self, i: int, first: tirx.Expr) -> None:
        """Replace the scores of a row by the values of logits."""
        count = self.tile.thread_keys
        lanes = logit_lanes(self.attention, count)
        row = row_that_exists(self.attention, self.tile.rows, self.first + self._row(i))
        for start in range(0, count, lanes.vector):
            at = range(i * count + start, i * count + start + lanes.vector)
            column = T.bind(first + self.unit * i64(count) + i64(start))
            place = [*self.batch, row, column]
            store_logits(self.attention, lanes, self.views, place, self.scores, at, self.tile.keys)

    def _rescale(self, i: int, higher: tirx.Buffer) -> None:
        """Compute the weights of a row, relative to the maximum so far.

        While all logits are -inf, any other reference avoids the difference of infinities; if they
        stay so, the quotient of zeros is NaN, as the definition has it.
        """
        across, columns = self.tile.thread_keys, self.tile.thread_columns
        lowest = tirx.const(float("-inf"), _FLOAT)
        most = registers(1)
        T.buffer_store(most, tirx.max(self.maximum[i], higher[i]), [0])
        reference, rescaling = registers(1), registers(1)
        nothing = tirx.EQ(most[0], lowest)
        T.buffer_store(reference, tirx.Select(nothing, tirx.const(0, _FLOAT), most[0]), [0])
        factor = tirx.const(self.attention.logit.factor, _FLOAT)
        T.buffer_store(rescaling, tirx.exp((self.maximum[i] - reference[0]) * factor), [0])
        T.buffer_store(self.maximum, most[0], [i])
        T.buffer_store(self.total, self.total[i] * rescaling[0], [i])
        for j in range(across):
            e = i * across + j
            weight = tirx.exp((self.scores[e] - reference[0]) * factor)
            T.buffer_store(self.scores, weight, [e])
            T.buffer_store(self.total, self.total[i] + self.scores[e], [i])
        for c in range(columns):
            e = i * columns + c
            T.buffer_store(self.output, self.output[e] * rescaling[0], [e])

    def _store_weights(self) -> None:
        """Store the weights so that rows are neighbours."""
        rows, across = self.tile.thread_rows, self.tile.thread_keys
        width = min(WIDTH, rows)
        for j in range(across):
            line = self.unit * i64(across) + i64(j)
            for i in range(0, rows, width):
                place = T.bind(line * i64(pitch_of(self.tile.rows)) + self._row(i))
                with T.vectorized(0, width) as k:
                    value = self.scores[k * across + (i * across + j)]
                    T.buffer_store(self.weights, value, [place + k.astype("int64")])

    def _over_row(
        self, values: tirx.Buffer, combine: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
    ) -> None:
        """Combine values of each row over the threads that share it; all of them get the result."""
        rows, width = self.tile.thread_rows, self.tile.key_threads
        if self.scratch is None:
            while (width := width // 2) > 0:
                for i in range(rows):
                    other = shuffle_xor(values[i], width, self.tile.key_threads)
                    T.buffer_store(values, combine(values[i], other), [i])
            return
        for i in range(rows):
            T.buffer_store(self.scratch, values[i], [self.thread * i64(rows) + i64(i)])
        sync()
        first = T.bind(self.unit_row * i64(width * rows))
        with T.serial(1, width) as step:
            other = (self.unit + step.astype("int64")) % i64(width) * i64(rows)
            for i in range(rows):
                value = self.scratch[first + other + i64(i)]
                T.buffer_store(values, combine(values[i], value), [i])
        sync()

    def _finish(self) -> None:
        """Divide by the sums of the weights; store."""
        tile, results = self.tile, self.attention.results
        self._over_row(self.total, lambda a, b: a + b)
        width = min(WIDTH, tile.thread_columns)
        lanes = epilogue_lanes(results, width)
        apart = tile.columns // (tile.thread_columns // width)
        for i in range(tile.thread_rows):
            row = T.bind(self.first + self._row(i))
            exists = divides(tile.rows, results.m) or row < i64(results.m)
            T.buffer_store(self.total, tirx.const(1, _FLOAT) / self.total[i], [i])
            for chunk in range(tile.thread_columns // width):
                column = T.bind(self.unit * i64(width) + i64(chunk * apart))
                e = i * tile.thread_columns + chunk * width
                values = [self.output[e + k] * self.total[i] for k in range(width)]
                place = (results, lanes, self.views, self.batch, row, column)
                store_results(*place, values, exists)


def _add_products(sums: tirx.Buffer, left: tirx.Buffer, right: tirx.Buffer) -> None:
    """Add the products of each left with each right element."""
    rows, columns = int(left.shape[0]), int(right.shape[0])
    with T.unroll(0, rows) as i, T.unroll(0, columns) as j:
        e = i * columns + j
        T.buffer_store(sums, sums[e] + left[i] * right[j], [e])
