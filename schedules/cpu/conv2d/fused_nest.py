# SPDX-License-Identifier: Apache-2.0
"""Loop nest of two fused packed convolutions: Algorithm 2 of the dissertation, chapter 3.

The nest (the four tunable loops in any order, layer one at any of five places)::

    parallel n, h_t, w_t[, oc_t]                 # loop 0
      for loop 1 in order                        # order: a permutation of
        for loop 2 in order                      #   oc2, ic_o, h_o, w_o
          [compute_at = 2: layer one's sub-tensor of the ranges open here, with its post-ops]
          for loop 3 in order
            for loop 4 in order
              micro-kernels of layer two; its post-ops when ic_o completes

Layer one's sub-tensor is always complete before layer two reads it, and stays in a buffer of the
parallel tile. The part of it that several tiles of layer two need (the halo of kernels larger than
1x1, or everything if ``oc2`` lies outside) is recomputed in each; so the output channels are
distributed over the cores (``oc_t``) only where there are too few rows.

Where the kernel's own data or output is NCHW (:func:`takes_plain`), each channel block of the
current rows is packed just before a depthwise layer one reads it, and each tile of output blocks is
unpacked just after layer two wrote it, both in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.statements import when
from schedules.workload.conv2d import ITEM_BYTES, Conv2DKernel

from ..core.kernel_builder import KernelBuilder
from ..core.micro_kernel import FeatureMap, Index, LayerOperands, ReducedBlocks, loop
from ..core.tiles import Run, Span, chunk, split_evenly, tile_of, tile_start
from ..cost.fused_conv2d_knobs import LOOPS, FusedConv2DKnobs, check_knobs, chunk_sizes, mid_extents
from .register_tile_nest import (
    BlockRuns,
    block_runs,
    compute_tile,
    flatten,
    for_each_block_tile,
    is_flat,
    pixel_nest,
    source_span,
    weight_lines,
    weight_turns,
)
from .register_transpose import BlockedPixels, Planes, move_pixels

# Elements between the planes of the intermediate, so that planes of 4 KiB do not share cache sets.
MID_SKEW = 16
# Bytes of a channel's current rows up to which the hardware does not prefetch the next channel's.
SHORT_STREAM = 1024


@dataclass(frozen=True)
class _OpenRanges:
    """Ranges of layer two that are open at a point of the nest.

    Parameters
    ----------
    rows : Span
        Output rows.
    row_counts : tuple[int, ...]
        The numbers of rows that ``rows`` may hold.
    tiles : Span | None
        Pixel tiles of a row; None for whole rows.
    block, blocks : Index, int
        The tile of output blocks, once ``oc2`` is open.
    reduction : ReducedBlocks
        Input blocks of layer two.
    """

    rows: Span
    row_counts: tuple[int, ...]
    tiles: Span | None
    reduction: ReducedBlocks
    block: Index = 0
    blocks: int = 0


class _TileNest:
    """The loops of one parallel tile."""

    def __init__(
        self,
        ops1: LayerOperands,
        ops2: LayerOperands,
        knobs: FusedConv2DKnobs,
        block_span: Span | None,
        plain_data: FeatureMap | None,
        plain_out: FeatureMap | None,
    ):
        self.ops1, self.ops2, self.knobs = ops1, ops2, knobs
        self.block_span = block_span
        self.plain_data, self.plain_out = plain_data, plain_out

    def build(self, tile: _OpenRanges, level: int = 0) -> None:
        """Open the loops from ``level`` on, and compute layer one where it belongs."""
        if level == self.knobs.compute_at:
            self._layer_one(tile)
        if level == len(LOOPS):
            self._layer_two(tile)
            return
        loops: dict[str, Callable[[_OpenRanges], Iterator[_OpenRanges]]] = {
            "oc2": self._loop_oc2,
            "ic_o": self._loop_ic,
            "h_o": self._loop_h,
            "w_o": self._loop_w,
        }
        for inner in loops[self.knobs.order[level]](tile):
            self.build(inner, level + 1)

    def _loop_oc2(self, tile: _OpenRanges) -> Iterator[_OpenRanges]:
        runs = block_runs(self.ops2, self.knobs.blocks2)
        for block, blocks in for_each_block_tile(runs, self.block_span):
            yield replace(tile, block=block, blocks=blocks)

    def _loop_ic(self, tile: _OpenRanges) -> Iterator[_OpenRanges]:
        parts = self.knobs.ic_o
        if parts == 1:
            yield tile
            return
        count = self.ops2.in_blocks // parts
        with loop(0, parts) as part:
            yield replace(
                tile, reduction=ReducedBlocks(part * count, count, part == 0, part == parts - 1)
            )

    def _loop_h(self, tile: _OpenRanges) -> Iterator[_OpenRanges]:
        step, (start, stop) = self.knobs.h, tile.rows
        if step >= max(tile.row_counts):
            yield tile
            return
        counts = {min(step, count) for count in tile.row_counts}
        counts |= {count % step for count in tile.row_counts} - {0}
        count = stop - start
        trips = -(-count // step) if isinstance(count, int) else tirx.ceildiv(count, step)
        with loop(0, trips) as index:
            first = start + index * step
            rows = (first, tirx.min(stop, first + step))
            yield replace(tile, rows=rows, row_counts=tuple(sorted(counts)))

    def _loop_w(self, tile: _OpenRanges) -> Iterator[_OpenRanges]:
        pieces = self.knobs.w_o
        if pieces == 1:
            yield tile
            return
        start, stop = tile.tiles or (0, self._row_tiles())
        with loop(0, pieces) as piece:
            low, high = chunk(stop - start, piece, pieces)
            yield replace(tile, tiles=(start + low, start + high))

    def _row_tiles(self) -> int:
        return len(split_evenly(self.ops2.output.width, self.knobs.pixels2))

    def _layer_one(self, tile: _OpenRanges) -> None:
        """Compute the sub-tensor of layer one that the open ranges of layer two read."""
        ops, layer2, knobs = self.ops1, self.ops2.layer, self.knobs
        rows = source_span(tile.rows, layer2, ops.output.height, axis=0)
        part = tile.reduction
        output = replace(ops.output, first_row=rows[0], first_block=part.start)
        ops = replace(ops, output=output)
        tiles = None
        if tile.tiles is not None:
            width, row2 = output.width, self.ops2.output.width
            columns = (
                tile_start(row2, knobs.pixels2, tile.tiles[0]),
                tile_start(row2, knobs.pixels2, tile.tiles[1]),
            )
            first, last = source_span(columns, layer2, width, axis=1)
            tiles = (
                tile_of(width, knobs.pixels1, first),
                tile_of(width, knobs.pixels1, last - 1) + 1,
            )
        if self.plain_data is not None:
            self._plain_layer_one(ops, rows, part, tiles)
        else:
            turns = weight_turns(ops, knobs.pixels1) if knobs.prefetch else 0
            for block, blocks in for_each_block_tile(self._runs_one(part.count), None):
                self._pixels_one(ops, rows, tiles, part.start + block, blocks, turns)
        self.ops2 = replace(self.ops2, source=output)

    def _pixels_one(
        self,
        ops: LayerOperands,
        rows: Span,
        tiles: Span | None,
        block: Index,
        blocks: int,
        turns: int = 0,
    ) -> None:
        lines = weight_lines(ops, blocks, self.knobs.h * turns)

        def body(row: Index, run: Run, column: Index) -> None:
            compute_tile(ops, block, blocks, row, run, column, turns=turns, lines=lines)

        pixel_nest(ops, rows, self.knobs.pixels1, body, tiles)

    def _plain_layer_one(
        self, ops: LayerOperands, rows: Span, part: ReducedBlocks, tiles: Span | None
    ) -> None:
        """Depthwise layer one of NCHW data: pack the rows of a block, then convolve them."""
        plain, packed = self.plain_data, ops.source
        assert plain is not None
        first, last = source_span(rows, ops.layer, plain.height, axis=0)
        lanes, width = ops.lanes, plain.width
        stream = packed.block_stride // lanes * ITEM_BYTES[ops.dtype]
        ahead = lanes * plain.block_stride if stream <= SHORT_STREAM else 0

        def one_block(block: Index, channels: int) -> None:
            start = plain.at(block * lanes, first, 0)
            planes = Planes(plain.buffer, start, plain.block_stride)
            block_lanes = BlockedPixels(packed.buffer, packed.offset, is_local=True)
            move_pixels(planes, block_lanes, (last - first) * width, lanes, channels, ahead)
            source = replace(packed, first_row=first, first_block=block)
            self._pixels_one(replace(ops, source=source), rows, tiles, block, 1)

        rest = ops.layer.in_channels % lanes
        full = part.count - (rest > 0)
        if full:
            with loop(0, full) as block:
                one_block(part.start + block, lanes)
        if rest:
            one_block(full, rest)

    def _runs_one(self, count: int) -> BlockRuns:
        """Tiles of ``count`` blocks of layer one; a grouped layer's must not cross groups."""
        layer = self.ops1.layer
        tile = 1 if layer.groups > 1 else self.knobs.blocks1
        ungrouped = replace(self.ops1, out_blocks=count, layer=replace(layer, groups=1))
        return block_runs(ungrouped, tile)

    def _layer_two(self, tile: _OpenRanges) -> None:
        """Call the micro-kernels of layer two; whole rows of a pointwise layer are flat."""
        if not is_flat(self.ops2) or tile.tiles is not None:
            self._pixels(self.ops2, tile.rows, tile, tile.tiles)
            return
        start, stop = tile.rows
        for count in tile.row_counts:
            if count == 0:
                continue
            with when(None if len(tile.row_counts) == 1 else stop - start == count):
                if self.plain_out is None:
                    self._pixels(flatten(self.ops2, start, count), (0, 1), tile, None)
                else:
                    self._plain_layer_two(tile, count)

    def _plain_layer_two(self, tile: _OpenRanges, rows: int) -> None:
        """Layer two into a buffer of the tile, then from there to NCHW."""
        plain, packed = self.plain_out, self.ops2.output
        assert plain is not None
        ops = flatten(self.ops2, tile.rows[0], rows)
        # The buffer begins with the tile's first row, so no row may stand in its offsets.
        output = replace(ops.output, offset=packed.offset, first_block=tile.block)
        self._pixels(replace(ops, output=output), (0, 1), tile, None)
        lanes, rest, pixels = ops.lanes, ops.layer.out_channels % ops.lanes, rows * plain.width

        def unpack(v: Index, channels: int) -> None:
            start = plain.at((tile.block + v) * lanes, tile.rows[0], 0)
            planes = Planes(plain.buffer, start, plain.block_stride)
            block_lanes = BlockedPixels(packed.buffer, v * packed.block_stride, is_local=True)
            move_pixels(block_lanes, planes, pixels, lanes, channels)

        has_rest = tirx.convert(tile.block) == ops.out_blocks - tile.blocks
        full = tirx.Select(has_rest, tile.blocks - 1, tile.blocks) if rest else tile.blocks
        with loop(0, full) as v:
            unpack(v, lanes)
        if rest:
            with when(has_rest):
                unpack(tile.blocks - 1, rest)

    def _pixels(
        self, ops: LayerOperands, rows: Span, tile: _OpenRanges, tiles: Span | None
    ) -> None:
        turns = weight_turns(ops, self.knobs.pixels2) if self.knobs.prefetch else 0
        passes = turns if is_flat(ops) else turns * min(tile.row_counts)
        lines = weight_lines(ops, tile.blocks, passes)

        def body(row: Index, run: Run, column: Index) -> None:
            where = row, run, column
            compute_tile(ops, tile.block, tile.blocks, *where, tile.reduction, turns, lines)

        pixel_nest(ops, rows, self.knobs.pixels2, body, tiles)


