# SPDX-License-Identifier: Apache-2.0
"""CPU rule for products of matrices and vectors, with their bias and activation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from schedules import attributes
from schedules.cpu.nests.reduction_nests import column_axis
from schedules.schedule_rule import KernelFacts
from schedules.tir.parameter_windows import lay_out_matrix
from schedules.tuning.template import Template

from ...core.kernel_builder import STACK_BYTES
from ...core.machine import CPUInfo
from ...core.rule import TunableCPURule
from ...nests.blocks import BlockFacts, Kernel, block_facts
from ...nests.elementwise_nest import schedule_spatial
from ...nests.loop_transforms import (
    facts_of_inlined,
    feeds,
    finish,
    merge_groups,
    open_inlined,
)
from ...nests.reduction_nests import (
    Columns,
    Result,
    Rows,
    reduce_in_columns,
    reduce_in_rows,
    reducible,
)
from .matmul_pattern import MatmulAxes, find_product, separate_groups
from .matvec import split_over_threads, stream_rows

PACKED_ROWS = 24
"""Least number of rows of a product for which a constant matrix is packed."""
_STREAMED_ROWS = 4
_LEAST_ROWS_TO_PACK = 8
_MOST_COLUMNS = 4
COLUMNS, DOTS = "columns", "dots"
_MOST_VECTORS = 8  # Vectors of one row.


@dataclass(frozen=True)
class DenseWorkload:
    """Products of matrices with more than one row each.

    Parameters
    ----------
    form : str
        ``columns``, with vectors along the columns, or ``dots``, with vectors along the sum.
    outer : int
        Products beside each other.
    rows, columns, depth : int
        Extents of a product: ``rows x depth`` by ``depth x columns``.
    item_bytes : int
        Bytes of the widest element.
    grouped : bool
        Whether tiles must divide the rows.
    """

    form: str
    outer: int
    rows: int
    columns: int
    depth: int
    item_bytes: int
    grouped: bool = False

    def width(self, cpu: CPUInfo) -> int:
        """Vectors of columns, or columns where each is a sum by itself."""
        lanes = max(1, cpu.vector_bits // 8 // self.item_bytes)
        return self.columns // min(self.columns, lanes) if self.form == COLUMNS else self.columns


@dataclass(frozen=True)
class DenseKnobs:
    """Knobs of a product of matrices.

    Parameters
    ----------
    rows, columns : int
        The register tile: rows x vectors of columns, or rows x columns of sums in lanes.
    packed : bool
        Whether a tile of columns is first copied to a contiguous panel that all rows read; not if
        it is a constant that is contiguous already.
    """

    rows: int
    columns: int
    packed: bool = False


class DenseTemplate(Template[DenseWorkload, DenseKnobs, CPUInfo]):
    """Register tiles and panels of :class:`Dense`."""

    name = "cpu.dense"
    version = 1
    knobs = DenseKnobs

    def read_workload(self, text: str) -> DenseWorkload:
        """Read the JSON of a workload."""
        return DenseWorkload(**json.loads(text))

    def describe(self, workload: DenseWorkload) -> str:
        """Return the shape of the product."""
        shape = f"{workload.rows}x{workload.depth} by {workload.depth}x{workload.columns}"
        kind = "matmul, weights [N, K]," if workload.form == DOTS else "matmul"
        return f"{kind} {shape}" + (f", {workload.outer} times" if workload.outer > 1 else "")

    def default(self, workload: DenseWorkload, machine: CPUInfo) -> DenseKnobs:
        """Return the register tile of the least time."""
        height, width = workload.rows, workload.width(machine)
        most = _most_sums(workload.form, machine)
        rows, columns = matrix_tile(height, width, most)
        rows = _divisor(height, rows) if workload.grouped else rows
        cores, tiles = machine.num_cores, -(-width // columns) * workload.outer
        packed = height >= PACKED_ROWS and (cores == 1 or feeds(tiles, cores))
        return DenseKnobs(rows, columns, packed and workload.form == COLUMNS)

    def settings(self, workload: DenseWorkload, machine: CPUInfo) -> Iterator[DenseKnobs]:
        """Yield tiles that use at least half of the sums that a tile may hold, or all columns."""
        height, width = workload.rows, workload.width(machine)
        most = _most_sums(workload.form, machine)
        panels = workload.form == COLUMNS and height >= _LEAST_ROWS_TO_PACK
        for columns in range(1, min(width, most, _MOST_COLUMNS) + 1):
            largest = min(height, most // columns)
            for rows in range(max(1, largest // 2), largest + 1):
                if not workload.grouped or height % rows == 0:
                    for packed in (False, True) if panels else (False,):
                        yield DenseKnobs(rows, columns, packed)

    def write(
        self, func: tirx.PrimFunc, workload: DenseWorkload, knobs: DenseKnobs, target: Target
    ) -> s_tir.Schedule:
        """Write the nest."""
        opened = _open(KernelFacts(func, target))
        assert opened is not None, "the workload was read from another function"
        return _write(opened, knobs)

    def cycles(self, workload: DenseWorkload, knobs: DenseKnobs, machine: CPUInfo) -> float:
        """Return the cycles of the register tiles."""
        width, lanes = workload.width(machine), max(1, machine.vector_bits // 8 // 4)
        depth = workload.depth if workload.form == COLUMNS else -(-workload.depth // lanes)
        tiles = _tile_cycles(workload.rows, width, knobs.rows, knobs.columns)
        return workload.outer * depth * tiles / machine.num_cores


DENSE = DenseTemplate()


class Dense(TunableCPURule):
    """Matrix times matrix and vector times matrix, batched or not, either weight layout.

    Weights ``[K, N]``: a tile of rows times vectors of columns stays in registers, such as 6 x 2
    vectors with AVX2, 7 x 2 with AVX-512, 8 x 3 with NEON; for many rows the columns' weights are
    copied to a contiguous panel first::

        for columns in T.parallel(63):
            for rows in range(8):
                for k in range(1280):
                    for row in T.unroll(6):
                        for vector in T.unroll(2):
                            for lane in T.vectorized(8):
                                acc[row, vector, lane] += x[rows * 6 + row, k] * w[k, ...]

    Constant weights of whole vectors are not copied, but stored as ``[N / 16, K, 16]``
    (:data:`schedules.attributes.LAID_OUT`).

    Weights ``[N, K]``: vectors run along K, with up to 12 dot products at once. One row is bound by
    memory: up to 8 vectors of columns, or 4 accumulators for each dot product; a matrix beyond the
    caches is read row after row (``stream_rows``). Left alone: functions with no or several
    reductions, reductions of anything but a product of two tensors, convolutions with a window,
    symbolic extents of the columns and of K.
    """

    template = DENSE

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function, or return None if it is no matrix product."""
        opened = _open(facts)
        if opened is None:
            return None
        workload = _workload(opened) if self.records else None
        recorded = None if workload is None else self.recorded(facts.func, workload, facts.target)
        return recorded or _write(opened, None)

    def workload(self, func: tirx.PrimFunc, target: Target) -> DenseWorkload | None:
        """Return the product of matrices, if it is one with knobs."""
        opened = _open(KernelFacts(func, target))
        return None if opened is None else _workload(opened)


