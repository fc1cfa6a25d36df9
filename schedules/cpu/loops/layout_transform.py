# SPDX-License-Identifier: Apache-2.0
"""CPU rule for transposes and for changes between NCHW and NCHW[x]c."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from tvm import ir, s_tir, sym, tirx
from tvm.s_tir.schedule import LoopRV

from schedules import attributes
from schedules.cpu.nests.tails import Overlap
from schedules.schedule_rule import KernelFacts
from schedules.tir.expression_walk import substitute
from schedules.tir.index_math import cut_points, factor_of

from ..core.rule import CPURule
from ..nests.blocks import Access, BlockFacts, Kernel
from ..nests.elementwise_nest import schedule_spatial
from ..nests.loop_transforms import (
    facts_of_inlined,
    finish,
    fuse_group,
    merge_groups,
    open_inlined,
    parallel_outer,
    worth_threads,
)

_CACHE_LINE = 64
_BLOCKS = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class _Walk:
    """Group of loops along which one side is contiguous."""

    group: int  # Position in the list of merged groups.
    run: int | None
    """Iterations after which contiguity ends (the lanes of a packed channel), None for never."""


class LayoutTransform(CPURule):
    """Functions that read along one axis and write along another.

    Both contiguous axes are tiled, so that each cache line that is read or written is used whole
    while it is in the first-level cache; vectors run along the written axis::

        for n_c_block_pixels in T.parallel(...):
            for pixel in range(8):
                for lane in T.vectorized(8):
                    out[n, c_block, pixels * 8 + pixel, lane] = data[n, c_block * 8 + lane, ...]

    Left alone: functions without such a block, those with a reduction, and symbolic extents of the
    two axes.
    """

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function, or return None if nothing in it is transposed."""
        kernel = open_inlined(facts)
        if kernel is None or not all(info.is_injective() for info in kernel.blocks):
            return None
        blocks = facts_of_inlined(facts)
        found = [_find_walks(block) for block in blocks]
        if not any(found):
            return None
        overlaps: list[Overlap] = []
        for info, block, walks in zip(kernel.blocks, blocks, found, strict=True):
            if walks is None:
                overlaps += schedule_spatial(kernel, info.block_rv, block)
            else:
                overlaps += _transpose(kernel, block, *walks)
        return finish(kernel.sch, overlaps)


def _find_walks(facts: BlockFacts | None) -> tuple[_Walk, _Walk] | None:
    """The loops along which the block writes and reads contiguously, if they differ."""
    if facts is None or facts.indirect or not facts.loads:
        return None
    groups = merge_groups(facts, range(len(facts.extents)))
    writes = _contiguous(facts, groups, facts.store)
    if writes is None:
        return None
    most = max(_touched(facts, load) for load in facts.loads)
    for load in facts.loads:
        reads = _contiguous(facts, groups, load)
        if _touched(facts, load) < most or reads is None or reads.group == writes.group:
            continue
        if all(facts.extents[k] for k in groups[writes.group] + groups[reads.group]):
            return writes, reads
    return None


def _touched(facts: BlockFacts, access: Access) -> int:
    return facts.volume([k for k, stride in enumerate(access.strides) if stride != 0])


def _contiguous(facts: BlockFacts, groups: list[list[int]], access: Access) -> _Walk | None:
    """The group of loops along which ``access`` moves by one element."""
    for index, group in enumerate(groups):
        if access.strides[group[-1]] == 1:
            return _Walk(index, None)
    for index, group in enumerate(groups):
        k = group[-1]
        if access.strides[k] is None and len(group) == 1:
            run = _longest_run(facts, access, k)
            if run > 0:
                return _Walk(index, run)
    return None


def _longest_run(facts: BlockFacts, access: Access, k: int) -> int:
    """Iterations of variable ``k`` that are sure to touch neighbours; 0 if fewer than 4."""
    runs = [run for run in _BLOCKS if run <= (facts.extents[k] or 0)]
    return max(takewhile(lambda run: _stride_is_one(facts, access, k, run), runs), default=0)


def _stride_is_one(facts: BlockFacts, access: Access, k: int, run: int) -> bool:
    """Return whether the first ``run`` iterations of variable ``k`` touch neighbouring elements."""
    analyzer = sym.Analyzer()
    inner = tirx.Var("inner", str(facts.vars[k].ty.dtype))
    analyzer.bind(inner, ir.Range(0, run))
    moved = substitute(access.offset, {facts.vars[k]: inner})
    return factor_of(inner, analyzer.simplify(moved)) == 1


def _transpose(
    kernel: Kernel, facts: BlockFacts | None, writes: _Walk, reads: _Walk
) -> list[Overlap]:
    """Tile both axes, vectorise the written one and parallelise what is outside of the tiles."""
    assert facts is not None, "the walks were found in these facts"
    sch = kernel.sch
    groups = merge_groups(facts, range(len(facts.extents)))
    loops = sch.get_loops(facts.block)
    fused = [fuse_group(sch, [loops[k] for k in group]) for group in groups]
    extents = [facts.volume(group) for group in groups]
    line = max(1, _CACHE_LINE // facts.itemsize)
    lanes = kernel.lanes(facts)
    overlaps: list[Overlap] = []

    def tile(walk: _Walk, wanted: int) -> LoopRV | None:
        size = min(wanted, walk.run or wanted, extents[walk.group])
        if extents[walk.group] == size:
            inner, fused[walk.group] = fused[walk.group], None
            return inner
        fused[walk.group], inner = sch.split(fused[walk.group], [None, size])
        if extents[walk.group] % size:
            overlaps.append(Overlap(facts.name, tuple(groups[walk.group]), size))
        return inner

    written, read = tile(writes, lanes), tile(reads, line)
    outside = [loop for loop in fused if loop is not None]
    sch.reorder(*outside, read, written)
    sch.vectorize(written)
    if fused[writes.group] is None:
        cuts = cut_points(sch, facts.block, groups[writes.group][-1])
        if cuts:
            sch.annotate(written, attributes.TAIL, [1, *cuts, extents[writes.group]])
    if worth_threads(facts):
        parallel_outer(sch, outside, kernel.cpu.num_cores)
    return overlaps
