# SPDX-License-Identifier: Apache-2.0
"""GPU rule for two fused convolutions in ``NCHW4c``, the second of them dense.

::

    for image, rectangle of output pixels, tile of output channels:     # blocks
        for chunk of the channels between the layers:
            first layer of the chunk, on the rectangle and its halo     # into shared memory
            sums += second layer's weights x the chunk                  # registers
        bias, residual, activation; store

Pixels between the layers that lie in the second layer's padding are zeros. Where a rectangle needs
a halo, or there are several tiles of channels, parts of the first layer are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from schedules.errors import OpError
from schedules.schedule_rule import KernelFacts
from schedules.workload.conv2d import Conv2DKernel, ConvLayer

from ..core.intrinsics import sync
from ..core.kernel_function import resident_blocks, unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.vector_loads import flat_view
from ..gemm.epilogue import LayerEpilogue, finish_tile
from ..gemm.implicit_gemm import LANES, ConvShape, Index
from ..gemm.main_loop import add_step, clear_sums
from ..gemm.shared_memory_pipeline import WeightStage, run_steps
from ..gemm.thread_block_tile import GemmBlock
from .conv2d import ConvRule, ConvTemplate, batch_of, packed_kernel
from .fused_first_layer import FirstLayer
from .fused_tiles import (
    ConvPair,
    FusedTile,
    choose_fused_tile,
    estimate_fused,
    fitting_fused_tiles,
)
from .tensor_core_pair import tensor_pair_function

MOST_TAPS = 49  # Taps of a depthwise first layer, which is unrolled.
MOST_DENSE_REGISTERS = 168
"""Registers of a thread in a setting with a dense first layer, estimated. The compiler loads ahead
what is unrolled, in up to all 255 registers; from 176 on it spills some of 6 of 36 settings
drawn."""


class FusedTemplate(ConvTemplate[FusedTile]):
    """Tiles of :class:`FusedConv2D`."""

    name = "gpu.fused_conv2d"
    version = 4
    knobs = FusedTile
    rule = "FusedConv2D"

    def default(self, workload: Conv2DKernel, machine: GPUInfo) -> FusedTile:
        """Return the tile of the least predicted time."""
        tile = choose_fused_tile(pair_of(workload, workload.batch or 1), machine)
        if tile is None:
            raise OpError(f"no tile of {self.describe(workload)} fits {machine.name}")
        return tile

    def settings(self, workload: Conv2DKernel, machine: GPUInfo) -> Iterator[FusedTile]:
        """Yield the tiles that the cost model compares, but those that may spill."""
        pair = pair_of(workload, workload.batch or 1)
        most = COSTS.fused_registers if pair.first.layer.is_depthwise else MOST_DENSE_REGISTERS
        for tile in fitting_fused_tiles(pair, machine):
            if pair.registers(tile) <= most:
                yield tile

    def kernel(
        self, func: tirx.PrimFunc, workload: Conv2DKernel, knobs: FusedTile, gpu: GPUInfo
    ) -> tirx.PrimFunc:
        """Write the kernel."""
        least = self.least_blocks(workload, knobs, gpu)
        return fused_template(func, workload, knobs, lambda: resident_blocks(gpu, least))

    def cycles(self, workload: Conv2DKernel, knobs: FusedTile, machine: GPUInfo) -> float:
        """Return the cost model's cycles."""
        return estimate_fused(pair_of(workload, workload.batch or 1), knobs, machine)


FUSED = FusedTemplate()


class FusedConv2D(ConvRule):
    """Keeps the intermediate of two convolutions in shared memory.

    Takes functions that legalization marked as a fused pair of float32 on images of a known size
    (the batch may be symbolic) in ``NCHW4c``, or NCHW data with such an output, as far as
    :func:`unsupported` allows and a tile fits the device; and pairs on tensor cores
    (:mod:`.tensor_core_pair`). Returns None for everything else.
    """

    template = FUSED

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        func = facts.func
        kernel = packed_kernel(func, layers=2)
        if kernel is None:
            return tensor_pair_function(func, gpu)
        if unsupported(*kernel.layers) is not None:
            return None
        tile = choose_fused_tile(pair_of(kernel, batch_of(func)), gpu)
        return None if tile is None else fused_template(func, kernel, tile)

    def workload(self, func: tirx.PrimFunc, target: Target) -> Conv2DKernel | None:
        """Return the pair, if the batch is known and a tile fits."""
        kernel = packed_kernel(func, layers=2)
        if kernel is None or not kernel.is_static or unsupported(*kernel.layers) is not None:
            return None
        tile = choose_fused_tile(pair_of(kernel, kernel.batch or 1), self.machine(target))
        return None if tile is None else kernel


def unsupported(layer1: ConvLayer, layer2: ConvLayer) -> str | None:
    """Reason why no kernel of this module takes a pair, whatever its sizes; None if one may."""
    if layer2.groups != 1:
        return "the second layer has groups; the kernel reduces over all its input channels"
    if layer1.groups != 1 and not layer1.is_depthwise:
        return "the first layer has groups; the kernel takes dense and depthwise ones"
    if layer1.is_depthwise and layer1.kernel[0] * layer1.kernel[1] > MOST_TAPS:
        return f"the first layer is depthwise with more than {MOST_TAPS} taps"
    return None


