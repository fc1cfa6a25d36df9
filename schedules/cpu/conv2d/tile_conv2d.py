# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of a packed convolution in tile registers (AMX).

Loop nest; a *group* is up to four products' worth of tiles of sums::

    parallel image, chunk of pixels, chunk of channels
      copy of the rows that the chunk reads, with the zeros around them    # if the layer is padded
      for group of channel tiles
        for group of pixel tiles
          for step of the reduction
            products of the group's tiles
            rows of the sums of the group before: scale, bias, residual, activation, output
          store the sums
      rows of the last group

A step reads a block of channels at one place of the kernel; where the pixels of a row of the kernel
fill no tile, a step reads them all, as they lie beside each other. Where tiles do not divide pixels
or channels, the last ones reach back, and some outputs are computed twice.

Of a layer with groups a tile of channels belongs to one, and reads its channels alone. Groups of
fewer than 16 come as one of 16, with weights of zero between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from schedules import attributes
from schedules.compute.conv2d import activate, scaled_sum
from schedules.workload.conv2d import Conv2DKernel

from ..core.kernel_builder import KernelBuilder
from ..core.machine import TILE_BITS, CPUInfo
from ..core.micro_kernel import (
    FeatureMap,
    Index,
    LayerOperands,
    bound,
    ended,
    loop,
    packed_bytes,
    unrolled,
    with_residual,
)
from ..core.tile_unit import TILE_ELEMENTS, TILE_WORDS, TileShape, TileUnit, tile_unit
from ..core.tiles import Span, chunk
from ..cost.tile_conv2d_knobs import (
    TileConv2DKnobs,
    TileGeometry,
    default_tile_knobs,
    packed_tiles,
    takes_tiles,
    tile_conv2d_space,
    tile_cycles,
)
from .conv2d import Conv2D, PackedTemplate, operands, packed_kernel
from .register_tile_nest import flatten, is_flat
from .words_of_rows import rounded

_LEFT, _RIGHT = 4, 6  # registers of factors; those of sums come first
_FEW_VECTORS = 16
"""Vectors of sums whose ends a CPU overlaps with products from any place of a step, as it reorders
some 500 instructions. More are spread between the products, as copies that take long to compile."""


class TileConv2DTemplate(PackedTemplate[TileConv2DKnobs]):
    """The nest of the module's docstring."""

    name = "cpu.tile_conv2d"
    version = 2
    knobs = TileConv2DKnobs

    def default(self, workload: Conv2DKernel, machine: CPUInfo) -> TileConv2DKnobs:
        """Return the cheapest setting of the cost model."""
        return default_tile_knobs(workload, machine)

    def settings(self, workload: Conv2DKernel, machine: CPUInfo) -> Iterable[TileConv2DKnobs]:
        """Yield the settings that the cost model compares."""
        return tile_conv2d_space(workload, machine)

    def write(
        self, func: tirx.PrimFunc, workload: Conv2DKernel, knobs: TileConv2DKnobs, target: Target
    ) -> s_tir.Schedule:
        """Write the nest."""
        return tile_conv2d_template(func, workload, knobs, CPUInfo.from_target(target))

    def cycles(self, workload: Conv2DKernel, knobs: TileConv2DKnobs, machine: CPUInfo) -> float:
        """Return the cost model's cycles."""
        return tile_cycles(workload, knobs, machine)


TILE_CONV2D = TileConv2DTemplate()


class TileConv2D(Conv2D):
    """Rule for packed convolutions of bytes or bfloat16 whose blocks and groups fit tiles.

    Returns None for CPUs whose tile registers do not multiply these.
    """

    template = TILE_CONV2D

    def workload(self, func: tirx.PrimFunc, target: Target) -> Conv2DKernel | None:
        """Return the convolution; None where tiles cannot compute it."""
        kernel = packed_kernel(func, layers=1)
        return kernel if kernel and takes_tiles(kernel, CPUInfo.from_target(target)) else None


