# SPDX-License-Identifier: Apache-2.0
"""Loop nest of a depthwise and a pointwise layer on NCHW data, with NCHW output.

Layer one's rows stay in a buffer of the parallel tile, as planes again::

    parallel n, h_t
      for step of h output rows
        for channel
          for row tile of at most R rows, vector of a row
            depthwise tile
        for tile of pixel vectors
          for tile of output channels
            pointwise tile
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from collections.abc import Iterator

from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T

from ..branch import when
from ..conv2d_workload import Conv2DKernel
from .kernel_builder import KernelBuilder
from .micro_kernel import Index, loop
from .planar_tile import (
    DepthwiseRows,
    PlanarImage,
    PointwiseOperands,
    depthwise_vector,
    pointwise_tile,
    reads_whole_vectors,
    vector_starts,
)
from .tiles import chunk, split_evenly

PLANE_SKEW = 16


@dataclass(frozen=True)
class PlanarKnobs:
    """What the nest leaves open.

    Parameters
    ----------
    h_t : int
        Parallel pieces of the output's rows.
    h : int
        Rows of a step.
    rows : int
        Most rows of a depthwise tile.
    outputs, vectors : int
        Channels x vectors of pixels of a pointwise tile.
    """

    h_t: int
    h: int
    rows: int = 4
    outputs: int = 4
    vectors: int = 3


def takes_planar(kernel: Conv2DKernel) -> bool:
    """Whether the nest can compute a kernel."""
    if len(kernel.layers) != 2 or not (kernel.plain_data and kernel.plain_out) or kernel.residual:
        return False
    layer1, layer2 = kernel.layers
    if None in (kernel.height, kernel.width) or not (layer1.is_depthwise and layer2.is_pointwise):
        return False
    if kernel.lanes not in (4, 8) or layer1.strides[1] > 2:
        return False
    height, width = int(kernel.height or 1), int(kernel.width or 1)
    out_h, out_w = layer1.output_size(height, width)
    stride, top = layer1.strides[0], layer1.padding[0]
    reach = (layer1.kernel[0] - 1) * layer1.dilation[0]
    if out_w < kernel.lanes or width < layer1.strides[1] * kernel.lanes:
        return False
    # Only the first and the last output row may read rows outside of the image.
    return out_h > 2 and top <= stride and (out_h - 2) * stride - top + reach < height


def planar_template(func: tirx.PrimFunc, kernel: Conv2DKernel, knobs: PlanarKnobs) -> s_tir.Schedule:
    """Write the loop nest of the module's docstring."""
    builder = KernelBuilder(func)
    with builder.body():
        with T.parallel(0, builder.batch * knobs.h_t) as index:
            image, piece = tirx.floordiv(index, knobs.h_t), tirx.floormod(index, knobs.h_t)
            with T.sblock("parallel_tile"):
                T.reads()
                T.writes()
                _Piece(builder, kernel, knobs, image).build(piece)
    return builder.schedule()


