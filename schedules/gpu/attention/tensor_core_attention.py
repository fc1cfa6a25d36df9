# SPDX-License-Identifier: Apache-2.0
"""Kernel of an attention on tensor cores, for factors of float16 and bfloat16.

Source: T. Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning*,
2023, Algorithm 1 and section 3.3: each warp has 32 or 16 queries, all keys of a tile and all
columns of the output, so that warps never exchange anything. The steps are those of
:mod:`.tiled_attention`; weights stay in registers, since the sums of four lanes in two products of
16 x 8 are what these lanes hold of the left factor in the next product of 16 x 16. So do the
queries, from the first tile of keys to the last.

A weight takes four instructions: a comparison, ``score * scale - maximum * scale`` in one, a power
of two, whose exponent is the natural one's if ``scale`` has a factor of log2(e), and an addition.
Keys past the end and a causal mask are looked at in the tiles that have some.

Tiles of keys and values have two stages in shared memory: one is copied while the other is in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.branch import when
from schedules.tir.index_math import i64
from schedules.workload.reduce import constant

from ..core.intrinsics import sync
from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.tensor_core import MATRIX_TYPES, TensorCore
from ..gemm.matmul.matmul_pattern import divides
from ..gemm.matmul.matmul_tile_sizes import assumed_size
from ..gemm.matmul.tensor_core_matmul import Factor, store_products
from ..gemm.matmul.tensor_core_tile import ELEMENTS, STEP, SharedTile, factor_dtype
from ..pointwise.point_kernel import Views
from .attention_pattern import AttentionFunction
from .score_registers import fill, logit_lanes, registers, row_that_exists, store_logits

_FLOAT = "float32"
_QUAD = 4  # lanes that share a row of a product, two neighbouring columns each
_ROWS = ((4, 32), (4, 16), (2, 16), (1, 16))  # warps of a block, queries of a warp
_MOST_REGISTERS = 232  # of the 255 that a thread may have
_BYTES = 2  # of an element of a factor


@dataclass(frozen=True)
class TensorAttentionTile:
    """Partition of some queries among the warps of a block.

    Parameters
    ----------
    warps : int
        Warps.
    warp_rows : int
        Queries of a warp, a multiple of 16.
    keys : int
        Keys that the block visits at a time.
    depth, columns : int
        Elements of a key and of a value, rounded up to whole swizzled lines.
    """

    warps: int
    warp_rows: int
    keys: int
    depth: int
    columns: int

    @property
    def rows(self) -> int:
        """Queries of the block."""
        return self.warps * self.warp_rows

    @property
    def threads(self) -> int:
        """Threads of the block."""
        return self.warps * COSTS.warp

    @property
    def registers(self) -> int:
        """An estimate of the registers of a thread."""
        sums = self.warp_rows * (self.keys + self.columns) // COSTS.warp
        queries = self.warp_rows * self.depth // (2 * COSTS.warp)
        fragments = max(self.keys, self.columns) // 4
        return sums + queries + fragments + 40

    @property
    def query_bytes(self) -> int:
        """Shared memory of the queries."""
        return self.rows * self.depth * _BYTES

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a tile of keys and values."""
        return self.keys * (self.depth + self.columns) * _BYTES

    @property
    def shared_bytes(self) -> int:
        """All shared memory."""
        return self.query_bytes + 2 * self.stage_bytes


