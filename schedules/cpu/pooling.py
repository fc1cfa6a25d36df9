# SPDX-License-Identifier: Apache-2.0
"""The rule for reductions over sliding windows: max, average and other pooling."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from .facts import BlockFacts, Kernel, block_facts, open_kernel, uses
from .guards import cut_points
from .overlap import Tails
from .steps import (
    SERIAL_ELEMENTS,
    finish,
    inline_blocks,
    parallel_outer,
    tile_size,
    unroll,
)
from .truncate import TAIL

_ACCUMULATORS = 8
_LONGEST_STEP = 16


@dataclass(frozen=True)
class _Window:
    """What a pooling block does with its loops.

    Parameters
    ----------
    slide : int
        Position of the innermost axis along which the window slides.
    vector : int
        Position of the axis along which the output is contiguous.
    """

    slide: int
    vector: int


class Pooling(CPUScheduleRule):
    """Windows that slide over one tensor, in NCHW, NCHW[x]c and NHWC, with their padding.

    Where the window does not slide along the contiguous axis (packed channels, channels last) the
    padding is inlined, and a tile of neighbouring outputs is kept in registers; the loops are cut
    where the window leaves the tensor, so that the inner part has no conditions::

        for n_c_h in T.parallel(...):
            for w in range(7):
                for kh, kw in unrolled(3, 3):
                    for pixel in T.unroll(8):
                        for lane in T.vectorized(8):
                            acc[pixel, lane] = T.max(acc[pixel, lane], data[...])

    Otherwise (NCHW) vectors run along the width and read a padded copy of the plane. Left alone:
    functions with another number of reductions than one, windows over a product (convolutions),
    reductions whose windows do not overlap with anything (see ``Reduction``), symbolic extents.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Schedule ``func``, or return None if it is no pooling."""
        kernel = open_kernel(func, target)
        found = _find_pool(kernel, keep_padding=False)
        if kernel is None or found is None:
            return None
        pool, facts, window = found
        if window.slide != window.vector:
            return _schedule_lanes(kernel, pool, facts, window)
        if window.vector in facts.guards and not _few_guarded(kernel, facts, window):
            kernel = open_kernel(func, target)
            found = _find_pool(kernel, keep_padding=True)
            if kernel is None or found is None:
                return None
            pool, facts, window = found
        return _schedule_rows(kernel, pool, facts, window)


def _find_pool(
    kernel: Kernel | None, keep_padding: bool
) -> tuple[SBlockInfo, BlockFacts, _Window] | None:
    """Inline around the only reduction; return it if it is a window over one tensor."""
    if kernel is None:
        return None
    reductions = [info for info in kernel.blocks if not info.is_injective()]
    if len(reductions) != 1:
        return None
    pool = reductions[0]
    before = kernel.blocks[: kernel.blocks.index(pool)]
    remaining = inline_blocks(kernel, keep=before[-1:] if keep_padding else ())
    place = remaining.index(pool)
    if place != (1 if keep_padding else 0) or len(remaining) > place + 2:
        return None
    facts = block_facts(kernel.sch, pool.block_rv)
    window = _window_of(facts)
    return None if facts is None or window is None else (pool, facts, window)


def _window_of(facts: BlockFacts | None) -> _Window | None:
    if facts is None or not facts.is_static or facts.indirect or facts.kinds.strip("S").strip("R"):
        return None
    if len({load.buffer for load in facts.loads}) != 1 or "R" not in facts.kinds:
        return None
    slides = _slides(facts)
    vectors = [k for k in facts.positions("S") if facts.store.strides[k] == 1]
    if not slides or not vectors:
        return None
    if vectors[0] not in slides and facts.loads[0].strides[vectors[0]] != 1:
        return None
    step = facts.loads[0].strides[vectors[0]]
    if vectors[0] in slides and (step is None or not 0 < step <= _LONGEST_STEP):
        return None
    slide = vectors[0] if vectors[0] in slides else slides[-1]
    return _Window(slide, vectors[0])


def _slides(facts: BlockFacts) -> list[int]:
    """Positions of the axes that share an index with a reduced one."""
    reduced = [facts.vars[k] for k in facts.positions("R")]
    return [
        k
        for k in facts.positions("S")
        if any(
            uses(index, facts.vars[k]) and any(uses(index, var) for var in reduced)
            for load in facts.loads
            for index in load.indices
        )
    ]


def _stage_output(kernel: Kernel, pool: SBlockInfo) -> SBlockRV:
    """The block that writes the finished outputs: the epilogue, else a copy from registers."""
    after = kernel.blocks[kernel.blocks.index(pool) + 1 :]
    if after:
        return after[0].block_rv
    return kernel.sch.cache_write(pool.block_rv, 0, "global")


def _schedule_lanes(
    kernel: Kernel, pool: SBlockInfo, facts: BlockFacts, window: _Window
) -> s_tir.Schedule:
    """Windows that do not slide along the contiguous axis: a tile of pixels in registers."""
    sch, block = kernel.sch, pool.block_rv
    output = _stage_output(kernel, pool)
    loops = sch.get_loops(block)
    reduced = [loops[k] for k in _all(facts, "R")]
    outer = [loops[k] for k in _all(facts, "S") if k not in (window.slide, window.vector)]
    extents = [facts.extents[k] or 1 for k in (window.slide, window.vector)]
    pixels = tile_size(extents[0], _ACCUMULATORS)
    lanes = min(extents[1], max(1, kernel.cpu.vector_bits // 8 // facts.itemsize))
    slide, pixel = sch.split(loops[window.slide], [None, pixels])
    vectors, lane = sch.split(loops[window.vector], [None, lanes])
    sch.reorder(*outer, slide, vectors, *reduced, pixel, lane)
    sch.reverse_compute_at(output, vectors)
    tails = Tails(sch)
    for place, tile in ((slide, pixels), (vectors, lanes)):
        tails.add(block, place, tile)
        tails.add(output, place, tile)
    cuts = tile_cuts(cut_points(sch, block, window.slide), extents[0], pixels)
    for vector, around in ((lane, [*reduced, pixel]), _last_two(sch.get_loops(output))):
        sch.vectorize(vector)
        unroll(sch, around)
    if facts.volume(range(len(facts.extents))) >= SERIAL_ELEMENTS:
        parallel_outer(sch, outer, kernel.cpu.num_cores)
    if len(cuts) > 1:
        sch.annotate(slide, TAIL, [1, *cuts])
    init = tails.decompose(block, reduced[0])
    unroll(sch, sch.get_loops(init)[-2:-1])
    return finish(sch, tails.collect())


def _all(facts: BlockFacts, kind: str) -> list[int]:
    return [k for k, other in enumerate(facts.kinds) if other == kind]


def _last_two(loops: list[LoopRV]) -> tuple[LoopRV, list[LoopRV]]:
    return loops[-1], loops[-2:-1]


def tile_cuts(points: list[int], extent: int, tile: int) -> list[int]:
    """Where to cut a loop over tiles so that no tile without a cut point shares code with one.

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


