# SPDX-License-Identifier: Apache-2.0
"""Register tiles of a depthwise and of a pointwise layer on NCHW planes: pixels in the lanes.

A vector holds ``x`` neighbouring pixels of one channel, and weights are single elements, broadcast.
So neither layer has to change a layout. The depthwise tile computes ``R`` rows of one vector; every
input row is loaded once for each kernel column and serves all rows that see it. In steps of two
pixels, neighbouring pixels are multiplied by the weights of two neighbouring kernel columns, and
only the finished sums are added in pairs, so that rows need no shuffles. At the border of the image
lanes are filled with zeros, and rows outside are left out.

The functions here may only be called between the ``with`` statements of an open ``IRBuilder``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from schedules.compute.conv2d import activate
from schedules.workload.conv2d import ConvLayer

from ...core.micro_kernel import UNROLLED_STEPS, Index, accumulators, bound, loop, unrolled
from ...core.prefetch import line_elements, prefetch


@dataclass(frozen=True)
class PlanarImage:
    """Rows of an image in NCHW: ``buffer[offset + channel * plane + row * width + column]``.

    Parameters
    ----------
    buffer : tirx.Buffer
        One-dimensional.
    offset : Index
        Element of channel 0, row 0, column 0.
    plane : int
        Elements from one channel to the next.
    height, width : int
        Extents, beyond which zeros are read.
    """

    buffer: tirx.Buffer
    offset: Index
    plane: int
    height: int
    width: int

    def at(self, channel: Index, row: Index, column: Index) -> Index:
        """Element of a pixel."""
        return self.offset + channel * self.plane + row * self.width + column

    def seen_from(self, channel: Index, row: Index) -> PlanarImage:
        """The image in a separate buffer that begins with a row of a channel; only for reading.

        Addresses are then that row's plus a constant, which addressing modes add for free.
        """
        pointer = ir.PointerType(ir.PrimType(self.buffer.dtype))
        start = T.bind(T.address_of(self.buffer[self.at(channel, row, 0)]), pointer)
        buffer = T.decl_buffer(self.buffer.shape, self.buffer.dtype, data=start)
        return replace(self, buffer=buffer, offset=0)


def vector_starts(extent: int, lanes: int) -> list[int]:
    """First elements of the vectors that cover a range; the last one may overlap its neighbour."""
    return [min(start, extent - lanes) for start in range(0, extent, lanes)]


def reads_whole_vectors(layer: ConvLayer, width: int, start: int, lanes: int) -> bool:
    """Return whether all vectors for the pixels ``[start, start + lanes)`` lie inside the row."""
    stride, groups = layer.strides[1], column_groups(layer)
    first = start * stride - layer.padding[1]
    return first >= 0 and first + groups[-1][0] + stride * lanes <= width


@dataclass(frozen=True)
class DepthwiseRows:
    """The part of a depthwise layer that :func:`depthwise_vector` computes.

    Parameters
    ----------
    layer : ConvLayer
        The layer; steps of one or two columns.
    source : PlanarImage
        Input, as :meth:`PlanarImage.seen_from` its channel and the first of the rows that exist.
    output : PlanarImage
        Begins with the output of the channel.
    lanes : int
        Pixels of a vector.
    rows, output_row : int
        Number of output rows, ``R``, and the first of them.
    visible : tuple[int, int]
        Range of the input rows that exist, counted from the first kernel row.
    weights : Sequence[tirx.Expr]
        Vectors of the weights of :func:`column_groups`, by kernel row and group.
    bias : tirx.Expr
        Vector with which the sums begin.
    paired : bool
        Whether the output is left in :func:`paired_order`, which steps of two produce.
    """

    layer: ConvLayer
    source: PlanarImage
    output: PlanarImage
    lanes: int
    rows: int
    output_row: int
    visible: tuple[int, int]
    weights: Sequence[tirx.Expr]
    bias: tirx.Expr
    paired: bool

    def users(self, row: int) -> list[tuple[int, int]]:
        """Output rows that read an input row, and the kernel row by which they do."""
        stride, dilation = self.layer.strides[0], self.layer.dilation[0]
        found = []
        for out in range(self.rows):
            kernel_row, rest = divmod(row - out * stride, dilation)
            if rest == 0 and 0 <= kernel_row < self.layer.kernel[0]:
                found.append((out, kernel_row))
        return found


def depthwise_vector(part: DepthwiseRows, column: Index, inside: bool) -> None:
    """Compute the pixels ``[column, column + lanes)`` of some rows.

    Parameters
    ----------
    part : DepthwiseRows
        The rows.
    column : Index
        First pixel; an int where ``inside`` is false.
    inside : bool
        Whether :func:`reads_whole_vectors` is true of it.
    """
    layer, buffer, stride = part.layer, part.source.buffer, part.layer.strides[1]
    groups, line = column_groups(layer), line_elements(buffer.dtype)
    sums = [[part.bias] * stride for _ in range(part.rows)]
    for row in range(*part.visible):
        start = part.source.at(0, row - part.visible[0], 0)
        if inside or part.lanes >= line:
            # The hardware does not prefetch across the jump to the next channel's plane.
            ahead = start + part.source.plane + column * stride
            for element in range(0, stride * part.lanes, line):
                prefetch(buffer, ahead + element)
        users = part.users(row)
        places = [(half, group) for group in range(len(groups)) for half in range(stride)]
        for half, group in places if users else ():
            first = column * stride + half * part.lanes + groups[group][0] - layer.padding[1]
            window = _window(part, start, first, inside)
            if window is None:
                continue
            for out, kernel_row in users:
                weight = part.weights[kernel_row * len(groups) + group]
                sums[out][half] = T.bind(sums[out][half] + window * weight)
    for out, halves in enumerate(sums):
        value = halves[0]
        if stride == 2:
            value = _pair_sums(halves, part.lanes)
        value = activate(value, layer.activation, buffer.dtype)
        if stride == 2 and not part.paired:
            value = _in_pixel_order(value, part.lanes)
        at = part.output.at(0, part.output_row + out, column)
        T.buffer_store(part.output.buffer, value, [T.ramp(at, 1, part.lanes)])


def column_groups(layer: ConvLayer) -> list[tuple[int, tuple[float, ...]]]:
    """Kernel columns that a vector of input serves: the first one's shift, and each one's share.

    In steps of two, neighbouring columns form pairs. Of an odd number one column stands in two
    pairs, with half its weight in each, so that nothing is multiplied by zero.
    """
    columns = layer.kernel[1]
    if layer.strides[1] == 1:
        return [(column * layer.dilation[1], (1.0,)) for column in range(columns)]
    if columns % 2 == 0:
        return [(column, (1.0, 1.0)) for column in range(0, columns, 2)]
    pairs = [(column, (1.0, 1.0)) for column in range(0, columns - 3, 2)]
    return [*pairs, (columns - 3, (1.0, 0.5)), (columns - 2, (0.5, 1.0))]


def paired_order(lanes: int) -> list[int]:
    """Pixel in each lane after the sums of pairs.

    Each quarter of four lanes takes two elements of either vector, as one instruction of x86 does.
    """
    half = lanes // 2
    return [
        pixel for low in range(0, half, 2) for pixel in (low, low + 1, half + low, half + low + 1)
    ]


def _in_pixel_order(value: tirx.Expr, lanes: int) -> tirx.Expr:
    """A vector that is in :func:`paired_order`, with each pixel in its own lane."""
    order = paired_order(lanes)
    return tirx.Shuffle([value], [order.index(pixel) for pixel in range(lanes)])


def _pair_sums(halves: Sequence[tirx.Expr], lanes: int) -> tirx.Expr:
    """Sums of neighbouring elements of two vectors, in :func:`paired_order`."""
    order = paired_order(lanes)
    first, second = ([2 * pixel + odd for pixel in order] for odd in (0, 1))
    return T.bind(tirx.Shuffle(halves, first) + tirx.Shuffle(halves, second))


def _window(part: DepthwiseRows, row: Index, first: Index, inside: bool) -> tirx.Expr | None:
    """The pixels ``[first, first + lanes)`` of a row; None where all of it is padding."""
    lanes, buffer, width = part.lanes, part.source.buffer, part.source.width
    if inside:
        return T.bind(buffer[T.ramp(row + first, 1, lanes)])
    assert isinstance(first, int)
    low = max(0, min(first, width - lanes))
    real = [0 <= first + lane < width for lane in range(lanes)]
    if not any(real):
        return None
    found = T.bind(buffer[T.ramp(row + low, 1, lanes)])
    if all(real):
        return found
    zero = T.broadcast(tirx.const(0, buffer.dtype), lanes)
    picked = [first + lane - low if real[lane] else lanes + lane for lane in range(lanes)]
    return T.bind(tirx.Shuffle([found, zero], picked))


@dataclass(frozen=True)
class Ahead:
    """Lines of an image that :func:`pointwise_tile` prefetches, the same ones of each channel.

    The reduction over the channels takes long enough for the memory to answer.

    Parameters
    ----------
    image : PlanarImage
        Image with as many channels as are summed.
    start : Index
        Element of channel 0 from which the lines are counted.
    lines : int
        Number of lines of each channel.
    """

    image: PlanarImage
    start: Index
    lines: int


@dataclass(frozen=True)
class PointwiseOperands:
    """Operands of :func:`pointwise_tile`.

    Parameters
    ----------
    layer : ConvLayer
        The layer.
    source, output : PlanarImage
        Input and output; all pixels of the step are one row.
    weight, bias : tirx.Buffer
        Flat, in the packed layouts of :mod:`schedules.compute.conv2d`.
    lanes : int
        Pixels of a vector.
    block : int
        Channels of a block of the weights.
    paired : bool
        Whether the input's vectors are in :func:`paired_order`.
    """

    layer: ConvLayer
    source: PlanarImage
    output: PlanarImage
    weight: tirx.Buffer
    bias: tirx.Buffer
    lanes: int
    block: int
    paired: bool


def pointwise_tile(
    ops: PointwiseOperands,
    block: Index,
    lane: Index,
    outputs: int,
    starts: Sequence[Index],
    ahead: Ahead | None = None,
) -> None:
    """Compute some output channels of some vectors of pixels.

    Parameters
    ----------
    ops : PointwiseOperands
        The layer.
    block, lane, outputs : Index, Index, int
        Channels ``[lane, lane + outputs)`` of a block.
    starts : Sequence[Index]
        First pixels of the vectors.
    ahead : Ahead | None
        Lines that will be read after the layer, to prefetch.
    """
    lanes, dtype = ops.lanes, ops.source.buffer.dtype
    places = [(o, v) for o in range(outputs) for v in range(len(starts))]
    with T.sblock("tile"):
        T.reads()
        T.writes()
        sums = dict(zip(places, accumulators(len(places), lanes, dtype), strict=True))
        whole = T.ramp(0, 1, lanes)
        origin = bound(block * ops.block + lane)
        target = bound(ops.output.at(origin, 0, 0))
        # The output lines arrive while the sums are computed.
        for o in range(outputs):
            first = target + (o * ops.output.plane + starts[0])
            for element in range(0, len(starts) * lanes, line_elements(dtype)):
                prefetch(ops.output.buffer, first + element, write=True)
        for o, v in places:
            bias = ops.bias[origin + o]
            T.buffer_store(sums[o, v], T.broadcast(bias, lanes), [whole])
        for channel, weights in _input_channels(ops, block):
            if ahead is not None:
                first = ahead.start + channel * ahead.image.plane
                for line in range(ahead.lines):
                    prefetch(ahead.image.buffer, first + line * line_elements(dtype), level=2)
            pixels = [
                T.bind(ops.source.buffer[T.ramp(ops.source.at(channel, 0, start), 1, lanes)])
                for start in starts
            ]
            for o in range(outputs):
                weight = T.bind(T.broadcast(ops.weight[weights + (lane + o)], lanes))
                for v, pixel in enumerate(pixels):
                    T.buffer_store(sums[o, v], sums[o, v][whole] + pixel * weight, [whole])
        for o, v in places:
            value = activate(sums[o, v][whole], ops.layer.activation, dtype)
            if ops.paired:
                value = _in_pixel_order(value, lanes)
            at = target + (o * ops.output.plane + starts[v])
            T.buffer_store(ops.output.buffer, value, [T.ramp(at, 1, lanes)])


def _input_channels(ops: PointwiseOperands, block: Index) -> Iterator[tuple[Index, Index]]:
    """Open loops over the input channels, unrolled as far as registers allow.

    Yields a channel, and the offset of its weights for the channels of an output block.
    """
    size, channels = ops.block, ops.layer.in_channels
    blocks, steps = -(-channels // size), math.gcd(size, UNROLLED_STEPS)

    def some(first: Index, count: int) -> Iterator[tuple[Index, Index]]:
        for step in unrolled(count):
            channel = first + step
            yield channel, (block * (blocks * size) + channel) * size

    if channels % size == 0:
        with loop(0, blocks) as in_block, loop(0, size // steps) as part:
            yield from some(in_block * size + part * steps, steps)
        return
    whole, rest = divmod(channels, steps)
    if whole:
        with loop(0, whole) as part:
            yield from some(part * steps, steps)
    yield from some(channels - rest, rest)
