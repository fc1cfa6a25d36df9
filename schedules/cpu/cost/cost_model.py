# SPDX-License-Identifier: Apache-2.0
"""Predicted time of a kernel of one or two convolutions for given knobs, and the default knobs.

The time is that of the busiest core: with ``N`` images, ``p`` parallel pieces of each and ``c``
cores,

    T = (ceil(N p / c) (nests + layouts) + fork if N p > 1) / CLOCK_HZ

The nests are those of :mod:`.nest_cost`. A single convolution is one nest for each group of units
of the largest chunk. A fused pair is, for each step of ``h`` output rows and each part of the
reduction, a nest of layer one over the rows that the step reads (its *halo* recomputed in every
step, all of it recomputed in every piece of the channels) and a nest of layer two; the tensor in
between lives in the level that holds it. The model assumes that the data was just written by all
cores in equal shares of rows and is in the first level that it fits, and that weights come from
memory, since the network's other layers ran in between.

Where cores share the rows of a depthwise layer, each one's prefetches run into the lines that the
other is writing, up to the end of a page; the layer has too little arithmetic to hide that:
``edge`` cycles a line.

The data of a pair's depthwise layer one streams through the L2 and evicts the intermediate: the
fuller the L2, the more goes to the L3 and comes back, and nothing hides that.

A kernel that packs NCHW data or unpacks its output pays for transposes by the byte. Lower-case
names here are fields of :class:`.MachineCosts`.

The default knobs are the cheapest of :func:`.conv2d_knobs.conv2d_space` or
:func:`.fused_conv2d_knobs.fused_conv2d_space`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from schedules.errors import OpError
from schedules.workload.conv2d import ITEM_BYTES, Conv2DKernel, ConvLayer

from ..core.machine import CPUInfo
from ..core.prefetch import CACHE_LINE_BYTES
from ..core.tiles import block_tiles, tile_counts
from .conv2d_knobs import Conv2DKnobs, conv2d_space
from .fused_conv2d_knobs import FusedConv2DKnobs, Grid, grids, tiles_one, tiles_two
from .nest_cost import L2, L3, MEMORY, LoopNest, Terms, bandwidth, fits, nest_terms, split

CLOCK_HZ = 3.0e9  # scales the estimates; no choice depends on it
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Estimate:
    """The predicted time of a kernel on its busiest core.

    Parameters
    ----------
    cycles : float
        All together.
    nests : Terms
        Sums over the nests, by cause; arithmetic and traffic overlap.
    edges, layouts, fork : float
        Costs outside the nests, in cycles.
    """

    cycles: float
    nests: Terms
    edges: float = 0.0
    layouts: float = 0.0
    fork: float = 0.0

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return self.cycles / CLOCK_HZ

    def terms(self) -> dict[str, float]:
        """All cycles by cause."""
        outside = {"edges": self.edges, "layouts": self.layouts, "fork": self.fork}
        return self.nests._asdict() | outside


def estimate(kernel: Conv2DKernel, knobs: Conv2DKnobs | FusedConv2DKnobs, cpu: CPUInfo) -> Estimate:
    """Predict the time of a packed kernel.

    Parameters
    ----------
    kernel : Conv2DKernel
        One layer or two; a symbolic batch counts as one image.
    knobs : Conv2DKnobs | FusedConv2DKnobs
        Any legal setting of the kernel's template with whole rows (``w_t`` and ``w_o`` of 1).
    cpu : CPUInfo
        The machine.
    """
    if isinstance(knobs, Conv2DKnobs):
        return _single(kernel, knobs, cpu)
    return _fused(kernel, knobs, cpu)


@lru_cache(maxsize=4096)
def default_conv2d_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> Conv2DKnobs:
    """Return the cheapest setting of a single convolution; the first of equals."""
    return min(conv2d_space(kernel, cpu), key=lambda knobs: _single(kernel, knobs, cpu).cycles)


@lru_cache(maxsize=4096)
def default_fused_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> FusedConv2DKnobs:
    """Return the cheapest setting of a fused pair.

    The cost of a grid is a sum over both layers, so that each layer's tile is chosen alone.
    """

    def cheapest(grid: Grid) -> tuple[float, FusedConv2DKnobs]:
        seconds = tiles_two(kernel, grid, cpu)
        first = min(
            tiles_one(kernel, cpu),
            key=lambda tile: _cycles(_layer_one(kernel, grid.knobs(tile, seconds[0]), cpu), cpu),
        )
        second = min(
            seconds,
            key=lambda tile: _cycles(_layer_two(kernel, grid.knobs(first, tile), cpu), cpu),
        )
        knobs = grid.knobs(first, second)
        return _fused(kernel, knobs, cpu).cycles, knobs

    return min((cheapest(grid) for grid in grids(kernel, cpu)), key=lambda found: found[0])[1]


Steps = list[tuple[float, Terms]]


def _cycles(steps: Steps, cpu: CPUInfo) -> float:
    return sum(count * terms.cycles(cpu.costs) for count, terms in steps)


def _finish(
    kernel: Conv2DKernel, pieces: int, steps: Steps, edges: float, layouts: float, cpu: CPUInfo
) -> Estimate:
    """Scale one piece's cost to the images of the busiest core."""
    batch = kernel.batch or 1
    rounds = -(-batch * pieces // cpu.num_cores)
    fork = cpu.costs.fork if batch * pieces > 1 and cpu.num_cores > 1 else 0.0
    columns = zip(*([count * value for value in terms] for count, terms in steps), strict=True)
    cycles = rounds * (_cycles(steps, cpu) + edges + layouts) + fork
    return Estimate(cycles, Terms(*map(sum, columns)), edges, layouts, fork)


def _single(kernel: Conv2DKernel, knobs: Conv2DKnobs, cpu: CPUInfo) -> Estimate:
    layer, lanes, item = kernel.layers[0], kernel.lanes, ITEM_BYTES[kernel.dtype]
    height, width = _size(kernel)
    out_h, out_w = layer.output_size(height, width)
    plain = kernel.data_layout == "NCHW"
    block_tiles = _block_tiles(layer, lanes, knobs.blocks)
    vectors = block_tiles[: -(-len(block_tiles) // knobs.block_chunks)]
    flat = layer.is_pointwise and not plain
    units = -(-out_h * out_w // knobs.pixels) if flat else out_h
    share = -(-units // knobs.unit_chunks)
    channels = layer.in_channels if plain else _padded(layer.in_channels, lanes)
    data_bytes = channels * height * width * item
    row_bytes = data_bytes / height
    if layer.groups > 1:  # each channel is read by one core
        row_bytes *= len(vectors) / len(block_tiles)
    nest = LoopNest(
        layer=layer,
        lanes=lanes,
        source_lanes=layer.input_step(1 if plain else lanes),
        item_bytes=item,
        size=(height, width),
        out_size=(out_h, out_w),
        pixels=knobs.pixels,
        vectors=vectors,
        in_blocks=_in_blocks(layer, 1 if plain else lanes),
        parts=knobs.ic_o,
        inside=knobs.blocks_inside,
        prefetch=knobs.prefetch,
        data_level=_home(data_bytes, cpu, foreign=knobs.block_chunks > 1),
        out_level=_home(_padded(layer.out_channels, lanes) * out_h * out_w * item, cpu),
        residual=kernel.residual,
    )
    steps: Steps = []
    for group, count in _pieces(share, knobs.unit_group):
        rows = height * group / units if flat else min(height, _rows_used(layer, group))
        nest = nest._replace(
            rows=1 if flat else group,
            flat=tile_counts(out_h * out_w, knobs.pixels, group) if flat else None,
            data_bytes=rows * row_bytes,
        )
        kept = layer.weight_elements() * item + nest.data_bytes
        steps += _with_weights(nest, count, not steps, kept, cpu)
    edges = 0.0
    if layer.group_lanes(lanes) and knobs.unit_chunks > 1:
        lines = min(share * out_w * lanes * item, PAGE_BYTES) / CACHE_LINE_BYTES
        edges = cpu.costs.edge * lines * len(vectors)
    return _finish(kernel, knobs.unit_chunks * knobs.block_chunks, steps, edges, 0.0, cpu)


def _fused(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, cpu: CPUInfo) -> Estimate:
    if knobs.w_t > 1 or knobs.w_o > 1:
        raise OpError(
            f"w_t is {knobs.w_t} and w_o is {knobs.w_o}; expected 1, because the cost model knows "
            "whole rows only"
        )
    steps = _layer_one(kernel, knobs, cpu) + _layer_two(kernel, knobs, cpu)
    steps += _evictions(kernel, knobs, cpu)
    layer1, layer2 = kernel.layers
    mid = layer1.output_size(*_size(kernel))
    out_h, out_w = layer2.output_size(*mid)
    moved = 0.0
    if kernel.plain_data:
        rows = sum(
            count * _rows_read(layer1, _rows_read(layer2, step, mid[0]), _size(kernel)[0])
            for step, count in _row_steps(kernel, knobs)
        )
        moved += rows * _size(kernel)[1] * layer1.in_channels
    if kernel.plain_out:
        moved += -(-out_h // knobs.h_t) * out_w * layer2.out_channels / knobs.oc_t
    layouts = moved * ITEM_BYTES[kernel.dtype] / cpu.costs.transpose_bytes_per_cycle
    return _finish(kernel, knobs.h_t * knobs.oc_t, steps, 0.0, layouts, cpu)


def _layer_one(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, cpu: CPUInfo) -> Steps:
    """Cost of layer one in all steps of a piece."""
    layer, layer2 = kernel.layers
    lanes, item = kernel.lanes, ITEM_BYTES[kernel.dtype]
    (height, width), mid = _size(kernel), layer.output_size(*_size(kernel))
    row_bytes = _padded(layer.in_channels, lanes) * width * item
    enclosing = knobs.order[: knobs.compute_at]
    parts = knobs.ic_o if "ic_o" in enclosing else 1
    repeats = parts
    if "oc2" in enclosing:
        repeats *= -(-len(_block_tiles(layer2, lanes, knobs.blocks2)) // knobs.oc_t)
    blocks = -(-layer.out_channels // lanes) // parts
    nest = LoopNest(
        layer=layer,
        lanes=lanes,
        source_lanes=layer.input_step(lanes),
        item_bytes=item,
        size=(height, width),
        out_size=mid,
        pixels=knobs.pixels1,
        vectors=split(blocks, knobs.blocks1 if layer.groups == 1 else 1),
        in_blocks=_in_blocks(layer, lanes),
        prefetch=knobs.prefetch and not layer.group_lanes(lanes),
        data_level=_home(row_bytes * height, cpu, foreign=knobs.oc_t > 1),
    )
    read_parts = parts if layer.group_lanes(lanes) else 1
    steps: Steps = []
    for step, count in _row_steps(kernel, knobs):
        rows = _rows_read(layer2, step, mid[0])
        read = _rows_read(layer, rows, height)
        fresh = min(read, rows * layer.strides[0])
        nest = nest._replace(
            rows=rows,
            data_bytes=fresh * row_bytes / read_parts,
            halo_bytes=(read - fresh) * row_bytes / read_parts,
            out_level=_mid_level(kernel, knobs, step, cpu),
        )
        kept = _kept(kernel, knobs, step)
        found = _with_weights(nest, count, not steps, kept, cpu)
        steps += [(times * repeats, terms) for times, terms in found]
    return steps


def _layer_two(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, cpu: CPUInfo) -> Steps:
    """Cost of layer two in all steps of a piece."""
    layer1, layer = kernel.layers
    lanes, item = kernel.lanes, ITEM_BYTES[kernel.dtype]
    mid = layer1.output_size(*_size(kernel))
    out_h, out_w = layer.output_size(*mid)
    block_tiles = _block_tiles(layer, lanes, knobs.blocks2)
    flat = layer.is_pointwise
    nest = LoopNest(
        layer=layer,
        lanes=lanes,
        source_lanes=lanes,
        item_bytes=item,
        size=mid,
        out_size=(out_h, out_w),
        pixels=knobs.pixels2,
        vectors=block_tiles[: -(-len(block_tiles) // knobs.oc_t)],
        in_blocks=_in_blocks(layer, lanes) // knobs.ic_o,
        calls=knobs.ic_o,
        prefetch=knobs.prefetch,
        out_level=_home(_padded(layer.out_channels, lanes) * out_h * out_w * item, cpu),
        residual=kernel.residual,
    )
    steps: Steps = []
    for step, count in _row_steps(kernel, knobs):
        mid_bytes = _mid_bytes(kernel, knobs, step)
        nest = nest._replace(
            rows=1 if flat else step,
            flat=tile_counts(step * out_w, knobs.pixels2) if flat else None,
            data_bytes=mid_bytes,
            data_level=_mid_level(kernel, knobs, step, cpu),
        )
        kept = _kept(kernel, knobs, step)
        found = _with_weights(nest, count, not steps, kept, cpu)
        steps += [(times * knobs.ic_o, terms) for times, terms in found]
    return steps


def _with_weights(nest: LoopNest, count: int, first: bool, kept: float, cpu: CPUInfo) -> Steps:
    """Cost of ``count`` nests; the ``first`` reads weights from memory, others where they fit.

    ``kept`` are the bytes accessed until they are needed again.
    """
    steps: Steps = []
    if first:
        steps.append((1, nest_terms(nest._replace(weight_level=MEMORY), cpu)))
    if count > first:
        later = nest._replace(weight_level=max(L2, fits(kept, cpu)))
        steps.append((count - first, nest_terms(later, cpu)))
    return steps


def _evictions(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, cpu: CPUInfo) -> Steps:
    """Cost of the part of the intermediate that layer one's data evicts from the L2.

    A dense layer one has enough arithmetic to hide it.
    """
    steps: Steps = []
    if not kernel.layers[0].is_depthwise:
        return steps
    for step, count in _row_steps(kernel, knobs):
        mid = _mid_bytes(kernel, knobs, step)
        full = (mid + _data_bytes(kernel, knobs, step)) / cpu.l2_bytes
        lost = mid * min(1.0, max(0.0, full - cpu.costs.kept))
        moved = (1 + cpu.costs.store) * lost / bandwidth(L3, cpu)
        steps.append((count * knobs.ic_o, Terms(exposed=moved)))
    return steps


def _row_steps(kernel: Conv2DKernel, knobs: FusedConv2DKnobs) -> list[tuple[int, int]]:
    """Output rows of a step and the number of such steps in the largest piece."""
    layer1, layer2 = kernel.layers
    out_h, _ = layer2.output_size(*layer1.output_size(*_size(kernel)))
    share = -(-out_h // knobs.h_t)
    return _pieces(share, knobs.h if "h_o" in knobs.order[: knobs.compute_at] else share)


def _pieces(extent: int, size: int) -> list[tuple[int, int]]:
    """Sizes and numbers of the pieces of at most ``size``."""
    whole, rest = divmod(extent, size)
    return [(size, whole)] * (whole > 0) + [(rest, 1)] * (rest > 0)


def _mid_bytes(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, step: int) -> float:
    """Bytes of the intermediate that a part of a step needs."""
    layer1, layer2 = kernel.layers
    mid_h, mid_w = layer1.output_size(*_size(kernel))
    channels = _padded(layer1.out_channels, kernel.lanes) / knobs.ic_o
    return _rows_read(layer2, step, mid_h) * mid_w * channels * ITEM_BYTES[kernel.dtype]


def _mid_level(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, step: int, cpu: CPUInfo) -> int:
    """Level from which layer two reads the intermediate, as half of layer one's data streams by."""
    return fits(_mid_bytes(kernel, knobs, step) + _data_bytes(kernel, knobs, step) / 2, cpu)


def _data_bytes(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, step: int) -> float:
    """Bytes of the data that layer one reads for a part of a step."""
    layer1, layer2 = kernel.layers
    (height, width), mid = _size(kernel), layer1.output_size(*_size(kernel))
    rows = _rows_read(layer1, _rows_read(layer2, step, mid[0]), height)
    return rows * width * layer1.in_channels * ITEM_BYTES[kernel.dtype] / knobs.ic_o


def _kept(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, step: int) -> float:
    """Bytes that a step needs again in the next one: weights and the intermediate's buffer."""
    layer1, layer2 = kernel.layers
    weights = layer1.weight_elements() + layer2.weight_elements() / knobs.oc_t
    mid = _mid_bytes(kernel, knobs, step) * knobs.ic_o
    return weights * ITEM_BYTES[kernel.dtype] + mid


def _size(kernel: Conv2DKernel) -> tuple[int, int]:
    return int(kernel.height or 1), int(kernel.width or 1)


def _padded(channels: int, lanes: int) -> int:
    return -(-channels // lanes) * lanes


def _in_blocks(layer: ConvLayer, lanes: int) -> int:
    """Input blocks, or pieces of a group, that one output channel reads."""
    if layer.group_lanes(lanes):
        return 1
    return -(-layer.in_channels // layer.groups // layer.input_step(lanes))


def _block_tiles(layer: ConvLayer, lanes: int, tile: int) -> tuple[int, ...]:
    """Channel blocks of each block tile; none crosses a group."""
    return block_tiles(layer, lanes, -(-layer.out_channels // lanes), tile)


def _rows_read(layer: ConvLayer, rows: int, height: int) -> int:
    """Rows of the image between the first and the last that ``rows`` output rows read."""
    reach = (layer.kernel[0] - 1) * layer.dilation[0] + 1
    return min(height, (rows - 1) * layer.strides[0] + reach)


def _rows_used(layer: ConvLayer, rows: int) -> int:
    """Rows that ``rows`` output rows read; strides may skip some."""
    reach = (layer.kernel[0] - 1) * layer.dilation[0] + 1
    return (rows - 1) * min(layer.strides[0], reach) + reach


def _home(size: float, cpu: CPUInfo, foreign: bool = False) -> int:
    """Level of a core's share of a tensor; of all of it, if other cores wrote the rest."""
    level = fits(size / cpu.num_cores, cpu)
    return max(level, L3) if foreign and cpu.num_cores > 1 else level
