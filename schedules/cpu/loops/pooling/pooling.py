# SPDX-License-Identifier: Apache-2.0
"""CPU rule for reductions over sliding windows: max, average and other pooling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.target import Target

from schedules.schedule_rule import KernelFacts
from schedules.tuning.template import Template

from ...core.machine import CPUInfo
from ...core.rule import TunableCPURule
from ...nests.blocks import BlockFacts, Kernel, block_facts, open_kernel
from ...nests.loop_transforms import facts_of_inlined, inline_blocks, open_inlined
from .pool_nests import PoolingLoops, pool_in_lanes, pool_in_rows, sliding_axes
from .pooling_knobs import (
    PoolingKnobs,
    PoolingWorkload,
    all_poolings,
    default_pooling,
    pooling_cycles,
)

_LONGEST_STEP = 16


class PoolingTemplate(Template[PoolingWorkload, PoolingKnobs, CPUInfo]):
    """Vectors, tiles and copies of :class:`Pooling`."""

    name = "cpu.pooling"
    version = 1
    knobs = PoolingKnobs

    def read_workload(self, text: str) -> PoolingWorkload:
        """Read the JSON of a workload."""
        return PoolingWorkload.from_json(text)

    def describe(self, workload: PoolingWorkload) -> str:
        """Return the outputs and the window."""
        pairs = list(zip(workload.kinds, workload.extents, strict=True))
        outputs, window = ("x".join(str(e) for k, e in pairs if k == kind) for kind in "SR")
        return f"pooling {outputs}, window {window}"

    def default(self, workload: PoolingWorkload, machine: CPUInfo) -> PoolingKnobs:
        """Return the setting of the rules."""
        return default_pooling(workload, machine)

    def settings(self, workload: PoolingWorkload, machine: CPUInfo) -> Iterable[PoolingKnobs]:
        """Yield every legal setting."""
        return all_poolings(workload, machine)

    def write(
        self, func: tirx.PrimFunc, workload: PoolingWorkload, knobs: PoolingKnobs, target: Target
    ) -> s_tir.Schedule:
        """Write the nest."""
        written = _write(KernelFacts(func, target), knobs)
        assert written is not None, "the workload was read from another function"
        return written

    def cycles(self, workload: PoolingWorkload, knobs: PoolingKnobs, machine: CPUInfo) -> float:
        """Return the cycles of the busiest thread."""
        return pooling_cycles(workload, knobs, machine)


POOLING = PoolingTemplate()


class Pooling(TunableCPURule):
    """Windows that slide over one tensor, in NCHW, NCHW[x]c and NHWC, with their padding.

    Where the window does not slide along the contiguous axis (packed channels, channels last) the
    padding is inlined, and a tile of neighbouring outputs is kept in registers; the loops are cut
    where the window leaves the tensor, so that the inner part has no conditions::

        for n_c_h in T.parallel(...):
            for w in range(7):
                for kh, kw in unrolled(3, 3):
                    for pixel in T.unroll(8):
                        for lane in T.vectorized(8):
                            acc[pixel, lane] = T.max(acc[pixel, lane], data[...])

    Otherwise (NCHW) vectors run along the width and read a padded copy of the plane. Left alone:
    functions with no or several reductions, windows over several tensors (convolutions), reductions
    without a sliding window, symbolic extents of the window, of the axes along which it slides, and
    of the contiguous one.
    """

    template = POOLING

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        """Schedule a function, or return None if it is no pooling."""
        workload = _workload(facts)
        if workload is None:
            return None
        target = facts.target
        recorded = self.recorded(facts.func, workload, target) if workload.is_static else None
        return recorded or _write(facts, default_pooling(workload, self.machine(target)))

    def workload(self, func: tirx.PrimFunc, target: Target) -> PoolingWorkload | None:
        """Return the pooling, if its extents are known."""
        facts = KernelFacts(func, target)
        workload = _workload(facts)
        if workload is None or not workload.is_static:
            return None
        needs_copy = workload.is_guarded and not workload.in_lanes
        return None if needs_copy and _find_pool(facts, keep_padding=True) is None else workload


@dataclass
class _Pool:
    """A pooling that was recognised in a schedule of its own."""

    kernel: Kernel
    info: SBlockInfo
    facts: BlockFacts
    window: PoolingLoops


def _workload(facts: KernelFacts) -> PoolingWorkload | None:
    """Read what a function pools; None if it is no pooling."""
    pool = _find_pool(facts, keep_padding=False)
    return None if pool is None else PoolingWorkload.of(pool.facts, pool.window)


def _write(facts: KernelFacts, knobs: PoolingKnobs) -> s_tir.Schedule | None:
    """Write the nest; None if the padding cannot be copied."""
    pool = _find_pool(facts, keep_padding=knobs.copied)
    if pool is None:
        return None
    kernel, window, threads = pool.kernel, pool.window, knobs.threads
    kernel.cpu = replace(kernel.cpu, vector_bits=knobs.vector_bits)
    if window.slide != window.vector:
        return pool_in_lanes(kernel, pool.info, pool.facts, window, knobs.pixels, threads)
    return pool_in_rows(kernel, pool.info, pool.facts, window, threads)


def _find_pool(facts: KernelFacts, keep_padding: bool) -> _Pool | None:
    """Inline around the only reduction; return it if it is a window over one tensor."""
    kernel = open_kernel(facts) if keep_padding else open_inlined(facts)
    if kernel is None:
        return None
    reductions = [info for info in kernel.blocks if not info.is_injective()]
    if len(reductions) != 1:
        return None
    pool = reductions[0]
    if keep_padding:
        before = kernel.blocks[: kernel.blocks.index(pool)]
        inline_blocks(kernel, keep=before[-1:])
    place = kernel.blocks.index(pool)
    if place != int(keep_padding) or len(kernel.blocks) > place + 2:
        return None
    inlined = None if keep_padding else facts_of_inlined(facts)[place]
    block = inlined or block_facts(kernel.sch, pool.block_rv)
    window = _window_of(block)
    return None if block is None or window is None else _Pool(kernel, pool, block, window)


def _window_of(facts: BlockFacts | None) -> PoolingLoops | None:
    if facts is None or facts.indirect or facts.kinds.strip("S").strip("R"):
        return None
    if any(facts.extents[k] is None for k in facts.positions("R")):
        return None
    if len({load.buffer for load in facts.loads}) != 1 or "R" not in facts.kinds:
        return None
    slides = sliding_axes(facts)
    vectors = [k for k in facts.positions("S") if facts.store.strides[k] == 1]
    if not slides or not vectors or any(facts.extents[k] is None for k in [*slides, *vectors]):
        return None
    if vectors[0] not in slides and facts.loads[0].strides[vectors[0]] != 1:
        return None
    step = facts.loads[0].strides[vectors[0]]
    if vectors[0] in slides and (step is None or not 0 < step <= _LONGEST_STEP):
        return None
    slide = vectors[0] if vectors[0] in slides else slides[-1]
    return PoolingLoops(slide, vectors[0])
