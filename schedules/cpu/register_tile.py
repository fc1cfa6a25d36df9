# SPDX-License-Identifier: Apache-2.0
"""The size of a register tile, chosen by counting cycles.

Per reduction step a tile of ``P`` pixels x ``V`` vectors issues ``P V`` multiply-adds and
``P + V`` loads and cannot finish before the latency of one multiply-add (its accumulators form
``P V`` independent chains). With two multiply-adds and two loads a cycle and a latency of four,
as on current x86 cores,

    cycles(P, V) = max(P V / 2, (P + V) / 2, 4)

and the layer costs the sum over all its tiles, tails included. ``P V + V + 1`` registers are
needed. The smallest sum wins; on a tie a tile that leaves the compiler a register to spare, then
the one with fewer loads a multiply-add, then the larger one.
"""

from __future__ import annotations

from functools import lru_cache

from ..conv2d_workload import ConvLayer
from .machine import CPUInfo
from .tiles import split_evenly

FMA_PER_CYCLE = 2
LOADS_PER_CYCLE = 2
FMA_LATENCY = 4
MAX_VECTORS = 4


def step_cycles(pixels: int, vectors: int) -> float:
    """Cycles of one reduction step of a tile."""
    return max(
        pixels * vectors / FMA_PER_CYCLE,
        (pixels + vectors) / LOADS_PER_CYCLE,
        FMA_LATENCY,
    )


def row_cycles(row: int, blocks: int, pixels: int, vectors: int) -> float:
    """Cycles of one reduction step for all tiles of a row of ``row`` pixels x ``blocks`` blocks."""
    return sum(
        step_cycles(p, v) for p in split_evenly(row, pixels) for v in split_evenly(blocks, vectors)
    )


@lru_cache(maxsize=1024)
def best_tile(row: int, blocks: int, registers: int) -> tuple[int, int]:
    """Pixels and vectors of the cheapest register tile.

    Parameters
    ----------
    row : int
        Pixels that can be cut freely: of a row, or of the whole image where it is flat.
    blocks : int
        Output channel blocks of one group.
    registers : int
        Vector registers of the CPU.
    """
    candidates = [
        (
            row_cycles(row, blocks, pixels, vectors),
            pixels * vectors + vectors + 1 == registers,
            (pixels + vectors) / (pixels * vectors),
            -pixels * vectors,
            pixels,
            vectors,
        )
        for vectors in range(1, min(MAX_VECTORS, blocks) + 1)
        for pixels in range(1, min(row, (registers - 1) // vectors - 1) + 1)
    ]
    return min(candidates)[-2:]


def register_tile(layer: ConvLayer, row: int, lanes: int, cpu: CPUInfo) -> tuple[int, int]:
    """Pixels and vectors of the default tile of a layer.

    A depthwise tile holds one vector of channels, and as many pixels as leave half of the registers
    for weights and inputs.
    """
    registers = cpu.num_vector_registers
    if layer.is_depthwise:
        return split_evenly(row, max(4, registers // 2 - 1))[0], 1
    blocks = -(-layer.out_channels // lanes)
    return best_tile(row, blocks // layer.groups, registers)