def pair_of(kernel: Conv2DKernel, batch: tirx.Expr | int) -> ConvPair:
    """The shapes of both layers of a kernel."""
    first = ConvShape.of(kernel, batch)
    return ConvPair(first, ConvShape(kernel.layers[1], batch, first.out_size))


def fused_template(
    func: tirx.PrimFunc,
    kernel: Conv2DKernel,
    tile: FusedTile,
    launched: Callable[[], AbstractContextManager] = nullcontext,
) -> tirx.PrimFunc:
    """Write the kernel of the module's docstring.

    Parameters
    ----------
    func : tirx.PrimFunc
        A function with the parameters data, weight, bias, weight, bias[, residual], output.
    kernel : Conv2DKernel
        Its workload.
    tile : FusedTile
        Partition of the work.
    launched : Callable
        Opened inside the launch, for requests to the compiler.
    """
    pair = pair_of(kernel, batch_of(func))
    second = pair.second
    across = -(-second.out_size[1] // tile.width)
    tiles = -(-second.out_size[0] // tile.height) * across

    def body() -> None:
        with (
            unless_empty(second.batch),
            T.launch_thread("blockIdx.y", second.const(-(-second.out_blocks // tile.blocks))) as y,
            T.launch_thread("blockIdx.x", second.const(second.batch) * tiles) as x,
            T.launch_thread("threadIdx.x", second.const(tile.threads)) as thread,
            launched(),
        ):
            views = [flat_view(param) for param in func.params]
            place = x % tiles
            row, column = place // across * tile.height, place % across * tile.width
            single = isinstance(second.batch, int) and second.batch == 1
            image: Index = 0 if single else x // tiles
            block = _Block(pair, tile, thread, image, row, column, y * tile.blocks, views)
            block.write(residual=kernel.residual)

    return write_kernels(func, body)


@dataclass(frozen=True)
class _Block:
    """Work of one block of threads.

    Parameters
    ----------
    pair, tile : ConvPair, FusedTile
        The layers, and extents of the block's part.
    thread : tirx.Expr
        Number of the thread.
    image, row, column : Index
        First pixel of the rectangle of output pixels.
    block : tirx.Expr
        The first block of output channels.
    views : list[tirx.Buffer]
        The parameters, flat.
    """

    pair: ConvPair
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
        covered = self.pair.chunks(tile) * tile.chunk * second.taps
        gemm = GemmBlock(
            second, tile.second, self.thread, 0, self.block, self.views[3], covered=covered
        )
        size = tile.chunk * self.pair.mid_pixels(tile) * LANES
        mid = T.alloc_buffer((size,), "float32", scope="shared")
        weights = WeightStage(gemm)
        sums = clear_sums(tile.second)
        compute_first = self._first_layer(mid).emitter()
        add = self._second_layer(gemm, weights, sums, mid)
        steps = tile.chunk * second.taps // tile.quads
        with T.serial(0, self.pair.chunks(tile)) as chunk:
            weights.fetch(chunk * steps)
            compute_first(chunk * tile.chunk)
            sync()  # TVM may give both layers' weights the same memory
            run_steps([weights], chunk * steps, steps, add, fetched=True)
            sync()
        epilogue = LayerEpilogue(second, self.views[4], self.views[-1], None)
        if residual:
            epilogue = replace(epilogue, residual=self.views[5])
        finish_tile(gemm, sums, epilogue, self._locate)

    def _locate(self, block: Index, pixel: Index) -> tuple[Index, tirx.Expr | None]:
        """Place of a pixel of the rectangle in the output, and whether it exists."""
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

    def _first_layer(self, mid: tirx.Buffer) -> FirstLayer:
        """The first layer on the rectangle and its halo."""
        layer = self.pair.second.layer
        row = T.bind(self.row * layer.strides[0] - layer.padding[0])
        column = T.bind(self.column * layer.strides[1] - layer.padding[1])
        return FirstLayer(
            self.pair, self.tile, self.thread, self.image, row, column, self.views[:3], mid
        )

    def _second_layer(
        self, gemm: GemmBlock, weights: WeightStage, sums: tirx.Buffer, mid: tirx.Buffer
    ) -> Callable[[Index, int], None]:
        """Emitter of the products of a step of a chunk."""
        tile, layer = gemm.tile, self.pair.second.layer
        pixels, width = self.pair.mid_pixels(self.tile), self.pair.mid_size(self.tile)[1]
        columns = [gemm.place.pixel + j * tile.pixel_threads for j in range(tile.thread_pixels)]
        seen = [
            T.bind(
                pixel // self.tile.width * (layer.strides[0] * width)
                + pixel % self.tile.width * layer.strides[1]
            )
            for pixel in columns
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
