# SPDX-License-Identifier: Apache-2.0
"""GPU rule for convolutions that no other rule takes.

Dense ones of float16, bfloat16, int8 and, on request, float32 rounded to TF32 are products on
tensor cores, of the weights and the windows of the data, by warpgroups where these take less time.
With groups of few channels threads have neighbouring outputs, in blocks of channels those of a
block; the others have one thread for each output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from schedules import attributes
from schedules.gpu.pointwise.elementwise import write_windows
from schedules.schedule_rule import KernelFacts
from schedules.tir.block_expressions import stages_of
from schedules.tir.expression_walk import substitute
from schedules.tir.extents import unravel
from schedules.tir.index_math import ceildiv, i64, volume
from schedules.tir.statements import when
from schedules.workload.conv2d import Conv2DKernel, from_json

from ..core.kernel_function import unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.tensor_core import MATRIX_TYPES
from ..gemm.matmul.matmul_pattern import ACCUMULATOR, read_matmul
from ..gemm.matmul.tensor_core_matmul import tensor_core_function
from ..gemm.matmul.warpgroup_conv2d import (
    SHAPES,
    WindowSizes,
    WindowTile,
    fastest_window_tile,
    ranked_window_tiles,
    warpgroup_conv2d_function,
    window_kernel,
    window_tile,
)
from .conv2d import ConvRule, ConvTemplate
from .tensor_core_pair_pattern import summed_in_float32

THREADS = 128
_MOST_BOXES, _MOST_FEWER = 3, 3  # Boxes and numbers of stages of a shape's settings.


@dataclass(frozen=True)
class WindowKnobs:
    """Tiles of a convolution of warpgroups.

    Parameters
    ----------
    columns, cluster, warpgroups : int
        Numbers as in :class:`.warpgroup_conv2d.WindowTile`.
    box : int
        Number of the box of pixels among all that fit, in order of their predicted times.
    stages : int
        Stages in shared memory.
    """

    columns: int
    cluster: int
    warpgroups: int
    box: int
    stages: int


class WarpgroupConv2DTemplate(ConvTemplate[WindowKnobs]):
    """Boxes of pixels (:mod:`..gemm.matmul.warpgroup_conv2d`)."""

    name = "gpu.conv2d_warpgroups"
    version = 1
    knobs = WindowKnobs
    rule = "AnyConv2D"

    def read_workload(self, text: str) -> Conv2DKernel:
        """Read the JSON of a workload."""
        kernel = super().read_workload(text)
        if len(kernel.layers) != 1 or kernel.dtype not in MATRIX_TYPES:
            raise ValueError(f"{text:.100} describes no convolution of warpgroups")
        return kernel

    def default(self, workload: Conv2DKernel, machine: GPUInfo) -> WindowKnobs:
        """Return the tile of the least predicted time."""
        sizes = _window_sizes(workload)
        _, tile = fastest_window_tile(sizes, machine)
        shape = tile.columns, tile.cluster, tile.warpgroups
        box = ranked_window_tiles(sizes, *shape, machine).index(tile)
        return WindowKnobs(*shape, box, tile.stages)

    def settings(self, workload: Conv2DKernel, machine: GPUInfo) -> Iterator[WindowKnobs]:
        """Yield all shapes with their boxes of the least predicted times, and the most stages."""
        sizes = _window_sizes(workload)
        for shape in SHAPES:
            if shape[1] <= machine.multiprocessors:
                tiles = ranked_window_tiles(sizes, *shape, machine)[:_MOST_BOXES]
                for box, tile in enumerate(tiles):
                    for stages in range(tile.stages, max(tile.stages - _MOST_FEWER, 2), -1):
                        yield WindowKnobs(*shape, box, stages)

    def kernel(
        self, func: tirx.PrimFunc, workload: Conv2DKernel, knobs: WindowKnobs, gpu: GPUInfo
    ) -> tirx.PrimFunc:
        """Write the kernel."""
        matmul = read_matmul(func, windows=True)
        found = None if matmul is None else window_tile(func, matmul, gpu)
        assert matmul is not None and found is not None, "the workload was read from it"
        windows, chosen = found
        tile = replace(_tile_of(workload, knobs, gpu), type=chosen.type)
        return window_kernel(func, matmul, windows, tile, gpu)

    def cycles(self, workload: Conv2DKernel, knobs: WindowKnobs, machine: GPUInfo) -> float:
        """Return the cycles of a multiprocessor with its share of the tiles."""
        tile = _tile_of(workload, knobs, machine)
        return tile.window_cycles(_window_sizes(workload), machine)


def _window_sizes(workload: Conv2DKernel) -> WindowSizes:
    layer, images = workload.layers[0], workload.batch
    height, width = workload.height, workload.width
    assert images and height and width, "it has no symbolic extents"
    chunk = MATRIX_TYPES[workload.dtype].chunk
    return WindowSizes.of_layer(layer, images, (height, width), chunk)


def _tile_of(workload: Conv2DKernel, knobs: WindowKnobs, gpu: GPUInfo) -> WindowTile:
    shape = knobs.columns, knobs.cluster, knobs.warpgroups
    ranked = ranked_window_tiles(_window_sizes(workload), *shape, gpu)
    return replace(ranked[knobs.box], most_stages=knobs.stages)


WARPGROUPS = WarpgroupConv2DTemplate()


class AnyConv2D(ConvRule):
    """Computes a convolution on tensor cores, or neighbouring outputs or one in a thread.

    Takes every function that legalization marked as one direct convolution: other element types
    than float32, other layouts than ``NCHW4c``, groups that cross block boundaries, symbolic sizes.
    16-bit floats are summed in float32. Returns None for everything else. Those of warpgroups are
    tuned.
    """

    template = WARPGROUPS

    def workload(self, func: tirx.PrimFunc, target: Target) -> Conv2DKernel | None:
        """Return the convolution, if its sizes are known and warpgroups take it."""
        kernel = _dense_kernel(func)
        if kernel is None or not kernel.is_static:
            return None
        matmul = read_matmul(func, windows=True)
        found = matmul and window_tile(func, matmul, self.machine(target))
        return kernel if found else None

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        func = facts.func
        text = func.attrs.get(attributes.WORKLOAD) if func.attrs else None
        if text is None:
            return None
        kernel = from_json(str(text))
        if kernel.winograd or len(kernel.layers) != 1:
            return None
        if kernel.layers[0].groups == 1:
            matmul = read_matmul(func, windows=True)
            for write in (warpgroup_conv2d_function, tensor_core_function):
                if matmul and (written := write(func, matmul, gpu)):
                    return written
        elif stages := facts.read(stages_of):
            if written := write_windows(func, summed_in_float32(stages), gpu):
                return written
        sch = s_tir.Schedule(tvm.IRModule({"main": func}))
        found = sch.get_child_blocks(sch.get_sblock("root"))
        if "pad1" in [sch.get(block).name_hint for block in found]:
            sch.compute_inline(sch.get_sblock("pad1"))
        blocks = sch.get(sch.get_sblock("conv1")), sch.get(sch.get_sblock("layer1"))
        threads = gpu.block_threads(THREADS)
        return write_kernels(func, lambda: _write_kernel(func, *blocks, threads))


def _dense_kernel(func: tirx.PrimFunc) -> Conv2DKernel | None:
    text = func.attrs.get(attributes.WORKLOAD) if func.attrs else None
    kernel = None if text is None else from_json(str(text))
    if kernel is None or kernel.winograd or len(kernel.layers) != 1:
        return None
    return kernel if kernel.layers[0].groups == 1 else None


def _write_kernel(
    func: tirx.PrimFunc, conv: s_tir.SBlock, layer: s_tir.SBlock, threads: int
) -> None:
    """Emit the launch, from the block that sums up and the one that ends the layer."""
    output = func.params[-1]
    total = volume(output.shape)
    count = ceildiv(total, threads)
    with unless_empty(count), T.launch_thread("blockIdx.x", count) as block:
        with T.launch_thread("threadIdx.x", i64(threads)) as thread:
            item = T.bind(block * i64(threads) + thread)
            with when(item < total):
                index = unravel(item, output.shape)
                sums = _sum_up(conv, index)
                value = substitute(layer.body.value, _places(layer, index))
                result = tvm_ffi.structural_map(
                    value, (ir.TensorLoad, lambda load: _replace(load, conv, sums))
                )
                T.buffer_store(output, result, index)


def _sum_up(conv: s_tir.SBlock, index: list[tirx.Expr]) -> tirx.Buffer:
    """Emit the loops over taps and channels; returns the register with the sum."""
    stored = str(conv.writes[0].source.dtype)
    dtype = ACCUMULATOR.get(stored, stored)
    sums = T.alloc_buffer((1,), dtype, scope="local")
    T.buffer_store(sums, tirx.const(0, dtype), [0])
    reduced = [v for v in conv.iter_vars if v.iter_type == tirx.IterVar.CommReduce]
    with T.grid(*[v.dom.extent for v in reduced]) as steps:
        values = _places(conv, index)
        values |= {v.var: s.astype(v.var.ty.dtype) for v, s in zip(reduced, steps, strict=True)}
        product = conv.body.value.b
        left, right = (
            substitute(factor, values).astype(dtype) for factor in (product.a, product.b)
        )
        T.buffer_store(sums, sums[0] + left * right, [0])
    return sums


def _places(block: s_tir.SBlock, index: list[tirx.Expr]) -> dict[tirx.Var, tirx.Expr]:
    """Values of the block's variables along the output for one element of it."""
    own = [v for v in block.iter_vars if v.iter_type != tirx.IterVar.CommReduce]
    return {v.var: at.astype(v.var.ty.dtype) for v, at in zip(own, index, strict=True)}


def _replace(load: ir.TensorLoad, conv: s_tir.SBlock, sums: tirx.Buffer) -> tirx.Expr:
    target = conv.writes[0].source
    return sums[0].astype(target.dtype) if load.source.same_as(target) else load