class _Piece:
    """One parallel piece."""

    def __init__(self, builder, kernel, knobs, image):
        self.builder, self.kernel, self.knobs = builder, kernel, knobs
        self.lanes = kernel.lanes
        self.layer1, self.layer2 = kernel.layers
        height, width = int(kernel.height), int(kernel.width)
        self.height, self.width = self.layer1.output_size(height, width)
        self.pixels = knobs.h * self.width
        self.source = PlanarImage(
            builder.flat[0], image * (self.layer1.in_channels * height * width),
            height * width, height, width)
        plane = -(-self.pixels // self.lanes) * self.lanes + PLANE_SKEW
        self.mid = PlanarImage(
            T.sblock_alloc_buffer((self.layer1.out_channels * plane,), kernel.dtype), 0, plane, knobs.h, self.width)
        size = self.height * self.width
        self.output = PlanarImage(
            builder.flat[-1], image * (self.layer2.out_channels * size), size, self.height, self.width)

    def build(self, piece):
        start, stop = chunk(self.height, piece, self.knobs.h_t)
        h = self.knobs.h
        count = stop - start
        trips = -(-count // h) if isinstance(count, int) else tirx.ceildiv(count, h)
        if self.height % self.knobs.h_t == 0:
            trips = -(-(self.height // self.knobs.h_t) // h)
        exact = self.height % (self.knobs.h_t * h) == 0
        with loop(0, trips) as step:
            # The last step ends with the last row, and may overlap the one before.
            row = start + step * h
            row = row if exact else tirx.min(row, stop - h)
            row = T.bind(row) if not isinstance(row, int) else row
            import os
            if os.environ.get('SKIP')!='dw':
              for channel in self.channels():
                self.depthwise(channel, row)
            if os.environ.get('SKIP')!='pw': self.pointwise(row)

    def channels(self):
        full, rest = divmod(self.layer1.in_channels, self.lanes)
        if full:
            with loop(0, full) as block:
                with T.serial(0, self.lanes) as lane:
                    yield (block, lane)
        if rest:
            with T.serial(0, rest) as lane:
                yield (full, lane)

    def depthwise(self, channel, row):
        block, lane = channel
        layer, lanes = self.layer1, self.lanes
        _, weight, bias = self.builder.flat[:3]
        taps = layer.kernel[0] * layer.kernel[1]
        weights = [T.bind(T.broadcast(weight[(block * taps + tap) * lanes + lane], lanes)) for tap in range(taps)]
        start = T.bind(T.broadcast(bias[block * lanes + lane], lanes))
        mid = replace(self.mid, offset=T.bind((block * lanes + lane) * self.mid.plane))
        first = 0
        sizes = split_evenly(self.knobs.h, self.knobs.rows)
        for index, size in enumerate(sizes):
            reach = (size - 1) * layer.strides[0] + (layer.kernel[0] - 1) * layer.dilation[0] + 1
            missing = layer.padding[0], max(0, (self.height - 1) * layer.strides[0] - layer.padding[0] + (layer.kernel[0] - 1) * layer.dilation[0] + 1 - self.source.height)
            part = DepthwiseRows(layer, self.source, mid, lanes, block * lanes + lane, size,
                (row + first) * layer.strides[0] - layer.padding[0], first, (0, reach), weights, start)
            at_top = row == 0 if index == 0 and missing[0] else None
            at_bottom = row == self.height - self.knobs.h if index == len(sizes) - 1 and missing[1] else None
            variants = [(None, (0, reach))]
            if at_top is not None:
                variants.append((at_top, (missing[0], reach)))
            if at_bottom is not None:
                variants.append((at_bottom, (0, reach - missing[1])))
            if at_top is not None and at_bottom is not None and self.knobs.h == self.height:
                variants = [(True, (missing[0], reach - missing[1]))]
            rest = [tirx.Not(c) for c, _ in variants if c is not None]
            for condition, visible in variants:
                with when(*(rest if condition is None else [condition])):
                    self.row_tile(replace(part, visible=visible))
            first += size

    def row_tile(self, part):
        part = replace(part, source=part.source.seen_from(part.channel, part.source_row + part.visible[0]))
        starts = vector_starts(self.width, self.lanes)
        inside = [reads_whole_vectors(self.layer1, self.source.width, s, self.lanes) for s in starts]
        index = 0
        while index < len(starts):
            end = index
            while end < len(starts) and inside[end] and (end == index or starts[end] % self.lanes == 0):
                end += 1
            if end == index:
                depthwise_vector(part, starts[index], False)
                index += 1
                continue
            with loop(0, end - index) as v:
                depthwise_vector(part, starts[index] + v * self.lanes if end - index > 1 else starts[index], True)
            index = end

    def pointwise(self, row):
        ops = PointwiseOperands(
            self.layer2, replace(self.mid, width=self.pixels),
            replace(self.output, offset=self.output.offset + row * self.width),
            self.builder.flat[3], self.builder.flat[4], self.lanes)
        starts = vector_starts(self.pixels, self.lanes)
        full = self.pixels // self.lanes
        tiles = split_evenly(len(starts), self.knobs.vectors)
        done = 0
        groups = []
        for size in tiles:
            exact = done + size <= full
            if groups and groups[-1][2] == size and exact:
                groups[-1][1] += 1
            else:
                groups.append([done, 1, size, exact])
            done += size
        for begin, count, size, exact in groups:
            with loop(0, count) as tile:
                if exact:
                    where = [(begin + tile * size + v) * self.lanes for v in range(size)]
                else:
                    where = starts[begin : begin + size]
                self.outputs(ops, where)

    def outputs(self, ops, starts):
        full, rest = divmod(self.layer2.out_channels, self.lanes)
        if full:
            with loop(0, full) as block:
                self.block(ops, block, self.lanes, starts)
        if rest:
            self.block(ops, full, rest, starts)

    def block(self, ops, block, channels, starts):
        lane = 0
        for size in split_evenly(channels, self.knobs.outputs):
            pointwise_tile(ops, block, lane, size, starts)
            lane += size
