# SPDX-License-Identifier: Apache-2.0
"""CPU rule for products of matrices and vectors, with their bias and activation."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from ..core.machine import CPUInfo
from ..core.rule import CPURule
from ..nests.blocks import BlockFacts, Kernel, block_facts, open_kernel
from ..nests.elementwise_nest import schedule_spatial
from ..nests.loop_transforms import feeds, finish, inline_blocks, merge_groups
from ..nests.reduction_nests import (
    Columns,
    Result,
    Rows,
    reduce_in_columns,
    reduce_in_rows,
    reducible,
)
from .matmul_pattern import Product, find_product, separate_groups
from .matvec import split_over_threads, stream_rows

_STACK_BYTES = 1024
_PACKED_ROWS = 24
_STREAMED_ROWS = 4
_MOST_VECTORS = 8  # of one row


class Dense(CPURule):
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

    Weights ``[N, K]``: vectors run along K, with up to 12 dot products at once. One row is bound by
    memory: up to 8 vectors of columns, or 4 accumulators for each dot product; a matrix beyond the
    caches is read row after row (``stream_rows``). Left alone: functions with no or several
    reductions, reductions of anything but a product of two tensors, convolutions with a window,
    symbolic extents of the columns and of K.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Schedule ``func``, or return None if it is no matrix product."""
        kernel = open_kernel(func, target)
        if kernel is None or sum(not info.is_injective() for info in kernel.blocks) != 1:
            return None
        remaining = inline_blocks(kernel)
        block = remaining[0].block_rv
        grouped = separate_groups(kernel.sch, block)
        facts = block_facts(kernel.sch, block)
        if facts is None or not reducible(facts):
            return None
        product = find_product(kernel.sch, block, facts)
        if product is None:
            return None
        consumers = [info.block_rv for info in remaining[1:]]
        if _in_dots(facts, product):
            plan = _plan_dots(kernel.cpu, facts, product, grouped)
            overlaps, rest = reduce_in_rows(kernel, block, consumers, plan)
        elif _streams(kernel, facts, product):
            overlaps, rest = _stream(kernel, block, facts, product, consumers)
        else:
            tile = _plan_columns(kernel, block, facts, product, grouped)
            overlaps, rest = reduce_in_columns(kernel, block, consumers, tile)
        for consumer in rest:
            overlaps += schedule_spatial(kernel, consumer)
        return finish(kernel.sch, overlaps)


def _in_dots(facts: BlockFacts, product: Product) -> bool:
    """Return whether both factors are contiguous along K, and the rows too few for a transpose."""
    if product.right.strides[product.n] == 1 or _height(facts, product) >= _PACKED_ROWS:
        return False
    return product.left.strides[product.k] == 1 and product.right.strides[product.k] == 1


def _streams(kernel: Kernel, facts: BlockFacts, product: Product) -> bool:
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
    product: Product,
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


def _height(facts: BlockFacts, product: Product) -> int:
    if product.row_axis is None:
        return 1
    return facts.extents[facts.positions("S")[product.row_axis]] or 1


def _accumulators(cpu: CPUInfo) -> int:
    """Vectors of sums that fit the registers, and a buffer that stays on the stack."""
    registers = 12 if cpu.num_vector_registers < 32 else 24
    return min(registers, (_STACK_BYTES - 1) // (cpu.vector_bits // 8))


def _plan_columns(
    kernel: Kernel, block: SBlockRV, facts: BlockFacts, product: Product, grouped: bool
) -> Columns:
    cpu = kernel.cpu
    width = facts.extents[product.n] or 1
    lanes = min(width, kernel.lanes(facts))
    count = width // lanes
    spatial = facts.positions("S")
    height, outer = _height(facts, product), facts.volume(spatial[:-1])
    if product.row_axis is None:
        return Columns(balanced_tile(-(-width // lanes), _MOST_VECTORS, outer, cpu.num_cores))
    rows, vectors = matrix_tile(height, count, _accumulators(cpu))
    rows = _divisor(height, rows) if grouped else rows
    packed = None
    tiles = -(-count // vectors) * outer // height
    if height >= _PACKED_ROWS and (feeds(tiles, cpu.num_cores) or cpu.num_cores == 1):
        reads = [region.source for region in kernel.sch.get(block).reads]
        packed = next(
            index for index, read in enumerate(reads) if read.same_as(product.right.buffer)
        )
    return Columns(vectors, rows, product.row_axis, packed)


def _plan_dots(cpu: CPUInfo, facts: BlockFacts, product: Product, grouped: bool) -> Rows:
    width = facts.extents[product.n] or 1
    if product.row_axis is None:
        return Rows(4)
    height = _height(facts, product)
    rows, columns = matrix_tile(height, width, min(12, _accumulators(cpu)))
    rows = _divisor(height, rows) if grouped else rows
    return Rows(1, ((product.row_axis, rows), (-1, columns)))


def _divisor(extent: int, largest: int) -> int:
    return max(tile for tile in range(1, largest + 1) if extent % tile == 0)


def matrix_tile(height: int, width: int, accumulators: int) -> tuple[int, int]:
    """Rows and columns of the register tile with the least time for the whole matrix.

    Parameters
    ----------
    height, width : int
        Rows, and vectors of columns (for dot products, columns).
    accumulators : int
        Number of sums that may be held at once.

    Returns
    -------
    tuple[int, int]
        Rows and columns; at most ``height`` and ``width``.
    """

    def cost(tile: tuple[int, int]) -> tuple[float, int, int]:
        rows, columns = tile
        tiles = -(-height // rows) * -(-width // columns)
        # Two loads or two multiply-adds a cycle, eight of the latter in flight; columns come
        # from the second-level cache at two thirds of a vector a cycle.
        return (
            tiles * max(rows * columns, rows + columns, 8, 3 * columns) / 2,
            -rows * columns,
            columns,
        )

    tiles = [
        (rows, columns)
        for rows in range(1, min(height, accumulators) + 1)
        for columns in range(1, min(width, accumulators // rows, 4) + 1)
    ]
    return min(tiles, key=cost)


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