def fused_conv2d_template(
    func: tirx.PrimFunc, kernel: Conv2DKernel, knobs: FusedConv2DKnobs
) -> s_tir.Schedule:
    """Write the loop nest of the module's docstring."""
    check_knobs(kernel, knobs)
    builder = KernelBuilder(func)
    pieces = knobs.h_t * knobs.w_t * knobs.oc_t
    with builder.body():
        with T.parallel(0, builder.batch * pieces) as index:
            image = tirx.floordiv(index, pieces)
            with T.sblock("parallel_tile"):
                T.reads()
                T.writes()
                ops1, ops2 = _operands(builder, kernel, knobs, image)
                piece = tirx.floormod(index, pieces)
                height = ops2.output.height
                tiles2 = len(split_evenly(ops2.output.width, knobs.pixels2))
                runs2 = block_runs(ops2, knobs.blocks2)
                nest = _TileNest(
                    ops1,
                    ops2,
                    knobs,
                    _share(
                        runs2.groups * runs2.tiles,
                        tirx.floormod(piece, knobs.oc_t),
                        knobs.oc_t,
                    ),
                    builder.feature_map(0, image) if kernel.plain_data else None,
                    builder.feature_map(-1, image) if kernel.plain_out else None,
                )
                piece = tirx.floordiv(piece, knobs.oc_t)
                whole = ReducedBlocks(0, ops2.in_blocks)
                nest.build(
                    _OpenRanges(
                        rows=chunk(height, tirx.floordiv(piece, knobs.w_t), knobs.h_t),
                        row_counts=chunk_sizes(height, knobs.h_t),
                        tiles=_share(tiles2, tirx.floormod(piece, knobs.w_t), knobs.w_t),
                        reduction=whole,
                    )
                )
    return builder.schedule()


