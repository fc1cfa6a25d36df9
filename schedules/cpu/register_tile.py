# SPDX-License-Identifier: Apache-2.0
"""Register tiles: what one step of the reduction costs, and which sizes are worth a try.

Per reduction step a tile of ``P`` pixels x ``V`` vectors issues ``P V`` multiply-adds, loads ``P``
elements and ``V`` vectors of weights, each as dear as ``w`` elements, and cannot finish before the
latency ``l`` of one multiply-add, because its accumulators form ``P V`` independent chains. With
``f`` multiply-adds and ``b`` loads a cycle

    cycles(P, V) = max(ceil(P V / f), (P + w V) / b, l)

and a row of pixels x channel blocks costs the sum over all its tiles, tails included.
``P V + V + 1`` registers are needed.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from ..conv2d_workload import ConvLayer
from .tiles import tile_counts

FMA_PER_CYCLE = 2
LOADS_PER_CYCLE = 1.77  # measured in tiles of one vector; two can start
WEIGHT_LOADS = 1.37  # a vector of weights, counted in loads of single elements
FMA_LATENCY = 4.08  # four, and a chain without slack shows every late load
MAX_VECTORS = 4
MOST_CYCLES = 1.2  # of a tile size worth a try, over those of the best


def step_cycles(pixels: int, vectors: int, loads: float = 1.0) -> float:
    """Cycles of one reduction step of a tile, with so many elements loaded for each pixel."""
    return max(
        ceil(pixels * vectors / FMA_PER_CYCLE),
        (pixels * loads + WEIGHT_LOADS * vectors) / LOADS_PER_CYCLE,
        FMA_LATENCY,
    )


def row_cycles(row: int, blocks: int, pixels: int, vectors: int) -> float:
    """Cycles of one reduction step for all tiles of a row of ``row`` pixels x ``blocks`` blocks."""
    return sum(
        count * times * step_cycles(p, v)
        for p, count in tile_counts(row, pixels)
        for v, times in tile_counts(blocks, vectors)
    )


@lru_cache(maxsize=1024)
def dense_tiles(row: int, blocks: int, registers: int) -> list[tuple[int, int]]:
    """Pixels and vectors of the register tiles worth a try, the one of the fewest cycles first.

    Sizes that cut the row alike count once, those above ``MOST_CYCLES`` are left out.

    Parameters
    ----------
    row : int
        Pixels that can be cut freely: of a row, or of the whole image where it is flat.
    blocks : int
        Output channel blocks of one group.
    registers : int
        Vector registers of the CPU.
    """
    cycles = {
        (tile_counts(row, pixels)[0][0], vectors): row_cycles(row, blocks, pixels, vectors)
        for vectors in range(1, min(MAX_VECTORS, blocks) + 1)
        for pixels in range(1, min(row, (registers - 1) // vectors - 1) + 1)
    }
    least = min(cycles.values())
    order = sorted(cycles, key=lambda tile: (cycles[tile], -tile[0] * tile[1]))
    return [tile for tile in order if cycles[tile] <= MOST_CYCLES * least]


def register_tiles(layer: ConvLayer, row: int, lanes: int, registers: int) -> list[tuple[int, int]]:
    """Pixels and vectors of the register tiles of a layer that are worth a try.

    A depthwise tile holds one vector of channels, and as many pixels as leave half of the registers
    for weights and inputs. One of groups of ``g`` lanes holds ``g`` accumulators and a vector of
    inputs for each pixel, a vector of weights, and leaves the compiler a register.
    """
    width = layer.group_lanes(lanes)
    if width > 1:
        most = max(1, (registers - 3) // (width + 1))
        cycles = {
            tile_counts(row, p)[0][0]: row_cycles(row, width, p, width) for p in range(1, most + 1)
        }
        least = MOST_CYCLES * min(cycles.values())
        return [(p, 1) for p in sorted(cycles, key=cycles.__getitem__) if cycles[p] <= least]
    if width:
        most = tile_counts(row, max(4, registers // 2 - 1))[0][0]
        sizes = {tile_counts(row, pixels)[0][0] for pixels in range((most + 1) // 2, most + 1)}
        return [(pixels, 1) for pixels in sorted(sizes, reverse=True)]
    if not layer.fills_blocks(lanes):  # elements of several groups are selected in registers
        return dense_tiles(row, 1, registers - registers // 4)
    blocks = -(-layer.out_channels // layer.groups // lanes)
    return dense_tiles(row, blocks, registers)