@dataclass
class _Opened:
    """A matrix product that was recognised in a fresh schedule."""

    kernel: Kernel
    block: SBlockRV
    facts: BlockFacts
    product: MatmulAxes
    grouped: bool
    consumers: list[SBlockRV]


def _open(facts: KernelFacts) -> _Opened | None:
    """Open a function for scheduling; None if it is no matrix product."""
    kernel = open_inlined(facts)
    if kernel is None or sum(not info.is_injective() for info in kernel.blocks) != 1:
        return None
    block, *consumers = [info.block_rv for info in kernel.blocks]
    grouped = separate_groups(kernel.sch, block)
    inlined = block_facts(kernel.sch, block) if grouped else facts_of_inlined(facts)[0]
    if inlined is None or not reducible(inlined):
        return None
    product = find_product(kernel.sch, block, inlined)
    if product is None:
        return None
    return _Opened(kernel, block, inlined, product, grouped, consumers)


def _workload(opened: _Opened) -> DenseWorkload | None:
    """The workload of a product; None without knobs: one row, a stream, symbolic extents."""
    facts, product = opened.facts, opened.product
    extents = [facts.extents[k] for k in (*facts.positions("S"), *facts.positions("R"))]
    dots = _in_dots(facts, product)
    if product.row_axis is None or None in extents:
        return None
    if not dots and _streams(opened.kernel, facts, product):
        return None
    rows = _height(facts, product)
    return DenseWorkload(
        form=DOTS if dots else COLUMNS,
        outer=facts.volume(facts.positions("S")[:-1]) // rows,
        rows=rows,
        columns=facts.extents[product.n] or 1,
        depth=facts.volume(facts.positions("R")),
        item_bytes=facts.itemsize,
        grouped=opened.grouped,
    )


