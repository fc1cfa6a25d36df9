# SPDX-License-Identifier: Apache-2.0
"""Kernel of a matrix product by tiles in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.branch import when
from schedules.tir.index_math import ceildiv, i64
from schedules.workload.reduce import unravel

from ..core.intrinsics import sync
from ..pointwise.coalescing import Lanes, classify
from ..pointwise.point_kernel import PointWriter, Views
from .implicit_gemm import Index
from .matmul_pattern import MatmulFunction, Operand, divides
from .matmul_tile_sizes import TileConfig
from .shared_memory_pipeline import run_steps

_WIDTH = 4  # elements of an access to shared memory
_SKEW = 4  # elements by which a row in shared memory is longer than the tile


@dataclass(frozen=True)
class _FactorTiles:
    """A factor's tiles: one in use, one being loaded, for each group of threads.

    Parameters
    ----------
    operand : Operand
        The factor.
    lanes : Lanes
        Width of its loads.
    rows : int
        Rows of a tile.
    config : TileConfig
        Sizes.
    shared : tuple[tirx.Buffer, tirx.Buffer]
        Each ``[groups, depth, rows + skew]``, as one row.
    staged : tirx.Buffer
        Registers for the thread's loads of the next tile.
    """

    operand: Operand
    lanes: Lanes
    rows: int
    config: TileConfig
    shared: tuple[tirx.Buffer, tirx.Buffer]
    staged: tirx.Buffer

    @classmethod
    def allocate(cls, operand: Operand, rows: int, config: TileConfig, dtype: str) -> _FactorTiles:
        pitch, depth = rows + _SKEW, config.depth
        size = config.groups * depth * pitch
        shared = tuple(T.alloc_buffer((size,), dtype, scope="shared") for _ in range(2))
        staged = T.alloc_buffer((rows * depth // config.group_threads,), dtype, scope="local")
        lanes = operand_lanes(operand, _WIDTH)
        return cls(operand, lanes, rows, config, (shared[0], shared[1]), staged)

    @property
    def pitch(self) -> int:
        return self.rows + _SKEW

    def start(self, group: tirx.Expr) -> tirx.Expr:
        """Begin of a group's tile in shared memory."""
        return group * i64(self.config.depth * self.pitch)

    def place(self, number: int, thread: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Row and depth in the tile of a thread's vector."""
        index, vector = thread + i64(number * self.config.group_threads), self.lanes.vector
        if self.operand.rows_first:
            per_line = i64(self.rows // vector)
            return index % per_line * i64(vector), index // per_line
        per_row = i64(self.config.depth // vector)
        return index // per_row, index % per_row * i64(vector)

    @property
    def count(self) -> int:
        """Vectors that a thread loads."""
        return self.rows * self.config.depth // self.lanes.vector // self.config.group_threads

    def load(
        self,
        views: Views,
        batch: Sequence[tirx.Expr],
        first_row: tirx.Expr,
        first_depth: tirx.Expr,
        thread: tirx.Expr,
    ) -> None:
        """Load a thread's part of a tile to registers; zero past the end."""
        rows, depth = self.operand.space.extents[-2:]
        vector = self.lanes.vector
        for number in range(self.count):
            row, inner = self.place(number, thread)
            row, inner = T.bind(first_row + row), T.bind(first_depth + inner)
            whole = self.config.depth * self.config.groups
            inside = [
                None if divides(self.rows, rows) else row < i64(rows),
                None if divides(whole, depth) else inner < i64(depth),
            ]
            if any(condition is not None for condition in inside):
                for k in range(vector):
                    zero = tirx.const(0, self.staged.dtype)
                    T.buffer_store(self.staged, zero, [number * vector + k])
            with when(*inside):
                places = []
                for k in range(vector):
                    at = (row + i64(k), inner) if self.operand.rows_first else (row, inner + i64(k))
                    places.append([*batch, *(at[::-1] if self.operand.rows_first else at)])
                writer = PointWriter(self.lanes, views, places)
                writer.steps()
                for k in range(vector):
                    value = writer.value(self.operand.value, k)
                    T.buffer_store(self.staged, value, [number * vector + k])

    def keep(self, stage: int, group: tirx.Expr, thread: tirx.Expr) -> None:
        """Store the loaded elements to shared memory, neighbouring rows beside each other."""
        vector = self.lanes.vector
        for number in range(self.count):
            row, inner = self.place(number, thread)
            at = T.bind(self.start(group) + inner * i64(self.pitch) + row)
            if self.operand.rows_first and vector > 1:
                with T.vectorized(0, vector) as k:
                    value = self.staged[k + number * vector]
                    T.buffer_store(self.shared[stage], value, [at + k.astype("int64")])
                continue
            for k in range(vector):
                value = self.staged[number * vector + k]
                T.buffer_store(self.shared[stage], value, [at + i64(k * self.pitch)])

    def fetch(self, stage: int, registers: tirx.Buffer, start: tirx.Expr, unit: tirx.Expr) -> None:
        """Load a thread's rows of one line, a chunk of four after the other."""
        chunks = int(registers.shape[0]) // _WIDTH
        for chunk in range(chunks):
            at = start + i64(chunk * (self.rows // chunks)) + unit * i64(_WIDTH)
            with T.vectorized(0, _WIDTH) as k:
                value = self.shared[stage][at + k.astype("int64")]
                T.buffer_store(registers, value, [k + chunk * _WIDTH])


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
        self.left = _FactorTiles.allocate(matmul.left, config.rows, config, matmul.dtype)
        self.right = _FactorTiles.allocate(matmul.right, config.columns, config, matmul.dtype)
        size = config.thread_rows * config.thread_columns
        self.sums = T.alloc_buffer((size,), matmul.dtype, scope="local")
        self.rows = T.alloc_buffer((config.thread_rows,), matmul.dtype, scope="local")
        self.columns = T.alloc_buffer((config.thread_columns,), matmul.dtype, scope="local")

    def write(self) -> None:
        zero = tirx.const(0, self.matmul.dtype)
        with T.unroll(0, int(self.sums.shape[0])) as e:
            T.buffer_store(self.sums, zero, [e])
        tiles = ceildiv(self.matmul.k, self.config.depth * self.config.groups)
        run_steps([self], i64(0), tiles, lambda _, half: self._multiply(half))
        if self.config.groups > 1:
            self._sum_groups()
        with when(self.group < i64(1) if self.config.groups > 1 else None):
            self._finish()

    def fetch(self, tile: Index) -> None:
        """Load both factors' tiles with a number to registers."""
        depth = T.bind((tile * i64(self.config.groups) + self.group) * i64(self.config.depth))
        self.left.load(self.views, self.batch, self.row, depth, self.thread)
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

    def _finish(self) -> None:
        """Store the results, four neighbours at a time."""
        config = self.config
        lanes = epilogue_lanes(self.matmul)
        row_chunks, column_chunks = config.thread_rows // _WIDTH, config.thread_columns // _WIDTH
        for i in range(config.thread_rows):
            inner = i64(i // _WIDTH * (config.rows // row_chunks) + i % _WIDTH)
            row = T.bind(self.row + inner + self.unit_row * i64(_WIDTH))
            for chunk in range(column_chunks):
                first = i64(chunk * (config.columns // column_chunks))
                column = T.bind(self.column + first + self.unit_column * i64(_WIDTH))
                sums = [
                    self.sums[i * config.thread_columns + chunk * _WIDTH + k] for k in range(_WIDTH)
                ]
                store_results(
                    self.matmul,
                    lanes,
                    self.views,
                    self.batch,
                    row,
                    column,
                    sums,
                    divides(config.rows, self.matmul.m),
                )


def store_results(
    matmul: MatmulFunction,
    lanes: Lanes,
    views: Views,
    batch: Sequence[tirx.Expr],
    row: tirx.Expr,
    column: tirx.Expr,
    sums: Sequence[tirx.Expr],
    row_exists: bool,
) -> None:
    """Emit the epilogue of neighbouring results of one row, as far as they exist."""
    for start in range(0, len(sums), lanes.vector):
        first = column + i64(start)
        inside = [None if row_exists else row < i64(matmul.m), first < i64(matmul.n)]
        with when(*inside):
            places = [[*batch, row, first + i64(k)] for k in range(lanes.vector)]
            writer = PointWriter(lanes, views, places)
            writer.give(matmul.accumulator, sums[start : start + lanes.vector])
            writer.write()


def epilogue_lanes(matmul: MatmulFunction, width: int = _WIDTH) -> Lanes:
    """The widest lanes of the epilogue, neighbours of a row, that no row ends within."""
    lanes = classify(matmul.epilogue, width, [matmul.accumulator])
    return lanes if lanes.is_aligned or width == 1 else epilogue_lanes(matmul, width // 2)


def operand_lanes(operand: Operand, width: int) -> Lanes:
    """Lanes of an operand: neighbours in memory, where all reads allow it, else one element."""
    space = operand.along_neighbours
    lanes = classify(space, width)
    if lanes.is_aligned and "each" not in lanes.kinds.values():
        return lanes
    return classify(space, 1)
