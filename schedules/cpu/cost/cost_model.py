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

A kernel that packs NCHW data or unpacks its output pays for transposes by the byte. One that
multiplies bfloat16 as floats pays ``half_vector`` for each vector of data that it widens in a copy,
and of sums that it rounds. Lower-case names here are fields of :class:`.MachineCosts`.

The default knobs are the cheapest of :func:`.conv2d_knobs.conv2d_space` or
:func:`.fused_conv2d_knobs.fused_conv2d_space`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from schedules.errors import OpError
from schedules.workload.conv2d import ITEM_BYTES, Conv2DKernel, ConvLayer

from ..core.machine import CPUInfo
from ..core.prefetch import CACHE_LINE_BYTES
from ..core.tiles import block_tiles, tile_counts
from .conv2d_knobs import Conv2DKnobs, conv2d_space
from .fused_conv2d_knobs import FusedConv2DKnobs, grids, tiles_one, tiles_two
from .nest_cost import (
    L2,
    L3,
    MEMORY,
    ConvNest,
    Terms,
    bandwidth,
    fits,
    multiply_adds,
    nest_terms,
    split,
)

CLOCK_HZ = 3.0e9  # scales the estimates; no choice depends on it
PAGE_BYTES = 4096
ROUNDED = 1 - 1e-9  # A lower bound is summed up in another order than a cost.


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
    rounds : int
        Times that the busiest core runs the nests.
    """

    cycles: float
    nests: Terms
    edges: float = 0.0
    layouts: float = 0.0
    fork: float = 0.0
    rounds: int = 1

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
    """Return the cheapest setting of a single convolution; the first of equals.

    Branch and bound: settings of the same tile and pieces have multiply-adds in common, and those
    that also cut the reduction alike all arithmetic of the first, whose groups are the largest.
    """
    search = _Search(kernel, cpu)
    shares = search.branches(
        enumerate(conv2d_space(kernel, cpu)),
        lambda knobs: (knobs.pixels, knobs.blocks, knobs.unit_chunks, knobs.block_chunks),
        lambda costed: costed.nests.multiply_adds,
    )
    chains = [
        chain
        for least, share in shares
        if search.may_hold_a_better(least)
        for chain in search.branches(
            share,
            lambda knobs: (knobs.blocks_inside, knobs.ic_o),
            lambda costed: costed.nests.multiply_adds + costed.nests.tiles + costed.nests.starts,
        )
    ]
    for least, chain in sorted(chains, key=lambda branch: branch[0]):
        if search.may_hold_a_better(least):
            for number, knobs in chain:
                search.cost(number, knobs)
    return search.best


Numbered = tuple[int, Conv2DKnobs]


class _Search:
    """Cheapest of the settings whose cost was asked for; of equals the one of the least number."""

    def __init__(self, kernel: Conv2DKernel, cpu: CPUInfo) -> None:
        self._kernel, self._cpu = kernel, cpu
        self._found: dict[int, Estimate] = {}
        self._best: tuple[float, int, Conv2DKnobs] | None = None

    @property
    def best(self) -> Conv2DKnobs:
        """The cheapest setting."""
        assert self._best is not None, "a space has the tile of one pixel and one block"
        return self._best[2]

    def cost(self, number: int, knobs: Conv2DKnobs) -> Estimate:
        """Cost of a setting."""
        if number not in self._found:
            found = self._found[number] = _single(self._kernel, knobs, self._cpu)
            if self._best is None or (found.cycles, number) < self._best[:2]:
                self._best = found.cycles, number, knobs
        return self._found[number]

    def may_hold_a_better(self, least: float) -> bool:
        """Return whether a setting that costs ``least`` or more may be cheaper than the best."""
        return self._best is None or least * ROUNDED <= self._best[0]

    def branches(
        self,
        settings: Iterable[Numbered],
        key: Callable[[Conv2DKnobs], Hashable],
        bound: Callable[[Estimate], float],
    ) -> list[tuple[float, list[Numbered]]]:
        """Settings with the same ``key``, and the least that they can cost, the lowest first.

        ``bound`` are cycles of a nest that all of a branch need, from the estimate of its first.
        """
        alike: dict[Hashable, list[Numbered]] = {}
        for number, knobs in settings:
            alike.setdefault(key(knobs), []).append((number, knobs))
        found = []
        for members in alike.values():
            first = self.cost(*members[0])
            found.append((first.rounds * bound(first) + first.fork, members))
        return sorted(found, key=lambda branch: branch[0])


@lru_cache(maxsize=4096)
def default_fused_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> FusedConv2DKnobs:
    """Return the cheapest setting of a fused pair.

    The cost of a grid is a sum over both layers, so that each layer's tile is chosen alone. Grids
    whose multiply-adds alone cost more than a setting found already are left out.
    """
    bounded = []
    ones, rows_one, rows_two = tiles_one(kernel, cpu), _Rows(), _Rows()
    for number, grid in enumerate(grids(kernel, cpu)):
        twos = tiles_two(kernel, grid, cpu)
        knobs = grid.knobs(ones[0], twos[0])
        first = _TiledLayer(_parts_one(kernel, knobs, cpu), ones, 1, cpu, rows_one)
        second = _TiledLayer(_parts_two(kernel, knobs, cpu), twos, grid.oc_t, cpu, rows_two)
        rounds, fork = _rounds(kernel, grid.h_t * grid.oc_t, cpu)
        least = rounds * (first.least + second.least) + fork
        bounded.append((least, number, grid, first, second))
    best: tuple[float, int, FusedConv2DKnobs] | None = None
    for least, number, grid, first, second in sorted(bounded, key=lambda found: found[:2]):
        if best is not None and least * ROUNDED > best[0]:
            break
        knobs = grid.knobs(first.cheapest(), second.cheapest())
        cycles = _fused(kernel, knobs, cpu).cycles
        if best is None or (cycles, number) < best[:2]:
            best = cycles, number, knobs
    assert best is not None, "a pair has the grid of one piece"
    return best[2]


_Rows = dict[tuple[tuple[int, int], int], float]
"""Cycles of the multiply-adds of a row, by register tile and pieces of the block tiles."""


class _TiledLayer:
    """Nests of a layer in one grid, with each register tile, and the least that they cost.

    ``rows`` is shared by the grids: the multiply-adds of nests that are not flat are those of a
    row, times the rows.
    """

    def __init__(
        self,
        parts: list[_Part],
        tiles: Iterable[tuple[int, int]],
        pieces: int,
        cpu: CPUInfo,
        rows: _Rows,
    ) -> None:
        self._parts, self._pieces, self._cpu, self._rows = parts, pieces, cpu, rows
        self._least = {tile: self._multiply_adds(tile) for tile in tiles}

    def _multiply_adds(self, tile: tuple[int, int]) -> float:
        """Cycles of the multiply-adds alone."""
        pieces, cpu = self._pieces, self._cpu
        if self._parts[0].nest.flat is not None:
            return sum(
                part.number * part.repeats * multiply_adds(part.tiled(tile, pieces).nest, cpu)
                for part in self._parts
            )
        if (tile, pieces) not in self._rows:
            nest = self._parts[0].tiled(tile, pieces).nest._replace(rows=1)
            self._rows[tile, pieces] = multiply_adds(nest, cpu)
        rows = sum(part.number * part.repeats * part.nest.rows for part in self._parts)
        return rows * self._rows[tile, pieces]

    @property
    def least(self) -> float:
        """Lower bound of all tiles: their multiply-adds."""
        return min(self._least.values())

    def cheapest(self) -> tuple[int, int]:
        """The cheapest tile; the first of equals."""
        best, cheapest = next(iter(self._least)), math.inf
        for tile, least in self._least.items():
            if least * ROUNDED <= cheapest:
                parts = [part.tiled(tile, self._pieces) for part in self._parts]
                cycles = _cycles(_cost(parts, self._cpu), self._cpu)
                if cycles < cheapest:
                    best, cheapest = tile, cycles
        return best


Steps = list[tuple[float, Terms]]


class _Part(NamedTuple):
    """Loop nests alike, one after another.

    Parameters
    ----------
    nest : ConvNest
        One of them.
    number : int
        Their number.
    first : bool
        Whether the first of them reads its weights from memory, the others where they fit.
    kept : float
        Bytes accessed until the weights are needed again.
    repeats : int
        Times that all of them run.
    """

    nest: ConvNest
    number: int
    first: bool
    kept: float
    repeats: int = 1

    def tiled(self, tile: tuple[int, int], pieces: int) -> _Part:
        """The same with another register tile, for one of ``pieces`` of the block tiles."""
        (pixels, blocks), nest = tile, self.nest
        flat = nest.flat and tile_counts(sum(size * n for size, n in nest.flat), pixels)
        vectors = _vectors(nest.layer, nest.lanes, blocks, pieces)
        return self._replace(nest=nest._replace(pixels=pixels, vectors=vectors, flat=flat))


def _cycles(steps: Steps, cpu: CPUInfo) -> float:
    return sum(count * terms.cycles(cpu.costs) for count, terms in steps)


def _cost(parts: Iterable[_Part], cpu: CPUInfo) -> Steps:
    """Cost of the nests by where their weights are."""
    steps: Steps = []
    for part in parts:
        counts, levels = [], []
        if part.first:
            counts.append(1)
            levels.append(MEMORY)
        if part.number > part.first:
            counts.append(part.number - part.first)
            levels.append(max(L2, fits(part.kept, cpu)))
        found = zip(counts, nest_terms(part.nest, levels, cpu), strict=True)
        steps += [(count * part.repeats, terms) for count, terms in found]
    return steps


def _rounds(kernel: Conv2DKernel, pieces: int, cpu: CPUInfo) -> tuple[int, float]:
    """Pieces of the busiest core, and the cycles of waking the others."""
    batch = kernel.batch or 1
    fork = cpu.costs.fork if batch * pieces > 1 and cpu.num_cores > 1 else 0.0
    return -(-batch * pieces // cpu.num_cores), fork


def _busy_cores(kernel: Conv2DKernel, pieces: int, cpu: CPUInfo) -> int:
    """Cores that compute at the same time."""
    return min((kernel.batch or 1) * pieces, cpu.num_cores)


def _finish(
    kernel: Conv2DKernel, pieces: int, steps: Steps, edges: float, layouts: float, cpu: CPUInfo
) -> Estimate:
    """Scale one piece's cost to the images of the busiest core."""
    rounds, fork = _rounds(kernel, pieces, cpu)
    columns = zip(*([count * value for value in terms] for count, terms in steps), strict=True)
    cycles = rounds * (_cycles(steps, cpu) + edges + layouts) + fork
    return Estimate(cycles, Terms(*map(sum, columns)), edges, layouts, fork, rounds)


