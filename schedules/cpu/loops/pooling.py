# SPDX-License-Identifier: Apache-2.0
"""CPU rule for reductions over sliding windows: max, average and other pooling."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from schedules import attributes
from schedules.cpu.core.machine import CPUInfo, vector_sizes
from schedules.cpu.core.rule import TunableCPURule
from schedules.cpu.nests.blocks import BlockFacts, Kernel, block_facts, open_kernel
from schedules.cpu.nests.elementwise_nest import schedule_spatial
from schedules.cpu.nests.fused_consumers import Tiled, follow_or_copy
from schedules.cpu.nests.loop_transforms import (
    facts_of_inlined,
    finish,
    inline_blocks,
    open_inlined,
    parallel_outer,
    tile_size,
    unroll,
    worth_threads,
)
from schedules.cpu.nests.tails import Tails
from schedules.schedule_rule import KernelFacts
from schedules.tir.expression_walk import uses
from schedules.tir.index_math import cut_points
from schedules.tuning.template import Template

_UNROLLED = 16
"""Elements of a window that are unrolled, at most, unless one row has more."""


@dataclass(frozen=True)
class PoolingLoops:
    """Loops of a pooling block."""

    slide: int  # Position of the innermost axis along which the window slides.
    vector: int  # Position of the axis along which the output is contiguous.


def sliding_axes(facts: BlockFacts) -> list[int]:
    """Positions of the spatial axes that share an index with a reduced one."""
    reduced = [facts.vars[k] for k in facts.positions("R")]
    return [
        k
        for k in facts.positions("S")
        if any(
            uses(index, facts.vars[k]) and uses(index, *reduced)
            for load in facts.loads
            for index in load.indices
        )
    ]


def _place_output(
    kernel: Kernel, pool: SBlockInfo, loop: LoopRV, tiled: Tiled
) -> tuple[SBlockRV, list[SBlockRV]]:
    """Place the block that writes the finished outputs at ``loop``: the epilogue, else a copy.

    Also returns the epilogue if it needs a separate nest.
    """
    after = [info.block_rv for info in kernel.blocks[kernel.blocks.index(pool) + 1 :]]
    moved, rest = follow_or_copy(kernel.sch, pool.block_rv, after, loop, tiled)
    return moved[0], rest


def _finish(kernel: Kernel, tails: Tails, rest: list[SBlockRV]) -> s_tir.Schedule:
    overlaps = tails.collect()
    for block in rest:
        overlaps += schedule_spatial(kernel, block)
    return finish(kernel.sch, overlaps)


def pool_in_lanes(
    kernel: Kernel,
    pool: SBlockInfo,
    facts: BlockFacts,
    window: PoolingLoops,
    most_pixels: int,
    threads: bool,
) -> s_tir.Schedule:
    """Windows that do not slide along the contiguous axis: a tile of pixels in registers."""
    sch, block = kernel.sch, pool.block_rv
    loops = sch.get_loops(block)
    reduced = [loops[k] for k in _positions(facts, "R")]
    outer = [loops[k] for k in _positions(facts, "S") if k not in (window.slide, window.vector)]
    extents = [facts.extents[k] or 1 for k in (window.slide, window.vector)]
    pixels = tile_size(extents[0], most_pixels)
    lanes = min(extents[1], kernel.lanes(facts))
    slide, pixel = sch.split(loops[window.slide], [None, pixels])
    vectors, lane = sch.split(loops[window.vector], [None, lanes])
    sch.reorder(*outer, slide, vectors, *reduced, pixel, lane)
    tiled = [(slide, pixels), (vectors, lanes)]
    output, rest = _place_output(kernel, pool, vectors, tiled)
    tails = Tails(sch)
    for place, tile in tiled:
        tails.add(block, place, tile)
        tails.add(output, place, tile)
    cuts = tile_cuts(cut_points(sch, block, window.slide), extents[0], pixels)
    for vector, around in (
        (lane, [*_short(facts, reduced), pixel]),
        _last_two(sch.get_loops(output)),
    ):
        sch.vectorize(vector)
        unroll(sch, around)
    if threads:
        parallel_outer(sch, outer, kernel.cpu.num_cores)
    if len(cuts) > 1:
        sch.annotate(slide, attributes.TAIL, [1, *cuts])
    init = tails.decompose(block, reduced[0])
    unroll(sch, sch.get_loops(init)[-2:-1])
    return _finish(kernel, tails, rest)


def _positions(facts: BlockFacts, kind: str) -> list[int]:
    return [k for k, other in enumerate(facts.kinds) if other == kind]


def _short(facts: BlockFacts, reduced: list[LoopRV]) -> list[LoopRV]:
    """The innermost loops of a window that are worth a copy of the code for each iteration."""
    extents = [facts.extents[k] or _UNROLLED for k in _positions(facts, "R")]
    first = len(extents) - 1
    while first and math.prod(extents[first - 1 :]) <= _UNROLLED:
        first -= 1
    return reduced[first:]


def _last_two(loops: list[LoopRV]) -> tuple[LoopRV, list[LoopRV]]:
    return loops[-1], loops[-2:-1]


def tile_cuts(
    points: list[int],  # Elements before which a condition changes.
    # ``extent``, ``tile``: elements in all and in a tile; the last tile overlaps the one before it.
    extent: int,
    tile: int,
) -> list[int]:
    """Cuts of a loop over tiles that separate tiles with a cut point from those without.

    Returns ends of the parts, the last one being the number of tiles.
    """
    count = -(-extent // tile)
    starts = [min(index * tile, extent - tile) for index in range(count)]
    ends = {count}
    for index, start in enumerate(starts):
        if any(start < point < start + tile for point in points):
            ends |= {index, index + 1}
        elif index and any(starts[index - 1] + tile <= point <= start for point in points):
            ends.add(index)
    return sorted(ends - {0})


def pool_in_rows(
    kernel: Kernel, pool: SBlockInfo, facts: BlockFacts, window: PoolingLoops, threads: bool
) -> s_tir.Schedule:
    """Windows that slide along the contiguous axis: vectors of neighbouring windows."""
    sch, block = kernel.sch, pool.block_rv
    padding = None if kernel.blocks[0] is pool else kernel.blocks[0].block_rv
    loops = sch.get_loops(block)
    reduced = [loops[k] for k in _positions(facts, "R")]
    outer = [loops[k] for k in _positions(facts, "S") if k != window.vector]
    width = facts.extents[window.vector] or 1
    lanes = min(width, kernel.lanes(facts))
    vectors, lane = sch.split(loops[window.vector], [None, lanes])
    sch.reorder(*outer, vectors, *reduced, lane)
    output, rest = _place_output(kernel, pool, vectors, [(vectors, lanes)])
    tails = Tails(sch)
    tails.add(block, vectors, lanes)
    tails.add(output, vectors, lanes)
    cuts = [] if padding is not None else cut_points(sch, block, window.vector)
    if _stride(facts, window) == 1:
        sch.vectorize(lane)
    unroll(sch, _short(facts, reduced))
    sch.vectorize(sch.get_loops(output)[-1])
    plane = len(_positions(facts, "S")) - len(sliding_axes(facts))
    outside = outer
    if padding is not None:
        outside = outer[: max(1, plane)]
        _place_padding(kernel, padding, outside)
    if threads:
        parallel_outer(sch, outside, kernel.cpu.num_cores)
    if cuts:
        sch.annotate(vectors, attributes.TAIL, [1, *tile_cuts(cuts, width, lanes)])
    init = tails.decompose(block, reduced[0])
    sch.vectorize(sch.get_loops(init)[-1])
    return _finish(kernel, tails, rest)


def _stride(facts: BlockFacts, window: PoolingLoops) -> int | None:
    """Elements between neighbouring windows."""
    return facts.loads[0].strides[window.vector]


def _place_padding(kernel: Kernel, padding: SBlockRV, outside: list[LoopRV]) -> None:
    """Compute the padded plane under ``outside``, in vectors cut where the padding begins."""
    sch = kernel.sch
    facts = block_facts(sch, padding)
    assert facts is not None, "a padding block stores"
    position = len(facts.extents) - 1
    cuts = cut_points(sch, padding, position)
    if outside:
        sch.compute_at(padding, outside[-1])
    row = sch.get_loops(padding)[-1]
    lanes = kernel.lanes(facts)
    vectors, lane = sch.split(row, [None, lanes])
    sch.vectorize(lane)
    sch.annotate(vectors, attributes.TAIL, [2, *cuts, facts.extents[position]])


_PIXELS = 8
_ALL_PIXELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_GATHER = 1.0  # cycles of a lane of a strided load
_TASK = 20.0  # cycles of beginning a tile


@dataclass(frozen=True)
class PoolingWorkload:
    """Loops of a pooling."""

    kinds: str  # ``S`` (an output's axis) or ``R`` (of the window) for each loop.
    extents: tuple[int | None, ...]  # Iterations; None where symbolic.
    strides: tuple[int | None, ...]
    """Strides of the data's address along each loop; None where a stride is no constant."""
    slide: int
    vector: int
    """``slide`` and ``vector``: as in :class:`PoolingLoops`."""
    item_bytes: int  # Bytes of the widest element.
    is_guarded: bool  # Whether padding begins along the vectors.
    is_large: bool  # Whether there is enough work for threads.

    @classmethod
    def of(cls, facts: BlockFacts, window: PoolingLoops) -> PoolingWorkload:
        """The loops of a block, with its padding inlined."""
        return cls(
            kinds=facts.kinds,
            extents=facts.extents,
            strides=facts.loads[0].strides,
            slide=window.slide,
            vector=window.vector,
            item_bytes=facts.itemsize,
            is_guarded=window.vector in facts.guards,
            is_large=worth_threads(facts),
        )

    @classmethod
    def from_json(cls, text: str) -> PoolingWorkload:
        """Read the JSON of a workload.

        Raises ``ValueError`` if it is anything else, or an extent is symbolic.
        """
        values = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("extents", "strides")}
        workload = cls(**{**values, **lists})
        axes = range(len(workload.extents))
        numbers = (*workload.extents, workload.item_bytes)
        if not (
            all(type(number) is int and number > 0 for number in numbers)
            and len(workload.kinds) == len(workload.strides) == len(axes)
            and workload.slide in axes
            and workload.vector in axes
        ):
            raise ValueError(f"{text:.100} describes no pooling")
        return workload

    @property
    def is_static(self) -> bool:
        """Return whether all extents are known."""
        return None not in self.extents

    @property
    def in_lanes(self) -> bool:
        """Return whether vectors run along an axis on which no window slides."""
        return self.slide != self.vector

    def volume(self, kind: str) -> int:
        """Product of the extents of a kind; a symbolic one counts as 64."""
        pairs = zip(self.kinds, self.extents, strict=True)
        return math.prod(extent or 64 for own, extent in pairs if own == kind)


