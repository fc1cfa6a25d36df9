# SPDX-License-Identifier: Apache-2.0
"""What statistics of rows add to a product, and what a layer norm of its own costs.

All figures are estimates of :mod:`schedules.gpu.core.machine_costs`.
"""

from __future__ import annotations

from schedules.compute.row_moments import SEGMENT
from schedules.workload.reduce import constant

from ...core.machine import GPUInfo
from ...core.machine_costs import COSTS
from .matmul_pattern import MatmulFunction
from .matmul_tile_sizes import assumed_size, choose_tiles
from .skinny_matmul import MOST_ROWS
from .tiled_matmul import holds_moments

_BYTES = 4  # of an element
_MOMENTS = 2  # of a segment
_PASSES = 2  # of a norm over its rows: in and out
_LANES = 128  # additions of a multiprocessor in a cycle


def takes_statistics(matmul: MatmulFunction, gpu: GPUInfo) -> bool:
    """Return whether the kernel of a product of float32 uses and stores statistics of its rows."""
    rows = constant(matmul.m)
    if rows is None or rows <= MOST_ROWS or matmul.dtype != "float32" or matmul.left.rows_first:
        return False
    extents = matmul.batches, matmul.m, matmul.n, matmul.k
    return matmul.moments is None or holds_moments(choose_tiles(*extents, _BYTES, gpu))


def statistics_cycles(matmul: MatmulFunction, gpu: GPUInfo) -> float:
    """Cycles by which statistics lengthen a product on the ordinary cores.

    Each block reads the moments of its rows and combines them before its first step; a step more
    subtracts from each element that it loads of the left factor. Moments of results are a barrier,
    a part of the tile in shared memory, and a segment for each thread.
    """
    extents = (matmul.batches, matmul.m, matmul.n, matmul.k)
    tile = choose_tiles(*extents, _BYTES, gpu)
    _, m, n, k = map(assumed_size, extents)
    blocks = -(-m // tile.rows) * -(-n // tile.columns)
    share = -(-blocks // gpu.multiprocessors)
    resident = max(1, COSTS.multiprocessor_threads // 2 // tile.threads)
    rounds, cycles = -(-share // resident), 0.0
    if matmul.statistics is not None:
        reads = sum(1 for step in matmul.statistics.space.steps if hasattr(step, "buffer"))
        cycles += share * tile.rows * reads * _BYTES / COSTS.l2_bytes
        cycles += rounds * COSTS.step_latency
    if matmul.left.shift is not None:
        cycles += share * tile.rows * k / _LANES
    if matmul.moments is not None:
        written = tile.rows * tile.columns // SEGMENT * _MOMENTS
        cycles += share * written * _BYTES / COSTS.l2_bytes
        cycles += rounds * COSTS.step_latency / 2
    return cycles


def norm_cycles(rows: int, columns: int, gpu: GPUInfo) -> float:
    """Cycles of a layer norm as a kernel of its own: launch, latency, its rows in and out."""
    traffic = _PASSES * rows * columns * _BYTES
    rate = COSTS.l2_bytes if traffic <= COSTS.l2_capacity else COSTS.memory_bytes
    return COSTS.launch + COSTS.block_latency + traffic / (rate * gpu.multiprocessors)
