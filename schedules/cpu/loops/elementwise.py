# SPDX-License-Identifier: Apache-2.0
"""CPU rule for functions that compute each output element on its own."""

from __future__ import annotations

from tvm import s_tir

from schedules.schedule_rule import KernelFacts

from ..core.rule import CPURule
from ..nests.elementwise_nest import schedule_spatial
from ..nests.flat_views import merge_shifted_loops
from ..nests.loop_transforms import facts_of_inlined, finish, open_inlined


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
