# SPDX-License-Identifier: Apache-2.0
"""Product of a vector and a large matrix that is read once, row by row."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from schedules.cpu.nests.tails import Overlap, Tails

from ...nests.blocks import BlockFacts, Kernel
from ...nests.fused_consumers import follow_or_copy, vectorize_under
from ...nests.loop_transforms import (
    align_iters,
    fuse_group,
    merge_groups,
    open_reduction,
    parallel_outer,
    static_extent,
    unroll,
)

_MOST_STEPS = 8


def stream_rows(
    kernel: Kernel,
    block: SBlockRV,
    consumers: Sequence[SBlockRV],
    vectors: int,
    row_axis: int | None,
) -> tuple[list[Overlap], list[SBlockRV]]:
    """Schedule ``out[m, n] += x[m, k] * w[k, n]`` for few ``m`` and a ``w`` beyond the caches.

    Each thread reads long pieces of the rows of ``w``, which suits the prefetchers, while its sums
    stay in the first-level cache; a register tile of columns would jump from row to row instead::

        for part in T.parallel(2):
            for k in range(160):
                for vector in range(63):
                    for lane in T.vectorized(8):
                        for step in T.unroll(8):
                            acc[...] += x[k * 8 + step] * w[k * 8 + step, ...]

    Parameters
    ----------
    kernel : Kernel
        The kernel.
    block : SBlockRV
        The reduction, in normal form.
    consumers : Sequence[SBlockRV]
        The blocks after it, in order.
    vectors : int
        Vectors of columns that one thread takes.
    row_axis : int | None
        The spatial axis ``m``, counted as ``open_reduction`` does, if there is one; all of it is
        computed at once.

    Returns
    -------
    tuple[list[Overlap], list[SBlockRV]]
        Overlapping tiles, and the consumers that could not be computed with it.
    """
    sch = kernel.sch
    facts, outer, reduced = open_reduction(kernel, block)
    width = static_extent(sch, outer[-1]) or 1
    lanes = min(width, kernel.lanes(facts))
    vectors = min(vectors, width // lanes)
    rows = [] if row_axis is None else [outer.pop(row_axis)]
    part, vector, lane = sch.split(outer.pop(), [None, vectors, lanes])
    extent = static_extent(sch, reduced[-1]) or 1
    steps = max(size for size in range(1, _MOST_STEPS + 1) if extent % size == 0)
    k, step = sch.split(reduced[-1], [None, steps])
    outer = [*outer, part]
    sch.reorder(*outer, *reduced[:-1], k, vector, lane, *rows, step)
    tiled = [(part, vectors * lanes)]
    moved, rest = follow_or_copy(sch, block, consumers, part, tiled)
    tails = Tails(sch)
    for stage in (block, *moved):
        tails.add(stage, part, vectors * lanes)
    for stage in moved:
        vectorize_under(kernel, stage, len(outer))
    sch.vectorize(lane)
    unroll(sch, [*rows, step])
    parallel_outer(sch, outer, kernel.cpu.num_cores)
    tails.decompose(block, [*reduced[:-1], k][0])
    return tails.collect(), rest


def split_over_threads(sch: s_tir.Schedule, facts: BlockFacts, parts: int) -> SBlockRV:
    """Reduce parts of the first reduced axis on their own.

    Parameters
    ----------
    sch : Schedule
        The schedule.
    facts : BlockFacts
        Facts of the reduction; its block will only add up the parts.
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
