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
from schedules.workload.conv2d import Conv2DKernel, FusedConv2DWorkload, from_json
from schedules.workload.reduce import unravel

from ..core.intrinsics import sync
from ..core.kernel_function import resident_blocks, unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.tensor_core import TensorCore
from ..core.vector_loads import hold
from ..gemm.matmul.matmul_pattern import ACCUMULATOR, MatmulFunction, divides, read_product
from ..gemm.matmul.tensor_core_matmul import QUAD, Factor, ThreadPart, row_vectors
from ..gemm.matmul.tensor_core_tile import ELEMENTS, STEP
from ..pointwise.coalescing import classify
from ..pointwise.point_kernel import PointWriter, Views
from .tensor_core_pair_tile import PairTile, choose_pair_tile


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
    tile = choose_pair_tile(pair_workload(kernel), gpu)
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


def pair_workload(kernel: Conv2DKernel) -> FusedConv2DWorkload:
    """The shapes of a pair; those of one image where the batch is symbolic."""
    size, batch = (int(kernel.height or 0), int(kernel.width or 0)), kernel.batch or 1
    return FusedConv2DWorkload(batch, *size, *kernel.layers, kernel.residual, kernel.dtype)


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
        if second is None:
            return None
        # Strided windows of neighbouring pixels do not begin beside each other, but are kept so.
        right = replace(second.right, rows_first=True)
        return PairFunction(None, replace(second, right=right))
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
        """Emit the epilogue, and store its results as lines of the second product's factor."""
        for i in range(self.tile.warp_rows // STEP):
            sums = self.sums_of_rows(i)
            for half in range(2):
                base = T.bind(self.first[0].astype("int32") + self.row + i * STEP + half * ELEMENTS)
                step, line = base // tile.mid.depth, base % tile.mid.depth
                for group, values in row_vectors(self.core, self.lane, sums, half):
                    held = self._finished(base + self.lane // QUAD, group, values)
                    chunk = self.column // ELEMENTS + group
                    place = step * tile.mid.nbytes + tile.mid.stored(self.lane, line, chunk)
                    self.core.store(place, held, 0)

    def _finished(self, row: tirx.Expr, group: int, values: Sequence[tirx.Expr]) -> tirx.Buffer:
        """Registers with the layer's results of eight pixels; zeros if there is no such channel."""
        matmul = self.matmul
        [store] = matmul.epilogue.stores
        space = replace(matmul.epilogue, stores=())
        lanes = classify(space, ELEMENTS, [matmul.accumulator])
        lanes = lanes if lanes.is_aligned else classify(space, 1, [matmul.accumulator])
        held = hold([tirx.const(0, store.buffer.dtype)] * ELEMENTS, store.buffer.dtype)
        first = self.first[1] + i64(self.column + (group + self.lane % QUAD) * ELEMENTS)
        with when(None if divides(self.tile.rows, matmul.m) else i64(row) < i64(matmul.m)):
            for start in range(0, ELEMENTS, lanes.vector):
                each = range(start, start + lanes.vector)
                points = [[*self.batch, i64(row), first + i64(k)] for k in each]
                writer = PointWriter(lanes, self.views, points)
                writer.give(matmul.accumulator, [values[k] for k in each])
                writer.steps()
                for lane, k in enumerate(each):
                    T.buffer_store(held, writer.value(store.value, lane), [k])
        return held


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
        """Emit the computation of a depthwise first layer, a chunk of a thread after the other."""
        tile, operand = self.tile, self.pair.second.right
        chunks = tile.mid.lines * tile.mid.chunks
        factor = Factor.of(operand, tile.mid, 0, chunks, self.views, [*self.batch, self.column])
        turns = chunks // tile.threads
        count = turns * (tile.channels // tile.mid.depth)
        # Unrolled, it would load ahead, and spill.
        with T.serial(0, count, annotations={"disable_unroll": True}) as number:
            step, chunk = number // turns, number % turns * tile.threads + self.thread
            at = T.bind(step * tile.mid.nbytes)
            factor.fetch(self.core, chunk, i64(step * tile.mid.depth), at)
            factor.keep(self.core, chunk, at)
