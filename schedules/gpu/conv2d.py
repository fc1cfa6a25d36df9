# SPDX-License-Identifier: Apache-2.0
"""The GPU rule for one dense or grouped convolution in ``NCHW4c``."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from ..conv2d_workload import Conv2DKernel, from_json
from .conv_epilogue import Epilogue, finish_tile
from .conv_gemm import DataStage, GemmBlock, WeightStage, multiply
from .conv_memory import flat_view
from .conv_shape import LANES, ConvShape, Index, Window, window_of
from .conv_tiles import ConvTile, Product, choose_tile
from .device import KINDS, GPUInfo
from .kernel_function import write_function


class Conv2D(GPUScheduleRule):
    """Computes a convolution as a product of matrices, from shared memory.

    Takes functions that legalization marked as one convolution of float32 on images of a known
    size (the batch may be symbolic) in ``NCHW4c``, or NCHW data with such an output, unless it is
    depthwise; returns None for everything else.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Write the kernel, or return None if the rule does not know the function."""
        kernel = packed_kernel(func, target, layers=1)
        if kernel is None or kernel.layers[0].is_depthwise:
            return None
        shape = ConvShape.of(kernel, batch_of(func))
        tile = choose_tile(Product.of(shape), GPUInfo.from_target(target))
        return conv2d_template(func, kernel, tile)


def packed_kernel(func: tirx.PrimFunc, target: Target, layers: int) -> Conv2DKernel | None:
    """The workload of a marked function in ``NCHW4c``, or None if no template can take it."""
    if not isinstance(func, tirx.PrimFunc) or target.kind.name not in KINDS:
        return None
    text = func.attrs.get("tvm_fusion.workload") if func.attrs else None
    if text is None:
        return None
    kernel = from_json(str(text))
    packed = kernel.out_layout == f"NCHW{LANES}c" and kernel.dtype == "float32"
    static = None not in (kernel.height, kernel.width)
    direct = not (kernel.winograd or kernel.plain_data or kernel.plain_out)
    return kernel if packed and static and direct and len(kernel.layers) == layers else None


def batch_of(func: tirx.PrimFunc) -> tirx.Expr | int:
    """Number of images; an expression where it is symbolic."""
    batch = func.params[0].shape[0]
    return int(batch) if isinstance(batch, tirx.IntImm) else batch


def conv2d_template(func: tirx.PrimFunc, kernel: Conv2DKernel, tile: ConvTile) -> s_tir.Schedule:
    """Write the kernel with a tile.

    Parameters
    ----------
    func : tirx.PrimFunc
        A function with the parameters data, weight, bias[, residual], output.
    kernel : Conv2DKernel
        Its workload.
    tile : ConvTile
        How blocks and threads share the output.
    """
    shape = ConvShape.of(kernel, batch_of(func))
    across = (shape.const(shape.pixels) + (tile.pixels - 1)) // tile.pixels
    down = -(-shape.out_blocks // tile.blocks)

    def body() -> None:
        with (
            T.launch_thread("blockIdx.y", shape.const(shape.groups * down)) as row,
            T.launch_thread("blockIdx.x", across) as column,
            T.launch_thread("threadIdx.x", shape.const(tile.threads)) as thread,
        ):
            data, weight, bias, *residual, output = [flat_view(param) for param in func.params]
            group = 0 if shape.groups == 1 else row // down
            first = (row if shape.groups == 1 else row % down) * tile.blocks
            gemm = GemmBlock(shape, tile, thread, group, first, weight)
            pixels = _Pixels(shape, tile, column * tile.pixels)
            sums = multiply(gemm, WeightStage(gemm), DataStage(gemm, data, pixels.window))
            epilogue = Epilogue(shape, bias, output, residual[0] if residual else None)
            finish_tile(gemm, sums, epilogue, pixels.locate)

    return s_tir.Schedule(tvm.IRModule({"main": write_function(func, body)}))


@dataclass(frozen=True)
class _Pixels:
    """The pixels of a block's tile: neighbours in the batch, beginning with ``first``."""

    shape: ConvShape
    tile: ConvTile
    first: tirx.Expr

    def window(self, pixel: tirx.Expr) -> Window:
        """What a pixel sees; those behind the last one see what that one sees."""
        last = self.shape.const(self.shape.pixels) - 1
        return window_of(self.shape, T.bind(tirx.min(self.first + pixel, last)))

    def locate(self, block: Index, pixel: Index) -> tuple[Index, tirx.Expr | None]:
        """Where the output has a pixel, and whether."""
        pixels, place = self.shape.pixels, self.first + pixel
        whole = isinstance(pixels, int) and pixels % self.tile.pixels == 0
        exists = None if whole else place < self.shape.const(pixels)
        return self.shape.out_place(block, place), exists
