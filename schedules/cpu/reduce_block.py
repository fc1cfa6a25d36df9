# SPDX-License-Identifier: Apache-2.0
"""Schedules of one reduction block: in columns or in rows, alone or split over the threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from .consumers import follow, vectorize_under
from .facts import BlockFacts, Kernel, block_facts
from .lanes import arrange_lanes, split_into_lanes
from .panel import copy_of_input, vectorize_copy
from .overlap import Overlap, Tails
from .steps import (
    SERIAL_ELEMENTS,
    align_iters,
    chunk_count,
    feeds,
    fuse_group,
    merge_groups,
    open_reduction,
    parallel_outer,
    static_extent,
    tile_size,
    unroll,
)

_ACCUMULATORS = 8
_ROWS = 4
_PARTS = 4

Result = tuple[list[Overlap], list[SBlockRV]]
"""Overlapping tiles, and the consumers that could not be computed with the reduction."""


@dataclass(frozen=True)
class Columns:
    """Vectors of neighbouring outputs in registers.

    Parameters
    ----------
    vectors : int
        How many vectors of the last spatial axis.
    rows : int
        How many steps of another spatial axis, ``row_axis``.
    row_axis : int
        Which spatial axis; ignored for one row.
    packed : int | None
        Which of the block's inputs is copied, for each tile of columns, to a buffer of its own,
        which all rows read; the loop over rows is then inside of the one over columns.
    """

    vectors: int
    rows: int = 1
    row_axis: int = -1
    packed: int | None = None


@dataclass(frozen=True)
class Rows:
    """Outputs that are reduced in lanes.

    Parameters
    ----------
    parts : int
        Most accumulators of one output.
    tile : tuple[tuple[int, int], ...]
        Spatial axes, and how many steps of each are reduced side by side.
    """

    parts: int
    tile: tuple[tuple[int, int], ...] = ()


def reducible(facts: BlockFacts | None) -> bool:
    """Whether :func:`reduce_block` can take the block."""
    if facts is None or not facts.loads or facts.guards or set(facts.kinds) - set("SR"):
        return False
    spatial, reduced = facts.positions("S"), facts.positions("R")
    if not reduced or any(facts.extents[k] is None for k in reduced):
        return False
    if spatial and max(spatial) > min(reduced):
        return False
    return not spatial or facts.extents[spatial[-1]] is not None


def reduce_block(kernel: Kernel, block: SBlockRV, consumers: Sequence[SBlockRV]) -> Result:
    """Schedule a reduction that is :func:`reducible`, and its consumers with it.

    Parameters
    ----------
    kernel : Kernel
        The kernel.
    block : SBlockRV
        The reduction, in normal form and not under a loop with other blocks.
    consumers : Sequence[SBlockRV]
        The blocks after it, in order.

    Returns
    -------
    Result
        Overlapping tiles, and the consumers that could not be computed with it.
    """
    facts = block_facts(kernel.sch, block)
    assert facts is not None, "a reducible block has facts"
    parts = _thread_parts(kernel, facts)
    if parts <= 1:
        return _reduce_whole(kernel, block, consumers)
    partial = _split_over_threads(kernel.sch, facts, parts)
    overlaps, _ = _reduce_whole(kernel, partial, ())
    more, rest = _reduce_whole(kernel, block, consumers)
    return overlaps + more, rest


def runs_in_columns(kernel: Kernel, facts: BlockFacts) -> bool:
    """Whether vectors run along the outputs: they lie side by side, or the rows are short."""
    spatial, reduced = facts.positions("S"), facts.positions("R")
    if not spatial:
        return False
    main = max(facts.loads, key=lambda a: facts.volume([k for k, s in enumerate(a.strides) if s]))
    lanes = kernel.cpu.vector_bits // 8 // facts.itemsize
    return main.strides[spatial[-1]] == 1 or facts.volume(reduced) < 2 * lanes


def _thread_parts(kernel: Kernel, facts: BlockFacts) -> int:
    """Into how many parts to cut the first reduced axis because the outputs are few."""
    spatial, reduced = facts.positions("S"), facts.positions("R")
    tiles = facts.volume(spatial)
    if runs_in_columns(kernel, facts):
        tiles //= kernel.cpu.vector_bits // 8 // facts.itemsize
    cores = kernel.cpu.num_cores
    if facts.volume([*spatial, *reduced]) < 4 * SERIAL_ELEMENTS or feeds(tiles, cores):
        return 1
    if cores == 1:
        return 1
    parts = chunk_count(facts.volume(merge_groups(facts, reduced)[0]), 2 * cores, False)
    return parts if parts < facts.volume(reduced) else 1


def _split_over_threads(sch: s_tir.Schedule, facts: BlockFacts, parts: int) -> SBlockRV:
    """Reduce parts of the first reduced axis on their own; return the block that does."""
    loops = sch.get_loops(facts.block)
    spatial = facts.kinds.count("S")
    unit = 0 if facts.positions("S") else spatial
    group = merge_groups(facts, facts.positions("R"))[0]
    part, _ = sch.split(fuse_group(sch, [loops[k] for k in group]), [parts, None])
    partial = sch.rfactor(part, 0)
    loops = sch.get_loops(partial)
    sch.reorder(*loops[:unit], loops[spatial], *loops[unit:spatial])
    align_iters(sch, partial)
    align_iters(sch, facts.block)
    return partial


def _reduce_whole(kernel: Kernel, block: SBlockRV, consumers: Sequence[SBlockRV]) -> Result:
    facts = block_facts(kernel.sch, block)
    assert facts is not None, "a reducible block has facts"
    lanes = kernel.cpu.vector_bits // 8 // facts.itemsize
    spatial, reduced = facts.positions("S"), facts.positions("R")
    extents = [facts.extents[k] for k in spatial]
    if runs_in_columns(kernel, facts):
        width = extents[-1] or 1
        count = -(-width // min(lanes, width))
        outer = facts.volume(spatial[:-1])
        vectors = balanced_tile(count, _ACCUMULATORS, outer, kernel.cpu.num_cores)
        height = extents[-2] if len(extents) > 1 else None
        rows = 1
        if height is not None and vectors < _ACCUMULATORS // 2:
            rows = tile_size(height, min(_ROWS, _ACCUMULATORS // vectors))
        return reduce_in_columns(kernel, block, consumers, Columns(vectors, rows, -2))
    short = len(merge_groups(facts, reduced)) == 1 and facts.volume(reduced) < 8 * lanes
    if spatial and short and extents[-1] is not None:
        tile = ((-1, tile_size(extents[-1], _ROWS)),)
        return reduce_in_rows(kernel, block, consumers, Rows(1, tile))
    return reduce_in_rows(kernel, block, consumers, Rows(_PARTS))


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


def reduce_in_columns(
    kernel: Kernel, block: SBlockRV, consumers: Sequence[SBlockRV], plan: Columns
) -> Result:
    """Reduce with vectors along the last spatial axis and a tile of them in registers."""
    sch = kernel.sch
    facts, outer, reduced = open_reduction(kernel, block)
    width = static_extent(sch, outer[-1]) or 1
    lanes = min(width, kernel.cpu.vector_bits // 8 // facts.itemsize)
    vectors = min(plan.vectors, width // lanes)
    packed = None if plan.packed is None else copy_of_input(sch, facts, plan.packed)
    tiles, rows, tiled = [], [], {}
    if plan.rows > 1:
        row_tiles, row = sch.split(outer.pop(plan.row_axis), [None, plan.rows])
        tiles, rows, tiled = [row_tiles], [row], {plan.rows: row_tiles}
    columns, vector, lane = sch.split(outer.pop(), [None, vectors, lanes])
    tiled = [(columns, vectors * lanes), *((loop, size) for size, loop in tiled.items())]
    outer = [*outer, columns, *tiles] if packed is not None else [*outer, *tiles, columns]
    sch.reorder(*outer, *reduced, *rows, vector, lane)
    moved, rest = follow(sch, consumers, outer[-1])
    if not moved:
        moved = [sch.cache_write(block, 0, "global")]
        sch.reverse_compute_at(moved[0], outer[-1])
    tails = Tails(sch)
    if packed is not None:
        sch.compute_at(packed, columns)
        tails.add(packed, columns, vectors * lanes)
        vectorize_copy(sch, packed, columns, lanes)
    for loop, size in tiled:
        for part in (block, *moved):
            tails.add(part, loop, size)
    for part in moved:
        vectorize_under(kernel, part, len(outer))
    sch.vectorize(lane)
    unroll(sch, [*reduced, *rows, vector])
    if facts.volume(range(len(facts.extents))) >= SERIAL_ELEMENTS * plan.rows:
        shared = len(outer) - (len(tiles) if packed is not None else 0)
        parallel_outer(sch, outer[:shared], kernel.cpu.num_cores)
    init = tails.decompose(block, reduced[0])
    unroll(sch, sch.get_loops(init)[-2 - len(rows) : -1])
    return tails.collect(), rest


def reduce_in_rows(
    kernel: Kernel, block: SBlockRV, consumers: Sequence[SBlockRV], plan: Rows
) -> Result:
    """Reduce each output in lanes, and the lanes at the end."""
    sch = kernel.sch
    facts, outer, reduced = open_reduction(kernel, block)
    lanes = kernel.cpu.vector_bits // 8 // facts.itemsize
    split = split_into_lanes(sch, block, reduced[-1], lanes, plan.parts)
    first = split.stages[0]
    outer, rows, tiled = sch.get_loops(first)[: len(outer)], [], []
    for axis, size in plan.tile:
        outer[axis], row = sch.split(outer[axis], [None, size])
        rows.append(row)
        tiled.append((outer[axis], size))
    tails, rest = Tails(sch), list(consumers)
    if outer:
        inner = sch.get_loops(first)[len(outer) + len(rows) :]
        sch.reorder(*outer, *inner, *rows)
        for stage in split.stages[1:]:
            sch.reverse_compute_at(stage, outer[-1])
        moved, rest = follow(sch, consumers, outer[-1])
        for part in (*split.stages, *moved):
            for loop, size in tiled:
                tails.add(part, loop, size)
        for part in moved:
            vectorize_under(kernel, part, len(outer))
    decompose_at = arrange_lanes(sch, split, len(outer), rows)
    if facts.volume(range(len(facts.extents))) >= SERIAL_ELEMENTS:
        parallel_outer(sch, outer, kernel.cpu.num_cores)
    tails.decompose(first, decompose_at)
    return tails.collect(), rest
