# SPDX-License-Identifier: Apache-2.0
"""Reduction of one block: in columns or in rows, whole or split over the threads."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from ..nests.blocks import BlockFacts, Kernel, block_facts
from ..nests.loop_transforms import (
    SERIAL_ELEMENTS,
    align_iters,
    chunk_count,
    feeds,
    fuse_group,
    merge_groups,
    tile_size,
)
from .reduction_nests import Columns, Result, Rows, reduce_in_columns, reduce_in_rows

_ACCUMULATORS = 8
_ROWS = 4
_PARTS = 4


def reducible(facts: BlockFacts | None) -> bool:
    """Return whether :func:`reduce_block` can take the block."""
    if facts is None or not facts.loads or facts.guards or set(facts.kinds) - set("SR"):
        return False
    spatial, reduced = facts.positions("S"), facts.positions("R")
    if not reduced or any(facts.extents[k] is None for k in reduced):
        return False
    if spatial and max(spatial) > min(reduced):
        return False
    return not spatial or facts.extents[spatial[-1]] is not None or not _side_by_side(facts)


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
        return reduce_whole(kernel, block, consumers)
    partial = split_over_threads(kernel.sch, facts, parts)
    overlaps, _ = reduce_whole(kernel, partial, ())
    more, rest = reduce_whole(kernel, block, consumers)
    return overlaps + more, rest


def runs_in_columns(kernel: Kernel, facts: BlockFacts) -> bool:
    """Return whether vectors run along the outputs: these are adjacent, or the rows are short."""
    spatial, reduced = facts.positions("S"), facts.positions("R")
    if not spatial or facts.extents[spatial[-1]] is None:
        return False
    lanes = kernel.lanes(facts)
    return _side_by_side(facts) or facts.volume(reduced) < 2 * lanes


def _side_by_side(facts: BlockFacts) -> bool:
    """Return whether neighbouring outputs come from neighbouring elements of the largest input."""
    main = max(facts.loads, key=lambda a: facts.volume([k for k, s in enumerate(a.strides) if s]))
    return main.strides[facts.positions("S")[-1]] == 1


def _thread_parts(kernel: Kernel, facts: BlockFacts) -> int:
    """Number of parts of the first reduced axis, split because the outputs are few."""
    spatial, reduced = facts.positions("S"), facts.positions("R")
    tiles = facts.volume(spatial)
    if runs_in_columns(kernel, facts):
        tiles //= kernel.lanes(facts)
    cores = kernel.cpu.num_cores
    if facts.volume([*spatial, *reduced]) < 4 * SERIAL_ELEMENTS or feeds(tiles, cores):
        return 1
    if cores == 1:
        return 1
    parts = chunk_count(facts.volume(merge_groups(facts, reduced)[0]), 2 * cores, False)
    return parts if parts < facts.volume(reduced) else 1


def split_over_threads(sch: s_tir.Schedule, facts: BlockFacts, parts: int) -> SBlockRV:
    """Reduce parts of the first reduced axis on their own.

    Parameters
    ----------
    sch : Schedule
        The schedule.
    facts : BlockFacts
        Of the reduction; its block will only add up the parts.
    parts : int
        Their number; a divisor of the axis, after merging.

    Returns
    -------
    SBlockRV
        The block that reduces each part; the first of its axes is the part. Both blocks are in
        normal form.
    """
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


def reduce_whole(kernel: Kernel, block: SBlockRV, consumers: Sequence[SBlockRV]) -> Result:
    """Schedule a reduction as :func:`reduce_block` does, but never split over the threads."""
    facts = block_facts(kernel.sch, block)
    assert facts is not None, "a reducible block has facts"
    lanes = kernel.lanes(facts)
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
