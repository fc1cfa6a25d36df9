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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T

from schedules.errors import OpError
from schedules.tir.branch import when
from schedules.workload.conv2d import Conv2DKernel

from ...core.kernel_builder import KernelBuilder
from ...core.micro_kernel import Index, loop
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
        self.layer1, self.layer2 = kernel.layers
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
            turns = None
            if self.knobs.ahead and trips != 1:
                turns = self._turns(tirx.min(row + step, stop - step))
            self._pointwise(row, turns)

    def _channels(self) -> Iterator[tuple[Index, Index]]:
        full, rest = divmod(self.layer1.in_channels, self.block)
        if full:
            with loop(0, full) as block, loop(0, self.block) as lane:
                yield block, lane
        if rest:
            with loop(0, rest) as lane:
                yield full, lane

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
            for condition, visible in self._visible(row, first, size):
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

    def _visible(
        self, row: Index, first: int, size: int
    ) -> list[tuple[tirx.Expr | None, tuple[int, int]]]:
        """Existing input rows of a tile, by condition: at the top, at the bottom, between.

        The tile holds the rows ``[first, first + size)`` of the step that begins with ``row``.
        """
        layer, out_h, step = self.layer1, self.output.height, self.knobs.h
        stride, top = layer.strides[0], layer.padding[0]
        reach = (layer.kernel[0] - 1) * layer.dilation[0] + 1
        below = (out_h - 1) * stride - top + reach - self.source.height
        rows = (size - 1) * stride + reach
        above = top if first == 0 else 0
        below = max(0, below) if first + size == step else 0
        if step == out_h:
            return [(None, (above, rows - below))]
        cases: list[tuple[tirx.Expr | None, tuple[int, int]]] = []
        at_top, at_bottom = tirx.convert(row) == 0, tirx.convert(row) == out_h - step
        if above:
            cases.append((at_top, (above, rows)))
        if below:
            cases.append((at_bottom, (0, rows - below)))
        others = [tirx.Not(condition) for condition, _ in cases if condition is not None]
        between = None if not others else tirx.all(*others) if len(others) > 1 else others[0]
        return [*cases, (between, (0, rows))]

    def _row_tile(self, part: DepthwiseRows) -> None:
        """All vectors of a row; neighbours that read no padding are a loop."""
        starts = vector_starts(self.mid.width, self.lanes1)
        inside = [
            reads_whole_vectors(self.layer1, self.source.width, start, self.lanes1)
            for start in starts
        ]
        run: list[int] = []
        for index, start in enumerate(starts):
            if inside[index] and start == index * self.lanes1:
                run.append(start)
                continue
            self._inside(part, run)
            run = []
            depthwise_vector(part, start, inside[index])
        self._inside(part, run)

    def _inside(self, part: DepthwiseRows, starts: Sequence[int]) -> None:
        if starts:
            with loop(0, len(starts)) as vector:
                depthwise_vector(part, starts[0] + vector * self.lanes1, True)

    def _turns(self, row: Index) -> _Turns:
        """Lines of the rows that layer one reads in the step from ``row`` on, but not earlier."""
        layer, step, block = self.layer1, self.knobs.h, self.block
        reach = (layer.kernel[0] - 1) * layer.dilation[0] + 1
        end = (row + step - 1) * layer.strides[0] - layer.padding[0] + reach
        rows = step * layer.strides[0]
        return _Turns(
            source=self.source,
            start=self.source.at(0, end - rows, 0),
            lines=-(-rows * self.source.width // line_elements(self.source.buffer.dtype)),
            pixel_tiles=len(self._pixel_tiles()),
            blocks=-(-self.layer2.out_channels // block),
            tiles=len(split_evenly(block, self.knobs.outputs)),
        )

    def _pixel_tiles(self) -> list[int]:
        """Vectors of pixels of the tiles of layer two."""
        return split_evenly(-(-self.pixels // self.lanes2), self.knobs.vectors)

    def _pointwise(self, row: Index, turns: _Turns | None) -> None:
        """Layer two of the rows of a step; ``turns`` are the lines that its tiles prefetch."""
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
        starts = vector_starts(self.pixels, self.lanes2)
        runs: list[list[list[int]]] = []  # tiles that differ only in their place
        done = 0
        for size in self._pixel_tiles():
            tile = starts[done : done + size]
            whole = tile[-1] % self.lanes2 == 0
            if runs and whole and len(runs[-1][-1]) == size:
                runs[-1].append(tile)
            else:
                runs.append([tile])
            done += size
        done = 0
        for run in runs:
            with loop(0, len(run)) as index:
                offset = index * (len(run[0]) * self.lanes2)
                tile = [offset + start for start in run[0]]
                self._outputs(ops, tile, turns, done + index)
            done += len(run)

    def _outputs(
        self,
        ops: PointwiseOperands,
        starts: Sequence[Index],
        turns: _Turns | None,
        pixel_tile: Index,
    ) -> None:
        """All output channels of some vectors of pixels, which are one tile."""
        full, rest = divmod(self.layer2.out_channels, self.block)

        def one_block(block: Index, channels: int) -> None:
            lane = 0
            for number, size in enumerate(split_evenly(channels, self.knobs.outputs)):
                ahead = turns.ahead(pixel_tile, block, number) if turns else None
                pointwise_tile(ops, block, lane, size, starts, ahead)
                lane += size

        if full:
            with loop(0, full) as block:
                one_block(block, self.block)
        if rest:
            one_block(full, rest)


@dataclass(frozen=True)
class _Turns:
    """Lines of memory to prefetch, divided among the tiles of layer two.

    Parameters
    ----------
    source : PlanarImage
        Image with the lines.
    start : Index
        Element of channel 0 from which they are counted.
    lines : int
        Number of lines of each channel.
    pixel_tiles, blocks, tiles : int
        Tiles of the pixels, blocks of output channels, and tiles of a block.
    """

    source: PlanarImage
    start: Index
    lines: int
    pixel_tiles: int
    blocks: int
    tiles: int

    def ahead(self, pixel_tile: Index, block: Index, tile: int) -> Ahead | None:
        """Share of a tile; where there are few lines, only the first tile of a block prefetches."""
        tiles = self.tiles if self.lines > self.pixel_tiles * self.blocks else 1
        if tile >= tiles:
            return None
        turns = self.pixel_tiles * self.blocks * tiles
        turn = (pixel_tile * self.blocks + block) * tiles + tile
        first = tirx.floordiv(turn * self.lines, turns) if turns > 1 else 0
        start = self.start + first * line_elements(self.source.buffer.dtype)
        return Ahead(self.source, start, -(-self.lines // turns))


def _repeated(values: Sequence[tirx.Expr], lanes: int) -> tirx.Expr:
    """A vector of one value, or of two alternating ones."""
    vectors = [T.broadcast(value, lanes) for value in values]
    if len(vectors) == 1:
        return vectors[0]
    return tirx.Shuffle(vectors, [lane % 2 * lanes + lane for lane in range(lanes)])


def _image(buffer: tirx.Buffer, image: Index, channels: int, size: tuple[int, int]) -> PlanarImage:
    plane = size[0] * size[1]
    return PlanarImage(buffer, image * (channels * plane), plane, *size)
