# SPDX-License-Identifier: Apache-2.0
"""Reading of a convolution as boxes of its tensors, in blocks of 16 bytes of channels.

The windows of neighbouring outputs begin at equal distances, so that for each tap those of a box of
outputs are themselves a box of the data, beyond whose edges there are zeros. The filters of a tap
are a box of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tvm import ir, sym, tirx

from schedules.tir.expression_walk import substitute
from schedules.tir.extents import Extent, constant, extent_of, size_of
from schedules.tir.index_math import i64, ravel
from schedules.workload.conv2d import ConvLayer

from ...core.tensor_core import CHUNK, MATRIX_TYPES
from ...core.warpgroup import LINE, BulkSource
from .matmul_pattern import Operand
from .tensor_core_tile import copied_read

BLOCKS = LINE // CHUNK
"""Blocks of channels that are copied at once."""
_WORD = 8  # bytes of what maps count as an element, so that boxes may be longer
LONGEST_BOX = 256
"""Elements of a box along an axis, the steps between them included."""
LONGEST_RUN = LONGEST_BOX * _WORD // CHUNK
"""Pixels of a box along an axis that is copied as one with the channels of a block."""
_LONGEST_STEP = 8
_MOST_AXES = 5

_Linear = tuple[list[int], int]
_Axes = TypeVar("_Axes", bound="BlockedAxes")


@dataclass(frozen=True)
class BoxAxis:
    """An axis of a tensor, along which a place is ``row * step + tap * reach + offset``.

    Parameters
    ----------
    extent, stride : Extent
        Of the axis, in elements.
    row, tap : int | None
        Numbers of the rows' axis and of the reduced axis that it depends on.
    step, reach, offset : int
        Factors of both, and the rest.
    """

    extent: Extent
    stride: Extent
    row: int | None
    tap: int | None
    step: int
    reach: int
    offset: int

    @property
    def is_plain(self) -> bool:
        """Return whether the place is that of a row."""
        return self.row is not None and (self.step, self.tap, self.offset) == (1, None, 0)

    def at(self, rows: Sequence[tirx.Expr], taps: Sequence[tirx.Expr]) -> tirx.Expr:
        """The place of a row and a tap."""
        place = i64(self.offset)
        if self.row is not None:
            place = place + rows[self.row] * i64(self.step)
        return place if self.tap is None else place + taps[self.tap] * i64(self.reach)


@dataclass(frozen=True)
class BlockedAxes:
    """The axes of a factor of a product in blocks of channels of 16 bytes.

    Parameters
    ----------
    axes : tuple[BoxAxis, ...]
        Axes of the tensor but those of the channels of a block, as a box lies in shared memory,
        that of neighbours first.
    rows : tuple[Extent, ...]
        Extents of the axes of which the product's rows, or columns, are the product.
    lanes : int
        Elements that lie beside each other for each place along the axes.
    """

    axes: tuple[BoxAxis, ...]
    rows: tuple[Extent, ...]
    lanes: int

    @classmethod
    def of_layer(
        cls, layer: ConvLayer, images: int, size: tuple[int, int], lanes: int
    ) -> BlockedAxes:
        """Those of the data of a dense layer, as its product has them, for an image of a size."""
        blocks, (height, width) = -(-layer.in_channels // lanes), size
        strides = blocks * height * width * lanes, width * lanes, lanes
        forms = (1, 1, 0), *zip(layer.strides, layer.kernel, layer.padding[:2], strict=True)
        counts = images, *layer.output_size(*size)
        axes: list[BoxAxis] = []
        rows: list[int] = []
        for number, (step, taps, padding) in enumerate(forms):
            # No place depends on an index that is always 0.
            row = len(rows) if counts[number] > 1 else None
            tap = number if taps > 1 else None
            extent = (images, *size)[number]
            if extent > 1 or row is not None or tap is not None:
                axes.append(BoxAxis(extent, strides[number], row, tap, step, 1, -padding))
            if row is not None:
                rows.append(counts[number])
        blocks_axis = BoxAxis(blocks, height * width * lanes, None, 0, 0, 1, 0)
        return cls((*axes[::-1], blocks_axis), tuple(rows), lanes).merged()

    @property
    def is_joined(self) -> bool:
        """Return whether neighbours along the first axis lie beside each other."""
        first = self.axes[0]
        return first.row is not None and first.step == 1 and constant(first.stride) == self.lanes

    @property
    def longest(self) -> tuple[int, ...]:
        """Longest box along each axis of the rows."""
        found = [1] * len(self.rows)
        for axis in self.axes:
            if axis.row is not None:
                found[axis.row] = LONGEST_BOX // axis.step
        if self.is_joined and self.axes[0].row is not None:
            found[self.axes[0].row] = LONGEST_RUN
        return tuple(found)

    def merged(self: _Axes) -> _Axes:
        """The same with neighbouring axes of rows as one where all of a tensor's rows are taken."""
        if len(self.axes) < 2 or not (self.axes[0].is_plain and self.axes[1].is_plain):
            return self
        first, second, *others = self.axes
        last = len(self.rows) - 1
        down, across = constant(second.extent), constant(first.extent)
        if down is None or across is None or self.rows[-2:] != (down, across):
            return self
        if (second.row, first.row) != (last - 1, last):
            return self
        if extent_of(second.stride) != across * int(constant(first.stride) or 0):
            return self
        size = down * across
        one = replace(first, extent=size, row=second.row)
        return replace(self, axes=(one, *others), rows=(*self.rows[:-2], size))


