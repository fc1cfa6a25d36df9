# SPDX-License-Identifier: Apache-2.0
"""GPU rule for one dense or grouped convolution in ``NCHW4c``.

Where the reduction is split among blocks there are two kernels: the product, and the addition of
the splits' results in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from schedules import attributes
from schedules.compute.conv2d import WORDS_RANK
from schedules.errors import OpError
from schedules.schedule_rule import KernelFacts
from schedules.tir.extents import extent_of
from schedules.tir.statements import when
from schedules.workload.conv2d import Conv2DKernel, ConvLayer, describe, from_json, to_json

from ..core.kernel_function import resident_blocks, unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.rule import GPUTemplate, Knobs, TunableGPURule
from ..core.vector_loads import flat_view
from ..gemm.conv_tiles import ConvTile, ProductExtents, choose_tile, estimate, fitting_tiles
from ..gemm.epilogue import Ending, LayerEpilogue, Partial, finish_tile, lanes_at, sum_parts
from ..gemm.implicit_gemm import LANES, ConvShape, Index, Window, window_of
from ..gemm.main_loop import multiply
from ..gemm.shared_memory_pipeline import DataStage, WeightStage
from ..gemm.thread_block_tile import GemmBlock

ADDING_THREADS = 128
LEAST_REGISTERS = 104
"""Registers of a thread; with as few as a small tile is estimated to need, some addresses spill."""
AMPLE_REGISTERS = 136
"""The same of settings that are no default: of those in 128, for four warps a partition, 1 % spill.

The compiler then takes more than 128 for these and a few others; none needs the 168 that it may.
"""
PARTITIONS = 4
"""Parts of a multiprocessor, each with its share of the registers and of the warps."""


class ConvTemplate(GPUTemplate[Conv2DKernel, Knobs]):
    """Base of the templates of convolutions of images of known sizes."""

    def read_workload(self, text: str) -> Conv2DKernel:
        """Read the JSON of a workload."""
        kernel = from_json(text)
        if not kernel.is_static:
            raise OpError(f"{describe(kernel)} has symbolic extents; expected known ones")
        return kernel

    def describe(self, workload: Conv2DKernel) -> str:
        """Return the layers and the image."""
        return describe(workload)


class Conv2DTemplate(ConvTemplate[ConvTile]):
    """Tiles of :class:`Conv2D`."""

    name = "gpu.conv2d"
    version = 5
    knobs = ConvTile
    rule = "Conv2D"

    def default(self, workload: Conv2DKernel, machine: GPUInfo) -> ConvTile:
        """Return the tile of the least predicted time."""
        tile = choose_tile(_extents(workload), machine)
        if tile is None:
            raise OpError(f"no tile of {describe(workload)} fits {machine.name}")
        return tile

    def settings(self, workload: Conv2DKernel, machine: GPUInfo) -> Iterable[ConvTile]:
        """Yield the tiles that the cost model compares."""
        return fitting_tiles(_extents(workload), machine)

    def kernel(
        self, func: tirx.PrimFunc, workload: Conv2DKernel, knobs: ConvTile, gpu: GPUInfo
    ) -> tirx.PrimFunc:
        """Write the kernel."""
        is_default = knobs == self.default(workload, gpu)
        registers = LEAST_REGISTERS if is_default else AMPLE_REGISTERS
        return conv2d_template(func, workload, knobs, gpu, registers)

    def cycles(self, workload: Conv2DKernel, knobs: ConvTile, machine: GPUInfo) -> float:
        """Return the cost model's cycles."""
        return estimate(_extents(workload), knobs, machine)


CONV2D = Conv2DTemplate()


class ConvRule(TunableGPURule):
    """Base of the rules of marked convolutions."""

    def workload_json(self, workload: Conv2DKernel) -> str:
        """Write the convolutions as legalization does."""
        return to_json(workload)


