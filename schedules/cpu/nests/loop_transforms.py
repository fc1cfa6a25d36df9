# SPDX-License-Identifier: Apache-2.0
"""Loop transformations that the rules share: inlining, merging, vectorising, parallelising."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir import ScheduleError
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.schedule_rule import KernelFacts
from schedules.tir.bfloat16 import keep_roundings
from schedules.tir.extents import constant
from schedules.tir.keep_nan import keep_nan
from schedules.tir.vector_math import vectorize_math

from .blocks import BlockFacts, Kernel, block_facts, open_kernel, realize_of
from .interleaved_loads import load_interleaved
from .overlapping_tails import Overlap, overlap_tails
from .stencils.conditional_rows import unroll_steps
from .stencils.shared_rows import multiply_add
from .stencils.streaming_stores import stream_stores
from .truncated_tails import truncate_tails
from .value_ranges import drop_limits

SERIAL_ELEMENTS = 16384
"""Least work for which a parallel region pays off."""


def attempt(step: Callable[..., object], *args: object) -> bool:
    """Try a schedule primitive; return whether it applied. A refused one changes nothing."""
    try:
        step(*args)
    except ScheduleError:
        return False
    return True


def inline_blocks(kernel: Kernel, keep: Sequence[SBlockInfo] = ()) -> list[SBlockInfo]:
    """Inline every injective block that can be, except those in ``keep``.

    Parameters
    ----------
    kernel : Kernel
        Its list of blocks is updated.
    keep : Sequence[SBlockInfo]
        Blocks that stay.

    Returns
    -------
    list[SBlockInfo]
        The remaining blocks in order.
    """
    sch = kernel.sch
    remaining = []
    for info in kernel.blocks:
        fixed = any(info is kept for kept in keep) or not info.is_injective()
        if fixed or not attempt(sch.compute_inline, info.block_rv):
            remaining.append(info)
    kernel.blocks = remaining
    return remaining


def open_inlined(facts: KernelFacts) -> Kernel | None:
    """Open a function as :func:`open_kernel` does, and inline every injective block that can be."""
    inlined = facts.read(_inlined)
    return None if inlined is None else inlined.copy()


def facts_of_inlined(facts: KernelFacts) -> list[BlockFacts | None]:
    """Facts of the blocks of :func:`open_inlined`; empty where there is no such kernel."""
    return facts.read(_inlined_facts)


def _inlined(facts: KernelFacts) -> Kernel | None:
    kernel = open_kernel(facts)
    if kernel is not None:
        inline_blocks(kernel)
    return kernel


def _inlined_facts(facts: KernelFacts) -> list[BlockFacts | None]:
    kernel = facts.read(_inlined)
    return [block_facts(kernel.sch, info.block_rv) for info in kernel.blocks] if kernel else []


def merge_groups(facts: BlockFacts, positions: Sequence[int]) -> list[list[int]]:
    """Group neighbouring loops that every access traverses as if they were one.

    Parameters
    ----------
    facts : BlockFacts
        The block.
    positions : Sequence[int]
        Consecutive positions of loops, outermost first.

    Returns
    -------
    list[list[int]]
        The positions in groups; loops with a guard or a symbolic extent stay alone.
    """
    groups: list[list[int]] = []
    for k in positions:
        if groups and _mergeable(facts, groups[-1][-1], k):
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups


def _mergeable(facts: BlockFacts, outer: int, inner: int) -> bool:
    extent = facts.extents[inner]
    if extent is None or facts.extents[outer] is None or facts.kinds[outer] != facts.kinds[inner]:
        return False
    if outer + 1 != inner or {outer, inner} & facts.guards:
        return False
    return all(
        access.strides[inner] is not None
        and access.strides[outer] == access.strides[inner] * extent  # type: ignore[operator]
        for access in facts.accesses
    )


def fuse_group(sch: s_tir.Schedule, loops: Sequence[LoopRV]) -> LoopRV:
    """Fuse the loops; a single one stays as it is."""
    return sch.fuse(*loops) if len(loops) > 1 else loops[0]


def feeds(extent: int, cores: int) -> bool:
    """Return whether a parallel loop of ``extent`` keeps ``cores`` equally busy."""
    return extent >= 4 * cores or (extent >= cores and extent % cores == 0)


def chunk_count(extent: int, wanted: int, any_count: bool) -> int:
    """Number of chunks of a loop: ``wanted`` or more, a divisor unless ``any_count``."""
    if extent <= wanted:
        return extent
    for count in range(wanted, min(extent, 8 * wanted) + 1):
        if extent % count == 0:
            return count
    return wanted if any_count else 1


def finish(sch: s_tir.Schedule, overlaps: Sequence[Overlap] = ()) -> s_tir.Schedule:
    """Apply what no primitive does: tails, streaming stores, NaN, vector code for functions.

    Parameters
    ----------
    sch : Schedule
        The finished schedule of one function named ``main``.
    overlaps : Sequence[Overlap]
        Axes with overlapping tiles.

    Returns
    -------
    Schedule
        A schedule of the final function.
    """
    func = sch.mod["main"]
    done = unroll_steps(truncate_tails(overlap_tails(func, overlaps)))
    done = multiply_add(drop_limits(done))
    done = load_interleaved(stream_stores(done))
    done = tvm_ffi.structural_map(done, (s_tir.SBlock, state_init))
    done = vectorize_math(keep_roundings(keep_nan(done)))
    return sch if done.same_as(func) else s_tir.Schedule(done)


def state_init(block: s_tir.SBlock) -> s_tir.SBlock:
    """Make the init of a block that reduces a single element the first statement of its body."""
    reduces = any(var.iter_type == tirx.IterVar.CommReduce for var in block.iter_vars)
    if block.init is None or reduces:
        return block
    return s_tir.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        tirx.SeqStmt([block.init, block.body]),
        None,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )


def static_extent(sch: s_tir.Schedule, loop: LoopRV) -> int | None:
    """The extent of a loop, or None where it is symbolic."""
    return constant(sch.get(loop).extent)


def worth_threads(facts: BlockFacts) -> bool:
    """Return whether a block loads enough for threads, or computes eight times as much."""
    everything = range(len(facts.extents))
    loaded = max(
        facts.volume([k for k in everything if access.strides[k] != 0]) for access in facts.accesses
    )
    return max(loaded, facts.volume(everything) // 8) >= SERIAL_ELEMENTS


def parallel_outer(sch: s_tir.Schedule, loops: Sequence[LoopRV], cores: int) -> None:
    """Run as many of the outermost loops in parallel as it takes to keep the cores busy."""
    taken, count = 0, 1
    while taken < len(loops) and not feeds(count, cores):
        count *= static_extent(sch, loops[taken]) or cores
        taken += 1
    if taken:
        sch.parallel(fuse_group(sch, loops[:taken]))


def unroll(sch: s_tir.Schedule, loops: Sequence[LoopRV], most: int = 128) -> None:
    """Unroll the innermost of the loops while their product is at most ``most``."""
    size = 1
    for loop in reversed(loops):
        extent = static_extent(sch, loop)
        if extent is None or size * extent > most:
            return
        size *= extent
        if extent > 1:
            sch.unroll(loop)


def tile_size(extent: int, most: int) -> int:
    """The tile of at most ``most`` that wastes the fewest iterations of ``extent``."""
    if extent <= most:
        return extent
    return min(range(most, most // 2, -1), key=lambda size: -(-extent // size) * size)


def align_iters(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Bring the iteration variables of a block into the order of its loops."""
    realize = realize_of(sch, block)
    order = []
    for loop in sch.get_loops(block):
        var = sch.get(loop).loop_var
        order += [k for k, value in enumerate(realize.iter_values) if value.same_as(var)]
    if len(order) == len(realize.iter_values):
        sch.reorder_block_iter_var(block, order)


def open_reduction(
    kernel: Kernel, block: SBlockRV
) -> tuple[BlockFacts, list[LoopRV], list[LoopRV]]:
    """Open a reduction.

    Parameters
    ----------
    kernel : Kernel
        The kernel.
    block : SBlockRV
        The reduction, in normal form.

    Returns
    -------
    tuple[BlockFacts, list[LoopRV], list[LoopRV]]
        Its facts, its spatial loops, and its reduced loops, the latter merged. Spatial loops that
        iterate once come first, so that -1, -2, ... number the others as ``positions("S")`` does.
    """
    sch = kernel.sch
    facts = block_facts(sch, block)
    assert facts is not None, "a reduction stores"
    loops = sch.get_loops(block)
    groups = merge_groups(facts, facts.positions("R"))
    reduced = [fuse_group(sch, [loops[k] for k in group]) for group in groups]
    moving = facts.positions("S")
    once = [k for k, kind in enumerate(facts.kinds) if kind == "S" and k not in moving]
    spatial = [loops[k] for k in (*once, *moving)]
    if once and moving:
        sch.reorder(*spatial)
    return facts, spatial, reduced
