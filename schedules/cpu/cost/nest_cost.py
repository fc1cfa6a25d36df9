# SPDX-License-Identifier: Apache-2.0
"""Cost of one loop nest of register tiles, in clock cycles of one core.

A nest computes ``R`` rows of one layer: its tiles of ``P`` pixels x ``V`` channel blocks run over
all pixels for each block tile, or over all block tiles for each tile of pixels. With ``c`` input
blocks of ``x`` lanes, ``k`` kernel taps and ``n`` parts of the reduction,

    T         = max(compute, traffic) + LEAK min(compute, traffic) + exposed
    compute   = multiply_adds + tiles + starts
    traffic   = weights + data + output

    multiply_adds = sum over tiles, visible taps: s step_cycles(P, V) + body a part of s, with
                    s the lanes of the c blocks that hold channels, and
                    tight or spill more a step where all registers are taken, or more
                    depthwise: P k / fma_per_cycle
                    groups of g lanes: k step_cycles(P, g)
                    groups across blocks: each pixel's element is loaded once for each group
                    that an output block belongs to, and D is read once for each group
    tiles     = sum over tiles: n drain max(0, P V - in flight) late + (n - 1) partial P V
                with late = 1, or where the sums are clipped
                (c x k (P V + P + V) / n - window) / (2 window), at least 0, at most 1
                depthwise: depthwise_tap k; plus inside if the block tiles run inside
    starts    = start for each time that the pixel loops begin
    weights   = W / B(home) + W (passes - 1) / B(where a block tile's part of them fits)
    data      = D / B(home) + D (block tiles - 1) / B(where D and the part fit)
                + the rows that kernels share, where they do not stay in L1
    output    = store O / B(home) + partial sums
    exposed   = misses that nothing hides: of weights that are not prefetched, and of strides that
                skip pixels, which the hardware does not predict

``step_cycles`` is that of :mod:`.register_tile`, tails and the missing taps at the border included;
"in flight" are the multiply-adds that fill the units, ``l f``; ``B(level)`` are the bytes a cycle
that a core gets from a level. Arithmetic and traffic overlap: the larger counts, and little
(``leak``) of the other. Lower-case names are fields of :class:`.MachineCosts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from schedules.workload.conv2d import ConvLayer

from ..core.machine import CPUInfo
from ..core.machine_costs import MachineCosts
from ..core.micro_kernel import UNROLLED_STEPS
from ..core.prefetch import CACHE_LINE_BYTES, lines_a_step
from ..core.tiles import row_runs, split_evenly
from .register_tile import step_cycles

L1, L2, L3, MEMORY = range(4)

CLIPPED = ("relu6", "clip", "round_clip")  # activations of two operations or three

Sizes = tuple[tuple[int, int], ...]


class Terms(NamedTuple):
    """Cycles of one nest by cause; those of a kernel are their sums."""

    multiply_adds: float = 0.0
    tiles: float = 0.0
    starts: float = 0.0
    weights: float = 0.0
    data: float = 0.0
    output: float = 0.0
    exposed: float = 0.0

    def cycles(self, costs: MachineCosts) -> float:
        """Total, with arithmetic and traffic overlapping."""
        compute = self.multiply_adds + self.tiles + self.starts
        traffic = self.weights + self.data + self.output
        return max(compute, traffic) + costs.leak * min(compute, traffic) + self.exposed


class ConvNest(NamedTuple):
    """One loop nest.

    Parameters
    ----------
    layer : ConvLayer
        The layer.
    lanes, source_lanes : int
        Channels in a block of the output and of the input (1 for NCHW data), or in a piece of a
        group's inputs.
    item_bytes : int
        Bytes of an element; of a weight if it has no other type.
    size, out_size : tuple[int, int]
        Height and width of the layer's whole input and output.
    pixels : int
        Pixels of a register tile.
    vectors : tuple[int, ...]
        Channel blocks of each block tile.
    in_blocks : int
        Input blocks that the nest sums up.
    prefetch : bool
        Whether it prefetches weights.
    parts, calls : int
        Parts of that sum; nests that continue one another's sums, of which this is one.
    inside : bool
        Whether the loop over block tiles runs inside the pixel loops.
    residual : bool
        Whether a tensor like the output is read.
    rows : int
        Output rows of the nest; 1 where it is flat.
    flat : Sizes | None
        Pixels of the tiles of a flat nest, and how many there are of each size.
    data_bytes, halo_bytes : float
        Bytes of the input that the nest reads, each once: for the first time, and again after
        another nest.
    data_level, out_level : int
        Levels in which data are when the nest begins, and to which the output goes.
    stored_bytes : int | None
        Bytes of a weight of another type.
    cores : int
        Cores that compute such nests at the same time.
    weight_shares : float
        All weights over those of the nest: cores that read the same ones get them from memory at
        the same time.
    """

    layer: ConvLayer
    lanes: int
    source_lanes: int
    item_bytes: int
    size: tuple[int, int]
    out_size: tuple[int, int]
    pixels: int
    vectors: tuple[int, ...]
    in_blocks: int
    prefetch: bool
    parts: int = 1
    calls: int = 1
    inside: bool = False
    residual: bool = False
    rows: int = 1
    flat: Sizes | None = None
    data_bytes: float = 0.0
    halo_bytes: float = 0.0
    data_level: int = L2
    out_level: int = L2
    stored_bytes: int | None = None
    cores: int = 1
    weight_shares: float = 1.0

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight."""
        return self.stored_bytes or self.item_bytes


