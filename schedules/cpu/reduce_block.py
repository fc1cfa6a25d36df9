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
from .overlap import Overlap, Tails
from .steps import (
    SERIAL_ELEMENTS,
    align_iters,
    chunk_count,
    feeds,
    fuse_group,
    merge_groups,
    parallel_outer,
    static_extent,
    tile_size,
    unroll,
)

_ACCUMULATORS = 8
_ROWS = 4
_PARTS = 4


@dataclass(frozen=True)
class _Loops:
    """The loops of a block, the reduced ones merged."""

    spatial: list[LoopRV]
    reduced: list[LoopRV]


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


def reduce_block(
    kernel: Kernel, block: SBlockRV, consumers: Sequence[SBlockRV]
) -> tuple[list[Overlap], list[SBlockRV]]:
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
    tuple[list[Overlap], list[SBlockRV]]
        Overlapping tiles, and the consumers that could not be computed with it.
    """
    facts = block_facts(kernel.sch, block)
    assert facts is not None, "a reducible block has facts"
    parts = _thread_parts(kernel, facts)
    if parts <= 1:
        return _schedule(kernel, block, consumers)
    partial = _split_over_threads(kernel.sch, facts, parts)
    overlaps, _ = _schedule(kernel, partial, ())
    more, rest = _schedule(kernel, block, consumers)
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
    extent = facts.volume(merge_groups(facts, reduced)[0])
    return 1 if cores == 1 else chunk_count(extent, 2 * cores, False)


def _split_over_threads(sch: s_tir.Schedule, facts: BlockFacts, parts: int) -> SBlockRV:
    """Reduce parts of the first reduced axis on their own; return the block that does."""
    loops = sch.get_loops(facts.block)
    spatial = len(facts.positions("S"))
    group = merge_groups(facts, facts.positions("R"))[0]
    part, _ = sch.split(fuse_group(sch, [loops[k] for k in group]), [parts, None])
    partial = sch.rfactor(part, 0)
    loops = sch.get_loops(partial)
    sch.reorder(loops[spatial], *loops[:spatial])
    align_iters(sch, partial)
    align_iters(sch, facts.block)
    return partial


def _schedule(
    kernel: Kernel, block: SBlockRV, consumers: Sequence[SBlockRV]
) -> tuple[list[Overlap], list[SBlockRV]]:
    facts = block_facts(kernel.sch, block)
    assert facts is not None, "a reducible block has facts"
    sch = kernel.sch
    loops = sch.get_loops(block)
    groups = merge_groups(facts, facts.positions("R"))
    nest = _Loops(
        spatial=[loops[k] for k in facts.positions("S")],
        reduced=[fuse_group(sch, [loops[k] for k in group]) for group in groups],
    )
    step = _in_columns if runs_in_columns(kernel, facts) else _in_rows
    return step(kernel, block, facts, nest, consumers)


def _in_columns(
    kernel: Kernel,
    block: SBlockRV,
    facts: BlockFacts,
    nest: _Loops,
    consumers: Sequence[SBlockRV],
) -> tuple[list[Overlap], list[SBlockRV]]:
    """Vectors of outputs, a tile of them in registers."""
    sch = kernel.sch
    width = static_extent(sch, nest.spatial[-1]) or 1
    lanes = min(width, kernel.cpu.vector_bits // 8 // facts.itemsize)
    vectors = tile_size(-(-width // lanes), min(_ACCUMULATORS, width // lanes))
    columns, vector, lane = sch.split(nest.spatial[-1], [None, vectors, lanes])
    outer, tile, tiled = nest.spatial[:-1], [vector], [(columns, vectors * lanes)]
    height = static_extent(sch, outer[-1]) if outer else None
    if height is not None and vectors < _ACCUMULATORS // 2:
        rows = tile_size(height, min(_ROWS, _ACCUMULATORS // vectors))
        row_tiles, row = sch.split(outer[-1], [None, rows])
        outer, tile = [*outer[:-1], row_tiles], [row, vector]
        tiled.append((row_tiles, rows))
    sch.reorder(*outer, columns, *nest.reduced, *tile, lane)
    outer = [*outer, columns]
    moved, rest = follow(sch, consumers, columns)
    if not moved:
        moved = [sch.cache_write(block, 0, "global")]
        sch.reverse_compute_at(moved[0], columns)
    tails = Tails(sch)
    for loop, size in tiled:
        for part in (block, *moved):
            tails.add(part, loop, size)
    for part in moved:
        vectorize_under(kernel, part, len(outer))
    sch.vectorize(lane)
    unroll(sch, [*nest.reduced, *tile])
    if facts.volume(range(len(facts.extents))) >= SERIAL_ELEMENTS:
        parallel_outer(sch, outer, kernel.cpu.num_cores)
    init = tails.decompose(block, nest.reduced[0])
    unroll(sch, sch.get_loops(init)[-1 - len(tile) : -1])
    return tails.collect(), rest


def _in_rows(
    kernel: Kernel,
    block: SBlockRV,
    facts: BlockFacts,
    nest: _Loops,
    consumers: Sequence[SBlockRV],
) -> tuple[list[Overlap], list[SBlockRV]]:
    """Each output from lanes that are reduced at the end; short rows several at a time."""
    sch = kernel.sch
    extent = static_extent(sch, nest.reduced[-1]) or 1
    lanes = kernel.cpu.vector_bits // 8 // facts.itemsize
    short = len(nest.reduced) == 1 and extent < 8 * lanes and bool(nest.spatial)
    split = split_into_lanes(sch, block, nest.reduced[-1], lanes, 1 if short else _PARTS)
    first = split.stages[0]
    outer, rows, height = sch.get_loops(first)[: len(nest.spatial)], [], 1
    if short:
        height = tile_size(static_extent(sch, outer[-1]) or 1, _ROWS)
        outer[-1], row = sch.split(outer[-1], [None, height])
        rows = [row]
    tails, rest = Tails(sch), list(consumers)
    if outer:
        for stage in split.stages[1:]:
            sch.reverse_compute_at(stage, outer[-1])
        moved, rest = follow(sch, consumers, outer[-1])
        for part in (*split.stages, *moved):
            tails.add(part, outer[-1], height)
        for part in moved:
            vectorize_under(kernel, part, len(outer))
    decompose_at = arrange_lanes(sch, split, len(outer), rows)
    if facts.volume(range(len(facts.extents))) >= SERIAL_ELEMENTS:
        parallel_outer(sch, outer, kernel.cpu.num_cores)
    tails.decompose(first, decompose_at)
    return tails.collect(), rest