class Conv2D(ConvRule):
    """Computes a convolution as a product of matrices, from shared memory.

    Takes functions that legalization marked as one convolution of float32 on images of a known
    size (the batch may be symbolic) in ``NCHW4c``, or NCHW data with such an output, unless it is
    depthwise, where a tile fits the device; returns None for everything else.
    """

    template = CONV2D

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        func = facts.func
        kernel = packed_kernel(func, layers=1)
        if kernel is None or kernel.layers[0].is_depthwise:
            return None
        shape = ConvShape.of(kernel, batch_of(func))
        tile = choose_tile(ProductExtents.of(shape), gpu)
        return None if tile is None else conv2d_template(func, kernel, tile, gpu)

    def workload(self, func: tirx.PrimFunc, target: Target) -> Conv2DKernel | None:
        """Return the convolution, if the batch is known and a tile fits."""
        kernel = packed_kernel(func, layers=1)
        if kernel is None or not kernel.is_static or kernel.layers[0].is_depthwise:
            return None
        return None if choose_tile(_extents(kernel), self.machine(target)) is None else kernel


def _extents(kernel: Conv2DKernel) -> ProductExtents:
    return ProductExtents.of(ConvShape.of(kernel, kernel.batch or 1))


def packed_kernel(func: tirx.PrimFunc, layers: int) -> Conv2DKernel | None:
    """The workload of a marked function in ``NCHW4c``, or None if no template can take it.

    Raises
    ------
    OpError
        If its groups do not consist of whole blocks of channels.
    """
    text = func.attrs.get(attributes.WORKLOAD) if func.attrs else None
    if text is None:
        return None
    kernel = from_json(str(text))
    packed = kernel.out_layout == f"NCHW{LANES}c" and kernel.dtype == "float32"
    packed = packed and kernel.data_dtype is kernel.out_dtype is None  # no bytes
    static = None not in (kernel.height, kernel.width)
    direct = not (kernel.winograd or kernel.plain_data or kernel.plain_out)
    # Weights of tensor cores have words.
    tensors = [param for param in func.params if isinstance(param.ty, tirx.BufferType)]
    direct = direct and all(len(tensor.shape) < WORDS_RANK for tensor in tensors)
    if not (packed and static and direct and len(kernel.layers) == layers):
        return None
    for layer in kernel.layers:
        _check_groups(layer)
    return kernel


def _check_groups(layer: ConvLayer) -> None:
    own = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    if layer.groups > 1 and not layer.is_depthwise and any(count % LANES for count in own):
        raise OpError(
            f"convolution {layer} in NCHW{LANES}c: groups of {own[0]} input and {own[1]} output "
            f"channels cross blocks; expected multiples of {LANES}: leave the layer in NCHW, as "
            "PackLayout does"
        )


def batch_of(func: tirx.PrimFunc) -> tirx.Expr | int:
    """Number of images; an expression where it is symbolic."""
    return extent_of(func.params[0].shape[0])


def conv2d_template(
    func: tirx.PrimFunc,
    kernel: Conv2DKernel,
    tile: ConvTile,
    gpu: GPUInfo,
    registers: int = LEAST_REGISTERS,
) -> tirx.PrimFunc:
    """Write the kernel with a tile.

    Parameters
    ----------
    func : tirx.PrimFunc
        A function with the parameters data, weight, bias[, residual], output.
    kernel : Conv2DKernel
        Its workload.
    tile : ConvTile
        Partition of the output; several splits need a batch of a known size.
    gpu : GPUInfo
        The device.
    registers : int
        Registers that a thread may use, at least.
    """
    shape = ConvShape.of(kernel, batch_of(func))
    blocks = _blocks_at_once(tile, max(tile.registers, registers), gpu)

    def body() -> None:
        if tile.splits == 1:
            _write_product(func, shape, tile, resident_blocks(gpu, blocks), None)
            return
        count = shape.images * shape.out_planes * shape.out_pixels
        partial = T.sblock_alloc_buffer((tile.splits * count * LANES,), "float32")
        _write_product(func, shape, tile, resident_blocks(gpu, blocks), partial)
        _write_addition(func, shape, tile.splits, partial, gpu.block_threads(ADDING_THREADS))

    return write_kernels(func, body)


