# SPDX-License-Identifier: Apache-2.0
"""Register tiles: the cost of one step of the reduction, and the sizes to consider.

Per reduction step a tile of ``P`` pixels x ``V`` vectors issues ``P V`` multiply-adds, loads ``P``
elements and ``V`` vectors of weights, each costing as much as ``w`` elements, and cannot finish
before the latency ``l`` of one multiply-add, because its accumulators form ``P V`` independent
chains. With ``f`` multiply-adds and ``b`` loads a cycle

    cycles(P, V) = max(ceil(P V / f), (P + w V) / b, l)

and a row of pixels x channel blocks costs the sum over all its tiles, tails included.
``P V + V + 1`` registers are needed, and some more where the compiler loads ahead.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from schedules.workload.conv2d import ConvLayer

from ..core.machine import CPUInfo
from ..core.tiles import tile_counts

MAX_VECTORS = 4
MOST_CYCLES = 1.2  # Tile sizes up to so many times the best cycles are considered.
# Most pixels of tiles of one to MAX_VECTORS vectors whose accumulators LLVM 22 keeps in registers,
# by the number of registers: read from the machine code, which the tests compile and read again.
MOST_PIXELS = {16: (9, 6, 4, 2), 32: (30, 12, 8, 6)}
# Likewise for vectors of 128 bits, of which those of the pixels stay in registers, too.
MOST_PIXELS_128 = {16: (6, 4, 3, 2), 32: (14, 10, 7, 5)}
# Most pixels of depthwise tiles in steps of several columns: kernels of up to three, and of more.
MOST_SKIPPING = {16: (7, 4), 32: (8, 8)}


def most_pixels(cpu: CPUInfo, vectors: int) -> int:
    """Most pixels of a tile of so many vectors that the registers hold."""
    limits = MOST_PIXELS_128 if cpu.vector_bits <= 128 else MOST_PIXELS
    return limits[cpu.num_vector_registers][vectors - 1]


def step_cycles(pixels: int, vectors: int, cpu: CPUInfo, loads: float = 1.0) -> float:
    """Cycles of one reduction step of a tile, with so many elements loaded for each pixel."""
    costs = cpu.costs
    return max(
        ceil(pixels * vectors / cpu.fma_per_cycle),
        (pixels * loads + costs.weight_loads * vectors) / costs.loads_per_cycle,
        costs.fma_latency,
    )


def row_cycles(row: int, blocks: int, pixels: int, vectors: int, cpu: CPUInfo) -> float:
    """Cycles of one reduction step for all tiles of a row of ``row`` pixels x ``blocks`` blocks."""
    return sum(
        count * times * step_cycles(p, v, cpu)
        for p, count in tile_counts(row, pixels)
        for v, times in tile_counts(blocks, vectors)
    )


@lru_cache(maxsize=1024)
def dense_tiles(
    row: int, blocks: int, cpu: CPUInfo, registers: int | None = None
) -> list[tuple[int, int]]:
    """Pixels and vectors of the register tiles to consider, the one of the fewest cycles first.

    Sizes that divide the row alike count once; those above ``MOST_CYCLES`` are left out.

    Parameters
    ----------
    row : int
        Pixels that can be cut freely: of a row, or of the whole image where it is flat.
    blocks : int
        Output channel blocks of one group.
    cpu : CPUInfo
        Whose registers hold the tile.
    registers : int, optional
        Number of registers that it may use, if not all.
    """
    free = registers or cpu.num_vector_registers

    def most(vectors: int) -> int:
        return max(1, min(row, most_pixels(cpu, vectors), (free - 1) // vectors - 1))

    cycles = {
        (tile_counts(row, pixels)[0][0], vectors): row_cycles(row, blocks, pixels, vectors, cpu)
        for vectors in range(1, min(MAX_VECTORS, blocks) + 1)
        for pixels in range(1, most(vectors) + 1)
    }
    larger_first = sorted(cycles, key=lambda tile: -tile[0] * tile[1])
    return _worth_a_try({tile: cycles[tile] for tile in larger_first})


def _worth_a_try(cycles: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
    """The tiles of the fewest cycles, the best first; equally good ones keep their order."""
    most = MOST_CYCLES * min(cycles.values())
    return [tile for tile in sorted(cycles, key=cycles.__getitem__) if cycles[tile] <= most]


def register_tiles(
    layer: ConvLayer, row: int, lanes: int, cpu: CPUInfo, spare: int = 0
) -> list[tuple[int, int]]:
    """Pixels and vectors of the register tiles to consider for a layer.

    A depthwise tile holds one vector of channels, and as many pixels as leave half of the registers
    for weights and inputs; fewer in steps of two columns, which share less of what they load. One
    of groups of ``g`` lanes holds ``g`` accumulators and a vector of inputs for each pixel, a
    vector of weights, and leaves the compiler a register. Dense ones leave ``spare`` registers:
    words of bytes are loaded before they are multiplied, several at once.
    """
    registers, width = cpu.num_vector_registers, layer.group_lanes(lanes)
    if width > 1:
        most = max(1, (registers - 3) // (width + 1))
        return _worth_a_try(
            {
                (tile_counts(row, p)[0][0], 1): row_cycles(row, width, p, width, cpu)
                for p in range(1, most + 1)
            }
        )
    if width:
        most = max(4, registers // 2 - 1)
        if layer.strides[1] > 1:
            most = MOST_SKIPPING[registers][layer.kernel[1] > 3]
        most = tile_counts(row, most)[0][0]
        sizes = {tile_counts(row, pixels)[0][0] for pixels in range((most + 1) // 2, most + 1)}
        return [(pixels, 1) for pixels in sorted(sizes, reverse=True)]
    if not layer.fills_blocks(lanes):  # elements of several groups are selected in registers
        return dense_tiles(row, 1, cpu, registers - registers // 4)
    blocks = -(-layer.out_channels // layer.groups // lanes)
    return dense_tiles(row, blocks, cpu, registers - spare if spare else None)
