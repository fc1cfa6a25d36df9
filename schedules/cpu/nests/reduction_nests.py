# SPDX-License-Identifier: Apache-2.0
"""Loop nests of one reduction and its consumers: in columns, in rows, or in the lanes of vectors.

A contiguous axis is reduced in lanes::

    for k in range(31):                                  # first stage: lanes
        for part in T.unroll(4):
            for lane in T.vectorized(8):
                acc[part, lane] += data[k * 32 + part * 8 + lane]
    for part in T.unroll(4):                             # second stage: parts, if several
        for lane in T.vectorized(8):
            sums[lane] += acc[part, lane]
    for lane in T.unroll(8):                             # last stage
        out += sums[lane]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules import attributes
from schedules.tir.expression_walk import loads, nodes, uses

from .blocks import BlockFacts, Kernel, realize_of
from .fused_consumers import follow, follow_or_copy, vectorize_under
from .loop_transforms import (
    open_reduction,
    parallel_outer,
    static_extent,
    tile_size,
    unroll,
    worth_threads,
)
from .tails import Overlap, Tails


def copy_of_input(
    sch: s_tir.Schedule,
    facts: BlockFacts,  # Facts of the block; its columns are its last spatial variable.
    index: int,  # Index among the block's reads.
) -> SBlockRV:
    """Let a block read a copy of one of its inputs, with the block's columns innermost.

    Returns the block that copies.
    """
    buffer = sch.get(facts.block).reads[index].source
    rank, place = len(buffer.shape), column_axis(facts, buffer)
    copy = sch.cache_read(facts.block, index, "global")
    if place != rank - 1:
        order = [d for d in range(rank) if d != place] + [place]
        sch.transform_layout(copy, ("write", 0), _permutation(order))
    return copy


def reads_columns_in_order(sch: s_tir.Schedule, facts: BlockFacts, index: int) -> bool:
    """Return whether column ``n`` of a block reads column ``n`` of an input: no steps, no offset.

    Parameters are those of :func:`copy_of_input`.
    """
    buffer = sch.get(facts.block).reads[index].source
    column = facts.vars[facts.positions("S")[-1]]
    load = next(load for load in facts.loads if load.buffer.same_as(buffer))
    return load.indices[column_axis(facts, buffer)].same_as(column)


def column_axis(facts: BlockFacts, buffer: tirx.Buffer) -> int:
    """Return the axis of an input along which the columns of a block run."""
    column = facts.vars[facts.positions("S")[-1]]
    load = next(load for load in facts.loads if load.buffer.same_as(buffer))
    return next(axis for axis, expr in enumerate(load.indices) if uses(expr, column))


def _permutation(order: list[int]):  # noqa: ANN202 - an index map is any callable
    return lambda *indices: [indices[d] for d in order]


def vectorize_copy(
    sch: s_tir.Schedule,
    copy: SBlockRV,  # What :func:`copy_of_input` returned, computed at ``columns``.
    columns: LoopRV,  # The loop over tiles of columns.
    lanes: int,  # Lanes of a vector; they divide the tile.
) -> None:
    """Vectorise a copy along the columns of its tile."""
    realize = realize_of(sch, copy)
    written = realize.block.body.indices[-1]
    axis = next(k for k, i in enumerate(realize.block.iter_vars) if uses(written, i.var))
    shared = sch.get(columns).loop_var
    loops = sch.get_loops(copy)
    depth = [sch.get(loop).loop_var.same_as(shared) for loop in loops].index(True) + 1
    last = [
        k
        for k, loop in enumerate(loops)
        if k >= depth and uses(realize.iter_values[axis], sch.get(loop).loop_var)
    ]
    if not last:
        return
    rest = [loop for k, loop in enumerate(loops) if k >= depth and k not in last]
    extent = static_extent(sch, loops[last[0]]) or 1
    vector, lane = sch.split(loops[last[0]], [None, min(lanes, extent)])
    sch.reorder(*rest, vector, lane)
    sch.vectorize(lane)


_PARTS = 4


@dataclass(frozen=True)
class LaneReduction:
    """A reduction that was cut into stages."""

    stages: list[SBlockRV]
    """The block that reduces in lanes, the one that adds the parts (if any), the original block."""
    parts: int
    lanes: int
    """``parts`` and ``lanes``: independent accumulators and their lanes."""
    extent: int  # Length of the reduced axis.


def split_into_lanes(
    sch: s_tir.Schedule,
    block: SBlockRV,  # The reduction; its loop nest holds no other block.
    loop: LoopRV,  # Its innermost loop, reduced.
    lanes: int,  # Lanes of a vector; fewer are used for a shorter loop.
    most_parts: int = _PARTS,  # Upper bound of the number of accumulators.
) -> LaneReduction:
    """Cut a reduction into stages; the new blocks are at the outermost level."""
    extent = static_extent(sch, loop) or 1
    lanes = min(extent, lanes)
    parts = tile_size(extent // lanes, most_parts)
    # No guard: `arrange_lanes` gives the rest a separate loop.
    _, lane = sch.split(loop, [None, parts * lanes], disable_predication=True)
    stages = [sch.rfactor(lane, -1), block]
    if parts > 1:
        _, lane = sch.split(sch.get_loops(block)[-1], [parts, lanes])
        stages.insert(1, sch.rfactor(lane, -1))
    return LaneReduction(stages, parts, lanes, extent)


def arrange_lanes(
    sch: s_tir.Schedule,
    split: LaneReduction,  # The stages, already at their final places.
    depth: int,  # Number of outer loops that they share.
    rows: Sequence[LoopRV] = (),  # Loops of the first stage over outputs that are reduced at once.
) -> LoopRV:
    """Vectorise and unroll the stages.

    Returns the first stage's outermost reduced loop, at which to decompose it at the end.
    """
    outermost = _arrange_first(sch, split, depth, rows)
    for stage in split.stages[1:]:
        loops = sch.get_loops(stage)[depth:]
        if stage is not split.stages[-1]:
            lane = _pop_lane(sch, stage, loops, split.lanes)
            sch.reorder(*loops, lane)
            sch.vectorize(lane)
        unroll(sch, loops)
    return outermost


def _arrange_first(
    sch: s_tir.Schedule, split: LaneReduction, depth: int, rows: Sequence[LoopRV]
) -> LoopRV:
    """Vectorise the stage that reads the input; return its outermost reduced loop."""
    first = split.stages[0]
    inner = sch.get_loops(first)[depth:]
    reduced = [loop for loop in inner if is_reduced(sch, first, loop)]
    row_vars = [sch.get(row).loop_var for row in rows]
    lane = next(
        loop
        for loop in reversed(inner)
        if not is_reduced(sch, first, loop)
        and not any(sch.get(loop).loop_var.same_as(var) for var in row_vars)
    )
    part, lane = sch.split(lane, [split.parts, split.lanes])
    sch.reorder(*reduced, part, lane, *rows)
    sch.vectorize(lane)
    unroll(sch, [part, *rows])
    if split.extent % (split.parts * split.lanes):
        sch.annotate(reduced[-1], attributes.TAIL, [3, split.extent])
    return reduced[0]


def _pop_lane(sch: s_tir.Schedule, block: SBlockRV, loops: list[LoopRV], lanes: int) -> LoopRV:
    """Remove the innermost loop over lanes from ``loops``."""
    for k in reversed(range(len(loops))):
        if static_extent(sch, loops[k]) == lanes and not is_reduced(sch, block, loops[k]):
            return loops.pop(k)
    raise AssertionError("a stage before the last one keeps its lanes")


def is_reduced(sch: s_tir.Schedule, block: SBlockRV, loop: LoopRV) -> bool:
    """Return whether ``loop`` runs over a reduced axis of ``block``."""
    realize, var = realize_of(sch, block), sch.get(loop).loop_var
    return any(
        uses(value, var) and int(axis.iter_type) == int(tirx.IterVar.CommReduce)
        for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
    )


Result = tuple[list[Overlap], list[SBlockRV]]
"""Overlapping tiles, and the consumers that could not be computed with the reduction."""


@dataclass(frozen=True)
class Columns:
    """Vectors of neighbouring outputs in registers."""

    vectors: int  # Number of vectors of the last spatial axis.
    rows: int = 1  # Number of steps of another spatial axis, ``row_axis``.
    row_axis: int = -2  # The spatial axis, counted as ``open_reduction`` does; ignored for one row.
    packed: int | None = None
    """The input that is copied, for each tile of columns, to a buffer that all rows read; the loop
    over rows is then inside of the one over columns."""
    laid_out: bool = False
    """Whether that input is not copied, because the caller gives it a layout in which vectors of
    columns are contiguous (:func:`schedules.tir.parameter_windows.lay_out_matrix`)."""


@dataclass(frozen=True)
class Rows:
    """Outputs that are reduced in lanes."""

    parts: int  # Most accumulators of one output.
    tile: tuple[tuple[int, int], ...] = ()
    """Spatial axes, counted likewise, and the steps of each that are reduced at once."""


def reducible(facts: BlockFacts | None) -> bool:
    """Return whether the nests of this module can take the block."""
    if facts is None or not facts.loads or facts.guards or set(facts.kinds) - set("SR"):
        return False
    spatial, reduced = facts.positions("S"), facts.positions("R")
    if not reduced or any(facts.extents[k] is None for k in reduced):
        return False
    if spatial and max(spatial) > min(reduced):
        return False
    return not spatial or facts.extents[spatial[-1]] is not None or not is_side_by_side(facts)


def in_any_order(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Return whether a block may reduce its elements in another order.

    One of several outputs, such as argmax, only if it compares all of them, positions included:
    else the first of equal values is to be found.
    """
    node = sch.get(block)
    comparisons = nodes(node.body, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
    compared = {load.source for load in loads(*comparisons)}
    return len(node.writes) == 1 or all(each.source in compared for each in node.writes)


def runs_in_columns(kernel: Kernel, facts: BlockFacts) -> bool:
    """Return whether vectors run along the outputs: these are adjacent, or the rows are short."""
    spatial, reduced = facts.positions("S"), facts.positions("R")
    if not spatial or facts.extents[spatial[-1]] is None:
        return False
    lanes = kernel.lanes(facts)
    return is_side_by_side(facts) or facts.volume(reduced) < 2 * lanes


def is_side_by_side(facts: BlockFacts) -> bool:
    """Return whether neighbouring outputs come from neighbouring elements of the largest input."""
    main = max(facts.loads, key=lambda a: facts.volume([k for k, s in enumerate(a.strides) if s]))
    return main.strides[facts.positions("S")[-1]] == 1


def reduce_in_columns(
    kernel: Kernel, block: SBlockRV, consumers: Sequence[SBlockRV], plan: Columns
) -> Result:
    """Reduce with vectors along the last spatial axis and a tile of them in registers."""
    sch = kernel.sch
    facts, outer, reduced = open_reduction(kernel, block)
    width = static_extent(sch, outer[-1]) or 1
    lanes = min(width, kernel.lanes(facts))
    vectors = min(plan.vectors, width // lanes)
    packed, copied = None, None if plan.laid_out else plan.packed
    if copied is not None:
        if width % (vectors * lanes) and not reads_columns_in_order(sch, facts, copied):
            plan = replace(plan, packed=None)  # the copy of a tile does not end where the tile does
        else:
            packed = copy_of_input(sch, facts, copied)
    tiles: list[LoopRV] = []
    rows: list[LoopRV] = []
    if plan.rows > 1:
        row_tiles, row = sch.split(outer.pop(plan.row_axis), [None, plan.rows])
        tiles, rows = [row_tiles], [row]
    columns, vector, lane = sch.split(outer.pop(), [None, vectors, lanes])
    tiled = [(columns, vectors * lanes), *((loop, plan.rows) for loop in tiles)]
    outer = [*outer, columns, *tiles] if plan.packed is not None else [*outer, *tiles, columns]
    sch.reorder(*outer, *reduced, *rows, vector, lane)
    moved, rest = follow_or_copy(sch, block, consumers, outer[-1], tiled)
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
    if worth_threads(facts):
        shared = len(outer) - (len(tiles) if plan.packed is not None else 0)
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
    lanes = kernel.lanes(facts)
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
        moved, rest = follow(sch, block, consumers, outer[-1], tiled)
        for part in (*split.stages, *moved):
            for loop, size in tiled:
                tails.add(part, loop, size)
        for part in moved:
            vectorize_under(kernel, part, len(outer))
    decompose_at = arrange_lanes(sch, split, len(outer), rows)
    if worth_threads(facts):
        parallel_outer(sch, outer, kernel.cpu.num_cores)
    tails.decompose(first, decompose_at)
    return tails.collect(), rest
