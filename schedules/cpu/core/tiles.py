# SPDX-License-Identifier: Apache-2.0
"""Partition of a row of pixels and of a list of channel blocks into register tiles.

A register tile is ``P`` pixels x ``V`` vectors of output channels. Tile sizes are compile-time
constants, so a row is described by *runs*: consecutive tiles of one size that see the same taps of
the kernel. Tiles at the border of a padded row see fewer taps; nothing is ever padded or copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from tvm import tirx

from schedules.workload.conv2d import ConvLayer

Index: TypeAlias = "tirx.Expr | int"
Span: TypeAlias = tuple[Index, Index]


@dataclass(frozen=True)
class Run:
    """Tiles ``first .. first + count`` of a row, equal in size and taps.

    Parameters
    ----------
    first, count : int
        Index of the first tile in the row and number of tiles.
    start, size : int
        First pixel of the first tile, and pixels per tile.
    taps : tuple[tuple[int, int], ...]
        Half-open range, for each kernel column, of the tile's pixels whose input pixel exists;
        ``(0, size)`` everywhere inside the row, smaller at its padded borders.
    """

    first: int
    count: int
    start: int
    size: int
    taps: tuple[tuple[int, int], ...]


def split_evenly(extent: int, tile: int) -> list[int]:
    """Sizes of the fewest tiles of at most ``tile`` that cover ``extent``, as equal as possible.

    Small tail tiles waste registers and loads: 17 pixels in tiles of 14 become 9 + 8.
    """
    count = -(-extent // tile)
    small, larger = divmod(extent, count)
    return [small + 1] * larger + [small] * (count - larger)


@lru_cache(maxsize=4096)
def tile_counts(extent: int, tile: int, first: int | None = None) -> tuple[tuple[int, int], ...]:
    """Sizes of the ``first`` tiles of :func:`split_evenly`, and the number of tiles of each."""
    count = -(-extent // tile)
    small, larger = divmod(extent, count)
    taken = count if first is None else first
    sizes = (small + 1, min(larger, taken)), (small, max(0, taken - larger))
    return tuple((size, number) for size, number in sizes if number)


@lru_cache(maxsize=4096)
def block_tiles(layer: ConvLayer, lanes: int, blocks: int, tile: int) -> tuple[int, ...]:
    """Output blocks of the tiles that cover ``blocks`` of a layer; none crosses a group."""
    if not layer.fills_blocks(lanes):
        return (1,) * blocks
    return tuple(split_evenly(blocks // layer.groups, tile) * layer.groups)


def chunk(extent: int, index: Index, chunks: int) -> Span:
    """Part ``index`` of ``chunks`` equal parts of a range."""
    if chunks == 1:
        return 0, extent
    return tirx.floordiv(index * extent, chunks), tirx.floordiv((index + 1) * extent, chunks)


def tile_start(extent: int, tile: int, index: Index) -> Index:
    """First element of tile ``index`` of :func:`split_evenly`."""
    sizes = split_evenly(extent, tile)
    larger = sizes.count(sizes[0]) if sizes[0] != sizes[-1] else 0
    return index * sizes[-1] + (tirx.min(index, larger) if larger else 0)


def tile_of(extent: int, tile: int, element: Index) -> Index:
    """Index of the tile of :func:`split_evenly` that holds ``element``."""
    sizes = split_evenly(extent, tile)
    if sizes[0] == sizes[-1]:
        return tirx.floordiv(element, sizes[0])
    larger = sizes.count(sizes[0])
    split = larger * sizes[0]
    return tirx.if_then_else(
        element < split,
        tirx.floordiv(element, sizes[0]),
        larger + tirx.floordiv(element - split, sizes[-1]),
    )


def row_runs(layer: ConvLayer, in_width: int, out_width: int, tile: int) -> list[Run]:
    """Cut one output row into runs of register tiles.

    Parameters
    ----------
    layer : ConvLayer
        Kernel width, stride, dilation and left padding are used.
    in_width, out_width : int
        Pixels of an input and of an output row.
    tile : int
        Largest number of pixels in a tile.
    """
    runs: list[Run] = []
    start = 0
    for index, size in enumerate(split_evenly(out_width, tile)):
        taps = tuple(_visible(layer, in_width, start, size, kw) for kw in range(layer.kernel[1]))
        last = runs[-1] if runs else None
        if last is not None and (last.size, last.taps) == (size, taps):
            runs[-1] = Run(last.first, last.count + 1, last.start, size, taps)
        else:
            runs.append(Run(index, 1, start, size, taps))
        start += size
    return runs


def _visible(layer: ConvLayer, in_width: int, start: int, size: int, kw: int) -> tuple[int, int]:
    """Pixels of a tile whose input column for kernel column ``kw`` lies inside the row."""
    stride = layer.strides[1]
    column = start * stride + kw * layer.dilation[1] - layer.padding[1]
    first = max(0, -(column // stride)) if column < 0 else 0
    behind = (in_width - 1 - column) // stride + 1
    return min(first, size), max(min(first, size), min(size, behind))
