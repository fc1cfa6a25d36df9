# SPDX-License-Identifier: Apache-2.0
"""Loop nests over register tiles, shared by the rules for single and fused convolutions.

A layer's output region is rows x tiles of a row x channel blocks. A pointwise layer on whole rows
is *flat*: its rows are one long row, so that 7 x 7 pixels are cut as 49 and not as 7.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from tvm import tirx

from schedules.workload.conv2d import ConvLayer

from ..core.micro_kernel import (
    FeatureMap,
    Index,
    LayerOperands,
    ReducedBlocks,
    RegisterTile,
    cancelled,
    dense_tile,
    loop,
    own_block_tile,
)
from ..core.prefetch import line_elements, lines_a_step
from ..core.tiles import Run, Span, block_tiles, row_runs, split_evenly


def is_flat(ops: LayerOperands) -> bool:
    """Return whether rows of input and output are adjacent in memory and see one tap only."""
    whole = all(
        image.row_stride == image.width * image.step
        for image in (ops.source, ops.output, ops.residual)
        if image is not None
    )
    return ops.layer.is_pointwise and whole


def flatten(ops: LayerOperands, row: Index, rows: int) -> LayerOperands:
    """The same layer on one long row that holds ``rows`` rows, beginning with ``row``."""

    def flat(image: FeatureMap) -> FeatureMap:
        start = image.offset + cancelled(row - image.first_row) * image.row_stride
        pixels = rows * image.width
        return replace(
            image,
            offset=start,
            row_stride=pixels * image.step,
            height=1,
            width=pixels,
            first_row=0,
        )

    residual = None if ops.residual is None else flat(ops.residual)
    return replace(ops, source=flat(ops.source), output=flat(ops.output), residual=residual)


class BlockRuns(NamedTuple):
    """Register tiles of the output blocks, in order.

    Parameters
    ----------
    groups : int
        Number of groups with the same tiles, which are a loop, so that their code stands there
        once; 1 where all tiles of the layer are equal.
    blocks : int
        Blocks of a group.
    runs : list of (int, int, int)
        Tiles of a group: first block, number of tiles, and blocks of a tile.
    """

    groups: int
    blocks: int
    runs: list[tuple[int, int, int]]

    @property
    def tiles(self) -> int:
        """Number of tiles in a group."""
        return sum(count for _, count, _ in self.runs)


def block_runs(ops: LayerOperands, tile: int) -> BlockRuns:
    """Cut the output blocks into register tiles of at most ``tile``."""
    sizes = block_tiles(ops.layer, ops.lanes, ops.out_blocks, tile)
    groups = ops.layer.groups if len(set(sizes)) > 1 else 1
    runs, start = list[tuple[int, int, int]](), 0
    for size, equal in itertools.groupby(sizes[: len(sizes) // groups]):
        count = len(list(equal))
        runs.append((start, count, size))
        start += count * size
    return BlockRuns(groups, start, runs)


def for_each_block_tile(runs: BlockRuns, span: Span | None) -> Iterator[tuple[Index, int]]:
    """Open loops over the tiles of output blocks; yields (first block, ``V``).

    ``span`` limits it to tiles ``[start, stop)``, counted over all groups.
    """
    groups: Span = (0, runs.groups)
    if span is not None and runs.groups > 1:
        start, stop = map(tirx.convert, span)
        groups = tirx.floordiv(start, runs.tiles), tirx.ceildiv(stop, runs.tiles)
    with loop(*groups) as group:
        before = group * runs.tiles
        for first, count, size in runs.runs:
            bounds = _clip(before, count, span)
            if bounds is not None:
                with loop(*bounds) as tile:
                    yield group * runs.blocks + first + (tile - before) * size, size
            before += count


def for_each_pixel_tile(runs: list[Run], span: Span | None) -> Iterator[tuple[Run, Index]]:
    """Open a loop over the tiles of a row; yields (run, first pixel)."""
    for run in runs:
        bounds = _clip(run.first, run.count, span)
        if bounds is not None:
            with loop(*bounds) as tile:
                yield run, run.start + (tile - run.first) * run.size


def _clip(first: Index, count: int, span: Span | None) -> Span | None:
    """The tiles ``[first, first + count)`` that lie in ``span``; None where it is known empty."""
    if span is None:
        return first, first + count
    start, stop = span
    if isinstance(first, int) and isinstance(start, int) and isinstance(stop, int):
        start, stop = max(first, start), min(first + count, stop)
        return (start, stop) if start < stop else None
    return tirx.max(first, start), tirx.min(first + count, stop)


def source_span(span: Span, layer: ConvLayer, extent: int, axis: int) -> Span:
    """Rows (axis 0) or columns (axis 1) of the input that ``layer`` reads for an output range."""
    stride, before = layer.strides[axis], layer.padding[axis]
    reach = (layer.kernel[axis] - 1) * layer.dilation[axis] + 1
    start, stop = span
    low, high = start * stride - before, (stop - 1) * stride + reach - before
    if before:
        low = tirx.max(0, low)
    return low, tirx.min(extent, high)


def compute_tile(
    ops: LayerOperands,
    block: Index,
    blocks: int,
    row: Index,
    run: Run,
    column: Index,
    reduction: ReducedBlocks | None = None,
    turns: int = 0,
    lines: int = 1,
    following: Index | None = None,
) -> None:
    """Call the micro-kernel of the layer's kind."""
    if ops.group_lanes:
        own_block_tile(ops, block, row, run, column)
    else:
        summed = reduction or ReducedBlocks(0, ops.in_blocks)
        tile = RegisterTile(block, blocks, row, run, column, summed, following)
        dense_tile(ops, tile, turns, lines)


def weight_turns(ops: LayerOperands, pixels: int) -> int:
    """Tiles of a row that can prefetch the next weights in turns; 0 if none can."""
    packed = ops.group_lanes == 0 and ops.source.lanes > 1
    return len(split_evenly(ops.output.width, pixels)) if packed else 0


def weight_lines(ops: LayerOperands, blocks: int, tiles: int) -> int:
    """Cache lines that a step of a tile prefetches, so that ``tiles`` tiles prefetch all."""
    return lines_a_step(
        blocks * ops.step * ops.lanes // line_elements(str(ops.weight.dtype)), tiles
    )


def pixel_nest(
    ops: LayerOperands,
    rows: Span,
    tile: int,
    body: Callable[[Index, Run, Index], None],
    tiles: Span | None = None,
) -> None:
    """Loop over rows and over the tiles of each row.

    Parameters
    ----------
    ops : LayerOperands
        The layer.
    rows : Span
        Output rows ``[start, stop)``.
    tile : int
        Pixels of a register tile.
    body : Callable
        Gets the row, the run and the column of each tile.
    tiles : Span | None
        Range of the tiles of a row; all if None.
    """
    runs = row_runs(ops.layer, ops.source.width, ops.output.width, tile)
    with loop(*rows) as row:
        for run, column in for_each_pixel_tile(runs, tiles):
            body(row, run, column)
