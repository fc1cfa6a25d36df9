# SPDX-License-Identifier: Apache-2.0
"""Contiguous copy of the part of an input that one tile of columns reads."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.tir.expression_walk import uses

from .blocks import BlockFacts, realize_of
from .loop_transforms import static_extent


def copy_of_input(sch: s_tir.Schedule, facts: BlockFacts, index: int) -> SBlockRV:
    """Let a block read a copy of one of its inputs, with the block's columns innermost.

    Parameters
    ----------
    sch : Schedule
        The schedule.
    facts : BlockFacts
        Of the block; its columns are its last spatial variable.
    index : int
        Index among the block's reads.

    Returns
    -------
    SBlockRV
        The block that copies.
    """
    column = facts.vars[facts.positions("S")[-1]]
    buffer = sch.get(facts.block).reads[index].source
    load = next(load for load in facts.loads if load.buffer.same_as(buffer))
    rank = len(load.indices)
    place = next(d for d, expr in enumerate(load.indices) if uses(expr, column))
    copy = sch.cache_read(facts.block, index, "global")
    if place != rank - 1:
        order = [d for d in range(rank) if d != place] + [place]
        sch.transform_layout(copy, ("write", 0), _permutation(order))
    return copy


def _permutation(order: list[int]):  # noqa: ANN202 - an index map is any callable
    return lambda *indices: [indices[d] for d in order]


def vectorize_copy(sch: s_tir.Schedule, copy: SBlockRV, columns: LoopRV, lanes: int) -> None:
    """Vectorise a copy along the columns of its tile.

    Parameters
    ----------
    sch : Schedule
        The schedule.
    copy : SBlockRV
        What :func:`copy_of_input` returned, computed at ``columns``.
    columns : LoopRV
        The loop over tiles of columns.
    lanes : int
        Lanes of a vector; they divide the tile.
    """
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
