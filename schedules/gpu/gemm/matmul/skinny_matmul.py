# SPDX-License-Identifier: Apache-2.0
"""Kernels of products with few rows on the left, where the right factor is read once.

Where neighbours of the right factor lie along the reduced axis, neighbouring lanes sum neighbouring
parts of one column, which are added at the end; where they lie along the columns, each lane has
separate columns, and the rows of threads share the reduced axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import constant, unravel
from schedules.tir.index_math import ceildiv, i64, simplified
from schedules.tir.statements import when

from ...core.intrinsics import shuffle_xor, sync
from ...core.kernel_function import unless_empty, write_kernels
from ...core.machine import GPUInfo
from ...pointwise.coalescing import Lanes, classify
from ...pointwise.point_kernel import PointWriter, Views
from ..implicit_gemm import Index
from .factor_tiles import operand_lanes
from .matmul_pattern import MatmulFunction, Operand
from .tiled_matmul import epilogue_lanes, store_results

MOST_ROWS = 8
_UNROLL = 4
_WIDTH = 4
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class RowsConfig:
    """Partition of some columns of all rows among the threads of a block.

    Parameters
    ----------
    along_depth : bool
        Whether lanes are neighbours along the reduced axis, not along the columns.
    vector : int
        Elements of the right factor that a lane loads at once.
    lanes : int
        Lanes that share a column, or that have neighbouring columns.
    parts : int
        Columns of a block, or threads that share the reduced axis.
    """

    along_depth: bool
    vector: int
    lanes: int
    parts: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.parts

    @property
    def columns(self) -> int:
        """Columns that a block computes."""
        return self.parts if self.along_depth else self.lanes * self.vector


def choose_rows(
    along_depth: bool,
    vector: int,
    rows: int,
    columns: int | None,
    depth: int | None,
    itemsize: int,
    gpu: GPUInfo,
) -> RowsConfig:
    """Blocks of at most 256 threads; fewer columns a block where there are few of them.

    Parameters
    ----------
    along_depth : bool
        Whether neighbours of the right factor lie along the reduced axis.
    vector : int
        Neighbours that a lane may load at once.
    rows, columns, depth : int or None
        Extents of the product; None where symbolic.
    itemsize : int
        Bytes of a sum.
    gpu : GPUInfo
        The GPU.
    """
    threads = gpu.block_threads(256)
    if along_depth:
        lanes = min(32, threads)
        while depth is not None and lanes > 4 and lanes * vector >= 2 * depth:
            lanes //= 2
        sharing = columns or gpu.multiprocessors
        busy = 128 * gpu.multiprocessors
        while lanes < threads and sharing * lanes < busy and (depth or 0) >= 8 * lanes * vector:
            lanes *= 2
        return RowsConfig(True, vector, lanes, min(threads // lanes, max(1, 128 // lanes)))
    lanes = 32 // vector
    while columns is not None and lanes > 2 and columns < gpu.multiprocessors * lanes * vector:
        lanes //= 2
    state = rows * vector * itemsize  # bytes of a thread's sums
    while threads > lanes and threads * state > gpu.shared_bytes:
        threads //= 2
    return RowsConfig(False, vector, lanes, threads // lanes)


def all_rows_configs(
    along_depth: bool, vector: int, rows: int, itemsize: int, gpu: GPUInfo
) -> Iterator[RowsConfig]:
    """All partitions of 64 to 256 threads, with whole or smaller vectors."""
    for width, lanes, parts in product((1, 2, 4), _POWERS, _POWERS):
        config = RowsConfig(along_depth, width, lanes, parts)
        scratch = 0 if along_depth else config.threads * rows * width * itemsize
        if (
            vector % width == 0
            and 64 <= config.threads <= gpu.block_threads(256)
            and scratch <= gpu.shared_bytes
            and (lanes > 2 or not along_depth)
        ):
            yield config


def scratch_place(config: RowsConfig, size: int, thread: Index, e: int) -> Index:
    """Place of one of the ``size`` sums of a thread in the shared memory where parts meet.

    Neighbouring threads have neighbouring vectors of up to four sums, which lie in different banks.
    """
    vector = math.gcd(size, _WIDTH)
    return thread * vector + (e // vector * vector * config.threads + e % vector)


def write_rows_kernel(
    func: tirx.PrimFunc, matmul: MatmulFunction, config: RowsConfig, gpu: GPUInfo
) -> tirx.PrimFunc:
    """Write the kernel of a product of few rows."""
    blocks = simplified(i64(matmul.batches) * ceildiv(matmul.n, config.columns))

    def body() -> None:
        with unless_empty(blocks), T.launch_thread("blockIdx.x", blocks) as block:
            write_rows(matmul, config, gpu, Views.declare(func, gpu), block)

    return write_kernels(func, body)


def write_rows(
    matmul: MatmulFunction, config: RowsConfig, gpu: GPUInfo, views: Views, block: tirx.Expr
) -> None:
    """Emit the body of a block: all rows of the columns with the number ``block``."""
    tiles = ceildiv(matmul.n, config.columns)
    *batch, tile = (T.bind(s) for s in unravel(block, [*matmul.batch, tiles], is_natural=True))
    with T.launch_thread("threadIdx.x", i64(config.threads)) as thread:
        first = T.bind(tile * i64(config.columns))
        body = _AlongDepth if config.along_depth else _AlongColumns
        body(matmul, config, gpu, views, batch, first, thread).write()


class _RowsKernel:
    """Common part of both kernels: the sums, and the step that adds to them."""

    def __init__(
        self,
        matmul: MatmulFunction,
        config: RowsConfig,
        gpu: GPUInfo,
        views: Views,
        batch: Sequence[tirx.Expr],
        first: tirx.Expr,
        thread: tirx.Expr,
    ):
        self.matmul, self.config, self.gpu, self.views = matmul, config, gpu, views
        self.batch, self.first = batch, first
        self.part = T.bind(thread // i64(config.lanes))
        self.lane = T.bind(thread % i64(config.lanes))
        rows = constant(matmul.m)
        assert rows is not None, "a known number of rows"
        self.rows = rows
        self.each = 1 if config.along_depth else config.vector
        size = rows * self.each
        self.sums = T.alloc_buffer((size,), matmul.dtype, scope="local")
        for e in range(size):
            T.buffer_store(self.sums, tirx.const(0, matmul.dtype), [e])
        self.right = operand_lanes(matmul.right, config.vector)
        width = config.vector if config.along_depth else 1
        left = operand_lanes(matmul.left, width)
        crosses = matmul.left.rows_first and width > 1  # its vectors run along the rows
        self.left = left if left.vector == width and not crosses else None

    def over(self, start: tirx.Expr, stride: int) -> None:
        """Add every product from ``start`` on, ``stride`` apart, several loads at a time."""
        depth = constant(self.matmul.k)
        step = stride * _UNROLL
        if depth is not None and depth >= step:
            with T.serial(i64(0), i64(depth // step)) as turn:
                at = T.bind(turn * i64(step) + start)
                self._add([at + i64(u * stride) for u in range(_UNROLL)])
        done = 0 if depth is None else depth // step * step
        rest = ceildiv(self.matmul.k, stride) - i64(done // stride)
        if depth is None or done < depth:
            with T.serial(i64(0), rest) as turn:
                at = T.bind(turn * i64(stride) + start + i64(done))
                with when(at < i64(self.matmul.k)):
                    self._add([at])

    def _add(self, places: Sequence[tirx.Expr]) -> None:
        loaded = [self._column_values(at) for at in places]
        for at, values in zip(places, loaded, strict=True):
            for row in range(self.rows):
                factors = self._row_values(row, at)
                for k, value in enumerate(values):
                    e = row * self.each + (0 if self.config.along_depth else k)
                    factor = factors[k] if self.config.along_depth else factors[0]
                    T.buffer_store(self.sums, self.sums[e] + factor * value, [e])

    def _column_values(self, at: tirx.Expr) -> list[tirx.Expr]:
        raise NotImplementedError

    def _row_values(self, row: int, at: tirx.Expr) -> list[tirx.Expr]:
        """Factors of a row, as many as there are neighbours along the reduced axis."""
        count = self.config.vector if self.config.along_depth else 1
        operand = self.matmul.left
        if self.left is not None:
            return self._values(self.left, operand, i64(row), at, count)
        single = operand_lanes(operand, 1)
        return [self._values(single, operand, i64(row), at + i64(k), 1)[0] for k in range(count)]

    def _values(
        self, lanes: Lanes, operand: Operand, row: tirx.Expr, at: tirx.Expr, count: int
    ) -> list[tirx.Expr]:
        """Load neighbours of a factor to registers."""
        places = []
        for k in range(count):
            if operand.rows_first:
                places.append([*self.batch, at, row + i64(k)])
            else:
                places.append([*self.batch, row, at + i64(k)])
        writer = PointWriter(lanes, self.views, places)
        writer.steps()
        register = T.alloc_buffer((count,), self.matmul.dtype, scope="local")
        for k in range(count):
            T.buffer_store(register, writer.value(operand.value, k), [k])
        return [register[k] for k in range(count)]


class _AlongDepth(_RowsKernel):
    """Lanes share a column."""

    def write(self) -> None:
        config = self.config
        column = self.column = T.bind(tirx.min(self.first + self.part, i64(self.matmul.n) - i64(1)))
        self.over(self.lane * i64(config.vector), config.lanes * config.vector)
        totals = [self._over_lanes(row) for row in range(self.rows)]
        lanes = classify(self.matmul.epilogue, 1, [self.matmul.accumulator])
        with when(self.lane < i64(1), self.first + self.part < i64(self.matmul.n)):
            for row, total in enumerate(totals):
                place = (self.matmul, lanes, self.views, self.batch, i64(row), column)
                store_results(*place, [total], row_exists=True)

    def _column_values(self, at: tirx.Expr) -> list[tirx.Expr]:
        return self._values(self.right, self.matmul.right, self.column, at, self.config.vector)

    def _over_lanes(self, row: int) -> tirx.Expr:
        """The sum over the lanes, in the first of them."""
        lanes, dtype = self.config.lanes, self.matmul.dtype
        total = T.alloc_buffer((1,), dtype, scope="local")
        T.buffer_store(total, self.sums[row], [0])
        if self.gpu.warp_size >= lanes and dtype in ("float32", "int32", "float64"):
            width = lanes // 2
            while width:
                T.buffer_store(total, total[0] + shuffle_xor(total[0], width, lanes), [0])
                width //= 2
            return total[0]
        scratch = T.alloc_buffer((self.config.threads,), dtype, scope="shared")
        at = self.part * i64(lanes) + self.lane
        width = lanes // 2
        while width:
            sync()
            T.buffer_store(scratch, total[0], [at])
            sync()
            T.buffer_store(total, total[0] + scratch[at ^ i64(width)], [0])
            width //= 2
        return total[0]


class _AlongColumns(_RowsKernel):
    """Each lane has neighbouring columns; the parts of the block share the reduced axis."""

    def write(self) -> None:
        config, matmul = self.config, self.matmul
        own = T.bind(self.first + self.lane * i64(config.vector))
        last = (ceildiv(matmul.n, config.vector) - i64(1)) * i64(config.vector)
        self.column = T.bind(tirx.min(own, last))
        self.over(self.part, config.parts)
        size = self.rows * config.vector
        scratch = T.alloc_buffer((config.threads * size,), matmul.dtype, scope="shared")
        half = config.parts // 2
        while half:
            sync()
            own_thread = self.part * i64(config.lanes) + self.lane
            other = T.bind((self.part ^ i64(half)) * i64(config.lanes) + self.lane)
            for e in range(size):
                T.buffer_store(scratch, self.sums[e], [scratch_place(config, size, own_thread, e)])
            sync()
            for e in range(size):
                more = scratch[scratch_place(config, size, other, e)]
                T.buffer_store(self.sums, self.sums[e] + more, [e])
            half //= 2
        lanes = epilogue_lanes(matmul)
        if lanes.vector > config.vector:
            lanes = classify(matmul.epilogue, 1, [matmul.accumulator])
        with when(self.part < i64(1), own < i64(matmul.n)):
            for row in range(self.rows):
                sums = [self.sums[row * config.vector + k] for k in range(config.vector)]
                place = (matmul, lanes, self.views, self.batch, i64(row), own)
                store_results(*place, sums, row_exists=True)

    def _column_values(self, at: tirx.Expr) -> list[tirx.Expr]:
        return self._values(self.right, self.matmul.right, self.column, at, self.config.vector)
