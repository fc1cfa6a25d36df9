# SPDX-License-Identifier: Apache-2.0
"""Knobs of the template of a single convolution, and their search space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from schedules.workload.conv2d import ITEM_BYTES, WORD_BYTES, WORDS, Conv2DKernel

from ..core.machine import CPUInfo
from ..core.tiles import tile_counts
from .register_tile import register_tiles

# With a smaller part of the weights, the start of the loop dominates.
LEAST_PART_BYTES = 4096
# A tile of pairs of pixels is considered if at most one pixel in so many is without another.
FEW_SINGLE = 10
# Registers for products of pairs on their way to the sums.
PAIR_REGISTERS = 2


@dataclass(frozen=True)
class Conv2DKnobs:
    """Knobs of the template.

    Parameters
    ----------
    pixels, blocks : int
        The register tile: pixels x channel blocks.
    unit_chunks, block_chunks : int
        Parallel pieces of the units and of the block tiles.
    unit_group : int
        Units whose input stays in L2 while all block tiles are computed.
    blocks_inside : bool
        Whether the loop over block tiles runs inside the pixel loops.
    ic_o : int
        Parts of the reduction, a divisor of the input blocks: the weights of one part and block
        tile stay in L1 while all pixels are computed. 1 where ``blocks_inside``.
    prefetch : bool
        Whether the micro-kernel prefetches the next weights. Of no use to depthwise layers and NCHW
        data.
    """

    pixels: int
    blocks: int
    unit_chunks: int
    block_chunks: int
    unit_group: int
    blocks_inside: bool
    ic_o: int = 1
    prefetch: bool = False


def conv2d_space(kernel: Conv2DKernel, cpu: CPUInfo) -> Iterator[Conv2DKnobs]:
    """All settings that the cost model compares, each of them legal.

    Weights are always prefetched where that is possible.
    """
    for tile in _tiles(kernel, cpu):
        yield from _settings(kernel, tile, cpu)


def in_conv2d_space(kernel: Conv2DKernel, knobs: Conv2DKnobs, cpu: CPUInfo) -> bool:
    """Return whether :func:`conv2d_space` yields a setting, without those of other tiles."""
    tile = knobs.pixels, knobs.blocks
    return tile in _tiles(kernel, cpu) and knobs in _settings(kernel, tile, cpu)


def _tiles(kernel: Conv2DKernel, cpu: CPUInfo) -> list[tuple[int, int]]:
    """Register tiles."""
    spare = 1 if kernel.weight_dtype else 0  # widened, weights are loaded ahead
    if kernel.out_dtype is not None:
        loads_ahead = kernel.word >= WORD_BYTES or cpu.half_dots == "bfdot"
        spare = cpu.num_vector_registers // 4 if loads_ahead else PAIR_REGISTERS
    row = _row(kernel)
    tiles = register_tiles(kernel.layers[0], row, kernel.lanes, cpu, spare)
    if not kernel.has_mmla:
        return tiles
    # The last pixel of an odd tile is multiplied with zeros in the place of another.
    single = [sum(size % 2 * count for size, count in tile_counts(row, p)) for p, _ in tiles]
    most = max(min(single), -(-row // FEW_SINGLE))
    return [tile for tile, count in zip(tiles, single, strict=True) if count <= most]


def _row(kernel: Conv2DKernel) -> int:
    """Pixels that tiles divide: of a row, or of the image where rows do not matter."""
    out_h, out_w = _out_size(kernel)
    return out_h * out_w if _is_flat(kernel) else out_w


def _out_size(kernel: Conv2DKernel) -> tuple[int, int]:
    return kernel.layers[0].output_size(int(kernel.height or 1), int(kernel.width or 1))


def _is_flat(kernel: Conv2DKernel) -> bool:
    return kernel.layers[0].is_pointwise and kernel.data_layout != "NCHW"


def _settings(kernel: Conv2DKernel, tile: tuple[int, int], cpu: CPUInfo) -> Iterator[Conv2DKnobs]:
    """The settings with a register tile of pixels x blocks."""
    layer, (pixels, blocks) = kernel.layers[0], tile
    plain = kernel.data_layout == "NCHW"
    units = -(-_row(kernel) // pixels) if _is_flat(kernel) else _out_size(kernel)[0]
    out_blocks = -(-layer.out_channels // kernel.lanes)
    # An output of another type has no room for partial sums.
    whole = plain or kernel.out_dtype is not None
    cuts = (1,) if whole else _reduction_parts(kernel, blocks)
    # LLVM 22 unrolls the columns of tiles of NCHW data whose blocks are cut, and spills.
    most = units, 1 if plain else -(-out_blocks // blocks)
    for unit_chunks, block_chunks in shares(kernel.batch or 1, cpu.num_cores, most):
        for group in _unit_groups(kernel, -(-units // unit_chunks), units, cpu):
            share = pixels, blocks, unit_chunks, block_chunks, group
            if layer.group_lanes(kernel.lanes):
                yield Conv2DKnobs(*share, blocks_inside=False)
                continue
            yield Conv2DKnobs(*share, blocks_inside=True)
            for parts in cuts:
                yield Conv2DKnobs(*share, blocks_inside=False, ic_o=parts, prefetch=not plain)


def shares(batch: int, cores: int, most: tuple[int, int]) -> list[tuple[int, int]]:
    """Parallel pieces of the pixels and of the channels of an image, at most so many of each.

    One piece, or as many as cores compute in one round, in two, or in one for each image. Some
    cores are idle where a layer has fewer pieces, and where these do not divide evenly.
    """
    if batch % cores == 0:
        return [(1, 1)]
    pairs = set[tuple[int, int]]()
    for rounds in {1, min(2, batch), batch}:
        pieces, largest = rounds * cores // batch, dict[int, int]()
        for pixels in range(1, min(pieces, most[0]) + 1):
            largest[min(pieces // pixels, most[1])] = pixels
        pairs |= {(pixels, channels) for channels, pixels in largest.items()}
    return [(1, 1), *sorted(pairs - {(1, 1)})]


def _unit_groups(kernel: Conv2DKernel, longest: int, units: int, cpu: CPUInfo) -> list[int]:
    """Sizes of a group: all units, or what a part of a cache holds."""
    layer = kernel.layers[0]
    if layer.group_lanes(kernel.lanes):
        return [longest]
    pixels = int(kernel.height or 1) * int(kernel.width or 1)
    used = min(1.0, layer.kernel[0] / layer.strides[0])
    unit_bytes = used * pixels * layer.in_channels * ITEM_BYTES[kernel.dtype] / units
    budgets = cpu.l1d_bytes / 2, cpu.l2_bytes / 4, cpu.l2_bytes / 2
    sizes = {max(1, min(longest, int(budget // unit_bytes))) for budget in budgets}
    return sorted(sizes | {longest}, reverse=True)


def _reduction_parts(kernel: Conv2DKernel, blocks: int) -> tuple[int, ...]:
    layer = kernel.layers[0]
    step = layer.input_step(kernel.lanes)
    in_blocks = -(-(layer.in_channels // layer.groups) // step)
    block_bytes = prod(layer.kernel) * blocks * step * kernel.lanes * ITEM_BYTES[kernel.dtype]
    return tuple(
        parts
        for parts in range(1, in_blocks + 1)
        if in_blocks % parts == 0
        and (parts == 1 or in_blocks // parts * block_bytes >= LEAST_PART_BYTES)
    )


def multiplies_words(kernel: Conv2DKernel, cpu: CPUInfo) -> bool:
    """Return whether an instruction multiplies the kernel's pairs of bfloat16, and faster."""
    in_pairs = kernel.has_words and not kernel.is_quantized
    return in_pairs and cpu.multiplies_pairs and kernel.lanes == cpu.lanes("float32")