def _write(opened: _Opened, knobs: DenseKnobs | None) -> s_tir.Schedule:
    """Write the nest, with the default's tile where no knobs are given."""
    kernel, block, facts = opened.kernel, opened.block, opened.facts
    product, grouped, consumers = opened.product, opened.grouped, opened.consumers
    laid_out = None
    if _in_dots(facts, product):
        plan = _plan_dots(kernel.cpu, facts, product, grouped, knobs)
        overlaps, rest = reduce_in_rows(kernel, block, consumers, plan)
    elif _streams(kernel, facts, product):
        overlaps, rest = _stream(kernel, block, facts, product, consumers)
    else:
        tile = _plan_columns(kernel, block, facts, product, grouped, knobs)
        overlaps, rest = reduce_in_columns(kernel, block, consumers, tile)
        if tile.laid_out:
            laid_out = _constant_matrix(kernel, facts, product)
    for consumer in rest:
        overlaps += schedule_spatial(kernel, consumer)
    done = finish(kernel.sch, overlaps)
    if laid_out is None:
        return done
    return s_tir.Schedule(lay_out_matrix(done.mod["main"], *laid_out, kernel.lanes(facts)))


def _in_dots(facts: BlockFacts, product: MatmulAxes) -> bool:
    """Return whether both factors are contiguous along K, and the rows too few for a transpose."""
    if product.right.strides[product.n] == 1 or _height(facts, product) >= PACKED_ROWS:
        return False
    return product.left.strides[product.k] == 1 and product.right.strides[product.k] == 1


def _streams(kernel: Kernel, facts: BlockFacts, product: MatmulAxes) -> bool:
    """Return whether a matrix that exceeds the caches of a core is used for few rows only."""
    touched = [k for k, stride in enumerate(product.right.strides) if stride != 0]
    return (
        product.right.strides[product.n] == 1
        and _height(facts, product) <= _STREAMED_ROWS
        and facts.volume(touched) * facts.itemsize > kernel.cpu.l2_bytes
        and facts.volume([product.n]) > _accumulators(kernel.cpu) * kernel.lanes(facts)
    )


