# SPDX-License-Identifier: Apache-2.0
"""Loop nest of a packed 3x3 convolution by Winograd's algorithm F(m x m, 3 x 3).

::

    parallel chunk of output blocks, group of output tiles     # of all images
      for input block, tile:      transform (m + 2) x (m + 2) pixels into as many points
      for point:                  a matrix product: tiles x input channels x output channels
      for output block, tile:     transform the points into m x m pixels, add, activate, store

The intermediates of the three steps stay in buffers of the task, point by point:
``[points, blocks, tiles, lanes]``. Tiles that reach over the border of the image read zeros and
store only what exists; the last group repeats its last tile.

Bytes are transformed in 16 bits, in tiles of 2x2, and multiplied in words of two channels; weights
are four times the transformed ones, so that all are whole, and sums in 32 bits are exact. Data of
bfloat16 is transformed in float32, rounded once, and multiplied in words of two channels as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tvm import DataType, s_tir, tirx
from tvm.script.ir_builder import tirx as T

from schedules.compute.conv2d import add_bytes, scaled_sum
from schedules.tir.float_bits import round_to_bits, widen_bits
from schedules.tir.statements import when
from schedules.workload.conv2d import Conv2DKernel, ConvLayer
from schedules.workload.winograd_matrices import TAPS

from ...core.kernel_builder import STACK_BYTES, KernelBuilder
from ...core.micro_kernel import (
    FeatureMap,
    Index,
    LayerOperands,
    ReducedBlocks,
    finished_sum,
    floats_of,
    loop,
    packed_bytes,
    rounded_halves,
    word_functions,
)
from ...core.prefetch import MOST_LINES, line_elements, prefetch
from ...core.tiles import split_evenly
from ...cost.winograd_knobs import WinogradKnobs
from ..register_tile_nest import (
    block_runs,
    compute_tile,
    for_each_block_tile,
    pixel_nest,
    weight_lines,
    weight_turns,
)
from .winograd_transforms import transform_data, transform_inverse


@dataclass(frozen=True)
class _Points:
    """A group of tiles at all points.

    Parameters
    ----------
    buffer : tirx.Buffer
        One-dimensional.
    plane : int
        Elements from one point to the next.
    group, lanes : int
        Tiles of a block, and channels, or words of these, of a tile.
    each : int
        Elements of the buffer for one of these.
    """

    buffer: tirx.Buffer
    plane: int
    group: int
    lanes: int
    each: int = 1

    @classmethod
    def allocate(
        cls, points: int, blocks: int, group: int, lanes: int, dtype: str, each: int = 1
    ) -> _Points:
        """A buffer whose planes are an odd number of cache lines, to spread over the cache sets."""
        line = line_elements(dtype)
        plane = (-(-blocks * group * lanes // line) | 1) * line
        buffer = T.sblock_alloc_buffer((points * plane * each,), dtype)
        return cls(buffer, plane, group, lanes, each)

    def at(self, point: Index, block: Index, tile: Index) -> Index:
        """Offset of the first lane of a tile."""
        return (point * self.plane + (block * self.group + tile) * self.lanes) * self.each

    def as_row(self, point: Index, first_block: Index) -> FeatureMap:
        """The tiles at one point as an image of one row."""
        row = self.group * self.lanes
        start = point * self.plane
        return FeatureMap(
            self.buffer, start, row, row, self.lanes, 1, self.group, first_block=first_block
        )


@dataclass(frozen=True)
class _Half:
    """Vectors of one tile between both transforms, on the stack: whole columns in each buffer.

    Parameters
    ----------
    pieces : tuple[tuple[tirx.Buffer, int, int], ...]
        Each buffer with its first column and its number of columns.
    lanes : int
        Channels of a vector.
    """

    pieces: tuple[tuple[tirx.Buffer, int, int], ...]
    lanes: int

    @classmethod
    def allocate(cls, rows: int, columns: int, lanes: int, dtype: str) -> _Half:
        """Allocate as few buffers of at most ``STACK_BYTES`` as hold all columns."""
        column_bytes = rows * lanes * DataType(dtype).bits // 8
        pieces, first = [], 0
        for width in split_evenly(columns, max(1, STACK_BYTES // column_bytes)):
            buffer = T.sblock_alloc_buffer((width * rows * lanes,), dtype)
            pieces.append((buffer, first, width))
            first += width
        return cls(tuple(pieces), lanes)

    def row(self, row: Index) -> Iterator[tuple[tirx.Buffer, Index]]:
        """Buffer and offset of each vector of a row."""
        for buffer, _, width in self.pieces:
            for column in range(width):
                yield buffer, (row * width + column) * self.lanes

    def columns(self, rows: int) -> Iterator[tuple[Index, list[tuple[tirx.Buffer, Index]]]]:
        """Open the loops over columns; yield each with buffer and offset of its vectors."""
        for buffer, first, width in self.pieces:
            with loop(0, width) as column:
                yield (
                    first + column,
                    [(buffer, (row * width + column) * self.lanes) for row in range(rows)],
                )


@dataclass(frozen=True)
class _TilePlace:
    """Place of an output tile: its image, and its row and column among the image's tiles."""

    image: Index
    row: Index
    column: Index


