# SPDX-License-Identifier: Apache-2.0
"""Kernel of two fused convolutions on tensor cores, in blocks of channels, the second one dense.

::

    for tile of pixels of all images:                           # blocks
        for tile of channels between the layers:
            sums = product of the windows of the data and the first layer's weights
            bias, activation; keep in shared memory, in the type of the tensors
        for tile of output channels:
            sums = product of what is in shared memory and the second layer's weights
            bias, residual, activation; store

Blocks of channels are 16 bytes, so that windows and weights are copied to shared memory as they
lie. The results of the first layer are rounded as a kernel of its own would round them; those of
float32 are factors of TF32 later. They are lines of channels, for each pixel of the block and,
before a wider layer, of a halo around them, which is computed by several blocks: a tap is then a
shift by some lines, or a line of zeros beyond the image.

The products are those of :mod:`schedules.gpu.gemm.matmul.tensor_core_matmul`. A depthwise first
layer is computed by the ordinary cores, as the elements of the second product's factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.tir.index_math import ceildiv, i64
from schedules.tir.statements import when
from schedules.workload.conv2d import ITEM_BYTES, Conv2DKernel, FusedConv2DWorkload, from_json

from ..core.intrinsics import sync
from ..core.kernel_function import ROLLED, resident_blocks, unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.tensor_core import CHUNK, TensorCore
from ..core.vector_loads import hold
from ..gemm.implicit_gemm import Index
from ..gemm.matmul.matmul_pattern import MatmulFunction, divides
from ..gemm.matmul.tensor_core_matmul import QUAD, Factor, ThreadPart, row_vectors
from ..gemm.matmul.tensor_core_tile import ELEMENTS, STEP, allows_tf32
from ..pointwise.coalescing import classify
from ..pointwise.point_kernel import PointWriter, Views
from .tensor_core_pair_pattern import PairFunction, read_pair
from .tensor_core_pair_tile import PANEL, ZEROS, PairTile, choose_pair_tile, halo


def tensor_pair_function(func: tirx.PrimFunc, gpu: GPUInfo) -> tirx.PrimFunc | None:
    """The scheduled function of a pair that legalization marked; None if it is none for them."""
    text = func.attrs.get(attributes.WORKLOAD) if func.attrs else None
    kernel = None if text is None else from_json(str(text))
    if kernel is None or not takes_pair(kernel, gpu, allows_tf32(func)):
        return None
    block = CHUNK // ITEM_BYTES[kernel.dtype]
    if not kernel.data_layout == kernel.out_layout == f"NCHW{block}c":
        return None
    workload = pair_workload(kernel)
    tile, pair = choose_pair_tile(workload, gpu, allows_tf32(func)), read_pair(func, kernel)
    if tile is None or pair is None:
        return None
    blocks = ceildiv(pair.second.m, tile.second.rows)

    def body() -> None:
        with (
            unless_empty(blocks),
            T.launch_thread("blockIdx.x", blocks) as number,
            resident_blocks(gpu, COSTS.register_file // (tile.registers * tile.threads)),
            T.launch_thread("threadIdx.x", tile.threads) as thread,
        ):
            first = T.bind(number * i64(tile.second.rows))
            views = Views.declare(func, gpu)
            _ThreadPart(pair, tile, workload, views, first, thread).write()

    return write_kernels(func, body)


def takes_pair(kernel: Conv2DKernel, gpu: GPUInfo, tf32: bool) -> bool:
    """Return whether tensor cores take a pair in blocks, one of float32 only as ``tf32``."""
    if len(kernel.layers) != 2 or kernel.height is None or kernel.width is None:
        return False
    return choose_pair_tile(pair_workload(kernel), gpu, tf32) is not None


def pair_workload(kernel: Conv2DKernel) -> FusedConv2DWorkload:
    """The shapes of a pair; those of one image where the batch is symbolic."""
    height, width = int(kernel.height or 0), int(kernel.width or 0)
    layer1, layer2 = kernel.layers
    more = kernel.residual, kernel.dtype
    return FusedConv2DWorkload(kernel.batch or 1, height, width, layer1, layer2, *more)


class _Intermediate(Factor):
    """The left factor of the second product, which is in shared memory as a whole."""

    def place(self, step: tirx.Expr, stage: Index) -> Index:
        """The first channel of a step."""
        return T.bind(step.astype("int32") * (PANEL * self.shared.chunk))

    def fetch(self, core: TensorCore, thread: tirx.Expr, depth: tirx.Expr, stage: Index) -> None:
        """Do nothing: it is there."""

    def load(
        self,
        core: TensorCore,
        fragment: tirx.Buffer,
        lane: tirx.Expr,
        row: Index,
        k: int,
        at: Index,
        shifts: tirx.Buffer | None = None,
    ) -> None:
        for number in range(int(fragment.shape[0]) // 4):
            place = self.shared.fragment(lane, row + number * STEP, at + k)
            core.load(fragment, 4 * number, T.bind(place), False)


class _Windows(_Intermediate):
    """The same as windows of a second layer that is not pointwise.

    Parameters
    ----------
    pair, tile : FusedConv2DWorkload, PairTile
        The layers, and the partition.
    first, skipped : tirx.Expr
        The block's first pixel, in its image, and the number of the halo's pixels before it.
    arguments : Any
        Arguments of a factor.
    """

    def __init__(
        self,
        pair: FusedConv2DWorkload,
        tile: PairTile,
        first: tirx.Expr,
        skipped: tirx.Expr,
        *arguments: Any,
    ):
        super().__init__(*arguments)
        self.layer, self.size, self.depth = pair.layer2, pair.mid_size, tile.second.depth
        self.first, self.skipped = first, skipped
        self.moved: tuple[tirx.Expr, tirx.Expr] = (first, first)
        self.chunk_of_step: Index = 0

    def place(self, step: tirx.Expr, stage: Index) -> Index:
        """Note the tap of a step, as a move by rows and columns, and its first chunk."""
        layer = self.layer
        inner = T.bind(step.astype("int32") * self.depth)
        tap = inner // layer.in_channels
        row, column = tap // layer.kernel[1], tap % layer.kernel[1]
        self.moved = (
            T.bind(row * layer.dilation[0] - layer.padding[0]),
            T.bind(column * layer.dilation[1] - layer.padding[1]),
        )
        self.chunk_of_step = T.bind(inner % layer.in_channels // self.shared.chunk)
        return 0

    def load(
        self,
        core: TensorCore,
        fragment: tirx.Buffer,
        lane: tirx.Expr,
        row: Index,
        k: int,
        at: Index,
        shifts: tirx.Buffer | None = None,
    ) -> None:
        (height, width), (down, right) = self.size, self.moved
        matrix, line = lane // ELEMENTS, lane % ELEMENTS
        chunk = self.chunk_of_step + k // self.shared.chunk + matrix // 2
        for number in range(int(fragment.shape[0]) // 4):
            own = row + number * STEP + matrix % 2 * ELEMENTS + line
            pixel = (self.first + own) % (height * width)
            y, x = pixel // width + down, pixel % width + right
            seen = own + self.skipped + down * width + right
            place = T.bind(self.shared.place(seen, chunk))
            exists = tirx.all(y >= 0, y < height, x >= 0, x < width)
            zeros = self.shared.nbytes + (place & (ZEROS - 1))  # The zeros lie in the same bank.
            core.load(fragment, 4 * number, T.bind(tirx.Select(exists, place, zeros)), False)


class _FirstPart(ThreadPart):
    """One thread's part of a tile of the first product, which stays in shared memory."""

    def keep(self, place: Callable[[Index, Index, int], Index]) -> None:
        """Emit the epilogue, and store its results.

        ``place`` gives the lane's byte for the first of eight lines and of 32 columns, in a turn.
        """
        chunk = self.core.type.chunk
        for i in range(self.tile.warp_rows // STEP):
            sums = self.sums_of_rows(i)
            for half, group, values in row_vectors(self.core, self.lane, sums):
                line = self.row + i * STEP + half * ELEMENTS
                held = self._finished(line + self.lane // QUAD, group, values)
                for turn in range(-(-ELEMENTS // chunk)):
                    at = place(line, self.column + group * ELEMENTS, turn)
                    self.core.store(at, held, turn * chunk)

    def _finished(self, row: Index, group: int, values: Sequence[tirx.Expr]) -> tirx.Buffer:
        """Registers with eight of the layer's results; zeros if there are no such channels."""
        matmul = self.matmul
        [store] = matmul.epilogue.stores
        space = replace(matmul.epilogue, stores=())
        width = min(ELEMENTS, self.core.type.chunk)
        lanes = classify(space, width, [matmul.accumulator])
        lanes = lanes if lanes.is_aligned else classify(space, 1, [matmul.accumulator])
        held = hold([tirx.const(0, store.buffer.dtype)] * ELEMENTS, store.buffer.dtype)
        pixel = T.bind(self.first[0] + i64(row))
        first = self.first[1] + i64(self.column + (group + self.lane % QUAD) * ELEMENTS)
        conditions = [
            place < i64(extent)
            for place, part, extent in (
                (pixel, self.tile.rows, matmul.m),
                (first, self.tile.columns, matmul.n),
            )
            if self.left.starts_anywhere or not divides(part, extent)
        ]
        with when(*conditions):
            for start in range(0, ELEMENTS, lanes.vector):
                each = range(start, start + lanes.vector)
                points = [[*self.batch, pixel, first + i64(k)] for k in each]
                writer = PointWriter(lanes, self.views, points)
                writer.give(matmul.accumulator, [values[k] for k in each])
                writer.steps()
                for lane, k in enumerate(each):
                    T.buffer_store(held, writer.value(store.value, lane), [k])
        return held


class _ThreadPart:
    """One thread's part of a block, whose pixels begin with ``row``."""

    def __init__(
        self,
        pair: PairFunction,
        tile: PairTile,
        workload: FusedConv2DWorkload,
        views: Views,
        row: tirx.Expr,
        thread: tirx.Expr,
    ):
        self.pair, self.tile, self.workload, self.views = pair, tile, workload, views
        self.row, self.thread = row, thread
        self.core = TensorCore(tile.second.type, tile.mid_bytes + tile.stages_bytes)

    def write(self) -> None:
        """Emit the whole part."""
        second, tile = self.pair.second, self.tile
        arguments = second.left, tile.mid, 0, tile.threads, self.views, [self.row]
        left = _Intermediate(*arguments)
        if self.pair.first is None:
            self._fill()
        elif self.workload.layer2.is_pointwise:
            self._multiply_first(self.pair.first, self.row)
        else:
            skipped = self._multiply_with_halo(self.pair.first)
            image = i64(math.prod(self.workload.mid_size))
            first = T.bind((self.row % image).astype("int32"))
            left = _Windows(self.workload, tile, first, skipped, *arguments)
        with T.serial(i64(0), ceildiv(second.n, tile.second.columns)) as number:
            sync()  # the stages are used again
            corner = self.row, T.bind(number * i64(tile.second.columns))
            ThreadPart(
                second,
                tile.second,
                self.views,
                [],
                corner,
                self.thread,
                self.core,
                tile.mid_bytes,
                left,
            ).write()

    def _multiply_with_halo(self, first: MatmulFunction) -> tirx.Expr:
        """Emit the first layer for the block's pixels and a halo; returns the pixels before."""
        mid = self.tile.mid
        before, _ = halo(self.workload.layer2, self.workload.mid_size[1])
        begin = T.bind(tirx.max(self.row - i64(before), i64(0)))
        dtype = self.tile.second.type.dtype
        zeros = hold([tirx.const(0, dtype)] * mid.chunk, dtype)
        with when(self.thread < ZEROS // CHUNK):
            self.core.store(mid.nbytes + self.thread * CHUNK, zeros, 0)
        self._multiply_first(first, begin, starts_anywhere=True)
        return T.bind((self.row - begin).astype("int32"))

    def _multiply_first(
        self, first: MatmulFunction, begin: tirx.Expr, starts_anywhere: bool = False
    ) -> None:
        """Emit the first layer for the pixels from one on."""
        tile, mid, product = self.tile, self.tile.mid, self.tile.first
        assert product is not None, "a dense layer has a tile"
        with T.grid(tile.pixels // product.rows, tile.channels // product.columns) as place:
            sync()
            row, column = (
                T.bind(number * step)
                for number, step in zip(place, (product.rows, product.columns), strict=True)
            )
            corner = T.bind(begin + i64(row)), T.bind(i64(column))
            part = _FirstPart(
                first, product, self.views, [], corner, self.thread, self.core, tile.mid_bytes
            )
            part.left.starts_anywhere = starts_anywhere
            part.accumulate()

            def at(line: Index, first: Index, turn: int) -> Index:
                return mid.stored(part.lane, row + line, column + first, turn)

            part.keep(at)

    def _fill(self) -> None:
        """Emit the computation of a depthwise first layer, a chunk of a thread after the other."""
        tile = self.tile
        chunks = tile.mid.lines * tile.mid.chunks
        factor = Factor.of(self.pair.second.left, tile.mid, 0, chunks, self.views, [self.row])
        with T.serial(0, chunks // tile.threads, annotations=ROLLED) as number:
            chunk = number * tile.threads + self.thread
            factor.fetch(self.core, chunk, i64(0), 0)
            factor.keep(self.core, chunk, 0)
