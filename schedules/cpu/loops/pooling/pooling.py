# SPDX-License-Identifier: Apache-2.0
"""CPU rule for reductions over sliding windows: max, average and other pooling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.target import Target

from schedules.tuning.template import Template

from ...core.machine import CPUInfo
from ...core.rule import CPUTemplate, TunableCPURule
from ...nests.blocks import BlockFacts, Kernel, block_facts, open_kernel
from ...nests.loop_transforms import inline_blocks
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
        written = _write(func, knobs, target)
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

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Schedule ``func``, or return None if it is no pooling."""
        workload = _workload(func, target)
        if workload is None:
            return None
        recorded = self.recorded(func, workload, target) if workload.is_static else None
        return recorded or _write(func, default_pooling(workload, self.machine(target)), target)

    def workload(self, func: tirx.PrimFunc, target: Target) -> PoolingWorkload | None:
        """Return the pooling, if its extents are known."""
        workload = _workload(func, target)
        if workload is None or not workload.is_static:
            return None
        copied = PoolingKnobs(self.machine(target).vector_bits, 1, True, False)
        needs_copy = workload.is_guarded and not workload.in_lanes
        return None if needs_copy and _write(func, copied, target) is None else workload

    def templates(self, workload: PoolingWorkload, machine: CPUInfo) -> Sequence[CPUTemplate]:
        """Return the one template."""
        return (POOLING,)


def _workload(func: tirx.PrimFunc, target: Target) -> PoolingWorkload | None:
    """Read what a function pools; None if it is no pooling."""
    found = _find_pool(open_kernel(func, target), keep_padding=False)
    return None if found is None else PoolingWorkload.of(found[1], found[2])


def _write(func: tirx.PrimFunc, knobs: PoolingKnobs, target: Target) -> s_tir.Schedule | None:
    """Write the nest; None if the padding cannot be copied."""
    kernel = open_kernel(func, target)
    found = _find_pool(kernel, keep_padding=knobs.copied)
    if kernel is None or found is None:
        return None
    pool, facts, window = found
    kernel.cpu = replace(kernel.cpu, vector_bits=knobs.vector_bits)
    if window.slide != window.vector:
        return pool_in_lanes(kernel, pool, facts, window, knobs.pixels, knobs.threads)
    return pool_in_rows(kernel, pool, facts, window, knobs.threads)


def _find_pool(
    kernel: Kernel | None, keep_padding: bool
) -> tuple[SBlockInfo, BlockFacts, PoolingLoops] | None:
    """Inline around the only reduction; return it if it is a window over one tensor."""
    if kernel is None:
        return None
    reductions = [info for info in kernel.blocks if not info.is_injective()]
    if len(reductions) != 1:
        return None
    pool = reductions[0]
    before = kernel.blocks[: kernel.blocks.index(pool)]
    remaining = inline_blocks(kernel, keep=before[-1:] if keep_padding else ())
    place = remaining.index(pool)
    if place != (1 if keep_padding else 0) or len(remaining) > place + 2:
        return None
    facts = block_facts(kernel.sch, pool.block_rv)
    window = _window_of(facts)
    return None if facts is None or window is None else (pool, facts, window)


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
