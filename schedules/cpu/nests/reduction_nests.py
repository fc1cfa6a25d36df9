# SPDX-License-Identifier: Apache-2.0
"""Loop nests of one reduction and its consumers: in columns or in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.tir.expression_walk import loads, nodes

from .blocks import BlockFacts, Kernel
from .cached_input import copy_of_input, reads_columns_in_order, vectorize_copy
from .fused_consumers import follow, follow_or_copy, vectorize_under
from .lane_reduction import arrange_lanes, split_into_lanes
from .loop_transforms import (
    open_reduction,
    parallel_outer,
    static_extent,
    unroll,
    worth_threads,
)
from .overlapping_tails import Overlap, Tails

Result = tuple[list[Overlap], list[SBlockRV]]
"""Overlapping tiles, and the consumers that could not be computed with the reduction."""


@dataclass(frozen=True)
class Columns:
    """Vectors of neighbouring outputs in registers.

    Parameters
    ----------
    vectors : int
        Number of vectors of the last spatial axis.
    rows : int
        Number of steps of another spatial axis, ``row_axis``.
    row_axis : int
        The spatial axis, counted as ``open_reduction`` does; ignored for one row.
    packed : int | None
        The input that is copied, for each tile of columns, to a buffer that all rows read; the loop
        over rows is then inside of the one over columns.
    laid_out : bool
        Whether that input is not copied, because the caller gives it a layout in which vectors of
        columns are contiguous (:func:`.cached_input.lay_out_matrix`).
    """

    vectors: int
    rows: int = 1
    row_axis: int = -2
    packed: int | None = None
    laid_out: bool = False


@dataclass(frozen=True)
class Rows:
    """Outputs that are reduced in lanes.

    Parameters
    ----------
    parts : int
        Most accumulators of one output.
    tile : tuple[tuple[int, int], ...]
        Spatial axes, counted likewise, and the steps of each that are reduced at once.
    """

    parts: int
    tile: tuple[tuple[int, int], ...] = ()


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
