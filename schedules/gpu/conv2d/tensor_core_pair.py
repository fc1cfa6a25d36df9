# SPDX-License-Identifier: Apache-2.0
"""Kernel of two fused convolutions on tensor cores, the second of them pointwise.

::

    for image, tile of pixels:                                  # blocks
        for tile of channels between the layers:
            sums = product of the first layer's weights and the windows of the data
            bias, activation; keep in shared memory, in the type of the tensors
        for tile of output channels:
            sums = product of the second layer's weights and what is in shared memory
            bias, residual, activation; store

The products are those of :mod:`schedules.gpu.gemm.matmul.tensor_core_matmul`. A depthwise first
layer is computed by the ordinary cores, as the elements of the second product's factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.block_expressions import Stage, read_stages
from schedules.tir.branch import when
from schedules.tir.index_math import ceildiv, i64, simplified
from schedules.workload.conv2d import Conv2DKernel, from_json
from schedules.workload.reduce import unravel

from ..core.intrinsics import sync
from ..core.kernel_function import resident_blocks, unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.tensor_core import TensorCore
from ..gemm.matmul.matmul_pattern import ACCUMULATOR, MatmulFunction, divides, read_product
from ..gemm.matmul.tensor_core_matmul import QUAD, Factor, ThreadPart, neighbours
from ..gemm.matmul.tensor_core_tile import ELEMENTS, STEP
from ..pointwise.coalescing import classify
from ..pointwise.point_kernel import PointWriter, Views
from .tensor_core_pair_tile import PairExtents, PairTile, choose_pair_tile


@dataclass(frozen=True)
class PairFunction:
    """The products of a pair.

    Parameters
    ----------
    first : MatmulFunction | None
        The first product, which stores the intermediate; None for a depthwise layer.
    second : MatmulFunction
        The second product. Its right factor is the intermediate, or what computes a depthwise one.
    """

    first: MatmulFunction | None
    second: MatmulFunction


def tensor_pair_function(func: tirx.PrimFunc, gpu: GPUInfo) -> tirx.PrimFunc | None:
    """The scheduled function of a pair that legalization marked; None if it is none for them."""
    text = func.attrs.get("tvm_fusion.workload") if func.attrs else None
    kernel = None if text is None else from_json(str(text))
    if kernel is None or len(kernel.layers) != 2 or kernel.out_layout != "NCHW":
        return None
    if kernel.height is None or kernel.width is None:
        return None
    tile = choose_pair_tile(pair_extents(kernel), gpu)
    pair = None if tile is None else read_pair(func, kernel)
    if tile is None or pair is None:
        return None
    across = ceildiv(pair.second.n, tile.columns)
    blocks = simplified(i64(pair.second.batches) * across)

    def body() -> None:
        with (
            unless_empty(blocks),
            T.launch_thread("blockIdx.x", blocks) as block,
            resident_blocks(gpu, COSTS.register_file // (tile.registers * tile.threads)),
        ):
            places = unravel(block, [*pair.second.batch, across], is_natural=True)
            *batch, column = (T.bind(place) for place in places)
            with T.launch_thread("threadIdx.x", tile.threads) as thread:
                first = T.bind(column * i64(tile.columns))
                _ThreadPart(pair, tile, Views.declare(func, gpu), batch, first, thread).write()

    return write_kernels(func, body)


def pair_extents(kernel: Conv2DKernel) -> PairExtents:
    """Sizes of a pair of images of a known size."""
    size = int(kernel.height or 0), int(kernel.width or 0)
    layer1, layer2 = kernel.layers
    out_size, images = layer1.output_size(*size), kernel.batch or 1
    return PairExtents(layer1, layer2, images, size, out_size, kernel.dtype, kernel.residual)


def read_pair(func: tirx.PrimFunc, kernel: Conv2DKernel) -> PairFunction | None:
    """Read the products of a pair; None if the function is none of those of its op."""
    stages = read_stages(func) or []
    names = [stage.name for stage in stages]
    if "layer1" not in names:
        return None
    place = names.index("layer1") + 1
    before, behind = stages[:place], stages[place:]
    if kernel.layers[0].is_depthwise:
        widened = _summed_in_float32(before)
        second = read_product(behind, func.params, windows=True, inlined=widened)
        return None if second is None else PairFunction(None, second)
    first = read_product(before, [before[-1].output], windows=True)
    second = read_product(behind, func.params, windows=True)
    return None if first is None or second is None else PairFunction(first, second)


def _summed_in_float32(stages: Sequence[Stage]) -> list[Stage]:
    """The stages, with sums of products of 16-bit floats in float32 before they are rounded."""
    wide = {
        stage.output: tirx.decl_buffer(stage.output.shape, ACCUMULATOR[str(stage.output.dtype)])
        for stage in stages
        if stage.reduced and str(stage.output.dtype) in ACCUMULATOR
    }

    def rounded(load: ir.TensorLoad) -> tirx.Expr:
        if load.source not in wide:
            return load
        return wide[load.source][tuple(load.indices)].astype(load.source.dtype)

    def widened(stage: Stage) -> Stage:
        if stage.output not in wide:
            value = tvm_ffi.structural_map(stage.value, (ir.TensorLoad, rounded))
            return replace(stage, value=value)
        output, product = wide[stage.output], stage.value.b
        left, right = (factor.astype(output.dtype) for factor in (product.a, product.b))
        own = output[tuple(axis.var for axis in stage.axes)]
        init = tirx.const(0, output.dtype)
        return replace(stage, output=output, value=own + left * right, init=init)

    return [widened(stage) for stage in stages]


class _Intermediate(Factor):
    """The right factor of the second product, which is in shared memory as a whole."""

    def place(self, step: tirx.Expr, stage: tirx.Expr) -> tirx.Expr:
        return step.astype("int32") * self.shared.nbytes

    def fetch(
        self, core: TensorCore, thread: tirx.Expr, depth: tirx.Expr, stage: tirx.Expr
    ) -> None:
        """Do nothing: it is there."""


class _FirstPart(ThreadPart):
    """One thread's part of a tile of the first product, which stays in shared memory."""

    def keep(self, tile: PairTile) -> None:
        """Emit the epilogue: rows past the end are zeros."""
        epilogue = replace(self.matmul.epilogue, stores=())
        [store] = self.matmul.epilogue.stores
        lanes = classify(epilogue, ELEMENTS, [self.matmul.accumulator])
        if not lanes.is_aligned:
            lanes = classify(epilogue, 1, [self.matmul.accumulator])
        held = T.alloc_buffer((ELEMENTS,), tile.second.type.dtype, scope="local")
        for i in range(self.tile.warp_rows // STEP):
            sums = self.sums_of_rows(i)
            for half in range(2):
                inner = self.row + i * STEP + half * ELEMENTS + self.lane // QUAD
                row = T.bind(self.first[0] + i64(inner))
                for group in range(0, len(sums) // 4, QUAD):
                    found = [
                        sums[4 * (group + j) + 2 * half + e] for j in range(QUAD) for e in range(2)
                    ]
                    values = neighbours(self.core, self.lane, found)
                    chunk = self.column // ELEMENTS + group + self.lane % QUAD
                    place = *self.batch, row, self.first[1] + i64(chunk * ELEMENTS)
                    for k in range(ELEMENTS):
                        T.buffer_store(held, tirx.const(0, held.dtype), [k])
                    exists = (
                        None if divides(self.tile.rows, self.matmul.m) else row < i64(self.matmul.m)
                    )
                    with when(exists):
                        for start in range(0, ELEMENTS, lanes.vector):
                            *outer, column = place
                            points = [
                                [*outer, column + i64(start + k)] for k in range(lanes.vector)
                            ]
                            writer = PointWriter(lanes, self.views, points)
                            part = values[start : start + lanes.vector]
                            writer.give(self.matmul.accumulator, part)
                            writer.steps()
                            for k in range(lanes.vector):
                                T.buffer_store(held, writer.value(store.value, k), [start + k])
                    line = row.astype("int32")
                    step, depth = line // tile.mid.depth, line % tile.mid.depth
                    self.core.store(step * tile.mid.nbytes + tile.mid.place(depth, chunk), held, 0)


class _ThreadPart:
    """One thread's part of a block."""

    def __init__(
        self,
        pair: PairFunction,
        tile: PairTile,
        views: Views,
        batch: Sequence[tirx.Expr],
        column: tirx.Expr,
        thread: tirx.Expr,
    ):
        self.pair, self.tile, self.views = pair, tile, views
        self.batch, self.column, self.thread = batch, column, thread
        self.core = TensorCore(tile.second.type.dtype, tile.mid_bytes + tile.stages_bytes)

    def write(self) -> None:
        """Emit the whole part."""
        tile, second = self.tile, self.pair.second
        if self.pair.first is None:
            self._fill()
        else:
            self._multiply_first(self.pair.first)
        arguments = second.right, tile.mid, 0, tile.threads, self.views, [*self.batch, self.column]
        right = _Intermediate(*arguments)
        with T.serial(i64(0), ceildiv(second.m, tile.second.rows)) as number:
            sync()  # the stages are used again
            row = T.bind(number * i64(tile.second.rows))
            place = self.views, self.batch, (row, self.column), self.thread
            ThreadPart(second, tile.second, *place, self.core, tile.mid_bytes, right).write()

    def _multiply_first(self, first: MatmulFunction) -> None:
        tile = self.tile
        assert tile.first is not None, "a dense layer has a tile"
        with T.serial(i64(0), ceildiv(first.m, tile.first.rows)) as number:
            sync()
            row = T.bind(number * i64(tile.first.rows))
            place = self.views, self.batch, (row, self.column), self.thread
            part = _FirstPart(first, tile.first, *place, self.core, tile.mid_bytes)
            part.accumulate()
            part.keep(tile)

    def _fill(self) -> None:
        """Emit the computation of a depthwise first layer, some channels after the other."""
        tile, operand = self.tile, self.pair.second.right
        place = 0, tile.threads, self.views, [*self.batch, self.column]
        factor = Factor.of(operand, tile.mid, *place)
        with T.serial(0, tile.channels // tile.mid.depth) as step:
            depth = step.astype("int64") * i64(tile.mid.depth)
            at = T.bind(step * tile.mid.nbytes)
            factor.fetch(self.core, self.thread, depth, at)
            factor.keep(self.core, self.thread, at)
