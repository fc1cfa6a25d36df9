# SPDX-License-Identifier: Apache-2.0
"""Kernel of a matrix product on tensor cores.

::

    begin to copy the first stages to shared memory
    for step:
        wait for the stage of the step; barrier
        begin to copy the stage that many steps ahead    # 16 bytes each, zeros past the end
        for 32 bytes of the reduced axis:
            fragments of both factors from shared memory  # ldmatrix, without bank conflicts
            sums += products of 16 x 8                    # mma.sync
    exchange sums so that each lane has eight neighbours; epilogue; store
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.expression_walk import substitute
from schedules.tir.extents import unravel
from schedules.tir.index_math import ceildiv, i64, simplified
from schedules.tir.statements import when

from ...core.intrinsics import sync
from ...core.kernel_function import ROLLED, resident_blocks, unless_empty, write_kernels
from ...core.machine import GPUInfo
from ...core.machine_costs import COSTS
from ...core.tensor_core import TensorCore
from ...pointwise.coalescing import classify
from ...pointwise.element_program import Step, Value
from ...pointwise.point_kernel import PointWriter, Views
from ..float4 import at_once, without_jumps
from ..implicit_gemm import Index
from .matmul_pattern import MatmulFunction, Operand, divides
from .row_tile import MomentRegisters, RowTile, combine, store_moments
from .tensor_core_tile import (
    ELEMENTS,
    STEP,
    SharedTile,
    TensorTile,
    allows_tf32,
    choose_tensor_tile,
    copied_read,
    element,
    is_copied,
)
from .tiled_matmul import Product, epilogue_lanes, store_results

QUAD = 4  # lanes with neighbouring columns of the same row


def tensor_core_function(
    func: tirx.PrimFunc, matmul: MatmulFunction, gpu: GPUInfo
) -> tirx.PrimFunc | None:
    """The scheduled function of a product; None if it is not one of tensor cores.

    Parameters
    ----------
    func, matmul : tirx.PrimFunc, MatmulFunction
        The function, and the product that it computes.
    gpu : GPUInfo
        The device.
    """
    tile = choose_tensor_tile(matmul, gpu, allows_tf32(func))
    if tile is None:
        return None
    rows, columns = ceildiv(matmul.m, tile.rows), ceildiv(matmul.n, tile.columns)
    blocks = simplified(i64(matmul.batches) * rows * columns)

    def body() -> None:
        with (
            unless_empty(blocks),
            T.launch_thread("blockIdx.x", blocks) as block,
            resident_blocks(gpu, COSTS.register_file // (tile.registers * tile.threads)),
        ):
            write_tensor_tiles(matmul, tile, Views.declare(func, gpu), block)

    return write_kernels(func, body)


def write_tensor_tiles(
    matmul: MatmulFunction, tile: TensorTile, views: Views, block: tirx.Expr
) -> None:
    """Emit the body of a block: the tile with the number ``block``."""
    place = [ceildiv(matmul.m, tile.rows), ceildiv(matmul.n, tile.columns)]
    *batch, row_tile, column_tile = (
        T.bind(s) for s in unravel(block, [*matmul.batch, *place], is_natural=True)
    )
    with T.launch_thread("threadIdx.x", tile.threads) as thread:
        first = T.bind(row_tile * i64(tile.rows)), T.bind(column_tile * i64(tile.columns))
        ThreadPart(matmul, tile, views, batch, first, thread).write()


class Factor:
    """One factor: where it comes from, and its part of each stage.

    Parameters
    ----------
    operand : Operand
        The factor.
    shared : SharedTile
        Its tile.
    begin : int
        First byte of the tile in a stage.
    threads : int
        Threads that load it.
    views : Views
        The tensors.
    start : Sequence[tirx.Expr]
        Place in the batch, and first row.

    Attributes
    ----------
    starts_anywhere : bool
        Whether the first row may be no multiple of the tile's.
    """

    starts_anywhere = False

    def __init__(
        self,
        operand: Operand,
        shared: SharedTile,
        begin: int,
        threads: int,
        views: Views,
        start: Sequence[tirx.Expr],
    ):
        self.shared, self.begin, self.threads = shared, begin, threads
        self.operand, self.views, self.start = operand, views, start
        self.turns = shared.lines * shared.chunks // threads

    @classmethod
    def of(cls, operand: Operand, shared: SharedTile, *arguments: Any) -> Factor:
        """The factor, copied where it lies in chunks, else gathered."""
        kind = _Copied if is_copied(operand, shared) else _Gathered
        return kind(operand, shared, *arguments)

    @property
    def is_gathered(self) -> bool:
        """True if what is fetched is in registers until it is kept."""
        return isinstance(self, _Gathered)

    def chunk(
        self, thread: tirx.Expr, turn: int, depth: tirx.Expr
    ) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
        """Row, place along the reduced axis, and byte in a stage, of a thread's chunk."""
        row, inner, place = self.shared.copied(thread + turn * self.threads)
        return self.start[-1] + i64(row), depth + i64(inner), place + self.begin

    def inside(self, row: tirx.Expr, inner: tirx.Expr) -> list[tirx.Expr]:
        """Conditions for an element to exist, or for a chunk that no end lies within."""
        rows, reduced = self.operand.space.extents[-2:]
        each = (
            (row < i64(rows), self.shared.rows, rows),
            (inner < i64(reduced), self.shared.depth, reduced),
        )
        starts = self.starts_anywhere, False
        return [
            inside
            for (inside, part, extent), anywhere in zip(each, starts, strict=True)
            if anywhere or not divides(part, extent)
        ]

    def fetch(self, core: TensorCore, thread: tirx.Expr, depth: tirx.Expr, stage: Index) -> None:
        """Begin to load the part of a thread, from a place of the reduced axis on."""
        raise NotImplementedError

    def keep(self, core: TensorCore, thread: tirx.Expr, stage: Index) -> None:
        """Store what was loaded to the stage, if it is not there."""

    def place(self, step: tirx.Expr, stage: Index) -> Index:
        """The byte where the tile of a step begins, of which the other factor has a stage."""
        return stage

    def load(
        self,
        core: TensorCore,
        fragment: tirx.Buffer,
        lane: tirx.Expr,
        row: Index,
        k: int,
        at: Index,
        shifts: tirx.Buffer | None = None,
    ) -> None:
        """Load the fragments of some rows and 32 bytes of the reduced axis from a stage.

        ``shifts`` has what is subtracted from the two rows of each 16 that a lane has.
        """
        for number in range(int(fragment.shape[0]) // 4):
            place = self.shared.fragment(lane, row + number * STEP, k)
            both = None if shifts is None else [shifts[2 * number + half] for half in range(2)]
            place, is_transposed = at + place + self.begin, self.shared.rows_first
            core.load(fragment, 4 * number, place, is_transposed, both)


class _Copied(Factor):
    """A factor whose chunks are copied to shared memory without registers."""

    def fetch(self, core: TensorCore, thread: tirx.Expr, depth: tirx.Expr, stage: Index) -> None:
        read = copied_read(self.operand)
        assert read is not None, "a factor that is copied is read as it lies"
        view = self.views.row(read.buffer)
        assert view is not None, "and is a parameter"
        position = self.operand.space.position(read)
        for turn in range(self.turns):
            row, inner, place = self.chunk(thread, turn, depth)
            at = dict(zip(self.operand.space.axes, [*self.start[:-1], row, inner], strict=True))
            guards = [without_jumps(substitute(guard, at)) for guard in read.guards]
            exists = at_once([*self.inside(row, inner), *guards])
            core.copy(stage + place, view, substitute(position, at), exists)


class _Gathered(Factor):
    """A factor whose elements the threads compute, or read one by one, on their way."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.value = element(self.operand)
        space = self.operand.along_neighbours if self.shared.rows_first else self.operand.space
        steps = tuple(map(_without_jumps, space.steps))
        self.lanes = classify(replace(space, steps=steps), self.shared.chunk)
        dtype = str(self.value.ty.dtype)
        self.held = T.alloc_buffer((self.turns * self.shared.chunk,), dtype, scope="local")

    def fetch(self, core: TensorCore, thread: tirx.Expr, depth: tirx.Expr, stage: Index) -> None:
        for turn in range(self.turns):
            row, inner, _ = self.chunk(thread, turn, depth)
            row, inner = T.bind(row), T.bind(inner)
            count = self.shared.chunk
            for k in range(count):
                T.buffer_store(self.held, tirx.const(0, self.held.dtype), [turn * count + k])
            width = count if self.lanes.is_aligned else 1
            for first in range(0, count, width):
                places = [self._place(row, inner, first + k) for k in range(width)]
                with when(at_once(self.inside(*places[0]))):
                    self._compute(places, turn * count + first)

    def _place(self, row: tirx.Expr, inner: tirx.Expr, k: int) -> tuple[tirx.Expr, tirx.Expr]:
        if self.shared.rows_first:
            return row + i64(k), inner
        return row, inner + i64(k)

    def _compute(self, places: Sequence[tuple[tirx.Expr, tirx.Expr]], first: int) -> None:
        lanes = self.lanes
        if len(places) < lanes.vector:
            lanes = classify(lanes.space, 1)
        points = [
            [*self.start[:-1], *(place[::-1] if self.shared.rows_first else place)]
            for place in places
        ]
        writer = PointWriter(lanes, self.views, points)
        writer.steps()
        for k in range(len(places)):
            T.buffer_store(self.held, writer.value(self.value, k), [first + k])

    def keep(self, core: TensorCore, thread: tirx.Expr, stage: Index) -> None:
        for turn in range(self.turns):
            _, _, place = self.chunk(thread, turn, i64(0))
            core.store(stage + place, self.held, turn * self.shared.chunk)


def _without_jumps(step: Step) -> Step:
    step = replace(step, guards=tuple(map(without_jumps, step.guards)))
    return (
        replace(step, expression=without_jumps(step.expression))
        if isinstance(step, Value)
        else step
    )


class ThreadPart:
    """One thread's part of a tile.

    Parameters
    ----------
    matmul, tile : MatmulFunction, TensorTile
        The product, and the partition of the tile.
    views, batch, first, thread : Views, Sequence[tirx.Expr], tuple, tirx.Expr
        The tensors, the place in the batch, the tile's first row and column, and the thread.
    core : TensorCore | None
        The instructions and their shared memory, if there are several products.
    begin : int
        First byte of the stages in it.
    left : Factor | None
        The left factor, if it lies in that memory as a whole.
    """

    def __init__(
        self,
        matmul: MatmulFunction,
        tile: TensorTile,
        views: Views,
        batch: Sequence[tirx.Expr],
        first: tuple[tirx.Expr, tirx.Expr],
        thread: tirx.Expr,
        core: TensorCore | None = None,
        begin: int = 0,
        left: Factor | None = None,
    ):
        self.matmul, self.tile, self.views = matmul, tile, views
        self.batch, self.first = batch, first
        self.thread, self.lane = thread, thread % COSTS.warp
        warp = thread // COSTS.warp
        self.row = warp // tile.warps_across * tile.warp_rows
        self.column = warp % tile.warps_across * tile.warp_columns
        self.core = core or TensorCore(tile.type, tile.stages * tile.stage_bytes)
        self.begin = begin
        self.stage_bytes, where = 0, (tile.threads, views)
        if left is None:
            shared = tile.shared(tile.rows, matmul.left, True)
            left = Factor.of(matmul.left, shared, 0, *where, [*batch, first[0]])
            self.stage_bytes = shared.nbytes
        shared, place = tile.shared(tile.columns, matmul.right, False), [*batch, first[1]]
        self.left = left
        self.right = Factor.of(matmul.right, shared, self.stage_bytes, *where, place)
        self.stage_bytes += shared.nbytes
        self.sums = T.alloc_buffer((tile.sums,), tile.type.register, scope="local")
        self.row_tile = RowTile.compute(
            matmul, views, first[0], tile.rows, self.thread, tile.threads
        )
        self.shifts = self._find_shifts()

    def _find_shifts(self) -> tirx.Buffer | None:
        """Registers with the value that is subtracted from each row of the lane's fragments."""
        name = self.matmul.left.shift
        if name is None:
            return None
        count = self.tile.warp_rows // ELEMENTS
        found = T.alloc_buffer((count,), name.ty.dtype, scope="local")
        for number in range(count):
            row = self.row + number * ELEMENTS + self.lane // QUAD
            T.buffer_store(found, self.row_tile.at(name, self.first[0] + i64(row)), [number])
        return found

    def write(self) -> None:
        """Emit the whole part."""
        self.accumulate()
        self._finish()

    def accumulate(self) -> None:
        """Emit the loop over the reduced axis."""
        for e in range(self.tile.sums):
            T.buffer_store(self.sums, tirx.const(0, self.sums.dtype), [e])
        tile, core = self.tile, self.core
        steps, ahead = -(-int(self.matmul.k) // tile.depth), tile.stages - 1
        for step in range(ahead):
            if step < steps:
                stage = tirx.const(self.begin + step * self.stage_bytes, "int32")
                self._fetch(i64(step), stage)
                self._keep(stage)
            core.commit()
        # The stages in use and being filled, in bytes: a remainder would take a division.
        used, filled = (T.alloc_buffer((1,), "int32", scope="local") for _ in range(2))
        T.buffer_store(used, self.begin, [0])
        T.buffer_store(filled, self.begin + ahead * self.stage_bytes, [0])
        with T.serial(i64(0), i64(steps), annotations=ROLLED) as step:
            core.wait(ahead - 1)
            sync()
            follows = step + i64(ahead) < i64(steps)
            with when(follows):
                self._fetch(step + i64(ahead), filled[0])
            core.commit()
            self._multiply(step, used[0])
            if self._is_gathered:
                with when(follows):
                    self._keep(filled[0])
            for stage in (used, filled):
                last = stage[0] == self.begin + ahead * self.stage_bytes
                following, first = stage[0] + self.stage_bytes, tirx.const(self.begin, "int32")
                T.buffer_store(stage, tirx.Select(last, first, following), [0])

    @property
    def _is_gathered(self) -> bool:
        return self.left.is_gathered or self.right.is_gathered

    def _fetch(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        depth = step * i64(self.tile.depth)
        for factor in (self.left, self.right):
            factor.fetch(self.core, self.thread, depth, stage)

    def _keep(self, stage: tirx.Expr) -> None:
        for factor in (self.left, self.right):
            factor.keep(self.core, self.thread, stage)

    def _multiply(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        tile, core = self.tile, self.core
        left_at, right_at = (factor.place(step, stage) for factor in (self.left, self.right))
        left = T.alloc_buffer((tile.warp_rows // 4,), "uint32", scope="local")
        right = T.alloc_buffer((tile.warp_columns // 4,), "uint32", scope="local")
        across = tile.warp_columns // ELEMENTS
        for k in range(0, tile.depth, tile.type.step):
            self.left.load(core, left, self.lane, self.row, k, left_at, self.shifts)
            self.right.load(core, right, self.lane, self.column, k, right_at)
            for i in range(tile.warp_rows // STEP):
                for j in range(across):
                    rows = [left[4 * i + r] for r in range(4)]
                    columns = [right[2 * j + r] for r in range(2)]
                    core.multiply(self.sums, 4 * (i * across + j), rows, columns)

    def sums_of_rows(self, i: int) -> list[tirx.Expr]:
        """The lane's sums of the warp's 16 rows with a number."""
        count = self.tile.warp_columns // ELEMENTS * 4
        return [self.tile.type.total(self.sums[i * count + e]) for e in range(count)]

    def _finish(self) -> None:
        """Store the results."""
        tile, exist = self.tile, divides(self.tile.rows, self.matmul.m)
        column = self.first[1] + i64(self.column)
        for i in range(tile.warp_rows // STEP):
            row = self.first[0] + i64(self.row + i * STEP)
            rows = rows_after(self.matmul, self.batch, row, exist)
            place = (self.matmul, self.views, rows, column, self.sums_of_rows(i))
            keep = MomentRegisters.allocate(self.matmul, vectors=2)
            store_products(self.core, self.lane, *place, self.row_tile, keep)


Locate = Callable[[tirx.Expr], tuple[list[tirx.Expr], tirx.Expr | bool]]
"""Function from one of 16 rows to its place in the product, batch first, and whether it exists.

The parts of the place are bound to variables.
"""


def rows_after(
    product: Product, batch: Sequence[tirx.Expr], first: tirx.Expr, exist: bool
) -> Locate:
    """Return the rows from ``first`` on, all of which are known to exist or not."""

    def locate(row: tirx.Expr) -> tuple[list[tirx.Expr], tirx.Expr | bool]:
        own = T.bind(first + row)
        return [*batch, own], exist or own < i64(product.m)

    return locate


class Exchanging(Protocol):
    """Instructions by which lanes of a warp exchange values."""

    def exchange(self, value: tirx.Expr, mask: int) -> tirx.Expr:
        """The value of the lane whose number differs by ``mask``."""


def store_products(
    core: Exchanging,
    lane: tirx.Expr,
    product: Product,
    views: Views,
    locate: Locate,
    column: tirx.Expr,
    sums: Sequence[tirx.Expr],
    rows: RowTile | None = None,
    keep: MomentRegisters | None = None,
) -> None:
    """Emit the epilogue of 16 rows, eight neighbours of a row at a time.

    Parameters
    ----------
    core, lane : Exchanging, tirx.Expr
        The instructions, and the lane that runs them.
    product, views : Product, Views
        What is stored.
    locate : Locate
        The rows of the warp.
    column : tirx.Expr
        Its first column.
    sums : Sequence[tirx.Expr]
        Four for each product of 16 x 8, a multiple of four products.
    rows : RowTile | None
        Values of the rows that the epilogue refers to.
    keep : MomentRegisters | None
        Registers for moments of the results, if they are stored, too.
    """
    # Vectors of 16 bytes of float32, for which all that the epilogue reads fits into registers.
    lanes = epilogue_lanes(product, ELEMENTS if keep is None else ELEMENTS // keep.vectors)
    places = [locate(i64(half * 8 + lane // QUAD)) for half in range(2)]
    for half, group, values in row_vectors(core, lane, sums):
        (*batch, own), exists = places[half]
        first = T.bind(column + i64((group + lane % QUAD) * ELEMENTS))
        place = batch, own, first, values, exists
        then = None if keep is None else keep.take
        store_results(product, lanes, views, *place, rows, then)
        if keep is not None:
            begin = column + i64(group * ELEMENTS)
            _finish_moments(core, lane, product, views, own, begin, keep)


def _finish_moments(
    core: Exchanging,
    lane: tirx.Expr,
    matmul: Product,
    views: Views,
    row: tirx.Expr,
    column: tirx.Expr,
    keep: MomentRegisters,
) -> None:
    """Combine the moments of four lanes, which have eight neighbours each, and store them."""
    assert isinstance(matmul, MatmulFunction) and matmul.moments is not None, "it has moments"
    held, others = (T.alloc_buffer((2,), keep.held.dtype, scope="local") for _ in range(2))
    combine(held, keep.parts, ELEMENTS // keep.vectors)
    for bit in (1, 2):
        for k in range(2):
            T.buffer_store(others, core.exchange(held[k], bit), [k])
        own, other = ((each[0], each[1]) for each in (held, others))
        combine(held, [own, other], bit * ELEMENTS)
    with when(tirx.EQ(lane % QUAD, 0), row < i64(matmul.m), column < i64(matmul.n)):
        store_moments(matmul, matmul.moments, views, row, column, held)


def row_vectors(
    core: Exchanging, lane: tirx.Expr, sums: Sequence[tirx.Expr]
) -> Iterator[tuple[int, int, list[tirx.Expr]]]:
    """Emit the exchanges of 16 rows, four products at a time.

    Both halves of the rows are next to each other, since compilers keep what one of them loads for
    its columns until the other one needs it.

    Yields which half it is, the first product's number, and eight neighbours of a row: lane
    ``4 r + t`` has those of row ``r`` of the half and product ``t``.
    """
    for group in range(0, len(sums) // 4, QUAD):
        for half in range(2):
            found = [sums[4 * (group + j) + 2 * half + e] for j in range(QUAD) for e in range(2)]
            yield half, group, _neighbours(core, lane, found)


def _neighbours(core: Exchanging, lane: tirx.Expr, found: Sequence[tirx.Expr]) -> list[tirx.Expr]:
    """Transpose pairs among four lanes, so that lane ``t`` has all columns of product ``t``."""
    dtype = str(found[0].ty.dtype)
    held = T.alloc_buffer((2 * QUAD,), dtype, scope="local")
    for e, value in enumerate(found):
        T.buffer_store(held, value, [e])
    got = T.alloc_buffer((1,), dtype, scope="local")
    for bit in (1, 2):
        upper = tirx.NE(lane & bit, 0)
        for j in (j for j in range(QUAD) if not j & bit):
            for e in range(2):
                low, high = 2 * j + e, 2 * (j | bit) + e
                sent = tirx.Select(upper, held[low], held[high])
                T.buffer_store(got, core.exchange(sent, bit), [0])
                T.buffer_store(held, tirx.Select(upper, held[high], got[0]), [high])
                # The upper lane keeps its second value, the lower one its first.
                T.buffer_store(held, tirx.Select(upper, got[0], held[low]), [low])
    return [held[e] for e in range(2 * QUAD)]