def tile_conv2d_template(
    func: tirx.PrimFunc, kernel: Conv2DKernel, knobs: TileConv2DKnobs, cpu: CPUInfo
) -> s_tir.Schedule:
    """Write the loop nest of the module's docstring."""
    builder = KernelBuilder(
        func if cpu.emulates_tiles else func.with_attr(attributes.TILES, kernel.dtype)
    )
    geometry = TileGeometry.of(kernel)
    with builder.body():
        pieces = knobs.unit_chunks * knobs.block_chunks
        with T.parallel(0, (1 if kernel.is_matrix else builder.batch) * pieces) as index:
            image, piece = tirx.floordiv(index, pieces), tirx.floormod(index, pieces)
            ops = operands(builder, kernel, image)
            if is_flat(ops):
                ops = flatten(ops, 0, ops.output.height)
            geometry = replace(geometry, lines=ops.output.height, width=ops.output.width)
            pixel_groups, channel_groups = geometry.groups(knobs)
            pixels = chunk(
                pixel_groups, tirx.floordiv(piece, knobs.block_chunks), knobs.unit_chunks
            )
            channels = chunk(
                channel_groups, tirx.floormod(piece, knobs.block_chunks), knobs.block_chunks
            )
            with T.sblock("tiles"):
                T.reads()
                T.writes()
                ops = bordered(ops, geometry.width, *_lines(geometry, knobs, pixels))
                write_tiles(ops, kernel, geometry, knobs, cpu, pixels, channels)
    return builder.schedule()


def write_tiles(
    ops: LayerOperands,
    kernel: Conv2DKernel,
    geometry: TileGeometry,
    knobs: TileConv2DKnobs,
    cpu: CPUInfo,
    pixels: Span | None = None,
    channels: Span | None = None,
) -> None:
    """Write the loops over groups of tiles, of all pixels and channels if no others are given."""
    sums, left = TileShape(knobs.rows, TILE_WORDS), TileShape(knobs.rows, geometry.depth)
    right = TileShape(geometry.depth, TILE_WORDS)
    shapes = [sums] * _LEFT + [left] * (_RIGHT - _LEFT) + [right] * 2
    # CPUs that only emulate tiles may lack what rounds two vectors at once, and LLVM dies of it.
    rounds = kernel.out_dtype != "bfloat16" or cpu.half_dots == "vdpbf16ps"
    packed = packed_tiles(kernel, knobs) if cpu.vector_bits == TILE_BITS and rounds else 1
    pixel_groups, channel_groups = geometry.groups(knobs)
    with tile_unit(shapes, kernel.dtype, cpu) as unit:
        nest = _TileNest(ops, geometry, knobs, unit, packed)
        nest.write(pixels or (0, pixel_groups), channels or (0, channel_groups))


def _unit(geometry: TileGeometry, knobs: TileConv2DKnobs, group: Index, number: int) -> Index:
    """Tile ``number`` of a group of tiles of pixels, counted over all lines."""
    units = geometry.lines * geometry.tiles_of_line(knobs.rows)
    unit = group * knobs.pixel_tiles + number
    return tirx.min(unit, units - 1) if units % knobs.pixel_tiles else unit