def _single(kernel: Conv2DKernel, knobs: Conv2DKnobs, cpu: CPUInfo) -> Estimate:
    layer, lanes, item = kernel.layers[0], kernel.lanes, ITEM_BYTES[kernel.dtype]
    height, width = _size(kernel)
    out_h, out_w = layer.output_size(height, width)
    plain = kernel.data_layout == "NCHW"
    pieces = knobs.unit_chunks * knobs.block_chunks
    vectors = _vectors(layer, lanes, knobs.blocks, knobs.block_chunks)
    flat = layer.is_pointwise and not plain
    units = -(-out_h * out_w // knobs.pixels) if flat else out_h
    share = -(-units // knobs.unit_chunks)
    channels = layer.in_channels if plain else _padded(layer.in_channels, lanes)
    data_bytes = channels * height * width * item
    row_bytes = data_bytes / height
    if layer.groups > 1:  # each channel is read by one core
        row_bytes *= len(vectors) / len(_block_tiles(layer, lanes, knobs.blocks))
    nest = ConvNest(
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
        stored_bytes=ITEM_BYTES[kernel.weight_dtype] if kernel.weight_dtype else None,
        cores=_busy_cores(kernel, pieces, cpu),
        weight_shares=_weight_shares(layer, lanes, vectors, cpu),
    )
    parts: list[_Part] = []
    for group, count in _pieces(share, knobs.unit_group):
        rows = height * group / units if flat else min(height, _rows_used(layer, group))
        nest = nest._replace(
            rows=1 if flat else group,
            flat=tile_counts(out_h * out_w, knobs.pixels, group) if flat else None,
            data_bytes=rows * row_bytes,
        )
        kept = layer.weight_elements() * nest.weight_bytes + nest.data_bytes
        parts.append(_Part(nest, count, not parts, kept))
    edges = 0.0
    if layer.group_lanes(lanes) and knobs.unit_chunks > 1:
        lines = min(share * out_w * lanes * item, PAGE_BYTES) / CACHE_LINE_BYTES
        edges = cpu.costs.edge * lines * len(vectors)
    layouts = 0.0
    if kernel.weight_dtype == "bfloat16":
        moved = sum(part.number * part.nest.data_bytes for part in parts) / (lanes * item)
        moved += share * (knobs.pixels if flat else out_w) * sum(vectors)
        layouts = moved * cpu.costs.half_vector
    return _finish(kernel, pieces, _cost(parts, cpu), edges, layouts, cpu)


def _fused(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, cpu: CPUInfo) -> Estimate:
    if knobs.w_t > 1 or knobs.w_o > 1:
        raise OpError(
            f"w_t is {knobs.w_t} and w_o is {knobs.w_o}; expected 1, because the cost model knows "
            "whole rows only"
        )
    parts = _parts_one(kernel, knobs, cpu) + _parts_two(kernel, knobs, cpu)
    steps = _cost(parts, cpu) + _evictions(kernel, knobs, cpu)
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


def _parts_one(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, cpu: CPUInfo) -> list[_Part]:
    """Nests of layer one in all steps of a piece."""
    layer, layer2 = kernel.layers
    lanes, item = kernel.lanes, ITEM_BYTES[kernel.dtype]
    (height, width), mid = _size(kernel), layer.output_size(*_size(kernel))
    row_bytes = _padded(layer.in_channels, lanes) * width * item
    enclosing = knobs.order[: knobs.compute_at]
    pieces = knobs.ic_o if "ic_o" in enclosing else 1
    repeats = pieces
    if "oc2" in enclosing:
        repeats *= -(-len(_block_tiles(layer2, lanes, knobs.blocks2)) // knobs.oc_t)
    blocks = -(-layer.out_channels // lanes) // pieces
    nest = ConvNest(
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
        cores=_busy_cores(kernel, knobs.h_t * knobs.oc_t, cpu),
    )
    read_pieces = pieces if layer.group_lanes(lanes) else 1
    parts: list[_Part] = []
    for step, count in _row_steps(kernel, knobs):
        rows = _rows_read(layer2, step, mid[0])
        read = _rows_read(layer, rows, height)
        fresh = min(read, rows * layer.strides[0])
        nest = nest._replace(
            rows=rows,
            data_bytes=fresh * row_bytes / read_pieces,
            halo_bytes=(read - fresh) * row_bytes / read_pieces,
            out_level=_mid_level(kernel, knobs, step, cpu),
        )
        parts.append(_Part(nest, count, not parts, _kept(kernel, knobs, step), repeats))
    return parts


def _parts_two(kernel: Conv2DKernel, knobs: FusedConv2DKnobs, cpu: CPUInfo) -> list[_Part]:
    """Nests of layer two in all steps of a piece."""
    layer1, layer = kernel.layers
    lanes, item = kernel.lanes, ITEM_BYTES[kernel.dtype]
    mid = layer1.output_size(*_size(kernel))
    out_h, out_w = layer.output_size(*mid)
    flat = layer.is_pointwise
    vectors = _vectors(layer, lanes, knobs.blocks2, knobs.oc_t)
    nest = ConvNest(
        layer=layer,
        lanes=lanes,
        source_lanes=lanes,
        item_bytes=item,
        size=mid,
        out_size=(out_h, out_w),
        pixels=knobs.pixels2,
        vectors=vectors,
        in_blocks=_in_blocks(layer, lanes) // knobs.ic_o,
        calls=knobs.ic_o,
        prefetch=knobs.prefetch,
        out_level=_home(_padded(layer.out_channels, lanes) * out_h * out_w * item, cpu),
        residual=kernel.residual,
        cores=_busy_cores(kernel, knobs.h_t * knobs.oc_t, cpu),
        weight_shares=_weight_shares(layer, lanes, vectors, cpu),
    )
    parts: list[_Part] = []
    for step, count in _row_steps(kernel, knobs):
        mid_bytes = _mid_bytes(kernel, knobs, step)
        nest = nest._replace(
            rows=1 if flat else step,
            flat=tile_counts(step * out_w, knobs.pixels2) if flat else None,
            data_bytes=mid_bytes,
            data_level=_mid_level(kernel, knobs, step, cpu),
        )
        parts.append(_Part(nest, count, not parts, _kept(kernel, knobs, step), knobs.ic_o))
    return parts


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


def _vectors(layer: ConvLayer, lanes: int, blocks: int, pieces: int) -> tuple[int, ...]:
    """Channel blocks of each block tile of the largest piece."""
    found = _block_tiles(layer, lanes, blocks)
    return found[: -(-len(found) // pieces)]


def _weight_shares(layer: ConvLayer, lanes: int, vectors: tuple[int, ...], cpu: CPUInfo) -> float:
    """All channel blocks over those of the largest piece; at most one for each core."""
    return min(-(-layer.out_channels // lanes) / sum(vectors), cpu.num_cores)


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