def nest_terms(nest: ConvNest, weight_levels: Sequence[int], cpu: CPUInfo) -> list[Terms]:
    """Return the cost of a nest, by the equations of the module's docstring.

    Parameters
    ----------
    nest : ConvNest
        The nest.
    weight_levels : Sequence[int]
        Levels in which its weights may be when it begins; the cost for each of them is returned.
    cpu : CPUInfo
        The machine.
    """
    layer, costs = nest.layer, cpu.costs
    if nest.flat is not None:
        spans = tiles = nest.flat
        visible = 1.0
    else:
        spans, tiles = _row_spans(layer, nest.size[1], nest.out_size[1], nest.pixels)
        visible = _visible_rows(layer, nest.size[0], nest.out_size[0])
    passes = sum(count for _, count in tiles) * nest.rows
    width = layer.group_lanes(nest.lanes)
    if width:
        compute = _own_blocks(nest, spans, passes, visible, cpu)
    else:
        compute = _dense(nest, spans, tiles, visible, cpu)
    vectors = sum(nest.vectors)
    taps = width or nest.in_blocks * nest.source_lanes
    block_bytes = taps * layer.kernel[0] * layer.kernel[1] * nest.lanes * nest.weight_bytes
    pixels = sum(size * count for size, count in tiles) * nest.rows
    out_bytes = pixels * vectors * nest.lanes * nest.item_bytes
    out_rate = bandwidth(nest.out_level, cpu, nest.cores)
    output = out_bytes * (costs.store + nest.residual) / nest.calls / out_rate
    if nest.parts > 1 or nest.calls > 1:
        kept = out_bytes * (1 if nest.calls > 1 else max(nest.vectors) / vectors)
        again = nest.parts - 1 / nest.calls
        output += 2 * again * out_bytes / bandwidth(fits(2 * kept, cpu), cpu, nest.cores)
    data, skipped = _data(nest, block_bytes, cpu)
    again_cycles, late = _weights_again(nest, block_bytes, passes, cpu)
    waits = 0.0 if width else 1 - _asked_for(nest, passes)
    whole = block_bytes * vectors
    terms = []
    for level in weight_levels:
        missed = 0.0
        if not width:
            missed = costs.miss * (late + whole * (level >= L3))
            missed *= waits
        weights = whole / bandwidth(level, cpu, nest.weight_shares) + again_cycles
        exposed = missed + costs.skip * skipped
        terms.append(Terms(*compute, weights, data, output, exposed))
    return terms


def multiply_adds(nest: ConvNest, cpu: CPUInfo) -> float:
    """Return the first of :func:`nest_terms`, a lower bound of all together."""
    layer = nest.layer
    if nest.flat is not None:
        return _multiply_adds(nest, nest.flat, 1.0, cpu)
    spans, _ = _row_spans(layer, nest.size[1], nest.out_size[1], nest.pixels)
    return _multiply_adds(nest, spans, _visible_rows(layer, nest.size[0], nest.out_size[0]), cpu)


def fits(size: float, cpu: CPUInfo) -> int:
    """First level that holds so many bytes beside the other data that passes through it."""
    size /= cpu.costs.cache_share
    return (size > cpu.l1d_bytes) + (size > cpu.l2_bytes) + (size > cpu.l3_bytes)


