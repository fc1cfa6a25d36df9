# SPDX-License-Identifier: Apache-2.0
"""Blocks that are computed inside the loops of a block before them."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from .facts import BlockFacts, Kernel, block_facts, realize_of, uses
from .steps import attempt, fuse_group, static_extent
from .truncate import TAIL


def follow(
    sch: s_tir.Schedule, consumers: Sequence[SBlockRV], loop: LoopRV
) -> tuple[list[SBlockRV], list[SBlockRV]]:
    """Compute the consumers at ``loop``, in order, where that is possible.

    Parameters
    ----------
    sch : Schedule
        The schedule.
    consumers : Sequence[SBlockRV]
        Injective blocks of the outermost level, in normal form.
    loop : LoopRV
        A loop around what they consume.

    Returns
    -------
    tuple[list[SBlockRV], list[SBlockRV]]
        Those that moved, and those that did not.
    """
    moved: list[SBlockRV] = []
    rest: list[SBlockRV] = []
    for consumer in consumers:
        taken = not rest and attempt(sch.reverse_compute_at, consumer, loop)
        (moved if taken else rest).append(consumer)
    return moved, rest


def vectorize_under(kernel: Kernel, block: SBlockRV, depth: int) -> None:
    """Vectorise the innermost of the loops that a block has to itself.

    Parameters
    ----------
    kernel : Kernel
        The kernel.
    block : SBlockRV
        An injective block.
    depth : int
        How many outer loops it shares with other blocks.
    """
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
    lanes = max(1, kernel.cpu.vector_bits // 8 // facts.itemsize)
    if extent <= max(lanes, 16) and (extent <= lanes or extent % lanes):
        sch.vectorize(loop)
        return
    vectors, lane = sch.split(loop, [None, lanes])
    sch.vectorize(lane)
    if extent % lanes:
        sch.annotate(vectors, TAIL, [2, extent])


def _contiguous_loops(
    sch: s_tir.Schedule, block: SBlockRV, facts: BlockFacts, loops: Sequence[LoopRV]
) -> int:
    """How many of the innermost loops every access walks as if they were one."""
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
