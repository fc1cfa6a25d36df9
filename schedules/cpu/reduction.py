# SPDX-License-Identifier: Apache-2.0
"""The rule for one reduction over any axes, with what comes before and after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from .facts import BlockFacts, Kernel, block_facts, open_kernel
from .steps import (
    SERIAL_ELEMENTS,
    attempt,
    chunk_count,
    feeds,
    finish,
    fuse_group,
    inline_blocks,
    merge_groups,
    schedule_spatial,
    tile_size,
    unroll,
)
from .tails import TAIL, Overlap, Tails

_ACCUMULATORS = 8
_ROWS = 4


@dataclass(frozen=True)
class _Shape:
    """How the block's loops are used.

    Parameters
    ----------
    spatial, reduced : list[list[int]]
        Merged groups of the spatial and of the reduced loops.
    along_reduced : bool
        Whether vectors run along the last reduced group, else along the last spatial one.
    """

    spatial: list[list[int]]
    reduced: list[list[int]]
    along_reduced: bool


class Reduction(CPUScheduleRule):
    """One reduction (sum, max, mean, argmax, ...) over any axes.

    Where the reduced axes are not innermost, vectors run along the outputs and a tile of
    accumulators stays in registers::

        for rows in T.parallel(...):
            for k in range(49):
                for row in T.unroll(4):
                    for lane in T.vectorized(8):
                        acc[row, lane] += data[rows * 4 + row, k, lane]

    Where they are, each row is reduced in lanes, which are then reduced themselves::

        for row in T.parallel(...):
            for k in range(31):
                for part in T.unroll(4):
                    for lane in T.vectorized(8):
                        acc[part, lane] += data[row, k * 32 + part * 8 + lane]

    With few outputs and much to reduce, the first reduced axis is also cut into parts for the
    threads. Left alone: functions with no or several reductions, reductions of symbolic extent.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Schedule ``func``, or return None if it does not have just one reduction."""
        kernel = open_kernel(func, target)
        if kernel is None or sum(not info.is_injective() for info in kernel.blocks) != 1:
            return None
        remaining = inline_blocks(kernel)
        if remaining[0].is_injective():
            return None
        facts = block_facts(kernel.sch, remaining[0].block_rv)
        shape = None if facts is None else _shape_of(kernel, facts)
        if facts is None or shape is None:
            return None
        return _Schedule(kernel, remaining, facts, shape).run()


def _shape_of(kernel: Kernel, facts: BlockFacts) -> _Shape | None:
    spatial, reduced = facts.positions("S"), facts.positions("R")
    if set(facts.kinds) - set("SR") or not reduced or not facts.loads:
        return None
    if any(facts.extents[k] is None for k in reduced):
        return None
    if spatial and max(spatial) > min(reduced):
        return None
    groups = merge_groups(facts, spatial), merge_groups(facts, reduced)
    main = max(facts.loads, key=lambda a: facts.volume([k for k, s in enumerate(a.strides) if s]))
    rows = bool(groups[0]) and main.strides[groups[0][-1][-1]] == 1
    lanes = kernel.cpu.vector_bits // 8 // facts.itemsize
    short = bool(spatial) and facts.volume(reduced) < 2 * lanes
    if rows or short:
        if any(facts.extents[k] is None for k in groups[0][-1]):
            return None
        return _Shape(groups[0], groups[1], False)
    return _Shape(groups[0], groups[1], True)