def choose_tensor_attention(
    attention: AttentionFunction, gpu: GPUInfo
) -> TensorAttentionTile | None:
    """The most queries that occupy the GPU, else 16; None if it is not one of tensor cores.

    They take queries, keys and values of float16, or of bfloat16, that fit into shared memory.
    """
    factors = (attention.query, attention.key, attention.value)
    dtypes = {factor_dtype(factor) for factor in factors}
    depth, columns = constant(attention.depth), constant(attention.columns)
    if not gpu.has_tensor_cores or len(dtypes) != 1 or None in dtypes:
        return None
    if depth is None or columns is None or min(depth, columns) < 1:
        return None
    depth, columns = _whole_lines(depth, 16), _whole_lines(columns, 32)
    keys = 64 if max(depth, columns) <= 64 else 32
    fitting = [
        tile
        for rows in _ROWS
        if (tile := TensorAttentionTile(*rows, keys, depth, columns)).shared_bytes
        <= gpu.shared_bytes
        and (tile.warp_rows == STEP or tile.registers <= _MOST_REGISTERS)
    ]
    batches, m = assumed_size(attention.batches), assumed_size(attention.m)
    for tile in fitting:
        rows = -(-m // tile.rows)
        if rows * tile.rows <= 1.5 * m and batches * rows >= gpu.multiprocessors:
            return tile
    return fitting[-1] if fitting else None


def _whole_lines(extent: int, least: int) -> int:
    """An extent rounded up, so that a swizzled line of it is whole."""
    while least < min(extent, 64):
        least *= 2
    return -(-extent // least) * least


def write_tensor_attention(
    attention: AttentionFunction, tile: TensorAttentionTile, views: Views, block: tirx.Expr
) -> None:
    """Emit the body of a block: the queries with the number ``block``, counted over the batch."""
    batch, first = attention.place(block, tile.rows)
    with T.launch_thread("threadIdx.x", tile.threads) as thread:
        _ThreadPart(attention, tile, views, batch, first, thread).write()


class _ThreadPart:
    """One thread's part of a block."""

    def __init__(
        self,
        attention: AttentionFunction,
        tile: TensorAttentionTile,
        views: Views,
        batch: Sequence[tirx.Expr],
        first: tirx.Expr,
        thread: tirx.Expr,
    ):
        self.attention, self.tile, self.views, self.batch = attention, tile, views, batch
        self.thread, self.lane = thread, thread % COSTS.warp
        self.row = thread // COSTS.warp * tile.warp_rows
        self.blocks = tile.warp_rows // STEP
        self.first = T.bind(first + i64(self.row))
        self.tiles = T.bind(attention.tiles(first, tile.rows, tile.keys))
        dtype = factor_dtype(attention.query)
        assert dtype is not None, "checked by the choice of the tile"
        self.core = TensorCore(MATRIX_TYPES[dtype], tile.shared_bytes)
        query, key, value = attention.query, attention.key, attention.value
        self.query = Factor.of(
            query,
            SharedTile(tile.rows, tile.depth, query.rows_first, True),
            0,
            tile.threads,
            views,
            [*batch, first],
        )
        begin = tile.query_bytes
        shared = SharedTile(tile.keys, tile.depth, key.rows_first, False)
        self.key = Factor.of(key, shared, begin, tile.threads, views, [*batch, i64(0)])
        shared = SharedTile(tile.columns, tile.keys, value.rows_first, False)
        begin += tile.keys * tile.depth * _BYTES
        self.value = Factor.of(value, shared, begin, tile.threads, views, [*batch, i64(0)])
        count = self.blocks * tile.depth // STEP * 4
        self.queries = T.alloc_buffer((count,), "uint32", scope="local")
        self.scores = registers(tile.warp_rows * tile.keys // COSTS.warp)
        self.output = registers(tile.warp_rows * tile.columns // COSTS.warp)
        self.maximum, self.total = (registers(2 * self.blocks) for _ in range(2))

    def write(self) -> None:
        """Emit the whole part."""
        tile, core = self.tile, self.core
        fill(self.output, 0.0)
        fill(self.total, 0.0)
        fill(self.maximum, float("-inf"))
        self._begin()
        tiles = self.tiles
        with T.serial(i64(0), tiles) as number:
            used = T.bind((number % i64(2)).astype("int32") * tile.stage_bytes)
            filled = T.bind(tile.stage_bytes - used)
            following = number + i64(1)
            core.wait(0)
            sync()
            with when(following < tiles):
                self._fetch(following * i64(tile.keys), filled)
            core.commit()
            self._multiply_keys(used)
            self._weigh(T.bind(number * i64(tile.keys)))
            self._multiply_values(used)
            if self.key.is_gathered or self.value.is_gathered:
                with when(following < tiles):
                    self._keep(filled)
        self._finish()

    def _begin(self) -> None:
        """Load the queries to registers, and begin to copy the first tile of keys and values."""
        core, start = self.core, tirx.const(0, "int32")
        self.query.fetch(core, self.thread, i64(0), start)
        core.commit()
        self._fetch(i64(0), start)
        self.query.keep(core, self.thread, start)
        self._keep(start)
        core.commit()
        core.wait(1)
        sync()
        fragment = T.alloc_buffer((4 * self.blocks,), "uint32", scope="local")
        for k in range(0, self.tile.depth, STEP):
            self.query.load(core, fragment, self.lane, self.row, k, start)
            for r in range(4 * self.blocks):
                T.buffer_store(self.queries, fragment[r], [k // STEP * 4 * self.blocks + r])

    def _fetch(self, first: tirx.Expr, stage: tirx.Expr) -> None:
        self.key.start = [*self.batch, first]
        self.key.fetch(self.core, self.thread, i64(0), stage)
        self.value.fetch(self.core, self.thread, first, stage)

    def _keep(self, stage: tirx.Expr) -> None:
        for factor in (self.key, self.value):
            factor.keep(self.core, self.thread, stage)

    def _multiply_keys(self, stage: tirx.Expr) -> None:
        tile, core = self.tile, self.core
        fill(self.scores, 0.0)
        right = T.alloc_buffer((tile.keys // 4,), "uint32", scope="local")
        for k in range(0, tile.depth, STEP):
            self.key.load(core, right, self.lane, 0, k, stage)
            first = k // STEP * 4 * self.blocks
            rows = [self.queries[first + r] for r in range(4 * self.blocks)]
            self._multiply(self.scores, rows, right, tile.keys)

    def _multiply_values(self, stage: tirx.Expr) -> None:
        tile, core = self.tile, self.core
        right = T.alloc_buffer((tile.columns // 4,), "uint32", scope="local")
        left = T.alloc_buffer((4 * self.blocks,), "uint32", scope="local")
        for k in range(0, tile.keys, STEP):
            for r in range(4 * self.blocks):
                # Rows of the upper, the lower half; then the next eight columns.
                e = self._first(r // 4, k // ELEMENTS, tile.keys) + r % 4 // 2 * 4 + r % 2 * 2
                T.buffer_store(left, core.pack(self.scores[e], self.scores[e + 1]), [r])
            self.value.load(core, right, self.lane, 0, k, stage)
            rows = [left[r] for r in range(4 * self.blocks)]
            self._multiply(self.output, rows, right, tile.columns)

    def _multiply(
        self, sums: tirx.Buffer, rows: list[tirx.Expr], right: tirx.Buffer, columns: int
    ) -> None:
        """Add the products of all rows of the warp with a fragment of the right factor."""
        for j in range(columns // ELEMENTS):
            both = [right[2 * j], right[2 * j + 1]]
            for i in range(self.blocks):
                first = self._first(i, j, columns)
                self.core.multiply(sums, first, rows[4 * i : 4 * i + 4], both)

    def _first(self, block: int, number: int, columns: int) -> int:
        """The first sum of a product of 16 x 8."""
        return (block * (columns // ELEMENTS) + number) * 4

    def _own(self, half: int, columns: int) -> list[int]:
        """The lane's sums in one of its rows, of which each 16 rows have two."""
        first = self._first(half // 2, 0, columns) + half % 2 * 2
        return [first + 4 * j + e for j in range(columns // ELEMENTS) for e in range(2)]

    def _weigh(self, first: tirx.Expr) -> None:
        """Turn scores into weights; rescale what was summed up with an earlier maximum."""
        self._logits(first)
        for half in range(2 * self.blocks):
            own = self._own(half, self.tile.keys)
            higher = registers(1)
            T.buffer_store(higher, self.maximum[half], [0])
            for e in own:
                T.buffer_store(higher, tirx.max(higher[0], self.scores[e]), [0])
            self._over_quad(higher, 0, tirx.max)
            # While all logits are -inf, any other reference avoids the difference of infinities.
            nothing = tirx.EQ(higher[0], tirx.const(float("-inf"), _FLOAT))
            reference, rescaling = registers(1), registers(1)
            zero = tirx.const(0, _FLOAT)
            T.buffer_store(reference, tirx.Select(nothing, zero, higher[0]), [0])
            T.buffer_store(rescaling, self._powers(reference[0], [self.maximum[half]])[0], [0])
            T.buffer_store(self.maximum, higher[0], [half])
            T.buffer_store(self.total, self.total[half] * rescaling[0], [half])
            weights = self._powers(reference[0], [self.scores[e] for e in own])
            for e, weight in zip(own, weights, strict=True):
                T.buffer_store(self.scores, weight, [e])
                T.buffer_store(self.total, self.total[half] + self.scores[e], [half])
            for e in self._own(half, self.tile.columns):
                T.buffer_store(self.output, self.output[e] * rescaling[0], [e])

    def _powers(self, reference: tirx.Expr, values: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        """Exponentials of some values of logits less a reference, times the factor of the logit."""
        factor = self.attention.logit.factor * math.log2(math.e)
        scale = tirx.const(factor, _FLOAT)
        if factor > 1:  # products by it may overflow
            return [self.core.exp2((value - reference) * scale) for value in values]
        scaled = registers(1)
        T.buffer_store(scaled, reference * scale, [0])
        return [self.core.exp2(value * scale - scaled[0]) for value in values]

    def _logits(self, first: tirx.Expr) -> None:
        """Replace the scores by the values of logits, -inf where a key does not exist."""
        attention, keys = self.attention, self.tile.keys
        logit, whole = attention.logit, []
        if not divides(keys, attention.n):
            whole.append(first + i64(keys) <= i64(attention.n))
        if logit.ahead is not None:
            whole.append(first + i64(keys - 1) <= self.first + i64(logit.ahead))
        if not logit.visible.same_as(logit.score):
            with when(*whole):
                self._store_logits(first, hides=False)
        if whole:
            with when(tirx.Not(tirx.all(*whole))):
                self._store_logits(first, hides=True)

    def _store_logits(self, first: tirx.Expr, hides: bool) -> None:
        lanes = logit_lanes(self.attention, 2)
        for half in range(2 * self.blocks):
            row = self.first + i64(self.lane // _QUAD + 8 * half)
            row = row_that_exists(self.attention, self.tile.rows, row)
            own = self._own(half, self.tile.keys)
            for place in range(0, len(own), lanes.vector):
                column = ELEMENTS * (place // 2) + place % 2
                column = T.bind(first + i64(self.lane % _QUAD * 2) + i64(column))
                at = own[place : place + lanes.vector]
                where = [*self.batch, row, column]
                keys = self.tile.keys if hides else None
                store_logits(self.attention, lanes, self.views, where, self.scores, at, keys)

    def _over_quad(
        self,
        values: tirx.Buffer,
        place: int,
        combine: Callable[[tirx.Expr, tirx.Expr], tirx.Expr],
    ) -> None:
        """Combine values of the lanes that share a row; all of them get the result."""
        other = registers(1)
        for mask in (1, 2):
            T.buffer_store(other, self.core.exchange(values[place], mask), [0])
            T.buffer_store(values, combine(values[place], other[0]), [place])

    def _finish(self) -> None:
        """Divide by the sums of the weights; store."""
        results = self.attention.results
        for half in range(2 * self.blocks):
            self._over_quad(self.total, half, lambda a, b: a + b)
            T.buffer_store(self.total, tirx.const(1, _FLOAT) / self.total[half], [half])
        rows_exist = divides(self.tile.rows, results.m)
        for i in range(self.blocks):
            span = self._first(i, 0, self.tile.columns), self._first(i + 1, 0, self.tile.columns)
            sums = [self.output[e] * self.total[2 * i + e // 2 % 2] for e in range(*span)]
            place = self.batch, self.first + i64(STEP * i), i64(0)
            store_products(self.core, self.lane, results, self.views, *place, sums, rows_exist)
