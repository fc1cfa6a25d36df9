# SPDX-License-Identifier: Apache-2.0
"""Kernel of a matrix product of warpgroups, for sm_90a.

::

    one thread:
        for tile of the block, step:
            wait until the stage is free
            copy 128 bytes of the reduced axis of both factors       # in bulk, zeros past the end
    each warpgroup:
        for tile of the block:
            for step:
                wait until the stage is filled
                sums += products of 64 rows and all columns          # asynchronous
                wait for the products of the step before; free its stage
            exchange sums so that each lane has eight neighbours; epilogue; store
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.tir.extents import Extent, constant, extent_of, unravel
from schedules.tir.index_math import ceildiv, i64, simplified

from ...core.kernel_function import ROLLED, resident_blocks, unless_empty, write_kernels
from ...core.machine import GPUInfo
from ...core.warpgroup import (
    LINE,
    ROWS,
    WARPGROUP,
    FactorLayout,
    Fetch,
    Layout,
    WarpgroupCore,
)
from ...pointwise.point_kernel import Views
from .matmul_pattern import MatmulFunction, Operand, divides
from .tensor_core_matmul import Locate, rows_after, store_products
from .tensor_core_tile import element, rounded_position
from .warpgroup_tile import WarpgroupTile, bulk_source, choose_warpgroup_tile

_BAND = 8  # rows of tiles, of which neighbouring blocks share columns


def warpgroup_function(
    func: tirx.PrimFunc, matmul: MatmulFunction, gpu: GPUInfo
) -> tirx.PrimFunc | None:
    """The scheduled function of a product; None if it is better computed otherwise.

    Parameters
    ----------
    func, matmul : tirx.PrimFunc, MatmulFunction
        The function, and the product that it computes.
    gpu : GPUInfo
        The device.
    """
    tile = choose_warpgroup_tile(matmul, gpu, rounded_position(func, matmul.right))
    return None if tile is None else warpgroup_kernel(func, matmul, tile, gpu)


def warpgroup_kernel(
    func: tirx.PrimFunc, matmul: MatmulFunction, tile: WarpgroupTile, gpu: GPUInfo
) -> tirx.PrimFunc:
    """The scheduled function of a product with a tile."""

    def factors() -> tuple[Factor, Factor]:
        right = Factor(matmul.right, tile.columns, tile.rows * LINE, tile.cluster)
        return Factor(matmul.left, tile.rows, 0), right

    return product_kernel(func, Grid(matmul, tile), factors, gpu, "Matmul (warpgroups)")


def product_kernel(
    func: tirx.PrimFunc,
    grid: Grid,
    factors: Callable[[], tuple[CopiedFactor, CopiedFactor]],
    gpu: GPUInfo,
    rule: str,
) -> tirx.PrimFunc:
    """The scheduled function of a product.

    Parameters
    ----------
    func : tirx.PrimFunc
        The function.
    grid : Grid
        The tiles of its result.
    factors : Callable
        Encodes the maps of both factors.
    gpu : GPUInfo
        The device.
    rule : str
        Name of the rule.
    """
    tile = grid.tile
    blocks = simplified(tirx.min(grid.tiles, i64(gpu.multiprocessors // tile.cluster)))
    threads = tile.warpgroups * WARPGROUP + WarpgroupCore.producers(tile.moves_registers)

    def body() -> None:
        with unless_empty(grid.tiles):
            both = factors()
            with (
                T.launch_thread("blockIdx.x", blocks * i64(tile.cluster)) as block,
                WarpgroupCore.launch_cluster(tile.cluster),
                resident_blocks(gpu, 1),
                T.launch_thread("threadIdx.x", threads) as thread,
            ):
                _write_block(grid, both, Views.declare(func, gpu), block, blocks, thread)

    written = write_kernels(func, body).with_attr(attributes.RULE, rule)
    if not tile.type.is_rounded:
        return written
    return written.with_attr(attributes.ROUNDED, [rounded_position(func, grid.matmul.right)])


class Grid:
    """Tiles of the result in the order in which blocks take them, those of a cluster as one.

    Bands of eight rows of tiles follow each other, each column by column, so that those computed at
    the same time share rows and columns in the second-level cache.
    """

    def __init__(self, matmul: MatmulFunction, tile: WarpgroupTile):
        self.matmul, self.tile = matmul, tile
        self.down = ceildiv(self.row_tiles, tile.cluster)
        self.across = ceildiv(matmul.n, tile.columns)
        self.tiles = simplified(i64(matmul.batches) * self.down * self.across)

    @property
    def row_tiles(self) -> Extent:
        """Tiles below each other."""
        return extent_of(ceildiv(self.matmul.m, self.tile.rows))

    @property
    def depth(self) -> int:
        """Length of the reduced axis as it is copied."""
        return int(constant(self.matmul.k) or 0)

    def start(self, number: tirx.Expr) -> list[tirx.Expr]:
        """First row of a tile."""
        return [T.bind(number * i64(self.tile.rows))]

    def locate(self, start: Sequence[tirx.Expr], first: tirx.Expr) -> Locate:
        """The rows of a tile from one of them on."""
        exist = divides(self.tile.cluster * self.tile.rows, self.matmul.m)
        return rows_after(self.matmul, start[:-1], T.bind(start[-1] + first), exist)

    def place(self, number: tirx.Expr, rank: tirx.Expr) -> tuple[list[tirx.Expr], list[tirx.Expr]]:
        """Starts of rows and of columns, in the batch, of a tile of a block of a cluster."""
        per_batch = i64(self.down) * self.across
        *batch, within = unravel(number, [*self.matmul.batch, per_batch], is_natural=True)
        height, wide = i64(_BAND), i64(self.across) * i64(_BAND)
        band, rest = tirx.truncdiv(within, wide), tirx.truncmod(within, wide)
        if not divides(_BAND, self.down):
            # It is positive, by which alone TVM knows that all that follows is narrow.
            height = T.bind(tirx.max(tirx.min(i64(self.down) - band * height, height), i64(1)))
        row = band * i64(_BAND) + tirx.truncmod(rest, height)
        start = self.start(T.bind(row * i64(self.tile.cluster) + rank))
        column = T.bind(tirx.truncdiv(rest, height) * i64(self.tile.columns))
        batch = [T.bind(each) for each in batch]
        return [*batch, *start], [*batch, column]


class CopiedFactor(Protocol):
    """A factor, and its part of each stage."""

    @property
    def layout(self) -> Layout:
        """Its tile."""

    @property
    def begin(self) -> int:
        """First byte of the tile in a stage."""

    def fetch(
        self,
        core: WarpgroupCore,
        start: Sequence[tirx.Expr],
        depth: tirx.Expr,
        stage: tirx.Expr,
        filled: tirx.Expr,
    ) -> None:
        """Begin to copy the tile at a start to a stage, from a place of the reduced axis on."""


class Factor:
    """One factor: where it lies in memory, and its part of each stage.

    Parameters
    ----------
    operand : Operand
        The factor.
    rows : int
        Of its tile.
    begin : int
        First byte of the tile in a stage.
    parts : int
        As of :class:`.warpgroup.FactorLayout`.
    """

    def __init__(self, operand: Operand, rows: int, begin: int, parts: int = 1):
        itemsize = DataType(element(operand).ty.dtype).bits // 8
        self.layout = FactorLayout(rows, operand.rows_first, parts, itemsize)
        self.begin = begin
        found = bulk_source(operand, self.layout)
        assert found is not None, "a factor that is copied is a tensor"
        self.source, self._axes = found
        self._map = WarpgroupCore.encode(self.source)

    def fetch(
        self,
        core: WarpgroupCore,
        start: Sequence[tirx.Expr],
        depth: tirx.Expr,
        stage: tirx.Expr,
        filled: tirx.Expr,
    ) -> None:
        """Begin to copy the tile at a place of the batch and a first row to a stage."""
        layout, dtype = self.layout, stage.ty.dtype
        for part, first in itertools.product(core.shares(layout), layout.boxes):
            row = i64(part) * i64(layout.rows // layout.parts) + i64(first)
            place = [*start[:-1], start[-1] + row, depth]
            coordinates = [place[axis] for axis in self._axes]
            at = stage + tirx.const(self.begin, dtype) + i64(layout.place(row)).astype(dtype)
            core.copy(self._map, self.source, coordinates, at, filled, layout.parts > 1)


def _write_block(
    grid: Grid,
    factors: tuple[CopiedFactor, CopiedFactor],
    views: Views,
    block: tirx.Expr,
    blocks: tirx.Expr,
    thread: tirx.Expr,
) -> None:
    """Emit the code of a block; its cluster computes every tile that it reaches by ``blocks``."""
    tile, matmul = grid.tile, grid.matmul
    left, right = factors
    cluster, rank = T.bind(block // i64(tile.cluster)), T.bind(block % i64(tile.cluster))
    where = thread, tile.cluster, rank
    stages = tile.stages, tile.stage_bytes, tile.warpgroups
    core = WarpgroupCore(tile.type, *stages, *where, moves_registers=tile.moves_registers)
    sums = T.alloc_buffer((tile.sums,), tile.type.register, scope="local")
    own = T.bind(thread // WARPGROUP * int(left.layout.place(ROWS)))
    turns = T.bind((grid.tiles - i64(1) - cluster) // blocks + i64(1))
    steps = -(-grid.depth // tile.depth)

    def fetch(number: tirx.Expr) -> Fetch:
        rows, columns = grid.place(cluster + number * blocks, rank)

        def fetch_step(step: tirx.Expr, stage: tirx.Expr, filled: tirx.Expr) -> None:
            depth = i64(step) * i64(tile.depth)
            left.fetch(core, rows, depth, stage, filled)
            right.fetch(core, columns, depth, stage, filled)

        return fetch_step

    def multiply(stage: tirx.Expr) -> None:
        dtype = stage.ty.dtype
        places = stage + own.astype(dtype), stage + tirx.const(right.begin, dtype)
        core.multiply(sums, (left.layout, places[0]), (right.layout, places[1]))

    def finish(number: tirx.Expr) -> None:
        start, (*_, column) = grid.place(cluster + number * blocks, rank)
        rows = grid.locate(start, i64(thread // 32 * (ROWS // 4)))
        values = [tile.type.total(sums[e]) for e in range(tile.sums)]
        store_products(core, thread % 32, matmul, views, rows, column, values)

    core.run(
        lambda: T.serial(i64(0), turns, annotations=ROLLED), steps, fetch, multiply, sums, finish
    )
