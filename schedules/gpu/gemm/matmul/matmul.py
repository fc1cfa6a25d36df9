# SPDX-License-Identifier: Apache-2.0
"""GPU rule for products of matrices, batched or not, with their epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import DataType, tirx
from tvm.target import Target

from schedules.schedule_rule import KernelFacts
from schedules.tir.block_expressions import stages_of
from schedules.tir.extents import constant

from ...core.machine import GPUInfo
from ...core.rule import TunableGPURule
from .factor_tiles import WIDTH, operand_lanes
from .matmul_pattern import MatmulFunction, read_matmul, read_product
from .matmul_tile_sizes import choose_tiles
from .skinny_matmul import MOST_ROWS, choose_rows, write_rows_kernel
from .statistics_cost import takes_statistics
from .templates import (
    ROWS,
    TILES,
    WARPGROUPS,
    MatmulTemplate,
    MatmulWorkload,
    WarpgroupWorkload,
)
from .tensor_core_matmul import tensor_core_function
from .tensor_core_tile import allows_tf32, along_depth, choose_tensor_tile, rounded_position
from .tiled_matmul import write_tiles_kernel
from .warpgroup_conv2d import warpgroup_conv2d_function
from .warpgroup_matmul import warpgroup_function
from .warpgroup_tile import choose_warpgroup_tile


class Matmul(TunableGPURule):
    """Matrix products: dense layers, attention, either layout of a factor.

    Those of float16, bfloat16, int8 and, where :data:`schedules.attributes.TF32` allows it, float32
    with more than eight rows run on tensor cores where the device has those of sm_80; those of 16
    bits by warpgroups where it has those of sm_90a, and they take less time; all others on the
    ordinary cores, as follows.

    A block computes a tile of the result from tiles of the factors in shared memory, of which the
    next ones are loaded while the current ones are multiplied; a thread holds up to 8 x 8 sums, to
    which bias, activation and residual are applied before they are stored. The tiles are the
    largest that give every multiprocessor one; where even the smallest do not, groups of threads
    share the reduction. Products of up to eight rows are computed as products of vectors, each
    block reading its columns once: lanes share the reduction of a column, or have separate columns,
    depending on the layout of the right factor. 16-bit floats are summed in float32.

    A value of each row may be subtracted from the left factor, and others be used by the epilogue,
    which may also store moments of segments of the result: the pass ``FuseLayerNorm`` makes such
    functions of products beside a layer norm. Their tiles are not tuned.

    Convolutions are taken where they run on tensor cores, as products of their weights and the
    windows of their data. Left alone: other convolutions, epilogues that move elements.
    """

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        func = facts.func
        stages = facts.read(stages_of) or []
        plain = read_product(stages, func.params)
        matmul = plain
        if plain is None and gpu.has_tensor_cores:
            matmul = read_product(stages, func.params, windows=True)
        if matmul is None:
            return None
        rows = constant(matmul.m)
        is_skinny = rows is not None and rows <= MOST_ROWS
        if not matmul.is_plain and not takes_statistics(matmul, gpu):
            return None
        by_warpgroups = warpgroup_conv2d_function if plain is None else warpgroup_function
        turned = func, matmul
        if plain is not None and gpu.has_tensor_cores:
            turned = along_depth(func, matmul)
        for write in () if is_skinny else (by_warpgroups, tensor_core_function):
            if (kernel := write(*turned, gpu)) is not None:
                return kernel
        if plain is None:
            return None
        return _rows(func, plain, gpu) if is_skinny else _tiles(func, plain, gpu)

    def workload(self, func: tirx.PrimFunc, target: Target) -> MatmulWorkload | None:
        """Return the product, if its extents are known and no single warps of tensor cores take it.

        Not one with statistics of rows, which some tiles cannot hold.
        """
        matmul = read_matmul(func)
        if matmul is None or not matmul.is_plain:
            return None
        found = MatmulWorkload.of(matmul)
        if found is None or found.is_skinny:
            return found
        gpu = self.machine(target)
        func, matmul = along_depth(func, matmul) if gpu.has_tensor_cores else (func, matmul)
        by_warpgroups = choose_warpgroup_tile(matmul, gpu, rounded_position(func, matmul.right))
        if by_warpgroups is not None:
            kind = by_warpgroups.type
            return WarpgroupWorkload(**vars(found), factors=kind.dtype, right=kind.right)
        return found if choose_tensor_tile(matmul, gpu, allows_tf32(func)) is None else None

    def templates(
        self, workload: MatmulWorkload, machine: GPUInfo
    ) -> Sequence[MatmulTemplate[Any]]:
        """Return the one template that takes such products."""
        if isinstance(workload, WarpgroupWorkload):
            return (WARPGROUPS,)
        return (ROWS,) if workload.is_skinny else (TILES,)


def _rows(func: tirx.PrimFunc, matmul: MatmulFunction, gpu: GPUInfo) -> tirx.PrimFunc:
    vector = operand_lanes(matmul.right, WIDTH).vector
    rows, columns, depth = (constant(extent) for extent in (matmul.m, matmul.n, matmul.k))
    along_depth = not matmul.right.rows_first
    config = choose_rows(along_depth, vector, rows or 1, columns, depth, _bytes(matmul), gpu)
    return write_rows_kernel(func, matmul, config, gpu)


def _tiles(func: tirx.PrimFunc, matmul: MatmulFunction, gpu: GPUInfo) -> tirx.PrimFunc:
    extents = matmul.batches, matmul.m, matmul.n, matmul.k
    config = choose_tiles(*extents, _bytes(matmul), gpu)
    return write_tiles_kernel(func, matmul, config, gpu)


def _bytes(matmul: MatmulFunction) -> int:
    return DataType(matmul.dtype).bits // 8