def suits_mmla(kernel: Conv2DKernel, cpu: CPUInfo) -> bool:
    """Return whether AArch64 multiplies two pixels by two output channels of a layer at once.

    Not where there is one pixel, or no more than a word of channels, as in the first layer.
    """
    layer = kernel.layers[0]
    if kernel.dtype not in cpu.mmla or layer.groups > 1 or kernel.rounding is not None:
        return False
    if kernel.height is None or kernel.width is None:
        return False
    height, width = _out_size(kernel)
    pixels = height * width if layer.is_pointwise else width
    if kernel.height == kernel.width == 1 and layer.is_pointwise:
        pixels = kernel.batch or 1
    return pixels > 1 and layer.in_channels > WORDS[kernel.dtype]


def in_vectors(kernel: Conv2DKernel, cpu: CPUInfo) -> Conv2DKernel:
    """The convolution as the nest computes it: that of words, or in blocks of single vectors.

    Pairs of bfloat16 that no instruction multiplies become floats: data in a copy, weights in each
    step of a tile.
    """
    (layer,), lanes = kernel.layers, cpu.lanes(kernel.sums or kernel.dtype)
    if kernel.has_words and not kernel.is_quantized and not multiplies_words(kernel, cpu):
        return replace(kernel.in_words(), layers=kernel.layers, weight_dtype=kernel.dtype)
    width = 0 if kernel.has_words or kernel.lanes == 1 else layer.group_lanes(kernel.lanes)
    if not width or kernel.lanes % lanes or layer.group_lanes(lanes) != width:
        return kernel.in_words()
    layout = f"NCHW{lanes}c"
    return replace(kernel, data_layout=layout, out_layout=layout)
