# SPDX-License-Identifier: Apache-2.0
"""CPU rule for one reduction over any axes, with its producers and consumers."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.target import Target

from ..core.rule import CPURule
from ..nests.blocks import block_facts, open_kernel
from ..nests.elementwise_nest import schedule_spatial
from ..nests.loop_transforms import finish, inline_blocks
from .block_reduction import reduce_block, reducible


class Reduction(CPURule):
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
    threads. Consumers of the reduction are computed with it if they are element-wise, else in a
    separate nest. Left alone: functions with no or several reductions, symbolic reduced extents.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Schedule ``func``, or return None if it does not have exactly one reduction."""
        kernel = open_kernel(func, target)
        if kernel is None or sum(not info.is_injective() for info in kernel.blocks) != 1:
            return None
        remaining = inline_blocks(kernel)
        block = remaining[0].block_rv
        if remaining[0].is_injective() or not reducible(block_facts(kernel.sch, block)):
            return None
        overlaps, rest = reduce_block(kernel, block, [info.block_rv for info in remaining[1:]])
        for consumer in rest:
            overlaps += schedule_spatial(kernel, consumer)
        return finish(kernel.sch, overlaps)