def _stream(
    kernel: Kernel,
    block: SBlockRV,
    facts: BlockFacts,
    product: MatmulAxes,
    consumers: list[SBlockRV],
) -> Result:
    """Give each thread whole rows of the matrix if they can be divided evenly, else columns."""
    height, cores = _height(facts, product), kernel.cpu.num_cores
    lanes = kernel.lanes(facts)
    sums = kernel.cpu.l1d_bytes // 2 // (height * lanes * facts.itemsize)
    outer = facts.volume(facts.positions("S")[:-1]) // height
    group = merge_groups(facts, facts.positions("R"))[0]
    parts = even_parts(facts.volume(group), cores)
    vectors = -(-facts.volume([product.n]) // lanes)
    if feeds(outer, cores) or (parts and len(facts.positions("R")) == len(group)):
        if feeds(outer, cores):
            return stream_rows(kernel, block, consumers, sums, product.row_axis)
        partial = split_over_threads(kernel.sch, facts, parts)
        overlaps, _ = stream_rows(kernel, partial, (), sums, product.row_axis)
        tile = balanced_tile(vectors, _MOST_VECTORS, outer * height, cores)
        more, rest = reduce_in_columns(kernel, block, consumers, Columns(tile))
        return overlaps + more, rest
    share = -(-vectors // max(1, cores // outer))
    return stream_rows(kernel, block, consumers, min(share, sums), product.row_axis)


def even_parts(extent: int, cores: int) -> int:
    """Number of equal parts of an axis with which all cores finish together; 0 if none."""
    choices = [
        parts
        for parts in range(cores, 4 * cores + 1)
        if extent % parts == 0 and parts < extent and -(-parts // cores) * cores <= 1.25 * parts
    ]
    return min(choices, default=0)


def _height(facts: BlockFacts, product: MatmulAxes) -> int:
    if product.row_axis is None:
        return 1
    return facts.extents[facts.positions("S")[product.row_axis]] or 1


def _accumulators(cpu: CPUInfo) -> int:
    """Vectors of sums that fit the registers, and a buffer that stays on the stack."""
    registers = 12 if cpu.num_vector_registers < 32 else 24
    return min(registers, STACK_BYTES // (cpu.vector_bits // 8))


def _most_sums(form: str, cpu: CPUInfo) -> int:
    """Sums that a register tile may hold: vectors of columns, or lanes of single sums."""
    return _accumulators(cpu) if form == COLUMNS else min(12, _accumulators(cpu))


def _plan_columns(
    kernel: Kernel,
    block: SBlockRV,
    facts: BlockFacts,
    product: MatmulAxes,
    grouped: bool,
    knobs: DenseKnobs | None,
) -> Columns:
    cpu = kernel.cpu
    width = facts.extents[product.n] or 1
    lanes = min(width, kernel.lanes(facts))
    count = width // lanes
    spatial = facts.positions("S")
    height, outer = _height(facts, product), facts.volume(spatial[:-1])
    if product.row_axis is None:
        return Columns(balanced_tile(-(-width // lanes), _MOST_VECTORS, outer, cpu.num_cores))
    is_whole = width % kernel.lanes(facts) == 0
    matrix = _constant_matrix(kernel, facts, product) if is_whole else None
    rows, vectors = matrix_tile(height, count, _accumulators(cpu), matrix is not None)
    rows = _divisor(height, rows) if grouped else rows
    packed = None
    tiles = -(-count // vectors) * outer // height
    pays = height >= PACKED_ROWS and (feeds(tiles, cpu.num_cores) or cpu.num_cores == 1)
    if knobs is not None:
        rows, vectors, pays = knobs.rows, knobs.columns, knobs.packed
    if pays:
        reads = [region.source for region in kernel.sch.get(block).reads]
        packed = next(
            index for index, read in enumerate(reads) if read.same_as(product.right.buffer)
        )
    laid_out = packed is not None and matrix is not None and count % vectors == 0
    return Columns(vectors, rows, product.row_axis, packed, laid_out)


def _constant_matrix(
    kernel: Kernel, facts: BlockFacts, product: MatmulAxes
) -> tuple[int, int] | None:
    """Position of the right factor, if it is a constant matrix, and the axis of its columns."""
    func, buffer = kernel.sch.mod["main"], product.right.buffer
    constants = func.attrs.get(attributes.CONSTANTS) or ()
    if len(buffer.shape) != 2 or str(buffer.dtype) not in ("float32", "float64"):
        return None
    for place in map(int, constants):
        if func.params[place].same_as(buffer):
            return place, column_axis(facts, buffer)
    return None


def _plan_dots(
    cpu: CPUInfo, facts: BlockFacts, product: MatmulAxes, grouped: bool, knobs: DenseKnobs | None
) -> Rows:
    width = facts.extents[product.n] or 1
    if product.row_axis is None:
        return Rows(4)
    height = _height(facts, product)
    rows, columns = matrix_tile(height, width, _most_sums(DOTS, cpu))
    rows = _divisor(height, rows) if grouped else rows
    if knobs is not None:
        rows, columns = knobs.rows, knobs.columns
    return Rows(1, ((product.row_axis, rows), (-1, columns)))


def _divisor(extent: int, largest: int) -> int:
    return max(tile for tile in range(1, largest + 1) if extent % tile == 0)


def matrix_tile(
    height: int, width: int, accumulators: int, is_whole: bool = False
) -> tuple[int, int]:
    """Rows and columns of the register tile with the least time for the whole matrix.

    Parameters
    ----------
    height, width : int
        Rows, and vectors of columns (for dot products, columns).
    accumulators : int
        Number of sums that may be held at once.
    is_whole : bool
        Whether tiles must divide the columns.

    Returns
    -------
    tuple[int, int]
        Rows and columns; at most ``height`` and ``width``.
    """

    def cost(tile: tuple[int, int]) -> tuple[float, int, int]:
        rows, columns = tile
        return _tile_cycles(height, width, rows, columns), -rows * columns, columns

    tiles = [
        (rows, columns)
        for rows in range(1, min(height, accumulators) + 1)
        for columns in range(1, min(width, accumulators // rows, _MOST_COLUMNS) + 1)
        if not (is_whole and width % columns)
    ]
    return min(tiles, key=cost)


def _tile_cycles(height: int, width: int, rows: int, columns: int) -> float:
    """Cycles of one step of the sum for all tiles of a matrix.

    Two loads or two multiply-adds a cycle, eight of the latter in flight; columns come from the
    second-level cache at two thirds of a vector a cycle.
    """
    tiles = -(-height // rows) * -(-width // columns)
    return tiles * max(rows * columns, rows + columns, 8, 3 * columns) / 2


def balanced_tile(extent: int, most: int, outer: int, cores: int) -> int:
    """The tile that finishes first: few rounds of the cores, little waste, enough accumulators.

    Parameters
    ----------
    extent : int
        Vectors along the axis.
    most : int
        Upper bound of the tile.
    outer : int
        Tiles along the other axes.
    cores : int
        Cores that share the tiles.

    Returns
    -------
    int
        Vectors of a tile.
    """

    def cost(size: int) -> tuple[float, int]:
        rounds = -(-(-(-extent // size) * outer) // cores)
        return rounds * max(size, 4), -size

    return min(range(1, min(extent, most) + 1), key=cost)
