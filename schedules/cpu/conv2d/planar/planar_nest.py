# SPDX-License-Identifier: Apache-2.0
"""Loop nest of a depthwise and a pointwise layer from NCHW data to an NCHW output.

Both layers compute on planes (:mod:`.planar_tile`), so that nothing is packed or unpacked, and the
rows of layer one stay as planes in a buffer of the parallel piece::

    parallel n, h_t
      for step of h output rows
        for channel
          for tile of R rows, for vector of a row
            depthwise tile
        for tile of vectors of the step's pixels
          for tile of output channels
            pointwise tile

The last step of a piece ends with the piece's last row, and may overlap the one before. The number
of pixels in a vector of either layer is independent of the channels of a block of the weights:
layer one's vectors must fit the rows, layer two's run over all pixels of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T

from schedules.errors import OpError
from schedules.tir.statements import when
from schedules.workload.conv2d import Conv2DKernel, ConvLayer

from ...core.kernel_builder import KernelBuilder
from ...core.micro_kernel import UNROLLED_STEPS, Index, loop
from ...core.prefetch import line_elements
from ...core.tiles import Span, chunk, split_evenly
from .planar_tile import (
    Ahead,
    DepthwiseRows,
    PlanarImage,
    PointwiseOperands,
    column_groups,
    depthwise_vector,
    pointwise_tile,
    reads_whole_vectors,
    vector_starts,
)

# Elements between the planes of the intermediate, so that planes of 4 KiB do not share cache sets.
PLANE_SKEW = 16


@dataclass(frozen=True)
class PlanarKnobs:
    """Knobs of the planar nest.

    Parameters
    ----------
    h_t : int
        Parallel pieces of the output's rows.
    h : int
        Rows of a step; no more than the smallest piece has.
    rows : int
        Most rows of a depthwise tile.
    outputs, vectors : int
        Register tile of layer two: channels x vectors of pixels.
    lanes1, lanes2 : int | None
        Pixels of a vector of either layer; None for the channels of a block of the weights.
    ahead : bool
        Whether layer two prefetches the rows that layer one will read in the next step.
    """

    h_t: int
    h: int
    rows: int = 4
    outputs: int = 4
    vectors: int = 3
    lanes1: int | None = None
    lanes2: int | None = None
    ahead: bool = False


def takes_planar(kernel: Conv2DKernel, lanes: int | None = None) -> bool:
    """Return whether the nest takes a kernel with ``lanes`` pixels in a vector of layer one.

    Rows hold at least a vector, steps are of one column, or of two for neighbouring kernel columns,
    and only the first and the last row of the output read padding. None stands for the channels of
    a block of the weights.
    """
    lanes = lanes or kernel.lanes
    if len(kernel.layers) != 2 or not (kernel.plain_data and kernel.plain_out) or kernel.residual:
        return False
    layer1, layer2 = kernel.layers
    if None in (kernel.height, kernel.width) or not (layer1.is_depthwise and layer2.is_pointwise):
        return False
    if lanes < 4 or lanes & (lanes - 1) or layer1.strides[1] > 2:
        return False
    height, width = int(kernel.height or 1), int(kernel.width or 1)
    out_h, out_w = layer1.output_size(height, width)
    if out_w < lanes or width < layer1.strides[1] * lanes:
        return False
    if layer1.strides[1] == 2 and (layer1.kernel[1] < 2 or layer1.dilation[1] > 1):
        return False
    stride, top = layer1.strides[0], layer1.padding[0]
    reach = (layer1.kernel[0] - 1) * layer1.dilation[0]
    return top <= stride and (out_h - 2) * stride - top + reach < height


def visible_rows(
    layer: ConvLayer, height: int, out_height: int, step: int, first: int, size: int
) -> dict[str, tuple[int, int]]:
    """Existing input rows of a tile in steps at the top, at the bottom, and between or everywhere.

    The tile holds the rows ``[first, first + size)`` of a step. Steps in which it reads no padding
    are no case of their own.
    """
    stride, top = layer.strides[0], layer.padding[0]
    reach = (layer.kernel[0] - 1) * layer.dilation[0] + 1
    below = (out_height - 1) * stride - top + reach - height
    rows = (size - 1) * stride + reach
    above = top if first == 0 else 0
    below = max(0, below) if first + size == step else 0
    if step == out_height:
        return {"everywhere": (above, rows - below)}
    cases = {"top": (above, rows)} if above else {}
    if below:
        cases["bottom"] = 0, rows - below
    return {**cases, "between": (0, rows)}


def vector_runs(
    layer: ConvLayer, width: int, out_width: int, lanes: int
) -> list[tuple[bool, list[int]]]:
    """First pixels of the vectors of a row, neighbours that read no padding together.

    With each run, whether its vectors read no padding.
    """
    runs: list[tuple[bool, list[int]]] = []
    for index, start in enumerate(vector_starts(out_width, lanes)):
        inside = reads_whole_vectors(layer, width, start, lanes)
        if runs and runs[-1][0] and inside and start == index * lanes:
            runs[-1][1].append(start)
        else:
            runs.append((inside, [start]))
    return runs


def tile_runs(pixels: int, lanes: int, vectors: int) -> list[list[list[int]]]:
    """First pixels of the vectors of layer two, by tiles; those that differ in place together."""
    starts, runs, done = vector_starts(pixels, lanes), list[list[list[int]]](), 0
    for size in split_evenly(len(starts), vectors):
        tile = starts[done : done + size]
        whole = tile[-1] % lanes == 0
        if runs and whole and len(runs[-1][-1]) == size:
            runs[-1].append(tile)
        else:
            runs.append([tile])
        done += size
    return runs


def output_runs(channels: int, outputs: int, prefetching: int) -> list[tuple[int, int]]:
    """Sizes of tiles of a block's channels, and the numbers of equal ones that follow each other.

    The first tiles, as many as are ``prefetching``, are not equal to the others.
    """
    sizes = enumerate(split_evenly(channels, outputs))
    runs = itertools.groupby(sizes, lambda tile: (tile[1], tile[0] < prefetching))
    return [(size, len(list(tiles))) for (size, _), tiles in runs]


class Turns(NamedTuple):
    """Lines of memory that layer two prefetches, divided among its tiles.

    Parameters
    ----------
    lines : int
        Number of lines of each channel.
    pixel_tiles, blocks, tiles : int
        Tiles of the pixels, blocks of output channels, and the first tiles of a block, which are
        those that prefetch: one where there are few lines.
    """

    lines: int
    pixel_tiles: int
    blocks: int
    tiles: int

    @classmethod
    def of(cls, kernel: Conv2DKernel, knobs: PlanarKnobs, pixel_tiles: int) -> Turns:
        """Those of the input rows that a step is the first to read."""
        rows = knobs.h * kernel.layers[0].strides[0]
        lines = -(-rows * int(kernel.width or 1) // line_elements(kernel.dtype))
        blocks = -(-kernel.layers[1].out_channels // kernel.lanes)
        all_tiles = len(split_evenly(kernel.lanes, knobs.outputs))
        return cls(lines, pixel_tiles, blocks, all_tiles if lines > pixel_tiles * blocks else 1)

    def first(self, pixel_tile: Index, block: Index, tile: Index) -> tuple[Index, int]:
        """The first line of a tile, and their number."""
        turns = self.pixel_tiles * self.blocks * self.tiles
        turn = (pixel_tile * self.blocks + block) * self.tiles + tile
        first = tirx.floordiv(turn * self.lines, turns) if turns > 1 else 0
        return first, -(-self.lines // turns)


def vector_instructions(kernel: Conv2DKernel, knobs: PlanarKnobs) -> int:
    """Instructions on vectors in the code of the nest, about."""
    (layer1, layer2), (height, width) = kernel.layers, (kernel.height or 1, kernel.width or 1)
    out_h, out_w = layer1.output_size(height, width)
    lanes1, lanes2 = knobs.lanes1 or kernel.lanes, knobs.lanes2 or kernel.lanes
    stride, groups, first, rows = layer1.strides[1], len(column_groups(layer1)), 0, 0
    for size in split_evenly(knobs.h, knobs.rows):
        for low, high in visible_rows(layer1, height, out_h, knobs.h, first, size).values():
            sums = size * layer1.kernel[0] * groups * stride
            rows += sums + (high - low) * (groups + 1) * stride + 2 * size * stride
        first += size
    blocks = {min(kernel.lanes, layer2.out_channels), layer2.out_channels % kernel.lanes} - {0}
    pixels = tile_runs(knobs.h * out_w, lanes2, knobs.vectors)
    turns = Turns.of(kernel, knobs, sum(map(len, pixels)))
    tiles = turns.tiles if knobs.ahead else 0
    runs = [output_runs(block, knobs.outputs, tiles) for block in blocks]
    outputs = [size for size, _ in itertools.chain(*runs)]
    whole = layer2.in_channels % kernel.lanes == 0
    steps = UNROLLED_STEPS + (0 if whole else layer2.in_channels % UNROLLED_STEPS)
    sums = 0
    for count in (len(run[0]) for run in pixels):
        sums += sum(steps * (out * count + out + count + 1) + 4 * out * count for out in outputs)
    return rows * len(vector_runs(layer1, width, out_w, lanes1)) + sums


def planar_template(
    func: tirx.PrimFunc, kernel: Conv2DKernel, knobs: PlanarKnobs
) -> s_tir.Schedule:
    """Write the loop nest of the module's docstring.

    Raises
    ------
    OpError
        If :func:`takes_planar` is false of the kernel, ``h`` is more than the rows of a piece, or a
        step has fewer pixels than a vector of layer two.
    """
    if not takes_planar(kernel, knobs.lanes1):
        raise OpError(f"{kernel} cannot be computed on planes; expected one of takes_planar")
    height, width = kernel.layers[0].output_size(int(kernel.height or 1), int(kernel.width or 1))
    if not 1 <= knobs.h <= height // knobs.h_t:
        raise OpError(
            f"h is {knobs.h}; expected 1 to {height // knobs.h_t}, the rows of the smallest of "
            f"{knobs.h_t} pieces"
        )
    lanes2, pixels = knobs.lanes2 or kernel.lanes, knobs.h * width
    if lanes2 > pixels:
        raise OpError(f"lanes2 is {lanes2}; expected at most the {pixels} pixels of a step")
    builder = KernelBuilder(func)
    with builder.body():
        with T.parallel(0, builder.batch * knobs.h_t) as index:
            image, piece = tirx.floordiv(index, knobs.h_t), tirx.floormod(index, knobs.h_t)
            with T.sblock("parallel_tile"):
                T.reads()
                T.writes()
                _Piece(builder, kernel, knobs, image).build(chunk(height, piece, knobs.h_t))
    return builder.schedule()


class _Piece:
    """The loops of one parallel piece."""

    def __init__(
        self, builder: KernelBuilder, kernel: Conv2DKernel, knobs: PlanarKnobs, image: Index
    ):
        self.kernel, (self.layer1, self.layer2) = kernel, kernel.layers
        self.lanes1, self.lanes2 = knobs.lanes1 or kernel.lanes, knobs.lanes2 or kernel.lanes
        self.block, self.knobs, self.flat = kernel.lanes, knobs, builder.flat
        size = int(kernel.height or 1), int(kernel.width or 1)
        out_size = self.layer1.output_size(*size)
        self.source = _image(builder.flat[0], image, self.layer1.in_channels, size)
        self.output = _image(builder.flat[-1], image, self.layer2.out_channels, out_size)
        self.pixels = knobs.h * out_size[1]
        plane = -(-self.pixels // self.lanes2) * self.lanes2 + PLANE_SKEW
        buffer = T.sblock_alloc_buffer((self.layer1.out_channels * plane,), kernel.dtype)
        self.mid = PlanarImage(buffer, 0, plane, knobs.h, out_size[1])

    def build(self, rows: Span) -> None:
        """All steps of the output rows ``[start, stop)``."""
        (start, stop), step = rows, self.knobs.h
        even = self.output.height % (self.knobs.h_t * step) == 0
        if even:
            trips: Index = self.output.height // (self.knobs.h_t * step)
        else:
            trips = tirx.ceildiv(tirx.convert(stop - start), step)
        with loop(0, trips) as index:
            row = start + index * step
            row = row if even else tirx.min(row, stop - step)
            for block, lane in self._channels():
                self._depthwise(block, lane, row)
            ahead = None
            if self.knobs.ahead and trips != 1:
                ahead = self._ahead(tirx.min(row + step, stop - step))
            self._pointwise(row, ahead)

    def _channels(self) -> Iterator[tuple[Index, Index]]:
        full, rest = divmod(self.layer1.in_channels, self.block)
        if rest:  # The body stands in the code once for both kinds of blocks.
            with loop(0, self.layer1.in_channels) as channel:
                yield tirx.floordiv(channel, self.block), tirx.floormod(channel, self.block)
        else:
            with loop(0, full) as block, loop(0, self.block) as lane:
                yield block, lane

    def _depthwise(self, block: Index, lane: Index, row: Index) -> None:
        """Layer one of a channel: the rows of a step, from output row ``row`` on."""
        layer, lanes, bias = self.layer1, self.lanes1, self.flat[2]
        channel, zero = block * self.block + lane, tirx.const(0, bias.dtype)
        part = DepthwiseRows(
            layer=layer,
            source=self.source,
            output=replace(self.mid, offset=T.bind(channel * self.mid.plane)),
            lanes=lanes,
            rows=0,
            output_row=0,
            visible=(0, 0),
            weights=self._weights(block, lane),
            bias=T.bind(_repeated([bias[channel], zero][: layer.strides[1]], lanes)),
            paired=self._is_paired(),
        )
        first = 0
        for size in split_evenly(self.knobs.h, self.knobs.rows):
            part = replace(part, rows=size, output_row=first)
            for condition, visible in self._visible_rows(row, first, size):
                with when(condition):
                    source_row = (row + first) * layer.strides[0] - layer.padding[0] + visible[0]
                    source = self.source.seen_from(channel, source_row)
                    self._row_tile(replace(part, source=source, visible=visible))
            first += size

    def _weights(self, block: Index, lane: Index) -> list[tirx.Expr]:
        """Weights of a channel of layer one, as :class:`.planar_tile.DepthwiseRows` wants them."""
        layer, weight = self.layer1, self.flat[1]
        height, width = layer.kernel
        vectors = []
        for row in range(height):
            for shift, shares in column_groups(layer):
                column = shift // layer.dilation[1]
                taps = [
                    weight[((block * height + row) * width + column + number) * self.block + lane]
                    * tirx.const(share, weight.dtype)
                    for number, share in enumerate(shares)
                ]
                vectors.append(T.bind(_repeated(taps, self.lanes1)))
        return vectors

    def _is_paired(self) -> bool:
        """Return whether layer two undoes the pixel order that steps of two leave in vectors."""
        whole = self.mid.width % self.lanes1 == 0 and self.lanes1 == self.lanes2
        return self.layer1.strides[1] == 2 and whole

    def _visible_rows(
        self, row: Index, first: int, size: int
    ) -> Iterator[tuple[tirx.Expr | None, tuple[int, int]]]:
        """Existing input rows of a tile, by condition on the first row of its step."""
        layer, step, height = self.layer1, self.knobs.h, self.source.height
        spans = visible_rows(layer, height, self.output.height, step, first, size)
        ends = {
            "top": tirx.convert(row) == 0,
            "bottom": tirx.convert(row) == self.output.height - step,
        }
        others = [tirx.Not(ends[name]) for name in spans if name in ends]
        for name, span in spans.items():
            between = None if not others else tirx.all(*others) if len(others) > 1 else others[0]
            yield ends.get(name, between), span

    def _row_tile(self, part: DepthwiseRows) -> None:
        """All vectors of a row."""
        width = self.source.width
        for inside, starts in vector_runs(self.layer1, width, self.mid.width, self.lanes1):
            with loop(0, len(starts)) as vector:
                depthwise_vector(part, starts[0] + vector * self.lanes1, inside)

    def _ahead(self, row: Index) -> Index:
        """First element of the rows that the step from ``row`` on is the first to read."""
        layer, step = self.layer1, self.knobs.h
        reach = (layer.kernel[0] - 1) * layer.dilation[0] + 1
        end = (row + step - 1) * layer.strides[0] - layer.padding[0] + reach
        return self.source.at(0, end - step * layer.strides[0], 0)

    def _pointwise(self, row: Index, ahead: Index | None) -> None:
        """Layer two of the rows of a step; its tiles prefetch the rows from ``ahead`` on."""
        ops = PointwiseOperands(
            layer=self.layer2,
            source=self.mid,
            output=replace(self.output, offset=self.output.at(0, row, 0)),
            weight=self.flat[3],
            bias=self.flat[4],
            lanes=self.lanes2,
            block=self.block,
            paired=self._is_paired(),
        )
        runs, done = tile_runs(self.pixels, self.lanes2, self.knobs.vectors), 0
        turns = Turns.of(self.kernel, self.knobs, sum(map(len, runs)))
        for run in runs:
            with loop(0, len(run)) as index:
                offset = index * (len(run[0]) * self.lanes2)
                tile = [offset + start for start in run[0]]
                self._outputs(ops, tile, turns, done + index, ahead)
            done += len(run)

    def _outputs(
        self,
        ops: PointwiseOperands,
        starts: Sequence[Index],
        turns: Turns,
        pixel_tile: Index,
        ahead: Index | None,
    ) -> None:
        """All output channels of some vectors of pixels, which are one tile."""
        full, rest = divmod(self.layer2.out_channels, self.block)

        def one_block(block: Index, channels: int) -> None:
            first = lane = 0
            prefetching = 0 if ahead is None else turns.tiles
            for size, count in output_runs(channels, self.knobs.outputs, prefetching):
                with loop(0, count) as index:
                    lines = None
                    if ahead is not None and first < prefetching:
                        line, number = turns.first(pixel_tile, block, first + index)
                        start = ahead + line * line_elements(self.source.buffer.dtype)
                        lines = Ahead(self.source, start, number)
                    pointwise_tile(ops, block, lane + index * size, size, starts, lines)
                first, lane = first + count, lane + count * size

        if full:
            with loop(0, full) as block:
                one_block(block, self.block)
        if rest:
            one_block(full, rest)


def _repeated(values: Sequence[tirx.Expr], lanes: int) -> tirx.Expr:
    """A vector of one value, or of two alternating ones."""
    vectors = [T.broadcast(value, lanes) for value in values]
    if len(vectors) == 1:
        return vectors[0]
    return tirx.Shuffle(vectors, [lane % 2 * lanes + lane for lane in range(lanes)])


def _image(buffer: tirx.Buffer, image: Index, channels: int, size: tuple[int, int]) -> PlanarImage:
    plane = size[0] * size[1]
    return PlanarImage(buffer, image * (channels * plane), plane, *size)