@dataclass(frozen=True)
class PoolingKnobs:
    """Knobs of a pooling."""

    vector_bits: int
    pixels: int  # Outputs of a tile in registers, at most; 1 where windows slide along the vectors.
    copied: bool
    """Whether windows along the vectors read a padded copy, not the data under conditions."""
    threads: bool  # Whether threads share the outputs.


def default_pooling(workload: PoolingWorkload, cpu: CPUInfo) -> PoolingKnobs:
    """Tiles that hide latency; a copy of padded data unless few vectors read padding."""
    if workload.in_lanes:
        return PoolingKnobs(cpu.vector_bits, _PIXELS, False, workload.is_large)
    lanes = max(1, cpu.vector_bits // 8 // workload.item_bytes)
    width = workload.extents[workload.vector] or 1
    few = workload.strides[workload.vector] != 1 and width >= 4 * lanes
    return PoolingKnobs(cpu.vector_bits, 1, workload.is_guarded and not few, workload.is_large)


def all_poolings(workload: PoolingWorkload, cpu: CPUInfo) -> Iterator[PoolingKnobs]:
    """Whole or half vectors, tiles of pixels or copies, with threads or without."""
    slides = int(workload.extents[workload.slide] or 1)
    pixels = [n for n in _ALL_PIXELS if n <= slides] if workload.in_lanes else [1]
    copies = (False, True) if workload.is_guarded and not workload.in_lanes else (False,)
    threads = (False, True) if cpu.num_cores > 1 else (False,)
    for setting in product(vector_sizes(cpu), pixels, copies, threads):
        yield PoolingKnobs(*setting)


def pooling_cycles(workload: PoolingWorkload, knobs: PoolingKnobs, cpu: CPUInfo) -> float:
    """Cycles of the busiest thread: loads and operations of all windows, or their latency."""
    lanes = max(1, knobs.vector_bits // 8 // workload.item_bytes)
    width, slides = (workload.extents[k] or 64 for k in (workload.vector, workload.slide))
    vectors = workload.volume("S") // width * -(-width // lanes)
    chain = 4.0 / (knobs.pixels if workload.in_lanes else 1)
    step_cycles = max(1 / cpu.costs.loads_per_cycle, chain)
    if not workload.in_lanes and workload.strides[workload.vector] != 1:
        step_cycles += _GATHER * lanes
    steps = vectors * workload.volume("R")
    if workload.in_lanes:
        steps = steps // slides * -(-slides // knobs.pixels) * min(knobs.pixels, slides)
    cores = cpu.num_cores if knobs.threads else 1
    copy = vectors * 4.0 * knobs.copied
    busy = (steps * step_cycles + copy + vectors / knobs.pixels * _TASK) / cores
    return busy + (cpu.costs.fork if knobs.threads else 0.0)


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
