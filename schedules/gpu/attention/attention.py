# SPDX-License-Identifier: Apache-2.0
"""GPU rule for attention, and its gain by being one kernel.

A block visits all keys, one tile after the other, so that few blocks with many keys leave most of
the device idle. Separate products divide the keys among blocks, and pay with launches and with
scores in memory. The figures are estimates of :mod:`schedules.gpu.core.machine_costs`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.core.kernel_function import resident_blocks, unless_empty, write_kernels
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS
from schedules.gpu.core.rule import GPURule
from schedules.gpu.gemm.matmul.matmul_tile_sizes import assumed_size
from schedules.gpu.gemm.matmul.skinny_matmul import MOST_ROWS
from schedules.gpu.gemm.matmul.tensor_core_tile import factor_dtype
from schedules.gpu.pointwise.point_kernel import Views
from schedules.schedule_rule import KernelFacts
from schedules.tir.block_expressions import read_stages, stages_of
from schedules.tir.extents import constant
from schedules.tir.index_math import ceildiv, i64, simplified

from .attention_pattern import AttentionFunction, read_attention
from .decode_attention import write_decode
from .decode_tile import choose_decode_tile
from .tensor_core_attention import (
    TensorAttentionTile,
    choose_tensor_attention,
    write_tensor_attention,
)
from .tiled_attention import AttentionTile, choose_attention_tile, write_attention
from .warpgroup_attention import choose_warpgroup_attention, write_warpgroup_attention

_LANES = 128  # products that a multiprocessor adds in a cycle, of float32
_TENSOR_LANES = 1024  # and of float16 on tensor cores
_PASSES = 4  # Passes over the scores: product, softmax in and out, product.
_KERNELS = 3
_CLEAR = 2  # an estimate must be off by more to mislead


def gains(
    attention: AttentionFunction, tile: AttentionTile | TensorAttentionTile, gpu: GPUInfo
) -> bool:
    """Return whether one kernel is not clearly slower than separate products and a softmax."""
    sizes = (attention.batches, attention.m, attention.n, attention.depth, attention.columns)
    batches, m, n, depth, columns = map(assumed_size, sizes)
    is_tensor = isinstance(tile, TensorAttentionTile)
    lanes, itemsize = (_TENSOR_LANES, 2) if is_tensor else (_LANES, 4)
    blocks = batches * -(-m // tile.rows)
    work = tile.rows * tile.keys * (tile.depth + tile.columns) / lanes
    steps = -(-n // tile.keys)
    fused = -(-blocks // gpu.multiprocessors) * steps * (work + COSTS.step_latency)
    scores = batches * m * n
    traffic = _PASSES * itemsize * scores / COSTS.l2_bytes
    apart = (traffic + scores * (depth + columns) / lanes) / gpu.multiprocessors
    return fused <= _CLEAR * (apart + _KERNELS * COSTS.launch)


def is_taken(func: tirx.PrimFunc, gpu: GPUInfo) -> bool:
    """Return whether the rule takes a function, and is likely to gain by it.

    A few queries of another layout are left to products of few rows, which read each key once, and
    16-bit factors too long for this kernel on tensor cores to products on them.
    """
    attention = read_attention(func, read_stages(func))
    rows = None if attention is None else constant(attention.m)
    if attention is None:
        return False
    if rows is not None and rows <= MOST_ROWS:
        return choose_decode_tile(attention, gpu) is not None
    tensor = choose_tensor_attention(attention, gpu)
    factors = (attention.query, attention.key, attention.value)
    if tensor is None and gpu.has_tensor_cores and all(map(factor_dtype, factors)):
        return False
    tile = tensor or choose_attention_tile(attention, gpu)
    return tile is not None and gains(attention, tile, gpu)


class Attention(GPURule):
    """Softmax of products of queries and keys, times values, in one kernel.

    A block has some queries of one head and visits all keys; scores and weights stay in registers
    and shared memory, sums are float32. Queries, keys and values of float16 and bfloat16 are
    multiplied on tensor cores where the device has those of sm_80. Scale, bias, mask and whatever
    else stands element by element between the product and the softmax are computed on the way, as
    are transpositions and reshapes before and behind.

    Of up to eight queries the keys are divided among blocks, and another kernel combines the parts.

    Left alone: heads whose tiles do not fit into shared memory.
    """

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        func = facts.func
        attention = read_attention(func, facts.read(stages_of))
        if attention is None:
            return None
        few = choose_decode_tile(attention, gpu)
        if few is not None:
            return write_decode(func, attention, few, gpu)
        tensor = choose_tensor_attention(attention, gpu)
        groups = choose_warpgroup_attention(attention, tensor, gpu)
        if groups is not None:
            return write_warpgroup_attention(func, attention, groups, gpu)
        if tensor is not None:
            return _kernels(
                func,
                attention,
                tensor.rows,
                resident_blocks(
                    gpu, COSTS.register_file // (COSTS.thread_registers * tensor.threads)
                ),
                lambda block: write_tensor_attention(
                    attention, tensor, Views.declare(func, gpu), block
                ),
            )
        tile = choose_attention_tile(attention, gpu)
        if tile is None:
            return None
        return _kernels(
            func,
            attention,
            tile.rows,
            nullcontext(),
            lambda block: write_attention(attention, tile, gpu, Views.declare(func, gpu), block),
        )


def _kernels(
    func: tirx.PrimFunc,
    attention: AttentionFunction,
    rows: int,
    registers: AbstractContextManager,
    write: Callable[[tirx.Expr], None],
) -> tirx.PrimFunc:
    """The function with one launch, of a block for each ``rows`` queries."""
    blocks = simplified(i64(attention.batches) * ceildiv(attention.m, rows))

    def body() -> None:
        with unless_empty(blocks), T.launch_thread("blockIdx.x", blocks) as block, registers:
            write(block)

    return write_kernels(func, body)
