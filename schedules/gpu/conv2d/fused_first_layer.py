# SPDX-License-Identifier: Apache-2.0
"""First layer of a fused pair, one chunk of its channels at a time, in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.compute.conv2d import activate
from schedules.tir.statements import when

from ..core.intrinsics import sync
from ..gemm.float4 import copy4, zero4
from ..gemm.implicit_gemm import LANES, Index, Window, inside
from ..gemm.main_loop import multiply
from ..gemm.shared_memory_pipeline import DataStage, WeightStage
from ..gemm.thread_block_tile import GemmBlock
from .depthwise_column import Column
from .fused_tiles import ConvPair, FusedTile


@dataclass(frozen=True)
class FirstLayer:
    """Part of the first layer that a block of threads computes.

    Parameters
    ----------
    pair, tile : ConvPair, FusedTile
        The layers, and extents of the block's part.
    thread : tirx.Expr
        Number of the thread.
    image : Index
        The image.
    row, column : tirx.Expr
        First pixel of the intermediate, negative in the second layer's padding.
    views : list[tirx.Buffer]
        Data, weight and bias, flat.
    mid : tirx.Buffer
        Shared memory for a chunk, ``[block][pixel][4]``.
    """

    pair: ConvPair
    tile: FusedTile
    thread: tirx.Expr
    image: Index
    row: tirx.Expr
    column: tirx.Expr
    views: list[tirx.Buffer]
    mid: tirx.Buffer

    def emitter(self) -> Callable[[tirx.Expr], None]:
        """Emitter of a chunk, which begins with the given block of channels."""
        return self._depthwise if self.pair.first.layer.is_depthwise else self._dense()

    def _depthwise(self, block: tirx.Expr) -> None:
        """Emit a depthwise layer: a thread computes several pixels in a column."""
        tile, shape = self.tile, self.pair.first
        height, width = self.pair.mid_size(tile)
        strips = -(-height // tile.rows)
        items = tile.chunk * strips * width
        for turn in range(self.pair.columns(tile)):
            item = self.thread + turn * tile.threads
            out_block = block + item // (strips * width)
            y, x = item % (strips * width) // width * tile.rows, item % width
            with when(None if (turn + 1) * tile.threads <= items else item < items):
                channel = T.bind(tirx.min(out_block, shape.const(shape.out_blocks - 1)))
                plane = self.image * shape.planes + channel
                data, weight, _ = self.views
                top, left = T.bind(self.row + y), T.bind(self.column + x)
                sums = Column(
                    shape, tile.rows, plane, channel, top, left, data, weight, anywhere=True
                ).add_all()
                bias = T.alloc_buffer((LANES,), "float32", scope="local")
                copy4(bias, 0, self.views[2], channel)
                for number in range(tile.rows):
                    at = item // (strips * width) * (height * width) + (y + number) * width + x
                    with when(None if height % tile.rows == 0 else y + number < height):
                        self._keep(at, sums, number, bias, (top + number, left), out_block)

    def _dense(self) -> Callable[[tirx.Expr], None]:
        """Emit a dense layer: a matrix product as in a single convolution, on the rectangle."""
        shape, width = self.pair.first, self.pair.mid_size(self.tile)[1]
        tile = self.tile.first(self.pair.mid_pixels(self.tile))
        gemm = GemmBlock(shape, tile, self.thread, 0, 0, self.views[1])
        weights = WeightStage(gemm)

        def window(pixel: tirx.Expr) -> Window:
            return self._window(self.row + pixel // width, self.column + pixel % width)

        data = DataStage(gemm, self.views[0], window)

        def compute(block: tirx.Expr) -> None:
            sums = multiply(gemm, weights.moved(block), data)
            sync()  # TVM may give the chunk memory that was read just now
            self._keep_all(gemm, sums, block)

        return compute

    def _window(self, row: tirx.Expr, column: tirx.Expr) -> Window:
        """Window of a pixel of the intermediate; pixels outside get that of the nearest one."""
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

    def _keep_all(self, gemm: GemmBlock, sums: tirx.Buffer, first: tirx.Expr) -> None:
        """Store the results of a dense first layer that a thread holds."""
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
                    at = self.row + pixel // width, self.column + pixel % width
                    number = i * tile.thread_pixels + j
                    to = block * pixels + pixel
                    self._keep(to, sums, number, bias, at, first + block)

    def _keep(
        self,
        to: Index,
        sums: tirx.Buffer,
        number: int,
        bias: tirx.Buffer,
        place: tuple[tirx.Expr, tirx.Expr],
        block: tirx.Expr,
    ) -> None:
        """Store four channels of a pixel of the intermediate.

        They are zeros in the second layer's padding, and if the first layer has no such block.
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
        copy4(self.mid, to, result, 0)