def bandwidth(level: int, cpu: CPUInfo, cores: float = 1.0) -> float:
    """Bytes a cycle that a core gets from a level while so many ask for different bytes."""
    share = min(1.0, cpu.costs.memory_cores / cores) if level == MEMORY else 1.0
    return cpu.costs.bytes_per_cycle[level] * share


@lru_cache(maxsize=4096)
def _row_spans(layer: ConvLayer, width: int, out_width: int, pixels: int) -> tuple[Sizes, Sizes]:
    """Pixels of a row that see a kernel column, with their number, and the sizes of the tiles."""
    spans: Counter[int] = Counter()
    tiles: Counter[int] = Counter()
    for run in row_runs(layer, width, out_width, pixels):
        tiles[run.size] += run.count
        for low, high in run.taps:
            spans[high - low] += run.count
    del spans[0]
    return tuple(spans.items()), tuple(tiles.items())


@lru_cache(maxsize=4096)
def _visible_rows(layer: ConvLayer, height: int, out_height: int) -> float:
    """Kernel rows that lie inside the image, mean over the output rows."""
    seen = 0
    for row in range(out_height):
        first = row * layer.strides[0] - layer.padding[0]
        seen += sum(0 <= first + kh * layer.dilation[0] < height for kh in range(layer.kernel[0]))
    return seen / out_height


def _dense(
    nest: ConvNest, spans: Sizes, tiles: Sizes, visible: float, cpu: CPUInfo
) -> tuple[float, float, float]:
    """Cycles of multiply-adds, of tiles and of starts."""
    costs, layer = cpu.costs, nest.layer
    reduction = None
    if layer.activation.kind in CLIPPED:
        taps = nest.in_blocks * nest.source_lanes * layer.kernel[0] * layer.kernel[1]
        reduction = taps / nest.parts
    drain, partial = _ends(nest.vectors, tiles, reduction, cpu)
    count = sum(number for _, number in tiles)
    each = costs.inside * count * len(nest.vectors) if nest.inside else 0.0
    ends = nest.rows * (drain * nest.parts + partial * (nest.parts - 1 / nest.calls) + each)
    starts = costs.start * (1 if nest.inside else len(nest.vectors) * nest.parts)
    return _multiply_adds(nest, spans, visible, cpu), ends, starts


def _multiply_adds(nest: ConvNest, spans: Sizes, visible: float, cpu: CPUInfo) -> float:
    """Cycles of the multiply-adds of all tiles."""
    layer, width = nest.layer, nest.layer.group_lanes(nest.lanes)
    if not width:
        bodies = nest.in_blocks * ceil(nest.source_lanes / UNROLLED_STEPS)
        loads = 1.0 if layer.groups == 1 else layer.mean_groups_met(nest.lanes)
        widen = cpu.costs.widen if nest.stored_bytes else 0.0
        steps = _steps(nest.vectors, spans, _lanes_summed(nest), bodies, loads, widen, cpu)
        return steps * nest.rows * visible
    if width == 1:
        steps = sum(size * number for size, number in spans) / cpu.fma_per_cycle
    else:
        steps = sum(step_cycles(size, width, cpu) * number for size, number in spans)
    return steps * nest.rows * visible * len(nest.vectors)


@lru_cache(maxsize=4096)
def _steps(
    vectors: tuple[int, ...],
    spans: Sizes,
    lanes: int,
    bodies: int,
    loads: float,
    widen: float,
    cpu: CPUInfo,
) -> float:
    """Cycles of the multiply-adds of a row, all taps visible."""
    costs, registers, steps = cpu.costs, cpu.num_vector_registers, 0.0
    for blocks, times in Counter(vectors).items():
        for size, number in spans:
            missing = size * blocks + blocks + 1 - registers
            lost = costs.spill * missing if missing > 0 else costs.tight * (missing == 0)
            lost += widen * blocks
            cycles = lanes * (step_cycles(size, blocks, cpu, loads) + lost) + bodies * costs.body
            steps += times * number * cycles
    return steps


