# SPDX-License-Identifier: Apache-2.0
"""The GPU rule for two fused convolutions in ``NCHW4c``, the second of them dense.

::

    for image, rectangle of output pixels, tile of output channels:     # blocks
        for chunk of the channels between the layers:
            first layer of the chunk, on the rectangle and its halo     # into shared memory
            sums += second layer's weights x the chunk                  # registers
        bias, residual, activation; store

Pixels between the layers that lie in the second layer's padding are zeros. Where a rectangle needs
a halo, or there are several tiles of channels, parts of the first layer are computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from ..branch import when
from ..compute.conv2d import activate
from ..conv2d_workload import Conv2DKernel, ConvLayer
from .conv2d import batch_of, packed_kernel
from .conv_epilogue import Epilogue, finish_tile
from .conv_gemm import (
    DataStage,
    GemmBlock,
    WeightStage,
    add_step,
    clear_sums,
    multiply,
    run_steps,
)
from .conv_memory import copy4, flat_view, zero4
from .conv_shape import LANES, ConvShape, Index, Window, inside
from .depthwise_column import Column
from .device import GPUInfo
from .device_ops import sync
from .fused_tiles import FusedTile, Pair, choose_fused_tile
from .kernel_function import write_kernels

MOST_TAPS = 49  # of a depthwise first layer, which is unrolled


class FusedConv2D(GPUScheduleRule):
    """Keeps what lies between two convolutions in shared memory.

    Takes functions that legalization marked as a fused pair of float32 on images of a known size
    (the batch may be symbolic) in ``NCHW4c``, or NCHW data with such an output, as far as
    :func:`unsupported` allows and a tile fits the device; returns None for everything else.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Write the kernel, or return None if the rule does not know the function."""
        kernel = packed_kernel(func, target, layers=2)
        if kernel is None or unsupported(*kernel.layers) is not None:
            return None
        tile = choose_fused_tile(pair_of(kernel, batch_of(func)), GPUInfo.from_target(target))
        return None if tile is None else fused_template(func, kernel, tile)


def unsupported(layer1: ConvLayer, layer2: ConvLayer) -> str | None:
    """Why no kernel of this module takes a pair, whatever its sizes; None if one may."""
    if layer2.groups != 1:
        return "the second layer has groups; the kernel reduces over all its input channels"
    if layer1.groups != 1 and not layer1.is_depthwise:
        return "the first layer has groups; the kernel takes dense and depthwise ones"
    if layer1.is_depthwise and layer1.kernel[0] * layer1.kernel[1] > MOST_TAPS:
        return f"the first layer is depthwise with more than {MOST_TAPS} taps"
    return None


def pair_of(kernel: Conv2DKernel, batch: tirx.Expr | int) -> Pair:
    """The shapes of both layers of a kernel."""
    first = ConvShape.of(kernel, batch)
    return Pair(first, ConvShape(kernel.layers[1], batch, first.out_size))


def fused_template(func: tirx.PrimFunc, kernel: Conv2DKernel, tile: FusedTile) -> s_tir.Schedule:
    """Write the kernel of the module's docstring.

    Parameters
    ----------
    func : tirx.PrimFunc
        A function with the parameters data, weight, bias, weight, bias[, residual], output.
    kernel : Conv2DKernel
        Its workload.
    tile : FusedTile
        How blocks and threads share the work.
    """
    pair = pair_of(kernel, batch_of(func))
    second = pair.second
    across = -(-second.out_size[1] // tile.width)
    tiles = -(-second.out_size[0] // tile.height) * across

    def body() -> None:
        with (
            T.launch_thread("blockIdx.y", second.const(-(-second.out_blocks // tile.blocks))) as y,
            T.launch_thread("blockIdx.x", second.const(second.batch) * tiles) as x,
            T.launch_thread("threadIdx.x", second.const(tile.threads)) as thread,
        ):
            views = [flat_view(param) for param in func.params]
            place = x % tiles
            row, column = place // across * tile.height, place % across * tile.width
            single = isinstance(second.batch, int) and second.batch == 1
            image: Index = 0 if single else x // tiles
            block = _Block(pair, tile, thread, image, row, column, y * tile.blocks, views)
            block.write(residual=kernel.residual)

    return s_tir.Schedule(tvm.IRModule({"main": write_kernels(func, body)}))


@dataclass(frozen=True)
class _Block:
    """What one block of threads computes.

    Parameters
    ----------
    pair, tile : Pair, FusedTile
        The layers, and extents of the block's part.
    thread : tirx.Expr
        Number of the thread.
    image, row, column : Index
        Where the rectangle of output pixels begins.
    block : tirx.Expr
        The first block of output channels.
    views : list[tirx.Buffer]
        The parameters, flat.
    """

    pair: Pair
    tile: FusedTile
    thread: tirx.Expr
    image: Index
    row: tirx.Expr
    column: tirx.Expr
    block: tirx.Expr
    views: list[tirx.Buffer]

    def write(self, residual: bool) -> None:
        """Emit everything."""
        tile, second = self.tile, self.pair.second
        gemm = GemmBlock(second, tile.second, self.thread, 0, self.block, self.views[3])
        size = tile.chunk * self.pair.mid_pixels(tile) * LANES
        mid = T.alloc_buffer((size,), "float32", scope="shared")
        weights = WeightStage(gemm)
        sums = clear_sums(tile.second)
        compute_first = self._first_layer(mid)
        add = self._second_layer(gemm, weights, sums, mid)
        steps = tile.chunk * second.taps // tile.quads
        with T.serial(0, self.pair.chunks(tile)) as chunk:
            weights.fetch(chunk * steps)
            compute_first(chunk * tile.chunk)
            sync()  # TVM may give both layers' weights the same memory
            run_steps([weights], chunk * steps, steps, add, fetched=True)
            sync()
        epilogue = Epilogue(second, self.views[4], self.views[-1], None)
        if residual:
            epilogue = replace(epilogue, residual=self.views[5])
        finish_tile(gemm, sums, epilogue, self._locate)

    def _locate(self, block: Index, pixel: Index) -> tuple[Index, tirx.Expr | None]:
        """Where the output has a pixel of the rectangle, and whether."""
        height, width = self.pair.second.out_size
        row, column = self.row + pixel // self.tile.width, self.column + pixel % self.tile.width
        conditions = [
            None if extent % step == 0 else place < extent
            for place, extent, step in (
                (row, height, self.tile.height),
                (column, width, self.tile.width),
            )
        ]
        given = [condition for condition in conditions if condition is not None]
        plane = self.image * self.pair.second.out_planes + block
        return (plane * height + row) * width + column, tirx.all(*given) if given else None

    # The first layer.

    def _first_layer(self, mid: tirx.Buffer) -> Callable[[tirx.Expr], None]:
        """What emits the first layer of a chunk, which begins with the given block."""
        layer = self.pair.second.layer
        row = T.bind(self.row * layer.strides[0] - layer.padding[0])
        column = T.bind(self.column * layer.strides[1] - layer.padding[1])
        if self.pair.first.layer.is_depthwise:
            return lambda block: self._depthwise(mid, block, row, column)
        return self._dense(mid, row, column)

    def _depthwise(
        self, mid: tirx.Buffer, block: tirx.Expr, row: tirx.Expr, column: tirx.Expr
    ) -> None:
        """A thread computes some pixels below each other of a block of channels."""
        tile, shape = self.tile, self.pair.first
        height, width = self.pair.mid_size(tile)
        strips = -(-height // tile.rows)
        items = tile.chunk * strips * width
        for turn in range(-(-items // tile.threads)):
            item = self.thread + turn * tile.threads
            own = block + item // (strips * width)
            y, x = item % (strips * width) // width * tile.rows, item % width
            with when(None if (turn + 1) * tile.threads <= items else item < items):
                channel = T.bind(tirx.min(own, shape.const(shape.out_blocks - 1)))
                plane = self.image * shape.planes + channel
                data, weight = self.views[:2]
                top, left = T.bind(row + y), T.bind(column + x)
                sums = Column(
                    shape, tile.rows, plane, channel, top, left, data, weight, anywhere=True
                ).add_all()
                bias = T.alloc_buffer((LANES,), "float32", scope="local")
                copy4(bias, 0, self.views[2], channel)
                for number in range(tile.rows):
                    at = item // (strips * width) * (height * width) + (y + number) * width + x
                    with when(None if height % tile.rows == 0 else y + number < height):
                        self._keep(mid, at, sums, number, bias, (top + number, left), own)

    def _dense(
        self, mid: tirx.Buffer, row: tirx.Expr, column: tirx.Expr
    ) -> Callable[[tirx.Expr], None]:
        """A product of matrices as that of a single convolution, on the pixels of the rectangle."""
        shape, width = self.pair.first, self.pair.mid_size(self.tile)[1]
        tile = self.tile.first(self.pair.mid_pixels(self.tile))
        gemm = GemmBlock(shape, tile, self.thread, 0, 0, self.views[1])
        weights = WeightStage(gemm)

        def window(pixel: tirx.Expr) -> Window:
            return self._first_window(row + pixel // width, column + pixel % width)

        data = DataStage(gemm, self.views[0], window)

        def compute(block: tirx.Expr) -> None:
            sums = multiply(gemm, weights.moved(block), data)
            self._keep_all(mid, gemm, sums, block, (row, column))

        return compute

    def _first_window(self, row: tirx.Expr, column: tirx.Expr) -> Window:
        """What a pixel between the layers sees; those outside see what the nearest one sees."""
        shape = self.pair.first
        height, width = shape.out_size
        row = tirx.max(tirx.min(row, shape.const(height - 1)), shape.const(0))
        column = tirx.max(tirx.min(column, shape.const(width - 1)), shape.const(0))
        base: Index = self.image * (shape.planes * shape.size[0] * shape.size[1])
        if not isinstance(base, int):
            base = T.bind(base)
        top = T.bind(row * shape.layer.strides[0] - shape.layer.padding[0])
        left = T.bind(column * shape.layer.strides[1] - shape.layer.padding[1])
        return Window(base, top, left)

    def _keep_all(
        self,
        mid: tirx.Buffer,
        gemm: GemmBlock,
        sums: tirx.Buffer,
        first: tirx.Expr,
        corner: tuple[tirx.Expr, tirx.Expr],
    ) -> None:
        """Keep what a thread has of a dense first layer."""
        tile, place, shape = gemm.tile, gemm.place, gemm.shape
        pixels, width = self.pair.mid_pixels(self.tile), self.pair.mid_size(self.tile)[1]
        bias = T.alloc_buffer((LANES,), "float32", scope="local")
        for i in range(tile.thread_blocks):
            block = place.block + i * tile.block_threads
            last = shape.const(shape.out_blocks - 1)
            copy4(bias, 0, self.views[2], tirx.min(first + block, last))
            for j in range(tile.thread_pixels):
                pixel = place.pixel + j * tile.pixel_threads
                with when(None if pixels == tile.pixels else pixel < pixels):
                    at = corner[0] + pixel // width, corner[1] + pixel % width
                    number = i * tile.thread_pixels + j
                    to = block * pixels + pixel
                    self._keep(mid, to, sums, number, bias, at, first + block)

    def _keep(
        self,
        mid: tirx.Buffer,
        to: Index,
        sums: tirx.Buffer,
        number: int,
        bias: tirx.Buffer,
        place: tuple[tirx.Expr, tirx.Expr],
        block: tirx.Expr,
    ) -> None:
        """Store four channels of a pixel between the layers.

        They are zeros in the second layer's padding, and if the first has no such block.
        """
        shape = self.pair.second
        result = T.alloc_buffer((LANES,), "float32", scope="local")
        conditions = inside(shape, *place, anywhere=True) if any(shape.layer.padding) else []
        if self.pair.first.out_blocks % self.tile.chunk:
            conditions.append(block < self.pair.first.out_blocks)
        if conditions:
            zero4(result, 0)
        with when(*conditions):
            with T.unroll(LANES) as lane:
                total = T.bind(sums[number * LANES + lane] + bias[lane])
                final = activate(total, self.pair.first.layer.activation, "float32")
                T.buffer_store(result, final, [lane])
        copy4(mid, to, result, 0)

    # The second layer.

    def _second_layer(
        self, gemm: GemmBlock, weights: WeightStage, sums: tirx.Buffer, mid: tirx.Buffer
    ) -> Callable[[Index, int], None]:
        """What emits the products of a step of a chunk."""
        tile, layer = gemm.tile, self.pair.second.layer
        pixels, width = self.pair.mid_pixels(self.tile), self.pair.mid_size(self.tile)[1]
        own = [gemm.place.pixel + j * tile.pixel_threads for j in range(tile.thread_pixels)]
        seen = [
            T.bind(
                pixel // self.tile.width * (layer.strides[0] * width)
                + pixel % self.tile.width * layer.strides[1]
            )
            for pixel in own
        ]

        def add(step: Index, half: int) -> None:
            def read(quad: Index) -> list[tuple[tirx.Buffer, Index]]:
                number = step * tile.quads + quad
                block, tap = number // self.pair.second.taps, number % self.pair.second.taps
                row = tap // layer.kernel[1] * (layer.dilation[0] * width)
                column = tap % layer.kernel[1] * layer.dilation[1]
                offset = block * pixels + row + column
                return [(mid, place + offset) for place in seen]

            add_step(gemm, sums, weights, half, read)

        return add
