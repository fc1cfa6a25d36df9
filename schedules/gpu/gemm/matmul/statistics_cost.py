# SPDX-License-Identifier: Apache-2.0
"""Costs of statistics of rows in a product, and of a layer norm of its own.

All figures are estimates of :mod:`schedules.gpu.core.machine_costs`.
"""

from __future__ import annotations

from schedules.compute.norms import SEGMENT
from schedules.tir.extents import constant

from ...core.machine import GPUInfo
from ...core.machine_costs import COSTS
from ...pointwise.element_program import Read
from .matmul_pattern import MatmulFunction
from .matmul_tile_sizes import TileConfig, assumed_size, choose_tiles
from .skinny_matmul import MOST_ROWS
from .tiled_matmul import holds_moments

_BYTES = 4  # of an element
_MOMENTS = 2  # of a segment
_PASSES = 2  # of a norm over its rows: in and out
_LANES = 128  # additions of a multiprocessor in a cycle
_RESIDENT = 512  # threads of a multiprocessor, of up to 128 registers each


def takes_statistics(matmul: MatmulFunction, gpu: GPUInfo) -> bool:
    """Return whether the kernel of a product of float32 uses and stores statistics of its rows."""
    rows = constant(matmul.m)
    if rows is None or rows <= MOST_ROWS or matmul.dtype != "float32" or matmul.left.rows_first:
        return False
    extents = matmul.batches, matmul.m, matmul.n, matmul.k
    return matmul.moments is None or holds_moments(choose_tiles(*extents, _BYTES, gpu))


def reading_cycles(matmul: MatmulFunction, gpu: GPUInfo) -> float:
    """Cycles by which statistics of its rows lengthen a product on the ordinary cores.

    Each block reads the moments of its rows and combines them before its first step, and subtracts
    from each element of the left factor that it loads.
    """
    if matmul.statistics is None:
        return 0.0
    tile, share, rounds = _blocks(matmul, gpu)
    reads = sum(isinstance(step, Read) for step in matmul.statistics.space.steps)
    cycles = share * tile.rows * reads * _BYTES / COSTS.l2_bytes + rounds * COSTS.step_latency
    if matmul.left.shift is not None:
        cycles += share * tile.rows * assumed_size(matmul.k) / _LANES
    return cycles


def moments_cycles(matmul: MatmulFunction, gpu: GPUInfo) -> float:
    """Cycles by which moments of its results lengthen a product on the ordinary cores.

    A barrier, and a segment for each thread.
    """
    if matmul.moments is None:
        return 0.0
    tile, share, rounds = _blocks(matmul, gpu)
    written = tile.rows * tile.columns // SEGMENT * _MOMENTS * _BYTES
    return share * written / COSTS.l2_bytes + rounds * COSTS.step_latency


def _blocks(matmul: MatmulFunction, gpu: GPUInfo) -> tuple[TileConfig, int, int]:
    """Tile, blocks of a multiprocessor, and how often it starts new ones."""
    tile = choose_tiles(matmul.batches, matmul.m, matmul.n, matmul.k, _BYTES, gpu)
    m, n = assumed_size(matmul.m), assumed_size(matmul.n)
    share = -(-(-(-m // tile.rows) * -(-n // tile.columns)) // gpu.multiprocessors)
    return tile, share, -(-share * tile.threads // _RESIDENT)


def norm_cycles(rows: int, columns: int, gpu: GPUInfo) -> float:
    """Cycles of a layer norm as a kernel of its own: launch, latency, its rows in and out."""
    traffic = _PASSES * rows * columns * _BYTES
    rate = COSTS.l2_bytes if traffic <= COSTS.l2_capacity else COSTS.memory_bytes
    return COSTS.launch + COSTS.block_latency + traffic / (rate * gpu.multiprocessors)