class _TaskNest:
    """The steps of one task."""

    def __init__(
        self,
        builder: KernelBuilder,
        kernel: Conv2DKernel,
        knobs: WinogradKnobs,
        dots: bool = False,
    ):
        self.kernel, self.knobs, self.layer, self.dots = kernel, knobs, kernel.layers[0], dots
        self.source, self.output, *residual = (
            replace(builder.feature_map(place, 0), buffer=builder.bits(place))
            for place in ((0, -1, -2) if kernel.residual else (0, -1))
        )
        self.residual = residual[0] if residual else None
        self.blocks = [int(builder.buffers[position].shape[1]) for position in (0, -2, -1)]
        self.weight, self.bias = builder.flat[1:3]
        self.scale, self.lanes, self.each = None, kernel.lanes, 1
        self.transformed = self.sums = kernel.sums or kernel.dtype
        if kernel.has_words:
            self.weight, self.each = builder.words(1), kernel.word
        if kernel.is_quantized:
            self.scale = builder.flat[3]
            self.transformed, self.sums = "int16", "int32"
        self.size, self.count = kernel.winograd, kernel.winograd + TAPS - 1
        self.out_blocks, self.in_blocks = (int(extent) for extent in builder.buffers[1].shape[1:3])
        self.rows, self.columns = (
            -(-extent // self.size) for extent in (self.output.height, self.output.width)
        )
        self.tiles = builder.batch * (self.rows * self.columns)

    def build(self) -> None:
        """All tasks."""
        points, blocks = self.count**2, self.out_blocks // self.knobs.block_chunks
        groups = tirx.ceildiv(tirx.convert(self.tiles), self.knobs.group)
        with T.parallel(0, groups * self.knobs.block_chunks) as index:
            with T.sblock("task"):
                T.reads()
                T.writes()
                first_tile = tirx.floormod(index, groups) * self.knobs.group
                first_block = tirx.floordiv(index, groups) * blocks
                group, words = self.knobs.group, self.lanes // self.each
                data = self._allocate_data(points, group, words)
                products = _Points.allocate(points, blocks, group, self.lanes, self.sums)
                self._transform_data(first_tile, (first_block, blocks), data)
                with loop(0, points) as point:
                    self._multiply(point, first_block, blocks, data, products)
                self._transform_inverse(first_tile, (first_block, blocks), products)

    def _allocate_data(self, points: int, group: int, words: int) -> _Points:
        """Words as they are multiplied, or floats where no instruction multiplies pairs."""
        floats = self.kernel.sums is not None and not self.dots
        dtype = "float32" if floats or self.each == 1 else "int32"
        each = self.each if floats else 1
        return _Points.allocate(points, self.in_blocks, group, words, dtype, each)

    def _place(self, tile: Index) -> _TilePlace:
        per_image = self.rows * self.columns
        row = tirx.floordiv(tirx.floormod(tile, per_image), self.columns)
        column = tirx.floormod(tile, self.columns)
        return _TilePlace(
            T.bind(tirx.floordiv(tile, per_image)), T.bind(row), T.bind(tirx.convert(column))
        )

    def _load(self, buffer: tirx.Buffer, offset: Index) -> tirx.Expr:
        return T.bind(buffer[T.ramp(offset, 1, self.lanes)])

    def _store(self, buffer: tirx.Buffer, offset: Index, value: tirx.Expr) -> None:
        lanes = DataType(str(value.ty.dtype)).lanes
        T.buffer_store(buffer, value, [T.ramp(offset, 1, lanes)])

    def _transform_data(self, first_tile: Index, span: tuple[Index, int], data: _Points) -> None:
        """Rows first, then the columns of that.

        Meanwhile the first weights of the output blocks ``span``, (first, number), are prefetched.
        Tiles at the left and right borders have separate code, in which pixels outside are zero; a
        row above or below the image is a branch.
        """
        count, classes = self.count, self._column_classes()
        half = _Half.allocate(count, count, self.lanes, self.transformed)
        with loop(0, self.in_blocks) as block, loop(0, self.knobs.group) as tile:
            self._prefetch_weights(block * self.knobs.group + tile, *span)
            place = self._place(tirx.min(first_tile + tile, self.tiles - 1))
            plane = _plane(self.source, self.blocks[0], place, block)
            for first, stop, inside in classes:
                here = tirx.all(place.column >= first, place.column < stop)
                with when(True if len(classes) == 1 else here):
                    self._transform_rows(plane, place, inside, half)
            for c, column in half.columns(count):
                values = [self._load(*at) for at in column]
                for r, value in enumerate(transform_data(self.size, values)):
                    start = data.at(r * count + c, block, tile)
                    self._store(data.buffer, start, self._multiplied(value))

    def _multiplied(self, value: tirx.Expr) -> tirx.Expr:
        """A transformed vector as it is multiplied."""
        if self.kernel.is_quantized:
            return T.reinterpret(f"int32x{self.lanes // self.each}", value)
        if self.kernel.sums is None:
            return value
        if self.dots:
            return T.reinterpret(f"int32x{self.lanes // self.each}", rounded_halves(value))
        return widen_bits(round_to_bits(value))

    def _prefetch_weights(self, step: Index, first_block: Index, blocks: int) -> None:
        """Prefetch some squares of the weights, in the order in which the products read them."""
        line = line_elements(self.sums)
        square, a_point = self.lanes**2 // self.each, blocks * self.in_blocks
        most = self.count**2 * blocks // self.knobs.group
        count = min(MOST_LINES * line // square, most)
        for k in range(count):
            number = step * count + k
            point = tirx.floordiv(number, a_point)
            start = (point * self.out_blocks + first_block) * self.in_blocks
            start = (start + tirx.floormod(number, a_point)) * square
            for offset in range(0, square, line):
                prefetch(self.weight, start + offset, level=2)

    def _transform_rows(
        self, plane: Index, place: _TilePlace, inside: Sequence[bool], half: _Half
    ) -> None:
        """Transform the rows of one tile, of whose columns those ``inside`` exist."""
        lanes, count, padding = self.lanes, self.count, self.layer.padding
        zero = T.broadcast(tirx.const(0, self.transformed), lanes)
        first_row, first_column = (
            start * self.size - before
            for start, before in zip((place.row, place.column), padding, strict=False)
        )
        with loop(0, count) as r:
            row = T.bind(first_row + r)
            with T.If(tirx.all(row >= 0, row < self.source.height)):
                with T.Then():
                    start = plane + row * self.source.row_stride + first_column * lanes
                    pixels = [
                        self._pixel(start + c * lanes) if exists else zero
                        for c, exists in enumerate(inside)
                    ]
                    values = transform_data(self.size, pixels)
                    for at, value in zip(half.row(r), values, strict=True):
                        self._store(*at, value)
                with T.Else():
                    for at in half.row(r):
                        self._store(*at, zero)

    def _pixel(self, offset: Index) -> tirx.Expr:
        value = self._load(self.source.buffer, offset)
        if self.kernel.sums is not None:
            return T.bind(widen_bits(value))
        return T.Cast(f"{self.transformed}x{self.lanes}", value) if self.each > 1 else value

    def _column_classes(self) -> list[tuple[int, int, Sequence[bool]]]:
        """Ranges ``[first, stop)`` of columns of tiles with the same existing columns of pixels."""
        classes: list[tuple[int, int, Sequence[bool]]] = []
        for column in range(self.columns):
            start = column * self.size - self.layer.padding[1]
            inside = [0 <= start + c < self.source.width for c in range(self.count)]
            first = column
            if classes and classes[-1][2] == inside:
                first = classes.pop()[0]
            classes.append((first, column + 1, inside))
        return classes

    def _multiply(
        self, point: Index, first_block: Index, blocks: int, data: _Points, products: _Points
    ) -> None:
        """The product at one point is a 1x1 convolution of one row of tiles."""
        channels = -(-self.layer.in_channels // self.each)
        layer = ConvLayer(channels, self.layer.out_channels, (1, 1))
        start = point * self.out_blocks + first_block
        ops = LayerOperands(
            layer=layer,
            source=data.as_row(point, 0),
            output=products.as_row(point, start),
            weight=self.weight,
            bias=None,
            residual=None,
            lanes=self.lanes,
            in_blocks=self.in_blocks,
            out_blocks=blocks,
            dtype=self.sums,
            word=self.kernel.word,
            pairs=data.each > 1,
            dots=self.dots,
        )
        turns = weight_turns(ops, self.knobs.pixels)
        for block, size in for_each_block_tile(block_runs(ops, self.knobs.blocks), None):
            # A task's weights of the next point do not follow those of this one.
            skipped = tirx.Select(tirx.convert(block + size) == blocks, self.out_blocks - blocks, 0)
            tile = functools.partial(
                compute_tile,
                ops,
                start + block,
                size,
                reduction=ReducedBlocks(0, self.in_blocks),
                turns=turns,
                lines=weight_lines(ops, self.knobs.blocks, turns),
                following=start + block + size + skipped,
            )
            pixel_nest(ops, (0, 1), self.knobs.pixels, tile)

    def _transform_inverse(
        self, first_tile: Index, span: tuple[Index, int], products: _Points
    ) -> None:
        """Rows first, then the columns of that, with the layer's epilogue."""
        lanes, count = self.lanes, self.count
        half = _Half.allocate(count, self.size, lanes, self.sums)
        with loop(0, span[1]) as b, loop(0, self.knobs.group) as t:
            block, tile = span[0] + b, first_tile + t
            whole = isinstance(self.tiles, int) and self.tiles % self.knobs.group == 0
            with when(True if whole else tile < self.tiles):
                place = self._place(tile)
                bias, scale = self._load(self.bias, block * lanes), None
                if self.scale is not None:
                    scale = T.bind(self._load(self.scale, block * lanes))
                with loop(0, count) as r:
                    row = [
                        self._load(products.buffer, products.at(r * count + c, b, t))
                        for c in range(count)
                    ]
                    for vector_place, value in zip(
                        half.row(r), transform_inverse(self.size, row), strict=True
                    ):
                        self._store(*vector_place, value)
                plane = added = _plane(self.output, self.blocks[-1], place, block)
                if self.residual is not None and self.residual.is_apart(self.output):
                    added = _plane(self.residual, self.blocks[-2], place, block)
                for c, vectors in half.columns(count):
                    values = [self._load(*vector_place) for vector_place in vectors]
                    column = place.column * self.size + c
                    with when(self.output.width % self.size == 0 or column < self.output.width):
                        start = plane + column * lanes
                        also = start if added is plane else added + column * lanes
                        self._finish(start, also, place.row * self.size, values, (bias, scale))

    def _finish(
        self,
        column: Index,
        added: Index,
        first_row: Index,
        values: Sequence[tirx.Expr],
        ends: tuple[tirx.Expr, tirx.Expr | None],
    ) -> None:
        """Write one column of an output tile.

        ``column`` is the begin of the image's column, ``added`` that of the residual's; ``ends``
        are the bias and the factor of sums of bytes.
        """
        bias, scale = ends
        for r, value in enumerate(transform_inverse(self.size, values)):
            row = first_row + r
            with when(self.output.height % self.size == 0 or row < self.output.height):
                offset = column + row * self.output.row_stride
                if scale is not None:  # weights are four times as large
                    two = T.broadcast(tirx.const(2, "int32"), self.lanes)
                    value = scaled_sum(value >> two, bias, scale)
                else:
                    value = value + bias
                other = None
                if self.residual is not None:
                    place = added + row * self.residual.row_stride
                    other = self._load(self.residual.buffer, place)
                self._store(self.output.buffer, offset, self._ended(value, other))

    def _ended(self, value: tirx.Expr, other: tirx.Expr | None) -> tirx.Expr:
        """A complete sum with the residual ``other``, activated."""
        activation, addition = self.layer.activation, self.kernel.addition
        if other is not None and addition is not None:
            value, activation = add_bytes(value, activation, other, addition), addition.activation
        elif other is not None:
            value = value + floats_of(other)
        if self.kernel.out_dtype == "uint8":
            return packed_bytes([value], activation)
        how = str(self.bias.dtype), self.kernel.out_dtype, self.dots
        return finished_sum(value, activation, *how)


def _plane(image: FeatureMap, blocks: int, place: _TilePlace, block: Index) -> Index:
    """Begin of a block of channels, of which the tensor has so many."""
    return (place.image * blocks + block) * image.block_stride + image.offset


def winograd_template(
    func: tirx.PrimFunc, kernel: Conv2DKernel, knobs: WinogradKnobs, dots: bool = False
) -> s_tir.Schedule:
    """Write the loop nest of the module's docstring.

    ``dots``: pairs of bfloat16 are multiplied by an instruction, not as float32.
    """
    builder = KernelBuilder(func)
    with builder.body(), word_functions(kernel.is_quantized, kernel.lanes * dots):
        _TaskNest(builder, kernel, knobs, dots).build()
    return builder.schedule()
