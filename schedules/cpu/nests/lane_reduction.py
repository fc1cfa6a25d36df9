# SPDX-License-Identifier: Apache-2.0
"""Reduction of a contiguous axis in the lanes of vectors.

::

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
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules import attributes
from schedules.tir.expression_walk import uses

from .blocks import realize_of
from .loop_transforms import static_extent, tile_size, unroll

_PARTS = 4


@dataclass(frozen=True)
class LaneReduction:
    """A reduction that was cut into stages.

    Parameters
    ----------
    stages : list[SBlockRV]
        The block that reduces in lanes, the one that adds the parts (if any), the original block.
    parts, lanes : int
        Independent accumulators and their lanes.
    extent : int
        Length of the reduced axis.
    """

    stages: list[SBlockRV]
    parts: int
    lanes: int
    extent: int


def split_into_lanes(
    sch: s_tir.Schedule, block: SBlockRV, loop: LoopRV, lanes: int, most_parts: int = _PARTS
) -> LaneReduction:
    """Cut a reduction into stages; the new blocks are at the outermost level.

    Parameters
    ----------
    sch : Schedule
        The schedule.
    block : SBlockRV
        The reduction; its loop nest holds no other block.
    loop : LoopRV
        Its innermost loop, reduced.
    lanes : int
        Lanes of a vector; fewer are used for a shorter loop.
    most_parts : int
        Upper bound of the number of accumulators.

    Returns
    -------
    Lanes
        The stages.
    """
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
    sch: s_tir.Schedule, split: LaneReduction, depth: int, rows: Sequence[LoopRV] = ()
) -> LoopRV:
    """Vectorise and unroll the stages.

    Parameters
    ----------
    sch : Schedule
        The schedule.
    split : LaneReduction
        The stages, already at their final places.
    depth : int
        Number of outer loops that they share.
    rows : Sequence[LoopRV]
        Loops of the first stage over outputs that are reduced at once.

    Returns
    -------
    LoopRV
        The first stage's outermost reduced loop, at which to decompose it at the end.
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
