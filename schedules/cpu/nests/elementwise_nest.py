# SPDX-License-Identifier: Apache-2.0
"""Loop nest of a block that computes each element on its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules import attributes
from schedules.tir.index_math import cut_points

from .blocks import BlockFacts, Kernel, block_facts, item_bytes
from .loop_transforms import chunk_count, feeds, fuse_group, merge_groups, worth_threads
from .stencil_rows import is_filter, rows_of_step, shared_rows
from .streaming_stores import worth_streaming
from .tails import Overlap
from .vector_loads import is_interleaved


def schedule_spatial(
    kernel: Kernel,  # The kernel; the block's loops are its iteration variables.
    block: SBlockRV,  # An injective block.
    known: BlockFacts | None = None,  # Its facts, if they have been collected.
) -> list[Overlap]:
    """Schedule an injective block as a separate nest: one parallel loop, vectors innermost.

    Returns tails for :func:`finish`.
    """
    sch = kernel.sch
    facts, loops = known or block_facts(sch, block), sch.get_loops(block)
    if facts is None or set(facts.kinds) - {"S"} or not loops or len(loops) != len(facts.kinds):
        return []
    groups = merge_groups(facts, range(len(facts.extents)))
    fused = [fuse_group(sch, [loops[k] for k in group]) for group in groups]
    extents = [facts.volume(group) for group in groups]
    is_adjacent = len(groups[-1]) == 1 and facts.store.strides[groups[-1][0]] == 1
    lanes, register = _lanes(kernel, facts), kernel.cpu.vector_bits // 8
    stored = lanes * item_bytes(facts.store.buffer)
    # Parts of a register, such as pixels of 8 bits, reach memory one by one.
    streams = is_adjacent and stored >= register and worth_streaming(kernel, facts)
    if streams:
        sch.annotate(block, attributes.STREAM, [register, kernel.cpu.l2_bytes // 4])
    if is_interleaved(facts, groups[-1][-1]):
        sch.annotate(block, attributes.INTERLEAVED, 1)
    row = shared_rows(sch.get(block), facts, groups)
    vectors, lane, overlaps = _vectorize_last(kernel, facts, groups[-1], fused[-1], lanes, streams)
    any_chunks = bool(overlaps)
    if is_filter(facts):
        sch.annotate(block, attributes.MULTIPLY_ADD, 1)
    chunked = vectors if lane is not None else None
    if row is not None and vectors is not None:
        conditional = lane is None or row in facts.guards
        count = rows_of_step(kernel.cpu, facts, row)
        if not conditional or _feeds_steps(kernel, facts, groups, row, count):
            place = groups.index([row])
            fused[place], rows = sch.split(fused[place], [None, count])
            overlaps += [Overlap(facts.name, (row,), count)] if extents[place] % count else []
            extents[place] = -(-extents[place] // count)
            if conditional:
                sch.reorder(*fused[:-1], rows)
                sch.annotate(rows, attributes.STEP, groups[-1])
                chunked = None
            else:
                sch.reorder(*fused[:-1], vectors, rows, lane)
                sch.unroll(rows)
    if worth_threads(facts):
        cores = kernel.cpu.num_cores
        _parallel_spatial(sch, fused[:-1], extents[:-1], chunked, cores, any_chunks)
    return overlaps


def _feeds_steps(
    kernel: Kernel, facts: BlockFacts, groups: Sequence[Sequence[int]], row: int, rows: int
) -> bool:
    """Return whether steps of rows, which are not cut into chunks, keep the cores busy."""
    steps = -(-facts.volume([row]) // rows)
    others = math.prod(facts.volume(group) for group in groups[:-1] if group != [row])
    return not worth_threads(facts) or feeds(steps * others, kernel.cpu.num_cores)


def _lanes(kernel: Kernel, facts: BlockFacts) -> int:
    """Elements of a vector; as many floats, where a wider one would cost more to compute.

    Rows of a filter take many registers, and AVX-512 stores the low parts of a register at once.
    """
    if is_filter(facts) or kernel.cpu.vector_bits >= 512:
        return kernel.cpu.vector_bits // 8 // max(facts.itemsize, facts.float_bytes)
    return kernel.lanes(facts)


def _vectorize_last(
    kernel: Kernel, facts: BlockFacts, group: list[int], loop: LoopRV, lanes: int, aligned: bool
) -> tuple[LoopRV | None, LoopRV | None, list[Overlap]]:
    """Vectorise the innermost loop; return the loops over vectors, over lanes, and the tail.

    There are no loops over lanes alone where the loop is cut.
    """
    sch = kernel.sch
    symbolic = facts.extents[group[-1]] is None
    extent = facts.volume(group)
    guarded = bool(set(group) & facts.guards)
    if not symbolic and extent <= max(lanes, 16) and not guarded:
        sch.vectorize(loop)
        return None, None, []
    tile = lanes if symbolic else min(lanes, extent)
    outer, inner = sch.split(loop, [None, tile])
    ends = [-1] if symbolic else [*cut_points(sch, facts.block, group[-1]), extent]
    if aligned:
        ends = _aligned(ends, tile)
    sch.vectorize(inner)
    if symbolic or len(ends) > 1:
        sch.annotate(outer, attributes.TAIL, [2, *ends])
        return outer, None, []
    if extent % tile:
        return outer, inner, [Overlap(facts.name, tuple(group), tile)]
    return outer, inner, []


def _aligned(ends: Sequence[int], tile: int) -> list[int]:
    """More cuts of a loop, so that the vectors of its long pieces are aligned."""
    begins = [0, *ends[:-1]]
    more = {-(-a // tile) * tile for a, b in zip(begins, ends, strict=True) if b - a >= 4 * tile}
    return sorted({*ends, *more} - {0})


def _parallel_spatial(
    sch: s_tir.Schedule,
    loops: Sequence[LoopRV],
    extents: Sequence[int],
    vectors: LoopRV | None,
    cores: int,
    overlapping: bool,
) -> None:
    """Run the outermost loops in parallel, with part of the loop over vectors if they are few."""
    taken, count = 0, 1
    while taken < len(loops) and not feeds(count, cores):
        count *= extents[taken]
        taken += 1
    chosen = list(loops[:taken])
    if not feeds(count, cores) and vectors is not None:
        extent = int(sch.get(vectors).extent)
        chunks = chunk_count(extent, -(-4 * cores // count), overlapping)
        if chunks > 1:
            chunk, _ = sch.split(vectors, [chunks, None])
            chosen.append(chunk)
    if chosen:
        sch.parallel(fuse_group(sch, chosen))
