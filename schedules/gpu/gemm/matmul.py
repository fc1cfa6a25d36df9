# SPDX-License-Identifier: Apache-2.0
"""GPU rule for products of matrices, batched or not, with their epilogue."""

from __future__ import annotations

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.index_math import ceildiv, i64, simplified
from schedules.workload.reduce import constant

from ..core.kernel_function import unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.rule import GPURule
from ..pointwise.point_kernel import Views
from .matmul_pattern import MatmulFunction, read_matmul
from .matmul_tile_sizes import choose_tiles
from .skinny_matmul import MOST_ROWS, choose_rows, write_rows
from .tensor_core_matmul import tensor_core_function
from .tiled_matmul import write_tiles


class Matmul(GPURule):
    """Matrix products: dense layers, attention, either layout of a factor.

    Those of float16 and bfloat16 with more than eight rows run on tensor cores where the device
    has those of sm_80; all others on the ordinary cores, as follows.

    A block computes a tile of the result from tiles of the factors in shared memory, of which the
    next ones are loaded while the current ones are multiplied; a thread holds up to 8 x 8 sums, to
    which bias, activation and residual are applied before they are stored. The tiles are the
    largest that give every multiprocessor one; where even the smallest do not, groups of threads
    share the reduction. Products of up to eight rows are computed as products of vectors, each
    block reading its columns once: lanes share the reduction of a column, or have separate columns,
    depending on the layout of the right factor. 16-bit floats are summed in float32.

    Convolutions are taken where they run on tensor cores, as products of their weights and the
    windows of their data. Left alone: other convolutions, epilogues that move elements.
    """

    def kernel(self, func: tirx.PrimFunc, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        plain = read_matmul(func)
        matmul = plain or (read_matmul(func, windows=True) if gpu.has_tensor_cores else None)
        if matmul is None:
            return None
        rows = constant(matmul.m)
        is_skinny = rows is not None and rows <= MOST_ROWS
        kernel = None if is_skinny else tensor_core_function(func, matmul, gpu)
        if kernel is None and plain is None:
            return None
        if kernel is None:
            write = _write_rows if is_skinny else _write_tiles
            kernel = write_kernels(func, lambda: write(func, matmul, gpu))
        return kernel


def _write_rows(func: tirx.PrimFunc, matmul: MatmulFunction, gpu: GPUInfo) -> None:
    config = choose_rows(matmul, gpu)
    blocks = simplified(i64(matmul.batches) * ceildiv(matmul.n, config.columns))
    with unless_empty(blocks), T.launch_thread("blockIdx.x", blocks) as block:
        write_rows(matmul, config, gpu, Views.declare(func, gpu), block)


def _write_tiles(func: tirx.PrimFunc, matmul: MatmulFunction, gpu: GPUInfo) -> None:
    itemsize = DataType(matmul.dtype).bits // 8
    config = choose_tiles(matmul.batches, matmul.m, matmul.n, matmul.k, itemsize, gpu)
    rows, columns = ceildiv(matmul.m, config.rows), ceildiv(matmul.n, config.columns)
    blocks = simplified(i64(matmul.batches) * rows * columns)
    with unless_empty(blocks), T.launch_thread("blockIdx.x", blocks) as block:
        write_tiles(matmul, config, Views.declare(func, gpu), block)