def _share(extent: int, index: Index, pieces: int) -> Span | None:
    return None if pieces == 1 else chunk(extent, index, pieces)


def _operands(
    builder: KernelBuilder, kernel: Conv2DKernel, knobs: FusedConv2DKnobs, image: Index
) -> tuple[LayerOperands, LayerOperands]:
    """Operands of both layers, with the intermediate in a buffer of the parallel tile."""
    _, weight1, _, weight2 = builder.buffers[:4]
    layer1, layer2 = kernel.layers
    source, output = builder.feature_map(0, image), builder.feature_map(-1, image)
    mid_h, mid_w = layer1.output_size(source.height, source.width)
    out_rows, rows, blocks = mid_extents(kernel, knobs, mid_h, output.height, int(weight2.shape[1]))
    lanes = kernel.lanes
    mid = _tile_buffer(kernel, blocks, rows, mid_h, mid_w)
    if kernel.plain_data:
        reach = (layer1.kernel[0] - 1) * layer1.dilation[0] + 1
        data_rows = min(source.height, (rows - 1) * layer1.strides[0] + reach)
        source = _tile_buffer(kernel, 1, data_rows, source.height, source.width)
    if kernel.plain_out:
        output = _tile_buffer(kernel, knobs.blocks2, out_rows, output.height, output.width)
    ops1 = LayerOperands(
        layer=layer1,
        source=source,
        output=mid,
        weight=builder.flat[1],
        bias=builder.flat[2],
        residual=None,
        lanes=lanes,
        in_blocks=1 if layer1.is_depthwise else int(weight1.shape[1]),
        out_blocks=int(weight1.shape[0]),
        dtype=kernel.dtype,
    )
    ops2 = LayerOperands(
        layer=layer2,
        source=mid,
        output=output,
        weight=builder.flat[3],
        bias=builder.flat[4],
        residual=builder.feature_map(-2, image) if kernel.residual else None,
        lanes=lanes,
        in_blocks=int(weight2.shape[1]),
        out_blocks=int(weight2.shape[0]),
        dtype=kernel.dtype,
    )
    return ops1, ops2


def _tile_buffer(
    kernel: Conv2DKernel, blocks: int, rows: int, height: int, width: int
) -> FeatureMap:
    """A buffer of the parallel tile for some blocks and whole rows of a packed image."""
    row_stride = width * kernel.lanes
    block_stride = rows * row_stride + MID_SKEW
    return FeatureMap(
        buffer=T.sblock_alloc_buffer((blocks * block_stride,), kernel.dtype),
        offset=0,
        block_stride=block_stride,
        row_stride=row_stride,
        lanes=kernel.lanes,
        height=height,
        width=width,
        is_local=True,
    )
