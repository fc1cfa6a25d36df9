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

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import constant
from schedules.tir.index_math import i64
from schedules.tir.statements import when

from ..core.intrinsics import sync
from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.tensor_core import MATRIX_TYPES, TensorCore
from ..gemm.matmul.matmul_tile_sizes import assumed_size
from ..gemm.matmul.tensor_core_matmul import Factor
from ..gemm.matmul.tensor_core_tile import ELEMENTS, STEP, SharedTile, factor_dtype
from ..pointwise.point_kernel import Views
from .attention_pattern import AttentionFunction
from .score_registers import RowSoftmax, fill

_ROWS = ((4, 32), (4, 16), (2, 16), (1, 16))  # warps of a block, queries of a warp
_MOST_REGISTERS = 232  # Registers of the 255 that a thread may have.
_BYTES = 2  # Bytes of an element of a factor.


@dataclass(frozen=True)
class TensorAttentionTile:
    """Partition of some queries among the warps of a block."""

    warps: int
    warp_rows: int  # Queries of a warp, a multiple of 16.
    keys: int  # Keys that the block visits at a time.
    depth: int
    columns: int
    """``depth`` and ``columns``: elements of a key and of a value, rounded up to whole swizzled
    lines."""

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


class _ThreadPart(RowSoftmax):
    """One thread's part of a block."""

    tile: TensorAttentionTile

    def __init__(
        self,
        attention: AttentionFunction,
        tile: TensorAttentionTile,
        views: Views,
        batch: Sequence[tirx.Expr],
        first: tirx.Expr,
        thread: tirx.Expr,
    ):
        self.row, self.thread = thread // COSTS.warp * tile.warp_rows, thread
        own = T.bind(first + i64(self.row))
        dtype = factor_dtype(attention.query)
        assert dtype is not None, "checked by the choice of the tile"
        core = TensorCore(MATRIX_TYPES[dtype], tile.shared_bytes)
        super().__init__(core, attention, tile, views, [*batch, own], thread % COSTS.warp)
        self.core = core
        self.tiles = T.bind(attention.tiles(first, tile.rows, tile.keys))
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

    def write(self) -> None:
        """Emit the whole part."""
        tile, core = self.tile, self.core
        self.begin()
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
            self.weigh(T.bind(number * i64(tile.keys)))
            self.rescale()
            self._multiply_values(used)
            if self.key.is_gathered or self.value.is_gathered:
                with when(following < tiles):
                    self._keep(filled)
        self.finish()

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
            self.pack(k, left, 0)
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
                first = self.place(i, j, columns)
                self.core.multiply(sums, first, rows[4 * i : 4 * i + 4], both)
