# SPDX-License-Identifier: Apache-2.0
"""CPU rules for functions that compute each element on its own, and for any, as the last resort."""

from __future__ import annotations

from collections.abc import Callable

from tvm import s_tir, tirx
from tvm.s_tir import ScheduleError
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.rule import CPURule
from schedules.cpu.nests.blocks import BlockFacts, Kernel, block_facts
from schedules.cpu.nests.elementwise_nest import schedule_spatial
from schedules.cpu.nests.flat_views import merge_shifted_loops
from schedules.cpu.nests.loop_transforms import (
    attempt,
    facts_of_inlined,
    finish,
    open_inlined,
    parallel_outer,
    static_extent,
)
from schedules.cpu.nests.reduction_nests import (
    Columns,
    Rows,
    in_any_order,
    is_reduced,
    reduce_in_columns,
    reduce_in_rows,
    reducible,
    runs_in_columns,
)
from schedules.cpu.nests.tails import Overlap
from schedules.schedule_rule import KernelFacts


class Elementwise(CPURule):
    """Injective functions: element-wise, broadcast, cast, concatenation, split, pad, resize, slice.

    All blocks are inlined into the outputs. Loops that every tensor traverses contiguously become
    one, the innermost is cut into vectors and the outermost run in parallel::

        for i in T.parallel(25088):
            for v in T.vectorized(8):
                out[i * 8 + v] = T.max(a[i * 8 + v] + b[i * 8 + v], 0)

    Rows of a filter that share loads are computed four or eight at a time, those at a border one by
    one; vectors that take turns in memory are loaded together; what is larger than the caches is
    stored past them, and what it reads is prefetched. A tail overlaps the vector before it. Where a
    condition depends on the innermost loop (padding, concatenation along it) that loop is cut at
    the condition instead.
    Functions with fewer than 16384 elements stay serial. Left alone: functions with a reduction,
    and blocks without a normal form.
    """

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function, or return None if a block of it reduces."""
        kernel = open_inlined(facts)
        if kernel is None or not all(info.is_injective() for info in kernel.blocks):
            return None
        kernel, blocks = merge_shifted_loops(kernel, facts_of_inlined(facts))
        overlaps = []
        for info, known in zip(kernel.blocks, blocks, strict=True):
            overlaps += schedule_spatial(kernel, info.block_rv, known)
        return finish(kernel.sch, overlaps)


_ACCUMULATORS = 4


class Fallback(CPURule):
    """Functions that the other rules leave: several unrelated reductions, symbolic or ragged loops.

    Blocks are inlined where that is possible; each of the others gets its own nest, injective
    ones as in ``Elementwise``, reductions with several vectors of accumulators, and where that
    does not work with its outermost spatial loops in parallel and its innermost one in vectors. A
    block for which all of this fails stays as it is; the rule never fails.
    """

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function, or return None if it has no root block."""
        if not _has_root(facts.func):
            return None  # sorts, scatters and scans write their whole body themselves
        kernel = open_inlined(facts)
        if kernel is None:
            return _schedule_opaque(facts.func, facts.target)
        overlaps: list[Overlap] = []
        for info in kernel.blocks:
            overlaps += _schedule_block(kernel, info.block_rv)
        return finish(kernel.sch, overlaps)


def _has_root(func: tirx.PrimFunc) -> bool:
    """Return whether a schedule finds the root block by its name."""
    return isinstance(func.body, s_tir.SBlockRealize) and func.body.block.name_hint == "root"


def _schedule_block(kernel: Kernel, block: SBlockRV) -> list[Overlap]:
    """The first way that works, tried on copies."""
    ways: list[Callable[[Kernel, SBlockRV], list[Overlap]]] = []
    facts = block_facts(kernel.sch, block)
    if facts is not None and set(facts.kinds) <= {"S"}:
        ways = [schedule_spatial]
    elif facts is not None and reducible(facts) and _is_free(kernel, facts):
        ways = [_reduce]
    for way in [*ways, _schedule_plainly]:
        trial = kernel.copy()
        try:
            overlaps = way(trial, block)
        except ScheduleError:
            continue
        kernel.sch = trial.sch
        return overlaps
    return []


def _is_free(kernel: Kernel, facts: BlockFacts) -> bool:
    """Return whether a reduction is not in lanes, or may be."""
    return runs_in_columns(kernel, facts) or in_any_order(kernel.sch, facts.block)


def _reduce(kernel: Kernel, block: SBlockRV) -> list[Overlap]:
    """Vectors along the outputs if these are adjacent, else along the reduced elements."""
    facts = block_facts(kernel.sch, block)
    assert facts is not None, "a reducible block has facts"
    if runs_in_columns(kernel, facts):
        return reduce_in_columns(kernel, block, (), Columns(_ACCUMULATORS))[0]
    return reduce_in_rows(kernel, block, (), Rows(_ACCUMULATORS))[0]


def _schedule_plainly(kernel: Kernel, block: SBlockRV) -> list[Overlap]:
    """Vectors along the last spatial loop, inside of the reduced ones; the others in parallel."""
    sch = kernel.sch
    facts = block_facts(sch, block)
    loops = sch.get_loops(block)
    if facts is None or set(facts.kinds) - set("SR") or not loops:
        return []
    spatial = [loop for loop, kind in zip(loops, facts.kinds, strict=True) if kind == "S"]
    reduced = [loop for loop, kind in zip(loops, facts.kinds, strict=True) if kind == "R"]
    if not spatial:
        return []
    lanes = kernel.lanes(facts)
    extent = static_extent(sch, spatial[-1])
    outer, lane = spatial, None
    if extent is not None and extent % lanes == 0 and reduced:
        vectors, lane = sch.split(spatial[-1], [None, lanes])
        outer = [*spatial[:-1], vectors]
    sch.reorder(*outer, *reduced, *([lane] if lane is not None else []))
    if lane is not None:
        sch.vectorize(lane)
    parallel_outer(sch, outer, kernel.cpu.num_cores)
    if reduced:
        sch.decompose_reduction(block, reduced[0])
    return []


def _schedule_opaque(func: tirx.PrimFunc, target: Target) -> s_tir.Schedule:
    """Functions without a normal form, and empty ones: only what is safe for any block.

    The outermost loop of each nest runs in parallel if it may. Reductions are decomposed, so that
    the result of reducing nothing is the initial value.
    """
    sch = s_tir.Schedule(func)
    cores = CPUInfo.from_target(target).num_cores
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        loops = sch.get_loops(block)
        reduced = [loop for loop in loops if is_reduced(sch, block, loop)]
        if loops and cores > 1 and static_extent(sch, loops[0]) != 0:
            attempt(sch.parallel, loops[0])
        if reduced:
            attempt(sch.decompose_reduction, block, reduced[0])
    return finish(sch)
