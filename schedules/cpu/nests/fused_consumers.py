# SPDX-License-Identifier: Apache-2.0
"""Fusion of consumers into the loops of the block that they consume."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules import attributes
from schedules.tir.expression_walk import uses
from schedules.tir.extents import constant, is_one

from .blocks import Access, BlockFacts, Kernel, block_facts, realize_of
from .loop_transforms import attempt, fuse_group, static_extent
from .tails import overlap_of

Tiled = Sequence[tuple[LoopRV, int]]
"""Loops over tiles, and the number of iterations in each tile."""


def follow(
    sch: s_tir.Schedule,
    block: SBlockRV,  # The block that they consume.
    consumers: Sequence[SBlockRV],  # Injective blocks of the outermost level, in normal form.
    loop: LoopRV,  # A loop around ``block``.
    # Loops around ``block`` whose last tile overlaps the one before it, if it has to.
    tiled: Tiled,
) -> tuple[list[SBlockRV], list[SBlockRV]]:
    """Compute the consumers of a block at ``loop``, in order, where that is possible.

    Returns those that moved, and those that did not: from the first on that, along an overlapping
    axis, reads another element than its own.
    """
    found = [overlap_of(sch, block, tiles, size) for tiles, size in tiled]
    overlapping = {k for overlap in found if overlap is not None for k in overlap.positions}
    realize = realize_of(sch, block)
    variables = [realize.block.iter_vars[k].var for k in overlapping]
    ready = {realize.block.writes[0].source: _dimensions(realize.block, variables)}
    for place, consumer in enumerate(consumers):
        facts = block_facts(sch, consumer)
        own = None if facts is None else _own_variables(facts, ready)
        stmt = sch.get(consumer)
        if own is None or not attempt(sch.reverse_compute_at, consumer, loop):
            return list(consumers[:place]), list(consumers[place:])
        ready[stmt.writes[0].source] = _dimensions(stmt, own)
    return list(consumers), []


def follow_or_copy(
    sch: s_tir.Schedule,
    block: SBlockRV,
    consumers: Sequence[SBlockRV],
    loop: LoopRV,
    tiled: Tiled,
) -> tuple[list[SBlockRV], list[SBlockRV]]:
    """Call :func:`follow`; if none can move, place a copy of the results at ``loop``."""
    moved, rest = follow(sch, block, consumers, loop, tiled)
    if not moved:
        moved = [sch.cache_write(block, 0, "global")]
        sch.reverse_compute_at(moved[0], loop)
    return moved, rest


def _dimensions(block: s_tir.SBlock, variables: Sequence[ir.Var]) -> set[int]:
    """Dimensions of the buffer that a block writes whose index uses one of the variables."""
    region = block.writes[0].region
    return {d for d, part in enumerate(region) if uses(part.min, *variables)}


def _own_variables(facts: BlockFacts, ready: dict[ir.Var, set[int]]) -> list[ir.Var] | None:
    """The variables by which a block indexes the overlapping dimensions of the results.

    None if it reads nothing of it, reads it in several places, or does not traverse these
    dimensions whole with a variable for each; likewise the others, unless it reshapes them.
    """
    loads = [load for load in facts.loads if load.buffer in ready]
    variables: list[ir.Var] = []
    for load in loads:
        if not tvm_ffi.structural_equal(load.indices, loads[0].indices) or not _is_reshape(
            facts, load
        ):
            return None
        for d in ready[load.buffer]:
            if _walker(facts, load, d) is None:
                return None
            variables.append(load.indices[d])
    return variables if loads else None


def _walker(facts: BlockFacts, load: Access, dimension: int) -> int | None:
    """The variable that indexes a dimension, of the same extent and indexing no other."""
    index, extent = load.indices[dimension], load.buffer.shape[dimension]
    for k, var in enumerate(facts.vars):
        if index.same_as(var) and sum(uses(other, var) for other in load.indices) == 1:
            length = facts.extents[k]
            whole = length is None or constant(extent) == length
            return k if whole else None
    return None


def _is_reshape(facts: BlockFacts, load: Access) -> bool:
    """Return whether the dimensions not traversed are read once, in another form."""
    rest = [
        d
        for d, extent in enumerate(load.buffer.shape)
        if _walker(facts, load, d) is None and not is_one(extent)
    ]
    if not rest:
        return True
    used = [k for k, var in enumerate(facts.vars) if any(uses(load.indices[d], var) for d in rest)]
    extents = [load.buffer.shape[d] for d in rest]
    if any(facts.extents[k] is None for k in used):
        return False
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return False
    if facts.volume(used) != math.prod(int(extent) for extent in extents):
        return False
    domain = {facts.vars[k]: ir.Range(0, facts.extents[k]) for k in used}
    indices = [load.indices[d] for d in rest]
    return bool(list(sym.detect_iter_map(indices, domain, check_level="bijective").indices))


def vectorize_under(
    kernel: Kernel,
    block: SBlockRV,  # An injective block.
    depth: int,  # Number of outer loops that it shares with other blocks.
) -> None:
    """Vectorise the innermost of the loops that a block shares with no other."""
    sch = kernel.sch
    loops = sch.get_loops(block)[depth:]
    facts = block_facts(sch, block)
    if not loops or facts is None:
        return
    group = _contiguous_loops(sch, block, facts, loops)
    extent = static_extent(sch, loops[-1])
    if extent is None:
        return
    loop = fuse_group(sch, loops[-group:])
    extent = static_extent(sch, loop) or 1
    lanes = kernel.lanes(facts)
    if extent <= max(lanes, 16) and (extent <= lanes or extent % lanes):
        sch.vectorize(loop)
        return
    vectors, lane = sch.split(loop, [None, lanes])
    sch.vectorize(lane)
    if extent % lanes:
        sch.annotate(vectors, attributes.TAIL, [2, extent])


def _contiguous_loops(
    sch: s_tir.Schedule, block: SBlockRV, facts: BlockFacts, loops: Sequence[LoopRV]
) -> int:
    """Number of the innermost loops that every access traverses as if they were one."""
    values = realize_of(sch, block).iter_values
    positions = []
    for loop in loops:
        var = sch.get(loop).loop_var
        using = [k for k, value in enumerate(values) if uses(value, var)]
        positions.append(using[0] if len(using) == 1 else None)
    count = 1
    while count < len(loops):
        inner, outer = positions[-count], positions[-count - 1]
        extent = static_extent(sch, loops[-count])
        if inner is None or outer != inner - 1 or {inner, outer} & facts.guards:
            break
        if extent is None or extent != facts.extents[inner]:
            break
        if any(
            _jumps(access.strides[outer], access.strides[inner], extent)
            for access in facts.accesses
        ):
            break
        count += 1
    return count


def _jumps(outer: int | None, inner: int | None, extent: int) -> bool:
    return inner is None or outer != inner * extent
