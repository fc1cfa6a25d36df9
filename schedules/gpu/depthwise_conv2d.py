# SPDX-License-Identifier: Apache-2.0
"""The GPU rule for one depthwise convolution in ``NCHW4c``.

A thread computes four channels of some pixels below each other. It walks down the rows of the
data that they see: the taps of a row are loaded once, 16 bytes each, and serve all outputs that
reach the row. Neighbouring threads have neighbouring columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from ..branch import when
from ..conv2d_workload import Conv2DKernel
from .conv2d import batch_of, packed_kernel
from .conv_epilogue import Epilogue, lanes_at
from .conv_memory import at_once, copy4, flat_view, zero4
from .conv_shape import LANES, ConvShape, Index, inside
from .device import GPUInfo
from .kernel_function import write_function

THREADS = 128
MOST_TAPS = 49  # the nest is unrolled
HELD_TAPS = 25  # weights that a thread can keep in registers
FULL = 512  # threads of a multiprocessor that hide the latency of memory; an estimate


class DepthwiseConv2D(GPUScheduleRule):
    """Computes a depthwise convolution, with rows of the data reused in registers.

    Takes what :class:`schedules.gpu.Conv2D` takes, but depthwise layers, of up to 49 taps; returns
    None for everything else.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Write the kernel, or return None if the rule does not know the function."""
        kernel = packed_kernel(func, target, layers=1)
        if kernel is None or not kernel.layers[0].is_depthwise or kernel.data_layout == "NCHW":
            return None
        shape = ConvShape.of(kernel, batch_of(func))
        if shape.taps > MOST_TAPS:
            return None
        return depthwise_template(func, kernel, choose_rows(shape, GPUInfo.from_target(target)))


def choose_rows(shape: ConvShape, gpu: GPUInfo) -> int:
    """How many outputs a thread computes: as many as leave threads for all multiprocessors.

    An estimate, measured on no GPU. A symbolic batch counts as one image.
    """
    images = shape.batch if isinstance(shape.batch, int) else 1
    height, width = shape.out_size
    for rows in (4, 2):
        threads = images * shape.out_planes * -(-height // rows) * width
        waste = -(-height // rows) * rows / height
        if threads >= FULL * gpu.multiprocessors and waste < 1.2:
            return rows
    return 1


def depthwise_template(func: tirx.PrimFunc, kernel: Conv2DKernel, rows: int) -> s_tir.Schedule:
    """Write the kernel.

    Parameters
    ----------
    func : tirx.PrimFunc
        A function with the parameters data, weight, bias[, residual], output.
    kernel : Conv2DKernel
        Its workload.
    rows : int
        Outputs of a thread.
    """
    shape = ConvShape.of(kernel, batch_of(func))
    height, width = shape.out_size
    strips = -(-height // rows)
    count = shape.const(shape.batch) * (shape.out_planes * strips * width)

    def body() -> None:
        with (
            T.launch_thread("blockIdx.x", (count + (THREADS - 1)) // THREADS) as block,
            T.launch_thread("threadIdx.x", shape.const(THREADS)) as thread,
        ):
            data, weight, bias, *residual, output = [flat_view(param) for param in func.params]
            item = T.bind(block * THREADS + thread)
            with when(item < count):
                plane, place = item // (strips * width), item % (strips * width)
                column = _Column(
                    shape, rows, plane, place // width * rows, place % width, data, weight
                )
                sums = column.add_all()
                epilogue = Epilogue(shape, bias, output, residual[0] if residual else None)
                loaded = epilogue.load_bias(column.channel)
                for number in range(rows):
                    row = column.row + number
                    with when(None if height % rows == 0 else row < height):
                        place = (plane * height + row) * width + column.column
                        epilogue.finish(place, loaded, lanes_at(sums, number * LANES))

    return s_tir.Schedule(tvm.IRModule({"main": write_function(func, body)}))


@dataclass(frozen=True)
class _Column:
    """Four channels of some outputs below each other.

    Parameters
    ----------
    shape : ConvShape
        The convolution.
    rows : int
        Number of outputs.
    plane : tirx.Expr
        Block of channels, counted over all images.
    row, column : tirx.Expr
        Place of the first output.
    data, weight : tirx.Buffer
        Flat views.
    """

    shape: ConvShape
    rows: int
    plane: tirx.Expr
    row: tirx.Expr
    column: tirx.Expr
    data: tirx.Buffer
    weight: tirx.Buffer

    @property
    def channel(self) -> tirx.Expr:
        """Block of channels."""
        return self.plane % self.shape.out_planes

    def add_all(self) -> tirx.Buffer:
        """Emit all rows of the data; returns registers ``[output][4]``."""
        layer = self.shape.layer
        sums = T.alloc_buffer((self.rows * LANES,), "float32", scope="local")
        for number in range(self.rows):
            zero4(sums, number)
        held = self._hold_weights()
        reach = (self.rows - 1) * layer.strides[0] + (layer.kernel[0] - 1) * layer.dilation[0] + 1
        for offset in range(reach):
            reached = self._reached(offset)
            if reached:
                self._add_row(sums, held, offset, reached)
        return sums

    def _reached(self, offset: int) -> list[tuple[int, int]]:
        """Which outputs see a row, ``offset`` behind the first one's first, by which kernel row."""
        layer, found = self.shape.layer, []
        for number in range(self.rows):
            tap, rest = divmod(offset - number * layer.strides[0], layer.dilation[0])
            if rest == 0 and 0 <= tap < layer.kernel[0]:
                found.append((number, tap))
        return found

    def _hold_weights(self) -> tirx.Buffer | None:
        """Registers with all weights, or None where they are too many."""
        taps = self.shape.taps
        if taps > HELD_TAPS:
            return None
        held = T.alloc_buffer((taps * LANES,), "float32", scope="local")
        for tap in range(taps):
            copy4(held, tap, self.weight, self.channel * taps + tap)
        return held

    def _add_row(
        self,
        sums: tirx.Buffer,
        held: tirx.Buffer | None,
        offset: int,
        reached: list[tuple[int, int]],
    ) -> None:
        """Load the taps of one row of the data, and add them to the outputs that see it."""
        layer, across = self.shape.layer, self.shape.layer.kernel[1]
        seen = T.alloc_buffer((across * LANES,), "float32", scope="local")
        row = self.row * layer.strides[0] + (offset - layer.padding[0])
        for kw in range(across):
            column = self.column * layer.strides[1] + (kw * layer.dilation[1] - layer.padding[1])
            place = (self.plane * self.shape.size[0] + row) * self.shape.size[1] + column
            conditions = inside(self.shape, row, column)
            conditions += self._has_row(row)
            if conditions:
                zero4(seen, kw)
            with when(at_once(conditions)):
                copy4(seen, kw, self.data, place)
        for number, kh in reached:
            for kw in range(across):
                tap = kh * across + kw
                source, at = self._weight(held, tap)
                with T.unroll(LANES) as lane:
                    product = seen[kw * LANES + lane] * source[at * LANES + lane]
                    to = number * LANES + lane
                    T.buffer_store(sums, sums[to] + product, [to])

    def _has_row(self, row: tirx.Expr) -> list[tirx.Expr]:
        """Outputs below the last row, which are not stored, may see data that do not exist."""
        height = self.shape.out_size[0]
        return [] if height % self.rows == 0 else [row < self.shape.size[0]]

    def _weight(self, held: tirx.Buffer | None, tap: int) -> tuple[tirx.Buffer, Index]:
        """Where the weights of a tap are, in fours."""
        if held is not None:
            return held, tap
        loaded = T.alloc_buffer((LANES,), "float32", scope="local")
        copy4(loaded, 0, self.weight, self.channel * self.shape.taps + tap)
        return loaded, 0