def _lines(geometry: TileGeometry, knobs: TileConv2DKnobs, pixels: Span) -> tuple[int, Span]:
    """Most lines of a chunk of groups of pixels, and the first and the last of this one."""
    tiles = geometry.tiles_of_line(knobs.rows)
    units = -(-geometry.groups(knobs)[0] // knobs.unit_chunks) * knobs.pixel_tiles
    first = tirx.floordiv(_unit(geometry, knobs, pixels[0], 0), tiles)
    last = tirx.floordiv(_unit(geometry, knobs, pixels[1] - 1, knobs.pixel_tiles - 1), tiles)
    return min(geometry.lines, -(-(units - 1) // tiles) + 1), (first, last)


def bordered(ops: LayerOperands, width: int, lines: int, span: Span) -> LayerOperands:
    """The layer on a copy of what some lines of its output read, with its borders; or as it is.

    Parameters
    ----------
    ops : LayerOperands
        The layer.
    width, lines : int
        Pixels of a line, and most lines.
    span : Span
        The first and the last line.
    """
    layer, source, (first, last) = ops.layer, ops.source, span
    if ops.rounding is None and not any(layer.padding):
        return ops
    if ops.rounding is not None:
        narrow = rounded(replace(ops, lanes=TILE_WORDS), (first, last + 1), lines)
        return replace(narrow, lanes=ops.lanes)
    reach = [(layer.kernel[i] - 1) * layer.dilation[i] + 1 for i in range(2)]
    height = (lines - 1) * layer.strides[0] + reach[0]
    width = (width - 1) * layer.strides[1] + reach[1]
    top, before = first * layer.strides[0] - layer.padding[0], layer.padding[1]
    words, step = source.lanes, width * source.lanes
    blocks = -(-layer.in_channels // words)
    copy = T.sblock_alloc_buffer((blocks * height * step,), "int32")
    inside = max(0, min(source.width, width - before))
    zeros = T.broadcast(T.int32(0), words) if words > 1 else T.int32(0)

    def pixel(place: Index) -> Index:
        return T.ramp(place, 1, words) if words > 1 else place

    with T.serial(0, blocks) as block:
        with T.serial(0, (last - first) * layer.strides[0] + reach[0]) as row:
            to, line = bound(block * (height * step) + row * step), row + top

            def clear(start: int, stop: int, to: Index = to) -> None:
                if start < stop:
                    with loop(start, stop) as column:
                        T.buffer_store(copy, zeros, [pixel(to + column * words)])

            with T.If(tirx.all(line >= 0, line < source.height)):
                with T.Then():
                    clear(0, min(before, width))
                    with loop(0, inside) as column:
                        value = source.buffer[pixel(source.at(block, line, column))]
                        T.buffer_store(copy, value, [pixel(to + (before + column) * words)])
                    clear(before + inside, width)
                with T.Else():
                    clear(0, width)
    stored = FeatureMap(
        buffer=copy,
        offset=before * words,
        block_stride=height * step,
        row_stride=step,
        lanes=words,
        height=source.height,
        width=source.width,
        first_row=top,
        is_local=True,
    )
    return replace(ops, source=stored)


@dataclass
class _TileNest:
    """Loops of one task over groups of tiles.

    Parameters
    ----------
    ops : LayerOperands
        The layer, whose source has its borders.
    geometry : TileGeometry
        Its tiles.
    knobs : TileConv2DKnobs
        The setting.
    unit : TileUnit
        The registers.
    packed : int
        Channel tiles whose outputs are packed into a vector.
    """

    ops: LayerOperands
    geometry: TileGeometry
    knobs: TileConv2DKnobs
    unit: TileUnit
    packed: int

    def __post_init__(self) -> None:
        tiles = self.knobs.pixel_tiles * self.knobs.channel_tiles
        self._sums = T.sblock_alloc_buffer((tiles * TILE_ELEMENTS,), "int32")
        # First channel tile of the group whose sums these are, and places of its pixels.
        self._state = T.sblock_alloc_buffer((1 + 2 * self.knobs.pixel_tiles,), "int32")

    def write(self, pixels: Span, channels: Span) -> None:
        """Compute the groups of a chunk, in a block that is declared to use all of its buffers.

        Else TVM's ``CompactBufferAllocation`` joins the regions of all accesses, for a third of the
        time of a compilation.
        """
        source = self.ops.source
        used = [self._sums, self._state]
        used += [image.buffer for image in (source, self.ops.output) if image.is_local]
        regions, numbers = [each[0 : each.shape[0]] for each in used], list(range(len(used)))
        with T.sblock("groups"):
            T.reads(*regions)
            T.writes(*regions)
            T.sblock_attr({"explicit_read_region": numbers, "explicit_write_region": numbers})
            self._write(pixels, channels)

    def _write(self, pixels: Span, channels: Span) -> None:
        """Loop over the groups.

        Interleaved, the first group has none before it: it makes output of what is in the buffer of
        sums, at its own place, where its own output follows.
        """
        if self.knobs.interleaved:
            self._remember(channels[0], pixels[0])
        with loop(*channels) as channel, loop(*pixels) as pixel:
            self._multiply(channel, pixel)
            self._remember(channel, pixel)
            for tile in range(self.knobs.pixel_tiles * self.knobs.channel_tiles):
                self.unit.store(tile, self._sums, tile * TILE_ELEMENTS)
            if not self.knobs.interleaved:
                self._finish(0, self._rows)
        if self.knobs.interleaved:
            self._finish(0, self._rows)

    @property
    def _rows(self) -> int:
        """Rows of sums of a group."""
        return self.knobs.pixel_tiles * self.knobs.rows

    def _first_channels(self, group: Index) -> Index:
        """First channel tile of a group."""
        tiles, count = self.geometry.channel_tiles, self.knobs.channel_tiles
        first = group * count
        return tirx.min(first, tiles - count) if tiles % count else first

    def _pixel(self, group: Index, number: int) -> tuple[Index, Index]:
        """Line and column of the first pixel of a tile."""
        geometry, rows = self.geometry, self.knobs.rows
        tiles = geometry.tiles_of_line(rows)
        unit = _unit(geometry, self.knobs, group, number)
        column = tirx.floormod(unit, tiles) * rows
        if geometry.width % rows:
            column = tirx.min(column, geometry.width - rows)
        return tirx.floordiv(unit, tiles), column

    def _remember(self, channel: Index, pixel: Index) -> None:
        """Note where the sums of a group belong."""
        T.buffer_store(self._state, self._first_channels(channel), [0])
        images = [self.ops.output, self.ops.residual]
        for number in range(self.knobs.pixel_tiles):
            at = self._pixel(pixel, number)
            for kind, image in enumerate(images):
                if image is not None:
                    place = replace(image, offset=0).at(0, *at)
                    T.buffer_store(self._state, place, [1 + 2 * number + kind])

    def _multiply(self, channel: Index, pixel: Index) -> None:
        """Sum up the products of a group, with the output of the group before between them."""
        knobs, layer, steps = self.knobs, self.ops.layer, self.geometry.steps
        for tile in range(knobs.pixel_tiles * knobs.channel_tiles):
            self.unit.zero(tile)
        first = self._first_channels(channel)
        weights = [bound(self._weight(first + n)) for n in range(knobs.channel_tiles)]
        starts = [self._start(first + n) for n in range(self.geometry.loads(knobs))]
        origins = []
        for number in range(knobs.pixel_tiles):
            line, column = self._pixel(pixel, number)
            row = line * layer.strides[0] - layer.padding[0]
            column = column * layer.strides[1] - layer.padding[1]
            at = self.ops.source.at(0, row, column)
            origins.append([bound(at + start) for start in starts])
        carrying = 0
        if knobs.interleaved:
            each = -(-self._rows // steps)
            carrying = -(-self._rows // each)
            with loop(0, carrying) as step:
                self._step(step, origins, weights, (step * each, each))
        whole, rest = divmod(steps - carrying, knobs.unrolled)
        if whole:
            with loop(0, whole) as part:
                for step in unrolled(knobs.unrolled):
                    self._step(carrying + part * knobs.unrolled + step, origins, weights)
        for step in range(steps - rest, steps):
            self._step(step, origins, weights)

    def _start(self, tile: Index) -> Index:
        """Place of the first word that a channel tile reads, from that of the pixel."""
        layer, source, tiles = self.ops.layer, self.ops.source, self.geometry.group_tiles
        if layer.groups == 1:
            return 0
        group = tirx.floordiv(tile, tiles)
        if tiles * layer.groups < self.geometry.channel_tiles:  # the last ones belong to none
            group = tirx.min(group, layer.groups - 1)
        word = group * (layer.in_channels // layer.groups)
        block = tirx.floordiv(word, source.lanes)
        return block * source.block_stride + tirx.floormod(word, source.lanes)

    def _weight(self, tile: Index) -> Index:
        """Place of the weights of a channel tile."""
        each = self.ops.lanes // TILE_WORDS
        block = self.geometry.steps * self.geometry.depth * self.ops.lanes
        return tirx.floordiv(tile, each) * block + tirx.floormod(tile, each) * TILE_WORDS

    def _step(
        self,
        step: Index,
        origins: Sequence[Sequence[Index]],
        weights: Sequence[Index],
        rows: tuple[Index, int] = (0, 0),
    ) -> None:
        """All products of a step; after each of them, its share of some rows of older sums."""
        ops, geometry, knobs, layer = self.ops, self.geometry, self.knobs, self.ops.layer
        taps = layer.kernel[0] * geometry.columns
        tap = tirx.floormod(step, taps)
        down, right = tirx.floordiv(tap, geometry.columns), tirx.floormod(tap, geometry.columns)
        moved = bound(
            tirx.floordiv(step, taps) * ops.source.block_stride
            + down * (layer.dilation[0] * ops.source.row_stride)
            + right * (layer.dilation[1] * ops.source.step)
        )
        first, count = rows
        products = knobs.pixel_tiles * knobs.channel_tiles
        for number in range(products):
            pixel, channel = divmod(number, knobs.channel_tiles)
            left = _LEFT + (pixel if len(origins[0]) == 1 else number % 2)
            if channel < len(origins[0]):
                stride, place = layer.strides[1] * ops.source.step, origins[pixel][channel] + moved
                self.unit.load(left, ops.source.buffer, place, stride)
            if pixel == 0:
                place = weights[channel] + step * (geometry.depth * ops.lanes)
                self.unit.load(_RIGHT + channel % 2, ops.weight, place, ops.lanes)
            self.unit.multiply(number, left, _RIGHT + channel % 2)
            if count * knobs.channel_tiles > _FEW_VECTORS:
                start, stop = number * count // products, (number + 1) * count // products
            else:  # all after the last product
                start, stop = 0, count * (number == products - 1)
            if start < stop:
                self._finish(first + start, stop - start)

    def _finish(self, first: Index, count: int) -> None:
        """Make output of some rows of the sums; beyond the last row, of that again."""
        ops, tiles, rows = self.ops, self.knobs.channel_tiles, self.knobs.rows
        with loop(0, count) as number:
            row = bound(tirx.min(first + number, self._rows - 1))
            tile, pixel = tirx.floordiv(row, rows), tirx.floormod(row, rows)
            sums = tile * (tiles * TILE_ELEMENTS) + pixel * TILE_WORDS
            places = [
                bound(self._state[1 + 2 * tile + kind] + pixel * image.step + image.offset)
                for kind, image in enumerate((ops.output, ops.residual))
                if image is not None
            ]
            values = [self._value(n, sums + n * TILE_ELEMENTS, places[-1]) for n in range(tiles)]
            each = self.packed
            for n in range(0, tiles, each):
                value = self._packed(values[n : n + each]) if each > 1 else ended(ops, values[n])
                ops.output.store(value, self._place(n, places[0], ops.output))

    def _value(self, number: int, sums: Index, residual: Index) -> tirx.Expr:
        """Sums of a channel tile, with what follows them up to the rounding."""
        ops, floats = replace(self.ops, lanes=TILE_WORDS), f"float32x{TILE_WORDS}"
        value = self._sums[T.ramp(sums, 1, TILE_WORDS)]
        channel = T.ramp((self._state[0] + number) * TILE_WORDS, 1, TILE_WORDS)
        bias = None if ops.bias is None else ops.bias[channel]
        if ops.scale is not None and bias is not None:
            value = scaled_sum(value, bias, ops.scale[channel])
        else:
            value = T.reinterpret(floats, value)
            value = value if bias is None else value + bias
        if ops.residual is None:
            return value
        return with_residual(ops, value, self._place(number, residual, ops.residual))

    def _packed(self, values: Sequence[tirx.Expr]) -> tirx.Expr:
        ops = self.ops
        if ops.out_dtype == "uint8":
            return packed_bytes(values, ops.ending)
        low, high = (activate(value, ops.ending, "float32") for value in values)
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        both = T.call_llvm_pure_intrin("bfloat16x32", name, high, low)
        return T.reinterpret("uint16x32", both)

    def _place(self, number: int, pixel: Index, image: FeatureMap) -> Index:
        """Place of a channel tile of a pixel, from that of the pixel in the first block."""
        each, first = self.ops.lanes // TILE_WORDS, self._state[0]
        if each % self.knobs.channel_tiles == 0:  # all tiles in one block
            block, lane = tirx.floordiv(first, each), tirx.floormod(first, each) + number
        else:
            block, lane = (f(first + number, each) for f in (tirx.floordiv, tirx.floormod))
        step = TILE_WORDS * image.lanes // self.ops.lanes
        return pixel + block * image.block_stride + lane * step