def _blocks_at_once(tile: ConvTile, registers: int, gpu: GPUInfo) -> int:
    """Blocks whose warps find their registers in the parts of a multiprocessor."""
    a_warp = gpu.warp_size * registers
    warps = PARTITIONS * (COSTS.register_file // PARTITIONS // a_warp)
    return warps // -(-tile.threads // gpu.warp_size)


def _write_product(
    func: tirx.PrimFunc,
    shape: ConvShape,
    tile: ConvTile,
    launched: AbstractContextManager,
    partial: tirx.Buffer | None,
) -> None:
    """Emit the kernel of the product, which ends with the layer or in ``partial``."""
    across = (shape.const(shape.pixels) + (tile.pixels - 1)) // tile.pixels
    down = -(-shape.out_blocks // tile.blocks)
    with (
        unless_empty(across),
        T.launch_thread("blockIdx.z", shape.const(tile.splits)) as split,
        T.launch_thread("blockIdx.y", shape.const(shape.groups * down)) as row,
        T.launch_thread("blockIdx.x", across) as column,
        T.launch_thread("threadIdx.x", shape.const(tile.threads)) as thread,
        launched,
    ):
        data, weight = [flat_view(param) for param in func.params[:2]]
        group = 0 if shape.groups == 1 else row // down
        first = (row if shape.groups == 1 else row % down) * tile.blocks
        gemm = GemmBlock(shape, tile, thread, group, first, weight, split)
        pixels = _Pixels(shape, tile, column * tile.pixels)
        sums = multiply(gemm, WeightStage(gemm), DataStage(gemm, data, pixels.window))
        ending: Ending
        if partial is None:
            ending = _epilogue(func, shape)
        else:
            ending = Partial(partial, split * (shape.images * shape.out_planes * shape.out_pixels))
        finish_tile(gemm, sums, ending, pixels.locate)


def _write_addition(
    func: tirx.PrimFunc, shape: ConvShape, splits: int, partial: tirx.Buffer, threads: int
) -> None:
    """Emit the kernel that adds up the splits' results, and applies the epilogue."""
    count = shape.images * shape.out_planes * shape.out_pixels
    with (
        T.launch_thread("blockIdx.x", shape.const(-(-count // threads))) as block,
        T.launch_thread("threadIdx.x", shape.const(threads)) as thread,
    ):
        epilogue = _epilogue(func, shape)
        item = T.bind(block * threads + thread)
        with when(None if count % threads == 0 else item < count):
            total = sum_parts(partial, splits, count, item)
            bias = epilogue.load_bias(item // shape.out_pixels % shape.out_planes)
            epilogue.finish(item, bias, lanes_at(total, 0))


def _epilogue(func: tirx.PrimFunc, shape: ConvShape) -> LayerEpilogue:
    """Epilogue of the layer; to be called inside the launch."""
    bias, *residual, output = [flat_view(param) for param in func.params[2:]]
    return LayerEpilogue(shape, bias, output, residual[0] if residual else None)


@dataclass(frozen=True)
class _Pixels:
    """The pixels of a block's tile: neighbours in the batch, beginning with ``first``."""

    shape: ConvShape
    tile: ConvTile
    first: tirx.Expr

    def window(self, pixel: tirx.Expr) -> Window:
        """Window of a pixel; pixels past the last one get the window of the last."""
        last = self.shape.const(self.shape.pixels) - 1
        return window_of(self.shape, T.bind(tirx.min(self.first + pixel, last)))

    def locate(self, block: Index, pixel: Index) -> tuple[Index, tirx.Expr | None]:
        """Place of a pixel in the output, and whether it exists."""
        pixels, place = self.shape.pixels, self.first + pixel
        whole = isinstance(pixels, int) and pixels % self.tile.pixels == 0
        exists = None if whole else place < self.shape.const(pixels)
        return self.shape.out_place(block, place), exists
