# SPDX-License-Identifier: Apache-2.0
"""Knobs of convolutions in tile registers, their search space, and the cycles that they take.

The busiest core takes, for groups of ``M`` pixel tiles by ``N`` channel tiles,

    T = max(products, loads) + leak min(products, loads)
        + crossings + weights + data + endings + groups + borders + fork

    products = groups x steps x M N x max(rows, 9) x a slowdown against products alone
    loads    = the tiles of all products, from the L1, or from the L2 where they do not fit; that
               of pixels once for all channels, or with groups for each tile of these
    crossings = rows of tiles of pixels that lie in two cache lines, as overlapping ones do
    weights  = the first load of each, from the L3
    data     = the first load of the image, which other cores wrote
    endings  = rows of sums that become output; little of it where products hide it
    borders  = the padded copy of the image, written and read once

The figures were fitted to 20 layers of ResNet-50 on two cores of Emerald Rapids, which they
reproduce to a fifth; products alone take 16 cycles for 16 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, inf, prod
from typing import NamedTuple

from schedules.workload.conv2d import (
    ITEM_BYTES,
    WORD_BYTES,
    WORDS,
    Activation,
    ChannelBlocks,
    Conv2DKernel,
)

from ..core.machine import CPUInfo
from ..core.tile_unit import TILE_ROWS, TILE_WORDS
from .conv2d_knobs import shares
from .cost_model import default_conv2d_knobs, estimate

_MOST_TAPS = 4096  # An int32 holds sums of 16 channels of bytes over so many taps.
LEAST_ROWS = 9  # a product of fewer takes as long
SUMS = 4  # tiles of sums that the registers hold beside the factors
SHAPES = ((1, 4), (2, 2), (1, 3), (1, 2), (2, 1), (1, 1))
UNROLLED = (1, 4)
MOST_PIECES = (1, 4, 16, 64)  # Pieces of the pixels that a core computes.
SLOWDOWN = 1.6
_L1, _L2, _L3 = 128.0, 79.0, 10.0  # bytes a cycle of tiles that are loaded again
_WEIGHTS, _DATA = 8.8, 22.0  # bytes a cycle of what is loaded for the first time
_CROSSING = 4.5  # cycles of a row in two cache lines more than of one in a single line
_LINE = 64  # bytes
_COPIED = 48.0  # bytes a cycle of the copy of an image
STORED, _FINISHED = 1.05, 2.2  # a row of 16 sums: from its tile, and to the output
_UNPACKED = 1.5  # where no instruction packs whole vectors of bytes or bfloat16
_HIDDEN = 0.95  # share of endings that products beside them hide
_GROUP = 66.0  # loops, addresses and zeros of a group
_STEP = 1.0  # end of a body of the loop over steps
FORK = 12000.0
_NEAR = 1.1  # times of vectors over those of tiles that are too near to spread infinities for


@dataclass(frozen=True)
class TileConv2DKnobs:
    """Knobs of the template.

    Parameters
    ----------
    rows : int
        Pixels of a tile, at most 16.
    pixel_tiles, channel_tiles : int
        Tiles of pixels and of 16 output channels whose products are summed at a time: at most four
        products.
    unit_chunks, block_chunks : int
        Parallel pieces of the pixels and of the channels.
    unrolled : int
        Steps of the reduction in a body of its loop, at most four.
    interleaved : bool
        Whether the sums of a group of tiles become output between the products of the next group.
    """

    rows: int
    pixel_tiles: int
    channel_tiles: int
    unit_chunks: int
    block_chunks: int
    unrolled: int
    interleaved: bool


@dataclass(frozen=True)
class TileGeometry:
    """Tiles that a convolution is cut into.

    Parameters
    ----------
    lines, width : int
        Rows of pixels that tiles do not cross, and pixels of each: one line of all pixels where the
        kernel is one pixel.
    depth : int
        Words of a row of a tile of pixels.
    steps : int
        Tiles of pixels that are summed up for an output.
    columns : int
        Tiles that a row of the kernel is cut into: one, where its pixels fill one.
    channel_tiles : int
        Tiles of 16 output channels.
    group_tiles : int
        Tiles of a group of channels, which read the same pixels.
    crossing : float
        Share of the rows of tiles of pixels that lie in two cache lines.
    """

    lines: int
    width: int
    depth: int
    steps: int
    columns: int
    channel_tiles: int
    group_tiles: int
    crossing: float

    @classmethod
    def of(cls, kernel: Conv2DKernel) -> TileGeometry:
        """Read a convolution of words."""
        (layer,) = kernel.layers
        lanes = layer.input_step(data_lanes(kernel))
        words, is_whole = lanes // kernel.word, lanes == data_lanes(kernel)
        lines, width = layer.output_size(int(kernel.height or 1), int(kernel.width or 1))
        if layer.is_pointwise:
            lines, width = 1, lines * width * (int(kernel.batch or 1) if kernel.is_matrix else 1)
        columns = layer.kernel[1]
        are_beside = is_whole and layer.dilation[1] == 1 and not kernel.is_matrix
        if are_beside and columns * words <= TILE_WORDS:
            words, columns = columns * words, 1
        blocks = -(-(layer.in_channels // layer.groups) // lanes)
        tiles = -(-layer.out_channels // kernel.lanes) * (kernel.lanes // TILE_WORDS)
        group_tiles = (
            tiles if layer.groups == 1 else layer.out_channels // layer.groups // TILE_WORDS
        )
        steps = blocks * layer.kernel[0] * columns
        pixel = data_lanes(kernel) * ITEM_BYTES[kernel.dtype]
        step = gcd(layer.strides[1] * pixel, _LINE)  # Rows begin at multiples of it.
        starts = range(0, _LINE, step)
        crossing = sum(start + words * WORD_BYTES > _LINE for start in starts) / len(starts)
        return cls(lines, width, words, steps, columns, tiles, group_tiles, crossing)

    def tiles_of_line(self, rows: int) -> int:
        """Tiles of a line."""
        return -(-self.width // rows)

    def loads(self, knobs: TileConv2DKnobs) -> int:
        """Tiles of channels that a tile of pixels is read for: one for all that read the same."""
        is_dense = self.group_tiles == self.channel_tiles
        is_shared = is_dense or self.group_tiles % knobs.channel_tiles == 0
        return 1 if is_shared else knobs.channel_tiles

    def groups(self, knobs: TileConv2DKnobs) -> tuple[int, int]:
        """Groups of tiles of pixels, and of channels."""
        units = self.lines * self.tiles_of_line(knobs.rows)
        return -(-units // knobs.pixel_tiles), -(-self.channel_tiles // knobs.channel_tiles)


def fits_tiles(kernel: Conv2DKernel, cpu: CPUInfo) -> bool:
    """Return whether tile registers can compute a packed convolution."""
    if kernel.dtype not in cpu.tiles or not kernel.has_words or len(kernel.layers) > 1:
        return False
    layer, word, lanes = kernel.layers[0], WORDS[kernel.dtype], data_lanes(kernel)
    if layer.groups > 1:
        own, outputs = (each // layer.groups for each in (layer.in_channels, layer.out_channels))
        # Groups are whole blocks of the data, or blocks whole groups.
        if own % TILE_WORDS or outputs % TILE_WORDS or max(own, lanes) % min(own, lanes):
            return False
    fills = lanes <= word * TILE_WORDS and not kernel.lanes % TILE_WORDS
    return fills and kernel.word == word


def tile_groups(kernel: Conv2DKernel, blocks: ChannelBlocks, cpu: CPUInfo) -> int:
    """Groups in which tile registers compute a convolution with groups.

    Parameters
    ----------
    kernel : Conv2DKernel
        The convolution, in NCHW.
    blocks : ChannelBlocks
        The blocks that it will be packed in.
    cpu : CPUInfo
        The machine.

    Returns
    -------
    int
        The layer's own, or as many of 16 channels if those have fewer: several are one then, with
        weights of zero between them. 0 where vectors compute it, because they are faster or tiles
        cannot.
    """
    found = _in_tiles(kernel, blocks, cpu)
    return 0 if found is None or _prefers_vectors(kernel, found, cpu) else found.layers[0].groups


def takes_tiles(kernel: Conv2DKernel, cpu: CPUInfo) -> bool:
    """Return whether tile registers compute a packed convolution.

    With groups of bytes in blocks of a vector the faster of both does.
    """
    can_choose = kernel.layers[0].groups > 1 and kernel.is_quantized
    return fits_tiles(kernel, cpu) and not (can_choose and _prefers_vectors(kernel, kernel, cpu))


def _prefers_vectors(kernel: Conv2DKernel, packed: Conv2DKernel, cpu: CPUInfo) -> bool:
    """Return whether vectors compute a layer with groups faster than tiles do, as it is packed.

    Or nearly as fast, where tiles would spread the infinities and NaN of narrow groups of floats.
    """
    if kernel.is_quantized and packed.lanes > cpu.lanes("int32"):
        return False
    is_wider = packed.layers[0].groups != kernel.layers[0].groups
    share = _NEAR if is_wider and not kernel.is_quantized else 1.0
    return _vector_cycles(kernel, cpu) <= share * _least_cycles(packed, cpu)


def _in_tiles(kernel: Conv2DKernel, blocks: ChannelBlocks, cpu: CPUInfo) -> Conv2DKernel | None:
    """A convolution in blocks and with groups that tile registers compute, if there are such."""
    if kernel.dtype not in cpu.tiles or len(kernel.layers) > 1:
        return None
    layer = kernel.layers[0]
    own = layer.in_channels // layer.groups
    if layer.groups > 1 and own < TILE_WORDS:
        fill = not TILE_WORDS % own and not layer.in_channels % TILE_WORDS
        is_alike = layer.in_channels == layer.out_channels and not layer.is_depthwise
        if not (fill and is_alike) or prod(layer.kernel) > _MOST_TAPS:
            return None
        layer = replace(layer, groups=layer.in_channels // TILE_WORDS)
    packed = _packed(replace(kernel, layers=(layer,)), blocks, WORDS[kernel.dtype])
    return packed if fits_tiles(packed, cpu) else None


def _least_cycles(kernel: Conv2DKernel, cpu: CPUInfo) -> float:
    """Cycles of a packed convolution in tile registers."""
    return tile_cycles(kernel, default_tile_knobs(kernel, cpu), cpu)


def _vector_cycles(kernel: Conv2DKernel, cpu: CPUInfo) -> float:
    """Cycles of a convolution with groups in blocks of a vector."""
    lanes = cpu.lanes("float32")
    word = WORDS[kernel.dtype] if kernel.is_quantized else 1
    packed = _packed(kernel, ChannelBlocks(lanes, lanes), word).in_words()
    return estimate(packed, default_conv2d_knobs(packed, cpu), cpu).cycles


def fastest_blocks(
    kernels: Sequence[Conv2DKernel], cpu: CPUInfo, are_equal: bool = False
) -> ChannelBlocks | None:
    """Blocks of channels with which tile registers compute convolutions fastest.

    Parameters
    ----------
    kernels : Sequence[Conv2DKernel]
        All convolutions of a network, in NCHW.
    cpu : CPUInfo
        The machine.
    are_equal : bool
        Whether all tensors need the same, as channels move from one to another.

    Returns
    -------
    ChannelBlocks | None
        At most as many as fill a row of a tile; None where tiles cannot compute all dense ones, and
        groups that they cannot compute need other blocks than of a vector. Depthwise layers and
        narrow groups of floats do not count, as vectors compute them in any blocks.
    """
    dense = [kernel for kernel in kernels if not _is_depthwise(kernel)]
    types = {kernel.dtype for kernel in dense}
    if len(types) != 1 or not types <= set(cpu.tiles):
        return None
    word = WORDS[types.pop()]
    row, cycles = word * TILE_WORDS, dict[ChannelBlocks, float]()
    widths = [TILE_WORDS << k for k in range(word.bit_length())]
    choices = [ChannelBlocks(width, width) for width in widths]
    for blocks in choices if are_equal else [*choices, ChannelBlocks(TILE_WORDS, row)]:
        cycles[blocks] = sum(_cycles(kernel, blocks, cpu) for kernel in dense)
    cycles = {blocks: total for blocks, total in cycles.items() if total < inf}
    return min(cycles, key=cycles.__getitem__, default=None)


def _cycles(kernel: Conv2DKernel, blocks: ChannelBlocks, cpu: CPUInfo) -> float:
    """Cycles of a convolution in blocks; infinity where no kernel computes it in these."""
    found, has_groups = _in_tiles(kernel, blocks, cpu), kernel.layers[0].groups > 1
    if found is not None and (not has_groups or tile_groups(kernel, blocks, cpu)):
        return _least_cycles(found, cpu)
    channels = kernel.layers[0].in_channels, kernel.layers[0].out_channels
    in_vectors = {blocks.of(each) for each in channels} == {cpu.lanes("float32")}
    return _vector_cycles(kernel, cpu) if has_groups and in_vectors else inf


def _is_depthwise(kernel: Conv2DKernel) -> bool:
    """Return whether a kernel multiplies floats in groups that blocks of any vectors hold."""
    is_single = len(kernel.layers) == 1 and not kernel.is_quantized
    return is_single and kernel.layers[0].group_lanes(TILE_WORDS) > 0


def _packed(kernel: Conv2DKernel, blocks: ChannelBlocks, word: int) -> Conv2DKernel:
    """A convolution in blocks of channels; an image of few channels in words of four."""
    layer = kernel.layers[0]
    few = layer.in_channels <= WORD_BYTES
    data = WORD_BYTES if few else blocks.of(layer.in_channels)
    layouts = f"NCHW{data}c", f"NCHW{blocks.of(layer.out_channels)}c"
    return replace(kernel, data_layout=layouts[0], out_layout=layouts[1], word=word)


def data_lanes(kernel: Conv2DKernel) -> int:
    """Channels in a block of the data, or of the words that an image of floats is rounded to."""
    if kernel.rounding is not None:
        return WORD_BYTES
    return int(kernel.data_layout[len("NCHW") : -1] or 1)


def tile_conv2d_space(kernel: Conv2DKernel, cpu: CPUInfo) -> Iterator[TileConv2DKnobs]:
    """All settings that the cost model compares."""
    for tiles in _tilings(kernel, cpu):
        for unrolled, interleaved in product(UNROLLED, (True, False)):
            yield TileConv2DKnobs(*tiles, unrolled, interleaved)


def _tilings(kernel: Conv2DKernel, cpu: CPUInfo) -> Iterator[tuple[int, int, int, int, int]]:
    """Rows of a tile, tiles of pixels and of channels, and parallel pieces of both."""
    geometry = TileGeometry.of(kernel)
    least = -(-geometry.width // TILE_ROWS)
    sizes = {-(-geometry.width // count) for count in range(least, least + 3)}
    for rows, (pixels, channels) in product(sorted(sizes, reverse=True), SHAPES):
        units = geometry.lines * geometry.tiles_of_line(rows)
        if pixels > units or channels > geometry.channel_tiles:
            continue
        groups = -(-units // pixels), -(-geometry.channel_tiles // channels)
        for parts in _pieces(kernel, groups, cpu):
            yield rows, pixels, channels, *parts


def _pieces(kernel: Conv2DKernel, groups: tuple[int, int], cpu: CPUInfo) -> list[tuple[int, int]]:
    """Parallel pieces of pixels and of channels; more of the pixels where each is copied."""
    found = shares(1 if kernel.is_matrix else kernel.batch or 1, cpu.num_cores, groups)
    times = MOST_PIECES if any(kernel.layers[0].padding) else (1,)
    more = ((pixels * many, channels) for many in times for pixels, channels in found)
    return list(dict.fromkeys(parts for parts in more if parts[0] <= groups[0]))


def packed_tiles(kernel: Conv2DKernel, knobs: TileConv2DKnobs) -> int:
    """Channel tiles whose outputs are packed into a vector, side by side: a divisor of a block's.

    Of bfloat16 two fill 512 bits, of bytes four; three of these are packed as fast.
    """
    most = {"uint8": WORD_BYTES, "bfloat16": 2}.get(str(kernel.out_dtype), 1)
    tiles = gcd(knobs.channel_tiles, kernel.lanes // TILE_WORDS)
    return next(count for count in range(most, 0, -1) if tiles % count == 0)


class TaskCycles(NamedTuple):
    """Clock cycles of a task, and those of what it loads first."""

    busy: float
    """All but the next ones."""
    weights: float
    """First load of the weights."""
    data: float
    """First load of the image."""


def tile_cycles(kernel: Conv2DKernel, knobs: TileConv2DKnobs, cpu: CPUInfo) -> float:
    """Predict the clock cycles of a kernel: those of its busiest core."""
    images = 1 if kernel.is_matrix else kernel.batch or 1
    tasks = images * knobs.unit_chunks * knobs.block_chunks
    each = sum(task_cycles(kernel, knobs, cpu))
    return each * -(-tasks // cpu.num_cores) + (FORK if tasks > 1 else 0.0)


def task_cycles(kernel: Conv2DKernel, knobs: TileConv2DKnobs, cpu: CPUInfo) -> TaskCycles:
    """Predict the clock cycles of the task with the most pixels and channels of an image."""
    geometry, layer = TileGeometry.of(kernel), kernel.layers[0]
    pixel_groups, channel_groups = geometry.groups(knobs)
    pixels = -(-pixel_groups // knobs.unit_chunks)
    channels = -(-channel_groups // knobs.block_chunks)
    groups, tiles = pixels * channels, knobs.pixel_tiles * knobs.channel_tiles
    products = groups * geometry.steps * tiles * max(knobs.rows, LEAST_ROWS) * SLOWDOWN
    row = geometry.depth * WORD_BYTES
    weights = geometry.steps * knobs.channel_tiles * row * TILE_WORDS
    read = pixels * knobs.pixel_tiles * knobs.rows * geometry.steps * row
    size = int(kernel.height or 1) * int(kernel.width or 1)
    data = size * layer.in_channels * ITEM_BYTES[kernel.dtype] / knobs.unit_chunks
    times = channels * geometry.loads(knobs)
    loads = groups * weights / load_rate(weights, cpu) + read * times / load_rate(data, cpu)
    finished = _FINISHED if packed_tiles(kernel, knobs) > 1 else _UNPACKED * _FINISHED
    endings = groups * tiles * knobs.rows * (STORED + finished)
    if knobs.interleaved:
        endings -= _HIDDEN * min(endings, products)
    borders = 2 * data / _COPIED if any(layer.padding) else 0.0
    loops = groups * (_GROUP + _STEP * geometry.steps / knobs.unrolled)
    busy = max(products, loads) + cpu.costs.leak * min(products, loads)
    crossings = read / row * times * geometry.crossing * _CROSSING
    busy += crossings + endings + borders + loops
    return TaskCycles(busy, weights * channels / _WEIGHTS, data / _DATA)


def load_rate(size: float, cpu: CPUInfo) -> float:
    """Bytes a cycle of tiles that so many bytes are read in turn from."""
    share, levels = cpu.costs.cache_share, ((cpu.l1d_bytes, _L1), (cpu.l2_bytes, _L2))
    return next((rate for capacity, rate in levels if size <= share * capacity), _L3)


def default_tile_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> TileConv2DKnobs:
    """Return the cheapest setting; the first of equals."""
    layer = replace(kernel.layers[0], activation=Activation())
    return _cheapest(replace(kernel, layers=(layer,), addition=None), cpu)


@lru_cache(maxsize=4096)
def _cheapest(kernel: Conv2DKernel, cpu: CPUInfo) -> TileConv2DKnobs:
    """The cheapest setting of a layer, whatever its end; unrolled and interleaved as all such."""
    settings = (TileConv2DKnobs(*tiles, UNROLLED[-1], True) for tiles in _tilings(kernel, cpu))
    return min(settings, key=lambda knobs: tile_cycles(kernel, knobs, cpu))
