# SPDX-License-Identifier: Apache-2.0
"""Register tiles of a depthwise and of a pointwise layer on NCHW planes: pixels in the lanes.

A vector holds ``x`` neighbouring pixels of one channel, and weights are single elements, broadcast.
So neither layer has to change the layout of what it reads or writes. The depthwise tile computes
``R`` rows of one vector; every input row is loaded once for each kernel column and serves all rows
that see it. Steps of two pixels are gathered by one shuffle of two vectors, which leaves the pixels
of a vector in an order that the finished sums undo. At the border of the image lanes are filled
with zeros, and rows outside are left out.

The functions here may only be called between the ``with`` statements of an open ``IRBuilder``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from ..compute.conv2d import activate
from ..conv2d_workload import ConvLayer
from .micro_kernel import Index, loop


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
        Extents beyond which zeros are read.
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
        """The image as a buffer of its own that begins with a row of a channel, for reading.

        Addresses are then that row's plus a constant, which instructions add for nothing.
        """
        pointer = ir.PointerType(ir.PrimType(self.buffer.dtype))
        start = T.bind(T.address_of(self.buffer[self.at(channel, row, 0)]), pointer)
        buffer = T.decl_buffer(self.buffer.shape, self.buffer.dtype, data=start)
        return replace(self, buffer=buffer, offset=0)


def _prefetch(buffer, offset, level):
    address = T.address_of(buffer[offset])
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", address, T.int32(0), T.int32(level), T.int32(1)))


def vector_starts(extent: int, lanes: int) -> list[int]:
    """First elements of the vectors that cover a range; the last one may overlap its neighbour."""
    return [min(start, extent - lanes) for start in range(0, extent, lanes)]


def reads_whole_vectors(layer: ConvLayer, width: int, start: int, lanes: int) -> bool:
    """Whether all that the pixels ``[start, start + lanes)`` read lies inside the row."""
    first = start * layer.strides[1] + _shift(layer, 0)[0]
    last = start * layer.strides[1] + _shift(layer, layer.kernel[1] - 1)[0]
    return first >= 0 and last + layer.strides[1] * lanes <= width


@dataclass(frozen=True)
class DepthwiseRows:
    """The part of a depthwise layer that :func:`depthwise_vector` computes.

    Parameters
    ----------
    layer : ConvLayer
        The layer; strides of the columns are 1 or 2.
    source, output : PlanarImage
        Input and output.
    lanes : int
        Pixels of a vector.
    channel : Index
        Channel of input and output.
    rows : int
        How many output rows, ``R``.
    source_row, output_row : Index
        Input row of the first output row's first kernel row, and that output row.
    visible : tuple[int, int]
        Which rows from ``source_row`` on exist.
    weights : Sequence[tirx.Expr]
        Vectors of equal lanes, by kernel row and column.
    bias : tirx.Expr
        Likewise.
    """

    layer: ConvLayer
    source: PlanarImage
    output: PlanarImage
    lanes: int
    channel: Index
    rows: int
    source_row: Index
    output_row: Index
    visible: tuple[int, int]
    weights: Sequence[tirx.Expr]
    bias: tirx.Expr


def depthwise_vector(part: DepthwiseRows, column: Index, inside: bool) -> None:
    """Compute the pixels ``[column, column + lanes)`` of some rows.

    Parameters
    ----------
    part : DepthwiseRows
        The rows.
    column : Index
        First pixel; an int where ``inside`` is false.
    inside : bool
        Whether all columns that they read exist.
    """
    layer, dtype = part.layer, part.source.buffer.dtype
    kernel_h, kernel_w = layer.kernel
    sums = [part.bias] * part.rows
    for row in range(*part.visible):
        users = [
            (out, (row - out * layer.strides[0]) // layer.dilation[0])
            for out in range(part.rows)
            if (row - out * layer.strides[0]) % layer.dilation[0] == 0
        ]
        users = [(out, kh) for out, kh in users if 0 <= kh < kernel_h]
        if not users:
            continue
        base = part.source.at(0, row - part.visible[0], 0)
        import os
        pf = os.environ.get("PF", "0")
        if pf != "0" and inside:
            _prefetch(part.source.buffer, base + part.source.plane + column * layer.strides[1], int(pf))
        for kw in range(kernel_w):
            window = _window(part, base, column, kw, inside)
            if window is None:
                continue
            for out, kh in users:
                weight = part.weights[kh * kernel_w + kw]
                sums[out] = T.bind(sums[out] + window * weight)
    for out, value in enumerate(sums):
        value = activate(value, layer.activation, dtype)
        if layer.strides[1] == 2:
            value = tirx.Shuffle([value], _gathered(part.lanes))
        at = part.output.at(0, part.output_row + out, column)
        T.buffer_store(part.output.buffer, value, [T.ramp(at, 1, part.lanes)])


def _gathered(lanes: int) -> list[int]:
    """Which pixel each lane holds after steps of two were gathered; also the way back.

    Each quarter of four lanes takes two elements of either vector, as x86 does it.
    """
    if lanes < 8:
        return list(range(lanes))
    quarter = [0, 1, lanes // 2, lanes // 2 + 1]
    return [start + lane for start in range(0, lanes // 2, 2) for lane in quarter]


def _window(part: DepthwiseRows, base: Index, column: Index, kw: int, inside: bool) -> tirx.Expr | None:
    """The input of ``lanes`` neighbouring outputs for one tap; None where all of it is padding."""
    lanes, stride, width = part.lanes, part.layer.strides[1], part.source.width
    buffer = part.source.buffer
    shift, odd = _shift(part.layer, kw)
    order = _gathered(lanes) if stride == 2 else list(range(lanes))
    low = column * stride + shift
    if not inside:
        assert isinstance(low, int)
        low = max(0, min(low, width - stride * lanes))
    vectors = [
        buffer[T.ramp(base + (low + number * lanes), 1, lanes)] for number in range(stride)
    ]
    if inside:
        picked = [stride * pixel + odd for pixel in order]
        return T.bind(vectors[0] if stride == 1 else tirx.Shuffle(vectors, picked))
    columns = [column * stride + shift + odd + stride * pixel for pixel in order]
    real = [0 <= column < width for column in columns]
    if not any(real):
        return None
    picked = [column - low if is_real else lane for lane, (column, is_real) in enumerate(zip(columns, real, strict=True))]
    found = vectors[0] if picked == list(range(lanes)) else T.bind(tirx.Shuffle(vectors, picked))
    if all(real):
        return found
    zero = T.broadcast(tirx.const(0, buffer.dtype), lanes)
    kept = [lane if is_real else lanes + lane for lane, is_real in enumerate(real)]
    return T.bind(tirx.Shuffle([found, zero], kept))


def _shift(layer: ConvLayer, kw: int) -> tuple[int, int]:
    """Where a kernel column's vectors begin, and whether it takes the even or the odd elements.

    Two kernel columns share the vectors that begin at an even distance.
    """
    shift = kw * layer.dilation[1] - layer.padding[1]
    odd = shift % 2 if layer.strides[1] == 2 else 0
    return shift - odd, odd


@dataclass(frozen=True)
class PointwiseOperands:
    """What :func:`pointwise_tile` reads and writes.

    Parameters
    ----------
    layer : ConvLayer
        The layer.
    source, output : PlanarImage
        Input and output, each as one row of pixels a channel.
    weight, bias : tirx.Buffer
        Flat, in the packed layouts of :mod:`schedules.compute.conv2d`.
    lanes : int
        Pixels of a vector; also channels of a block of the weights.
    """

    layer: ConvLayer
    source: PlanarImage
    output: PlanarImage
    weight: tirx.Buffer
    bias: tirx.Buffer
    lanes: int


def pointwise_tile(
    ops: PointwiseOperands, block: Index, lane: int, outputs: int, starts: Sequence[Index]
) -> None:
    """Compute some output channels of some vectors of pixels.

    Parameters
    ----------
    ops : PointwiseOperands
        The layer.
    block, lane, outputs : Index, int, int
        Channels ``[lane, lane + outputs)`` of a block.
    starts : Sequence[Index]
        First pixels of the vectors.
    """
    lanes, channels = ops.lanes, ops.layer.in_channels
    dtype = ops.source.buffer.dtype
    vectors = len(starts)
    with T.sblock("tile"):
        T.reads()
        T.writes()
        sums = T.sblock_alloc_buffer((outputs * vectors * lanes,), dtype)

        def at(o: int, v: int) -> tirx.Expr:
            return T.ramp((o * vectors + v) * lanes, 1, lanes)

        for o in range(outputs):
            bias = T.bind(T.broadcast(ops.bias[block * lanes + lane + o], lanes))
            for v in range(vectors):
                T.buffer_store(sums, bias, [at(o, v)])
        in_blocks = -(-channels // lanes)

        def step(in_block: Index, count: int) -> None:
            weights = (block * in_blocks + in_block) * (lanes * lanes) + lane
            for i in range(count):
                pixels = [
                    T.bind(ops.source.buffer[T.ramp(ops.source.at(in_block * lanes + i, 0, start), 1, lanes)])
                    for start in starts
                ]
                for o in range(outputs):
                    weight = T.bind(T.broadcast(ops.weight[weights + (i * lanes + o)], lanes))
                    for v, pixel in enumerate(pixels):
                        T.buffer_store(sums, sums[at(o, v)] + pixel * weight, [at(o, v)])

        full, rest = divmod(channels, lanes)
        if full:
            with loop(0, full) as in_block:
                step(in_block, lanes)
        if rest:
            step(full, rest)
        for o in range(outputs):
            for v, start in enumerate(starts):
                value = activate(sums[at(o, v)], ops.layer.activation, dtype)
                target = ops.output.at(block * lanes + lane + o, 0, start)
                T.buffer_store(ops.output.buffer, value, [T.ramp(target, 1, lanes)])
