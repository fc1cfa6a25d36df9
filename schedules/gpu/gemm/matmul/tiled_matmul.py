# SPDX-License-Identifier: Apache-2.0
"""Kernel of a matrix product by tiles in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.compute.norms import SEGMENT
from schedules.tir.extents import Extent, unravel
from schedules.tir.index_math import ceildiv, i64, simplified
from schedules.tir.statements import when

from ...core.intrinsics import sync
from ...core.kernel_function import resident_blocks, unless_empty, write_kernels
from ...core.machine import GPUInfo
from ...pointwise.coalescing import Lanes, classify
from ...pointwise.iteration_domain import IterationSpace
from ...pointwise.point_kernel import PointWriter, Views
from ..implicit_gemm import Index
from ..shared_memory_pipeline import run_steps
from .factor_tiles import WIDTH, FactorTiles
from .matmul_pattern import MatmulFunction, divides
from .matmul_tile_sizes import TileConfig
from .row_tile import MomentRegisters, RowTile, combine, store_moments


def write_tiles_kernel(
    func: tirx.PrimFunc,
    matmul: MatmulFunction,
    config: TileConfig,
    gpu: GPUInfo,
    least_blocks: int = 0,
) -> tirx.PrimFunc:
    """Write the kernel of a product with tiles of some size; see :func:`resident_blocks`."""
    rows, columns = ceildiv(matmul.m, config.rows), ceildiv(matmul.n, config.columns)
    blocks = simplified(i64(matmul.batches) * rows * columns)

    def body() -> None:
        with (
            unless_empty(blocks),
            T.launch_thread("blockIdx.x", blocks) as block,
            resident_blocks(gpu, least_blocks),
        ):
            write_tiles(matmul, config, Views.declare(func, gpu), block)

    return write_kernels(func, body)


def write_tiles(
    matmul: MatmulFunction, config: TileConfig, params: Views, block: tirx.Expr
) -> None:
    """Emit the body of a block: the tile with the number ``block``.

    While a tile is multiplied, the next one is loaded to registers; between the two steps there is
    one barrier, since shared memory holds two tiles of each factor.
    """
    place = [ceildiv(matmul.m, config.rows), ceildiv(matmul.n, config.columns)]
    *batch, row_tile, column_tile = (
        T.bind(s) for s in unravel(block, [*matmul.batch, *place], is_natural=True)
    )
    with T.launch_thread("threadIdx.x", i64(config.threads)) as thread:
        _ThreadPart(matmul, config, params, batch, row_tile, column_tile, thread).write()


class _ThreadPart:
    """One thread's part of a tile."""

    def __init__(
        self,
        matmul: MatmulFunction,
        config: TileConfig,
        views: Views,
        batch: Sequence[tirx.Expr],
        row_tile: tirx.Expr,
        column_tile: tirx.Expr,
        thread: tirx.Expr,
    ):
        self.matmul, self.config, self.views, self.batch = matmul, config, views, batch
        self.row = T.bind(row_tile * i64(config.rows))
        self.column = T.bind(column_tile * i64(config.columns))
        self.group = T.bind(thread // i64(config.group_threads))
        self.thread = T.bind(thread % i64(config.group_threads))
        across = i64(config.columns // config.thread_columns)
        self.unit_row, self.unit_column = self.thread // across, self.thread % across
        threads, groups = config.group_threads, config.groups
        self.left, self.right = (
            FactorTiles.allocate(
                operand, extent, config.depth, threads, matmul.dtype, groups, stages=2
            )
            for operand, extent in ((matmul.left, config.rows), (matmul.right, config.columns))
        )
        size = config.thread_rows * config.thread_columns
        self.sums = T.alloc_buffer((size,), matmul.dtype, scope="local")
        self.rows = T.alloc_buffer((config.thread_rows,), matmul.dtype, scope="local")
        self.columns = T.alloc_buffer((config.thread_columns,), matmul.dtype, scope="local")
        place = self.row, config.rows, thread, config.threads
        self.row_tile = RowTile.compute(matmul, views, *place)
        self.shifts = self.left.shifts(self.row_tile, self.row, self.thread)

    def write(self) -> None:
        zero = tirx.const(0, self.matmul.dtype)
        with T.unroll(0, int(self.sums.shape[0])) as e:
            T.buffer_store(self.sums, zero, [e])
        tiles = ceildiv(self.matmul.k, self.config.depth * self.config.groups)
        run_steps([self], i64(0), tiles, lambda _, half: self._multiply(half))
        if self.config.groups > 1:
            self._sum_groups()
        if self.matmul.moments is None:
            with self._first_group():
                self._finish(range(self.config.thread_columns // WIDTH))
            return
        for chunk in range(self.config.thread_columns // WIDTH):
            sync()  # shared memory is used again
            with self._first_group():
                self._finish([chunk])
            self._combine_moments(chunk)

    def _first_group(self) -> AbstractContextManager:
        return when(self.group < i64(1) if self.config.groups > 1 else None)

    def fetch(self, tile: Index) -> None:
        """Load both factors' tiles with a number to registers."""
        depth = T.bind((tile * i64(self.config.groups) + self.group) * i64(self.config.depth))
        self.left.load(self.views, self.batch, self.row, depth, self.thread, self.shifts)
        self.right.load(self.views, self.batch, self.column, depth, self.thread)

    def keep(self, half: int) -> None:
        """Store them to a half of the shared memory."""
        self.left.keep(half, self.group, self.thread)
        self.right.keep(half, self.group, self.thread)

    def _multiply(self, stage: int) -> None:
        config, left, right = self.config, self.left, self.right
        left_start, right_start = (T.bind(tile.start(self.group)) for tile in (left, right))
        with T.serial(0, config.depth) as k:
            line = k.astype("int64")
            left.fetch(stage, self.rows, left_start + line * i64(left.pitch), self.unit_row)
            at = right_start + line * i64(right.pitch)
            right.fetch(stage, self.columns, at, self.unit_column)
            with T.unroll(0, config.thread_rows) as i, T.unroll(0, config.thread_columns) as j:
                e = i * config.thread_columns + j
                value = self.sums[e] + self.rows[i] * self.columns[j]
                T.buffer_store(self.sums, value, [e])

    def _sum_groups(self) -> None:
        """Add the sums of the other groups to those of the first, as many as fit at a time."""
        scratch, threads = self.left.shared[0], self.config.group_threads
        size, others = int(self.sums.shape[0]), self.config.groups - 1
        part = size
        while part * others * threads > int(scratch.shape[0]):
            part //= 2
        for first in range(0, size, part):
            sync()
            with when(self.group > i64(0)), T.unroll(0, part) as e:
                at = (self.group - i64(1)) * i64(part * threads) + self.thread
                place = at + e.astype("int64") * i64(threads)
                T.buffer_store(scratch, self.sums[e + first], [place])
            sync()
            with when(self.group < i64(1)):
                for other in range(others):
                    with T.unroll(0, part) as e:
                        at = i64(other * part * threads) + self.thread
                        more = scratch[at + e.astype("int64") * i64(threads)]
                        T.buffer_store(self.sums, self.sums[e + first] + more, [e + first])

    def _finish(self, chunks: Sequence[int]) -> None:
        """Store the results of some chunks of columns, four neighbours at a time."""
        config = self.config
        lanes = epilogue_lanes(self.matmul)
        row_chunks, column_chunks = config.thread_rows // WIDTH, config.thread_columns // WIDTH
        keep = MomentRegisters.allocate(self.matmul)
        for i in range(config.thread_rows):
            inner = i64(i // WIDTH * (config.rows // row_chunks) + i % WIDTH)
            row = T.bind(self.row + inner + self.unit_row * i64(WIDTH))
            for chunk in chunks:
                first = i64(chunk * (config.columns // column_chunks))
                column = T.bind(self.column + first + self.unit_column * i64(WIDTH))
                sums = [
                    self.sums[i * config.thread_columns + chunk * WIDTH + k] for k in range(WIDTH)
                ]
                store_results(
                    self.matmul,
                    lanes,
                    self.views,
                    self.batch,
                    row,
                    column,
                    sums,
                    divides(config.rows, self.matmul.m) or row < i64(self.matmul.m),
                    rows=self.row_tile,
                    then=None if keep is None else keep.take,
                )
                if keep is not None:
                    at = self.unit_column * i64(self.left.pitch) + row - self.row
                    for k in range(2):
                        T.buffer_store(self.left.shared[k], keep.held[k], [at])

    def _combine_moments(self, chunk: int) -> None:
        """Combine the moments of four neighbours, which lie in shared memory, to segments."""
        config, matmul, moments = self.config, self.matmul, self.matmul.moments
        assert moments is not None, "there is something to combine"
        width = config.columns // (config.thread_columns // WIDTH)
        held = T.alloc_buffer((2,), matmul.dtype, scope="local")
        thread = self.group * i64(config.group_threads) + self.thread
        items = config.rows * (width // SEGMENT)
        sync()
        for turn in range(-(-items // config.threads)):
            item = T.bind(thread + i64(turn * config.threads))
            inner, segment = item % i64(config.rows), item // i64(config.rows)
            row = T.bind(self.row + inner)
            column = T.bind(self.column + i64(chunk * width) + segment * i64(SEGMENT))
            exists = None if divides(config.threads, items) else item < i64(items)
            with when(exists, row < i64(matmul.m), column < i64(matmul.n)):
                parts = []
                for quad in range(SEGMENT // WIDTH):
                    line = segment * i64(SEGMENT // WIDTH) + i64(quad)
                    at = line * i64(self.left.pitch) + inner
                    parts.append((self.left.shared[0][at], self.left.shared[1][at]))
                combine(held, parts, WIDTH)
                store_moments(matmul, moments, self.views, row, column, held)


def holds_moments(config: TileConfig) -> bool:
    """Return whether a block with this partition can combine the moments of its results."""
    width = config.columns // (config.thread_columns // WIDTH)
    return width % SEGMENT == 0 and width // WIDTH <= config.depth * config.groups


class Product(Protocol):
    """Facts of a product for its epilogue."""

    @property
    def m(self) -> Extent:
        """Rows."""

    @property
    def n(self) -> Extent:
        """Columns."""

    @property
    def accumulator(self) -> tirx.Var:
        """Stands for an element."""

    @property
    def epilogue(self) -> IterationSpace:
        """Axes: those of the batch, rows, columns; it stores the outputs."""


def store_results(
    matmul: Product,
    lanes: Lanes,
    views: Views,
    batch: Sequence[tirx.Expr],
    row: tirx.Expr,
    column: tirx.Expr,
    sums: Sequence[tirx.Expr],
    row_exists: tirx.Expr | bool,
    rows: RowTile | None = None,
    then: Callable[[PointWriter], None] | None = None,
) -> None:
    """Emit the epilogue of neighbouring results of one row, as far as they exist.

    ``rows`` has the values of a row that the epilogue refers to; ``then`` emits what is done with
    each vector once it is stored.
    """
    for start in range(0, len(sums), lanes.vector):
        first = column + i64(start)
        with when(row_exists, first < i64(matmul.n)):
            places = [[*batch, row, first + i64(k)] for k in range(lanes.vector)]
            writer = PointWriter(lanes, views, places)
            writer.give(matmul.accumulator, sums[start : start + lanes.vector])
            if rows is not None:
                rows.give(writer, row)
            writer.write()
            if then is not None:
                then(writer)


def epilogue_lanes(matmul: Product, width: int = WIDTH) -> Lanes:
    """The widest lanes of the epilogue, neighbours of a row, that no row ends within.

    Narrower ones where all accesses are then vectors, as to blocks of fewer channels.
    """
    halves = [width >> part for part in range(width.bit_length())]
    found = [classify(matmul.epilogue, each, [matmul.accumulator]) for each in halves]
    found = [lanes for lanes in found if lanes.is_aligned] or found[-1:]
    wide = (lanes for lanes in found if "each" not in lanes.kinds.values())
    return next(wide, found[0])