@dataclass(frozen=True)
class BlockedTensor(BlockedAxes):
    """A factor of a product in blocks of channels of 16 bytes.

    Parameters
    ----------
    buffer : tirx.Buffer
        The tensor.
    block : int
        Number of the reduced axis of blocks of channels, behind those of taps.
    """

    buffer: tirx.Buffer
    block: int

    @property
    def words(self) -> int:
        """The same in words, as maps count them."""
        return self.lanes * MATRIX_TYPES[str(self.buffer.dtype)].itemsize // _WORD

    def source(self, box: Sequence[int], blocks: int = BLOCKS) -> BulkSource:
        """The tensor of which boxes of some rows and blocks are copied."""
        words, others = self.words, list(self.axes)
        extents, counts = [i64(words)], [words]
        if self.is_joined:
            first = others.pop(0)
            extents = [i64(first.extent) * i64(words)]
            counts = [self._length(first, box, blocks) * words]
        extents += [i64(axis.extent) for axis in others]
        counts += [self._length(axis, box, blocks) for axis in others]
        strides = tuple(i64(axis.stride) for axis in others)
        steps = (1, *(max(1, axis.step) for axis in others))
        word = self.lanes // words
        return BulkSource(
            self.buffer, tuple(extents), strides, tuple(counts), steps, word, is_swizzled=False
        )

    def _length(self, axis: BoxAxis, box: Sequence[int], blocks: int) -> int:
        if axis.row is not None:
            return box[axis.row]
        return blocks if axis.tap == self.block else 1

    def coordinates(
        self, rows: Sequence[tirx.Expr], depths: Sequence[tirx.Expr]
    ) -> list[tirx.Expr]:
        """Coordinates of the box of some first rows, a tap and a first block."""
        places = [axis.at(rows, depths) for axis in self.axes]
        if self.is_joined:
            return [places[0] * i64(self.words), *places[1:]]
        return [i64(0), *places]


@dataclass(frozen=True)
class WindowProduct:
    """A convolution as a product: a row for each output pixel, a column for each output channel.

    Parameters
    ----------
    data, filters : BlockedTensor
        The factors.
    taps : tuple[int, ...]
        Extents of the reduced axes but those of channels.
    blocks : int
        Blocks of reduced channels.
    """

    data: BlockedTensor
    filters: BlockedTensor
    taps: tuple[int, ...]
    blocks: int

    @classmethod
    def of(cls, left: Operand, right: Operand) -> WindowProduct | None:
        """The convolution that a product of two factors is; None if it has no such boxes."""
        data, filters = _read_blocked(left, lanes=1), _read_blocked(right, lanes=2)
        if data is None or filters is None or left.depth_parts != right.depth_parts:
            return None
        *taps, blocks, _ = (constant(extent) or 0 for extent in _depth_parts(left, data.lanes))
        columns = [axis for axis in filters.axes if axis.row == 0]
        is_by_columns = filters.rows[1:] == (data.lanes,) and all(each.is_plain for each in columns)
        steps = [axis.step for axis in (*data.axes, *filters.axes)]
        if not is_by_columns or max(steps) > _LONGEST_STEP or 0 in (*taps, blocks):
            return None
        found = cls(data.merged(), filters, tuple(taps), blocks)
        ranks = [len(each.source([1] * len(each.rows)).box) for each in (found.data, filters)]
        return found if max(ranks) <= _MOST_AXES else None


def _read_blocked(operand: Operand, lanes: int) -> BlockedTensor | None:
    """A factor whose last axes are the channels of a block; else None.

    With two of them, reduced ones are the first of 16-bit elements, else the last.
    """
    found = _read_axes(operand)
    if found is None or len(found[1]) <= lanes:
        return None
    buffer, axes = found
    kind = MATRIX_TYPES[str(buffer.dtype)]
    parts = _depth_parts(operand, kind.chunk)
    depth, rows = len(parts), len(operand.row_parts)
    if depth < 2:
        return None
    ends = [(None, depth - 1), (rows - 1, None)]
    ends = ends[:lanes] if kind.transposes else ends[lanes - 1 :: -1]
    for axis, (row, tap), place in zip(axes[-lanes:], ends, (lanes - 1, 0), strict=False):
        is_lane = (axis.row, axis.tap, axis.offset) == (row, tap, 0)
        if not is_lane or axis.step + axis.reach != 1 or constant(axis.extent) != kind.chunk:
            return None
        assert constant(axis.stride) == kind.chunk**place, "last axes lie beside each other"
    rest = axes[-lanes - 1 :: -1]
    blocks = [axis for axis in rest if axis.tap == depth - 2]
    kept = [axis for axis in rest if axis.tap != depth - 2]
    own, taps = ([getattr(axis, name) for axis in kept] for name in ("row", "tap"))
    wanted = range(rows - lanes + 1), range(depth - 2)
    for numbers, expected in zip((own, taps), wanted, strict=True):
        if sorted(number for number in numbers if number is not None) != list(expected):
            return None
    if len(blocks) != 1 or not kept or (blocks[0].row, blocks[0].offset) != (None, 0):
        return None
    if blocks[0].reach != 1 or extent_of(blocks[0].extent) != constant(parts[-2]):
        return None
    # Matrices follow each other along the rows. Only those of 16-bit filters, which are transposed,
    # do so along the depth.
    by_depth = lanes == 2 and kind.transposes
    order = [*blocks, *kept] if by_depth else [*kept, *blocks]
    return BlockedTensor(tuple(order), operand.row_parts, kind.chunk**lanes, buffer, depth - 2)


