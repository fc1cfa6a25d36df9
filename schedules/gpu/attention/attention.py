# SPDX-License-Identifier: Apache-2.0
"""GPU rule for attention."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.index_math import ceildiv, i64, simplified
from schedules.workload.reduce import constant

from ..core.kernel_function import unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.rule import GPURule
from ..gemm.skinny_matmul import MOST_ROWS
from ..gemm.tensor_core_tile import factor_dtype
from ..pointwise.point_kernel import Views
from .attention_pattern import read_attention
from .attention_tile import choose_attention_tile
from .tiled_attention import write_attention


def is_taken(func: tirx.PrimFunc, gpu: GPUInfo) -> bool:
    """Return whether the rule takes a function, and is likely to gain by it.

    Few queries of many keys are better left to separate products, whose blocks share the keys; and
    16-bit factors to those on tensor cores.
    """
    attention = read_attention(func)
    if attention is None or choose_attention_tile(attention, gpu) is None:
        return False
    rows = constant(attention.m)
    if rows is not None and rows <= MOST_ROWS:
        return False
    factors = (attention.query, attention.key, attention.value)
    return not (gpu.has_tensor_cores and all(map(factor_dtype, factors)))


class Attention(GPURule):
    """Softmax of products of queries and keys, times values, in one kernel.

    A block has some queries of one head and visits all keys; scores and weights stay in registers
    and shared memory, sums are float32. Scale, bias, mask and whatever else stands element by
    element between the product and the softmax are computed on the way, as are transpositions and
    reshapes before and behind.

    Left alone: heads whose tiles do not fit into shared memory.
    """

    def kernel(self, func: tirx.PrimFunc, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        attention = read_attention(func)
        tile = None if attention is None else choose_attention_tile(attention, gpu)
        if attention is None or tile is None:
            return None
        blocks = simplified(i64(attention.batches) * ceildiv(attention.m, tile.rows))

        def body() -> None:
            with unless_empty(blocks), T.launch_thread("blockIdx.x", blocks) as block:
                write_attention(attention, tile, gpu, Views.declare(func, gpu), block)

        return write_kernels(func, body)
