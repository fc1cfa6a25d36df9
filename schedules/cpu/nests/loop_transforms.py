# SPDX-License-Identifier: Apache-2.0
"""Loop transformations that the rules share: inlining, merging, vectorising, parallelising.

Limits that ranges make needless go. A level of 8 bits is at most 255, and so is a weighted mean of
some; a conversion back cuts off what is behind the point::

    before: T.Cast("uint8", T.max(T.min(0.3 * a[i] + 0.7 * b[i] + 0.5, 255.0), 0.0))
    after:  T.Cast("uint8", 0.3 * a[i] + 0.7 * b[i] + 0.5)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir import ScheduleError
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules.schedule_rule import KernelFacts
from schedules.tir.extents import constant
from schedules.tir.float_bits import keep_nan, keep_roundings
from schedules.tir.vector_math import vectorize_math

from .blocks import BlockFacts, Kernel, block_facts, open_kernel, realize_of
from .stencil_rows import multiply_add, unroll_steps
from .streaming_stores import stream_stores
from .tails import Overlap, overlap_tails, truncate_tails
from .vector_loads import load_interleaved

_MOST_BITS = 16  # which floats hold exactly
_ROUNDED = 1e-5  # more than the relative error of some hundred operations


@dataclass(frozen=True)
class Range:
    """Least and largest value, but for the rounding of floats."""

    least: float
    most: float

    def __add__(self, other: Range) -> Range:
        return Range(self.least + other.least, self.most + other.most)

    def __sub__(self, other: Range) -> Range:
        return Range(self.least - other.most, self.most - other.least)

    def __mul__(self, other: Range) -> Range:
        ends = [a * b for a in (self.least, self.most) for b in (other.least, other.most)]
        return _ANY if any(map(math.isnan, ends)) else Range(min(ends), max(ends))


_ANY = Range(-math.inf, math.inf)


def drop_limits(
    func: tirx.PrimFunc,  # A scheduled function.
) -> tirx.PrimFunc:
    """Drop the limits of values that are converted to integers and are within these anyway.

    Returns the same function if there are none.
    """

    def rewrite(block: s_tir.SBlock) -> s_tir.SBlock:
        return tvm_ffi.structural_map(block, (tirx.Cast, _unlimited))

    return tvm_ffi.structural_map(func, (s_tir.SBlock, rewrite))


def range_of(value: ir.Expr) -> Range:
    """Range of an expression; all numbers where nothing is known of it, NaN apart."""
    if isinstance(value, tirx.FloatImm | tirx.IntImm):
        return Range(float(value.value), float(value.value))
    if isinstance(value, tirx.Cast) and _is_float(value):
        return _of_type(str(value.value.ty.dtype))
    if not _is_float(value):
        return _ANY
    if isinstance(value, tirx.Add):
        return range_of(value.a) + range_of(value.b)
    if isinstance(value, tirx.Sub):
        return range_of(value.a) - range_of(value.b)
    if isinstance(value, tirx.Mul):
        return range_of(value.a) * range_of(value.b)
    if isinstance(value, tirx.Min | tirx.Max):
        a, b = range_of(value.a), range_of(value.b)
        pick = min if isinstance(value, tirx.Min) else max
        return Range(pick(a.least, b.least), pick(a.most, b.most))
    return _ANY


def _of_type(dtype: str) -> Range:
    kind = tvm_ffi.dtype(dtype)
    if not dtype.startswith(("int", "uint")) or kind.bits > _MOST_BITS:
        return _ANY
    if dtype.startswith("uint"):
        return Range(0.0, 2.0**kind.bits - 1)
    return Range(-(2.0 ** (kind.bits - 1)), 2.0 ** (kind.bits - 1) - 1)


def _is_float(value: ir.Expr) -> bool:
    return str(value.ty.dtype).startswith("float")


def _unlimited(cast: tirx.Cast) -> tirx.Cast:
    """A conversion to an integer without limits that change nothing."""
    dtype = str(cast.ty.dtype)
    kept = _of_type(dtype)
    if kept == _ANY or not _is_float(cast.value):
        return cast
    value = _without(cast.value, kept)
    return cast if value.same_as(cast.value) else tirx.Cast(dtype, value)


def _without(value: ir.Expr, kept: Range) -> ir.Expr:
    """A value without limits of ``kept``, one within another."""
    if not isinstance(value, tirx.Min | tirx.Max):
        return value
    inner = _without(value.a, kept)
    if _is_needless(value, kept):
        return inner
    return value if inner.same_as(value.a) else type(value)(inner, value.b)


def _is_needless(limit: tirx.Min | tirx.Max, kept: Range) -> bool:
    """Return whether a limit, the type's own, is beyond what a conversion of the rest gives."""
    inner, bound = range_of(limit.a), range_of(limit.b)
    if isinstance(limit, tirx.Max):
        least = inner.least - _ROUNDED * abs(inner.least)
        return bound == Range(kept.least, kept.least) and least > kept.least - 1
    most = inner.most + _ROUNDED * abs(inner.most)
    return bound == Range(kept.most, kept.most) and most < kept.most + 1


SERIAL_ELEMENTS = 16384
"""Least work for which a parallel region pays off."""


def attempt(step: Callable[..., object], *args: object) -> bool:
    """Try a schedule primitive; return whether it applied. A refused one changes nothing."""
    try:
        step(*args)
    except ScheduleError:
        return False
    return True


def inline_blocks(
    kernel: Kernel,  # Its list of blocks is updated.
    keep: Sequence[SBlockInfo] = (),  # Blocks that stay.
) -> list[SBlockInfo]:
    """Inline every injective block that can be, except those in ``keep``.

    Returns the remaining blocks in order.
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


def merge_groups(
    facts: BlockFacts,
    positions: Sequence[int],  # Consecutive positions of loops, outermost first.
) -> list[list[int]]:
    """Group neighbouring loops that every access traverses as if they were one.

    Returns the positions in groups; loops with a guard or a symbolic extent stay alone.
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


def chunk_count(extent: int, least: int, any_count: bool) -> int:
    """Number of chunks of a loop: ``least`` or more, a divisor unless ``any_count``."""
    if extent <= least:
        return extent
    for count in range(least, min(extent, 8 * least) + 1):
        if extent % count == 0:
            return count
    return least if any_count else 1


def finish(
    sch: s_tir.Schedule,  # The finished schedule of one function named ``main``.
    overlaps: Sequence[Overlap] = (),  # Axes with overlapping tiles.
) -> s_tir.Schedule:
    """Apply what no primitive does: tails, streaming stores, NaN, vector code for functions.

    Returns a schedule of the final function.
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
    kernel: Kernel,
    block: SBlockRV,  # The reduction, in normal form.
) -> tuple[BlockFacts, list[LoopRV], list[LoopRV]]:
    """Open a reduction.

    Returns its facts, its spatial loops, and its reduced loops, the latter merged. Spatial loops
    that iterate once come first, so that -1, -2, ... number the others as ``positions("S")`` does.
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