def _depth_parts(operand: Operand, chunk: int) -> list[Extent]:
    """Extents of the reduced axes, channels as blocks of some and as lanes."""
    *taps, channels = operand.depth_parts
    count = constant(channels)
    if count is None or count == chunk or count % chunk:
        return [*taps, channels]
    return [*taps, count // chunk, chunk]


def _read_axes(operand: Operand) -> tuple[tirx.Buffer, list[BoxAxis]] | None:
    """The axes of the tensor that a factor is, but those of one element; None if it is none."""
    read = copied_read(operand)
    if read is None or operand.shift is not None or len(operand.space.axes) != 2:
        return None
    kind = MATRIX_TYPES.get(str(read.buffer.dtype))
    if kind is None:
        return None
    parts = [*operand.row_parts, *_depth_parts(operand, kind.chunk)]
    fresh = [tirx.Var(f"a{k}", "int64") for k in range(len(parts))]
    count, analyzer = len(operand.row_parts), sym.Analyzer()
    for axis, extent in zip(fresh, parts, strict=True):
        analyzer.bind(axis, ir.Range.from_min_extent(i64(0), i64(extent)))
    flat = [ravel(fresh[:count], parts[:count]), ravel(fresh[count:], parts[count:])]
    values = dict(zip(operand.space.axes, flat, strict=True))
    places = [analyzer.simplify(substitute(index, values)) for index in read.indices]
    linear = [found for place in places if (found := _linear(place, fresh)) is not None]
    guards = [analyzer.simplify(substitute(guard, values)) for guard in read.guards]
    shape = [extent_of(extent) for extent in read.buffer.shape]
    if len(linear) < len(places) or not all(_follows(g, fresh, linear, shape) for g in guards):
        return None
    axes: list[BoxAxis] = []
    for number, (factors, offset) in enumerate(linear):
        stride = size_of(shape[number + 1 :])
        axis = _box_axis(factors, offset, count, shape[number], stride)
        if axis is None:
            return None
        if constant(axis.extent) != 1 or axis.row is not None or axis.tap is not None:
            axes.append(axis)
    return read.buffer, axes


def _linear(expression: tirx.Expr, axes: Sequence[tirx.Var]) -> _Linear | None:
    """Factors of axes, and the rest, where all are constants."""
    found = sym.detect_linear_equation(expression, list(axes))
    known = [value for part in found if (value := constant(part)) is not None]
    return (known[:-1], known[-1]) if found and len(known) == len(found) else None


def _box_axis(
    factors: Sequence[int], offset: int, count: int, extent: Extent, stride: Extent
) -> BoxAxis | None:
    """The axis of a place; None if it depends on several axes of rows, or of taps."""
    rows = [k for k in range(count) if factors[k]]
    taps = [k for k in range(count, len(factors)) if factors[k]]
    if len(rows) > 1 or len(taps) > 1 or min(factors) < 0:
        return None
    row, tap = rows[0] if rows else None, taps[0] - count if taps else None
    step, reach = (factors[found[0]] if found else 0 for found in (rows, taps))
    return BoxAxis(extent, stride, row, tap, step, reach, offset)


def _follows(
    guard: tirx.Expr, axes: Sequence[tirx.Var], places: Sequence[_Linear], shape: Sequence[Extent]
) -> bool:
    """Return whether a condition holds wherever all places are within the shape."""
    if isinstance(guard, tirx.And):
        return all(_follows(part, axes, places, shape) for part in (guard.a, guard.b))
    if isinstance(guard, tirx.LE | tirx.LT):
        least, most = guard.a, guard.b
    elif isinstance(guard, tirx.GE | tirx.GT):
        least, most = guard.b, guard.a
    else:
        return False
    found = _linear(most - least, axes)
    if found is None:
        return False
    factors, rest = found
    rest -= isinstance(guard, tirx.LT | tirx.GT)
    for (own, offset), extent in zip(places, shape, strict=True):
        known = constant(extent)
        if factors == own and rest >= offset:
            return True
        if known is not None and factors == [-f for f in own] and rest + offset >= known - 1:
            return True
    return False