def _schedule_rows(
    kernel: Kernel, pool: SBlockInfo, facts: BlockFacts, window: _Window
) -> s_tir.Schedule:
    """Windows that slide along the contiguous axis: vectors of neighbouring windows."""
    sch, block = kernel.sch, pool.block_rv
    padding = None if kernel.blocks[0] is pool else kernel.blocks[0].block_rv
    output = _stage_output(kernel, pool)
    loops = sch.get_loops(block)
    reduced = [loops[k] for k in _all(facts, "R")]
    outer = [loops[k] for k in _all(facts, "S") if k != window.vector]
    width = facts.extents[window.vector] or 1
    lanes = min(width, max(1, kernel.cpu.vector_bits // 8 // facts.itemsize))
    vectors, lane = sch.split(loops[window.vector], [None, lanes])
    sch.reorder(*outer, vectors, *reduced, lane)
    sch.reverse_compute_at(output, vectors)
    tails = Tails(sch)
    tails.add(block, vectors, lanes)
    tails.add(output, vectors, lanes)
    cuts = [] if padding is not None else cut_points(sch, block, window.vector)
    if _stride(facts, window) == 1:
        sch.vectorize(lane)
    unroll(sch, reduced)
    sch.vectorize(sch.get_loops(output)[-1])
    plane = len(_all(facts, "S")) - len(_slides(facts))
    outside = outer[:plane] if padding is not None else outer
    if padding is not None and plane == 0:
        outside = outer[:1]
    if padding is not None:
        _place_padding(kernel, padding, outside[-1])
    if facts.volume(range(len(facts.extents))) >= SERIAL_ELEMENTS:
        parallel_outer(sch, outside, kernel.cpu.num_cores)
    if cuts:
        sch.annotate(vectors, TAIL, [1, *tile_cuts(cuts, width, lanes)])
    init = tails.decompose(block, reduced[0])
    sch.vectorize(sch.get_loops(init)[-1])
    return finish(sch, tails.collect())


def _stride(facts: BlockFacts, window: _Window) -> int | None:
    """Elements between neighbouring windows."""
    return facts.loads[0].strides[window.vector]


def _few_guarded(kernel: Kernel, facts: BlockFacts, window: _Window) -> bool:
    """Whether windows are strided, which needs no padded copy, and few tiles have conditions."""
    width, lanes = facts.extents[window.vector] or 1, kernel.cpu.vector_bits // 8 // facts.itemsize
    return _stride(facts, window) != 1 and width >= 4 * lanes


def _place_padding(kernel: Kernel, padding: SBlockRV, loop: LoopRV) -> None:
    """Compute the padded plane at ``loop``, its rows in vectors cut where the padding begins."""
    sch = kernel.sch
    facts = block_facts(sch, padding)
    assert facts is not None, "a padding block stores"
    position = len(facts.extents) - 1
    cuts = cut_points(sch, padding, position)
    sch.compute_at(padding, loop)
    row = sch.get_loops(padding)[-1]
    lanes = max(1, kernel.cpu.vector_bits // 8 // facts.itemsize)
    vectors, lane = sch.split(row, [None, lanes])
    sch.vectorize(lane)
    sch.annotate(vectors, TAIL, [2, *cuts, facts.extents[position]])
