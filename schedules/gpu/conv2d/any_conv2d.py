# SPDX-License-Identifier: Apache-2.0
"""GPU rule for convolutions that no other rule takes.

Dense ones of float16, bfloat16, int8 and, on request, float32 rounded to TF32 are products on
tensor cores, of the weights and the windows of the data, by warpgroups where these take less time.
With groups of few channels threads have neighbouring outputs, in blocks of channels those of a
block; the others have one thread for each output.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.gpu.pointwise.elementwise import write_windows
from schedules.schedule_rule import KernelFacts
from schedules.tir.block_expressions import stages_of
from schedules.tir.expression_walk import substitute
from schedules.tir.extents import unravel
from schedules.tir.index_math import ceildiv, i64, volume
from schedules.tir.statements import when
from schedules.workload.conv2d import from_json

from ..core.kernel_function import unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.rule import GPURule
from ..gemm.matmul.matmul_pattern import ACCUMULATOR, read_matmul
from ..gemm.matmul.tensor_core_matmul import tensor_core_function
from ..gemm.warpgroup_conv2d import warpgroup_conv2d_function
from .tensor_core_pair_pattern import summed_in_float32

THREADS = 128


class AnyConv2D(GPURule):
    """Computes a convolution on tensor cores, or neighbouring outputs or one in a thread.

    Takes every function that legalization marked as one direct convolution: other element types
    than float32, other layouts than ``NCHW4c``, groups that cross block boundaries, symbolic sizes.
    16-bit floats are summed in float32. Returns None for everything else.
    """

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