@lru_cache(maxsize=4096)
def _ends(
    vectors: tuple[int, ...], tiles: Sizes, reduction: float | None, cpu: CPUInfo
) -> tuple[float, float]:
    """Cycles of draining the tiles of a row, and of storing and loading their partial sums.

    ``reduction`` is the length of the sums, if they are clipped.
    """
    costs, drain, partial = cpu.costs, 0.0, 0.0
    for blocks, times in Counter(vectors).items():
        for size, number in tiles:
            waiting = max(0, size * blocks - costs.fma_latency * cpu.fma_per_cycle)
            late = 1.0
            if reduction is not None:
                instructions = reduction * (size * blocks + size + blocks)
                late = min(1.0, max(0.0, (instructions - costs.window) / (2 * costs.window)))
            drain += times * number * costs.drain * waiting * late
            partial += times * number * size * blocks * costs.partial
    return drain, partial


def _lanes_summed(nest: ConvNest) -> int:
    """Input lanes that one output channel sums up in this nest: of whole blocks if in parts."""
    lanes = nest.in_blocks * nest.source_lanes
    if nest.layer.groups > 1 or nest.parts > 1 or nest.calls > 1:
        return lanes
    return min(lanes, nest.layer.in_channels)


def _own_blocks(
    nest: ConvNest, spans: Sizes, passes: int, visible: float, cpu: CPUInfo
) -> tuple[float, float, float]:
    blocks, layer = len(nest.vectors), nest.layer
    chain = cpu.costs.depthwise_tap * layer.kernel[0] * layer.kernel[1]
    steps = _multiply_adds(nest, spans, visible, cpu)
    return steps, passes * blocks * chain, cpu.costs.start * blocks


def _weights_again(
    nest: ConvNest, block_bytes: float, passes: int, cpu: CPUInfo
) -> tuple[float, float]:
    """Cycles of reading weights after the first pass, and their bytes from beyond the L2."""
    whole = block_bytes * sum(nest.vectors)
    kept = whole
    if not nest.inside:
        kept = block_bytes * max(nest.vectors) / nest.parts
    level = fits(kept, cpu)
    if level == L2 and nest.prefetch:
        level = max(level, fits(2 * kept, cpu))  # the next ones arrive while these are used
    again = whole * (passes - 1)
    cycles = again / bandwidth(level, cpu, nest.weight_shares)
    return cycles, again if level >= L3 else 0.0


def _asked_for(nest: ConvNest, passes: int) -> float:
    """Share of the weights that ``passes`` tiles prefetch."""
    if not nest.prefetch:
        return 0.0
    square = nest.source_lanes * nest.lanes * nest.weight_bytes // CACHE_LINE_BYTES
    needed = max(1, max(nest.vectors) * square)
    return min(1.0, passes * lines_a_step(needed, passes) / needed)


def _data(nest: ConvNest, block_bytes: float, cpu: CPUInfo) -> tuple[float, float]:
    """Cycles of the traffic of data, and those among them that nothing hides."""
    layer = nest.layer
    first = nest.data_bytes / bandwidth(nest.data_level, cpu, nest.cores)
    first += nest.halo_bytes / bandwidth(L2, cpu)
    if layer.group_lanes(nest.lanes):
        return first, 0.0
    part_bytes = block_bytes * max(nest.vectors) / nest.parts
    turns, read = float(len(nest.vectors)), nest.data_bytes
    if layer.groups > 1:  # a block tile reads the data of its group
        own = layer.out_channels / layer.groups / nest.lanes
        turns, read = max(1.0, own / max(nest.vectors)), read / layer.groups
    if nest.inside:
        turns = 1.0
    level = fits(read + part_bytes, cpu)
    level = min(level, L2) if read <= cpu.l2_bytes else max(level, nest.data_level)
    again = (turns - 1) * nest.data_bytes / bandwidth(level, cpu, nest.cores)
    skipped = again if layer.strides[1] > layer.kernel[1] and level >= L3 else 0.0
    if nest.flat is None and layer.kernel[0] > layer.strides[0]:
        rows = max(1, nest.rows * layer.strides[0])
        band = nest.data_bytes / rows * layer.kernel[0] / nest.parts
        if fits(band + part_bytes, cpu) > L1:
            more = nest.data_bytes * (layer.kernel[0] / layer.strides[0] - 1)
            again += turns * more / bandwidth(L2, cpu)
    return first + again, skipped


@lru_cache(maxsize=4096)
def split(extent: int, tile: int) -> tuple[int, ...]:
    """Cached sizes of :func:`split_evenly`."""
    return tuple(split_evenly(extent, tile))
