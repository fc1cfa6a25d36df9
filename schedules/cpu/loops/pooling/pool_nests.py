# SPDX-License-Identifier: Apache-2.0
"""Loop nests of windows that slide over a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import s_tir
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules import attributes
from schedules.tir.cut_points import cut_points
from schedules.tir.expression_walk import uses

from ...nests.blocks import BlockFacts, Kernel, block_facts
from ...nests.elementwise_nest import schedule_spatial
from ...nests.fused_consumers import Tiled, follow_or_copy
from ...nests.loop_transforms import finish, parallel_outer, tile_size, unroll
from ...nests.overlapping_tails import Tails

_UNROLLED = 16
"""Elements of a window that are unrolled, at most, unless one row has more."""


@dataclass(frozen=True)
class PoolingLoops:
    """Loops of a pooling block.

    Parameters
    ----------
    slide : int
        Position of the innermost axis along which the window slides.
    vector : int
        Position of the axis along which the output is contiguous.
    """

    slide: int
    vector: int


def sliding_axes(facts: BlockFacts) -> list[int]:
    """Positions of the spatial axes that share an index with a reduced one."""
    reduced = [facts.vars[k] for k in facts.positions("R")]
    return [
        k
        for k in facts.positions("S")
        if any(
            uses(index, facts.vars[k]) and uses(index, *reduced)
            for load in facts.loads
            for index in load.indices
        )
    ]


def _place_output(
    kernel: Kernel, pool: SBlockInfo, loop: LoopRV, tiled: Tiled
) -> tuple[SBlockRV, list[SBlockRV]]:
    """Place the block that writes the finished outputs at ``loop``: the epilogue, else a copy.

    Also returns the epilogue if it needs a separate nest.
    """
    after = [info.block_rv for info in kernel.blocks[kernel.blocks.index(pool) + 1 :]]
    moved, rest = follow_or_copy(kernel.sch, pool.block_rv, after, loop, tiled)
    return moved[0], rest


def _finish(kernel: Kernel, tails: Tails, rest: list[SBlockRV]) -> s_tir.Schedule:
    overlaps = tails.collect()
    for block in rest:
        overlaps += schedule_spatial(kernel, block)
    return finish(kernel.sch, overlaps)


def pool_in_lanes(
    kernel: Kernel,
    pool: SBlockInfo,
    facts: BlockFacts,
    window: PoolingLoops,
    most_pixels: int,
    threads: bool,
) -> s_tir.Schedule:
    """Windows that do not slide along the contiguous axis: a tile of pixels in registers."""
    sch, block = kernel.sch, pool.block_rv
    loops = sch.get_loops(block)
    reduced = [loops[k] for k in _positions(facts, "R")]
    outer = [loops[k] for k in _positions(facts, "S") if k not in (window.slide, window.vector)]
    extents = [facts.extents[k] or 1 for k in (window.slide, window.vector)]
    pixels = tile_size(extents[0], most_pixels)
    lanes = min(extents[1], kernel.lanes(facts))
    slide, pixel = sch.split(loops[window.slide], [None, pixels])
    vectors, lane = sch.split(loops[window.vector], [None, lanes])
    sch.reorder(*outer, slide, vectors, *reduced, pixel, lane)
    tiled = [(slide, pixels), (vectors, lanes)]
    output, rest = _place_output(kernel, pool, vectors, tiled)
    tails = Tails(sch)
    for place, tile in tiled:
        tails.add(block, place, tile)
        tails.add(output, place, tile)
    cuts = tile_cuts(cut_points(sch, block, window.slide), extents[0], pixels)
    for vector, around in (
        (lane, [*_short(facts, reduced), pixel]),
        _last_two(sch.get_loops(output)),
    ):
        sch.vectorize(vector)
        unroll(sch, around)
    if threads:
        parallel_outer(sch, outer, kernel.cpu.num_cores)
    if len(cuts) > 1:
        sch.annotate(slide, attributes.TAIL, [1, *cuts])
    init = tails.decompose(block, reduced[0])
    unroll(sch, sch.get_loops(init)[-2:-1])
    return _finish(kernel, tails, rest)


def _positions(facts: BlockFacts, kind: str) -> list[int]:
    return [k for k, other in enumerate(facts.kinds) if other == kind]


def _short(facts: BlockFacts, reduced: list[LoopRV]) -> list[LoopRV]:
    """The innermost loops of a window that are worth a copy of the code for each iteration."""
    extents = [facts.extents[k] or _UNROLLED for k in _positions(facts, "R")]
    first = len(extents) - 1
    while first and math.prod(extents[first - 1 :]) <= _UNROLLED:
        first -= 1
    return reduced[first:]


def _last_two(loops: list[LoopRV]) -> tuple[LoopRV, list[LoopRV]]:
    return loops[-1], loops[-2:-1]


def tile_cuts(points: list[int], extent: int, tile: int) -> list[int]:
    """Cuts of a loop over tiles that separate tiles with a cut point from those without.

    Parameters
    ----------
    points : list[int]
        Elements before which a condition changes.
    extent, tile : int
        Elements in all and in a tile; the last tile overlaps the one before it.

    Returns
    -------
    list[int]
        Ends of the parts, the last one being the number of tiles.
    """
    count = -(-extent // tile)
    starts = [min(index * tile, extent - tile) for index in range(count)]
    ends = {count}
    for index, start in enumerate(starts):
        if any(start < point < start + tile for point in points):
            ends |= {index, index + 1}
        elif index and any(starts[index - 1] + tile <= point <= start for point in points):
            ends.add(index)
    return sorted(ends - {0})


def pool_in_rows(
    kernel: Kernel, pool: SBlockInfo, facts: BlockFacts, window: PoolingLoops, threads: bool
) -> s_tir.Schedule:
    """Windows that slide along the contiguous axis: vectors of neighbouring windows."""
    sch, block = kernel.sch, pool.block_rv
    padding = None if kernel.blocks[0] is pool else kernel.blocks[0].block_rv
    loops = sch.get_loops(block)
    reduced = [loops[k] for k in _positions(facts, "R")]
    outer = [loops[k] for k in _positions(facts, "S") if k != window.vector]
    width = facts.extents[window.vector] or 1
    lanes = min(width, kernel.lanes(facts))
    vectors, lane = sch.split(loops[window.vector], [None, lanes])
    sch.reorder(*outer, vectors, *reduced, lane)
    output, rest = _place_output(kernel, pool, vectors, [(vectors, lanes)])
    tails = Tails(sch)
    tails.add(block, vectors, lanes)
    tails.add(output, vectors, lanes)
    cuts = [] if padding is not None else cut_points(sch, block, window.vector)
    if _stride(facts, window) == 1:
        sch.vectorize(lane)
    unroll(sch, _short(facts, reduced))
    sch.vectorize(sch.get_loops(output)[-1])
    plane = len(_positions(facts, "S")) - len(sliding_axes(facts))
    outside = outer
    if padding is not None:
        outside = outer[: max(1, plane)]
        _place_padding(kernel, padding, outside)
    if threads:
        parallel_outer(sch, outside, kernel.cpu.num_cores)
    if cuts:
        sch.annotate(vectors, attributes.TAIL, [1, *tile_cuts(cuts, width, lanes)])
    init = tails.decompose(block, reduced[0])
    sch.vectorize(sch.get_loops(init)[-1])
    return _finish(kernel, tails, rest)


def _stride(facts: BlockFacts, window: PoolingLoops) -> int | None:
    """Elements between neighbouring windows."""
    return facts.loads[0].strides[window.vector]


def _place_padding(kernel: Kernel, padding: SBlockRV, outside: list[LoopRV]) -> None:
    """Compute the padded plane under ``outside``, in vectors cut where the padding begins."""
    sch = kernel.sch
    facts = block_facts(sch, padding)
    assert facts is not None, "a padding block stores"
    position = len(facts.extents) - 1
    cuts = cut_points(sch, padding, position)
    if outside:
        sch.compute_at(padding, outside[-1])
    row = sch.get_loops(padding)[-1]
    lanes = kernel.lanes(facts)
    vectors, lane = sch.split(row, [None, lanes])
    sch.vectorize(lane)
    sch.annotate(vectors, attributes.TAIL, [2, *cuts, facts.extents[position]])
