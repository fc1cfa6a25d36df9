# SPDX-License-Identifier: Apache-2.0
"""Main loop of a convolution as a matrix product, for one block of threads.

::

    fetch step 0 into registers; keep it in shared memory; barrier
    for step:
        fetch step + 1 into registers          # 16 bytes each; zeros in the padding
        for each quad of the step:             # from shared memory, 16 bytes each
            accumulators += 4 weights x blocks, times pixels x 4 data
        keep step + 1 in the other half; barrier
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .conv_tiles import ConvTile
from .float4 import copy4, zero4
from .implicit_gemm import LANES, Index
from .shared_memory_pipeline import DataStage, WeightStage, run_steps
from .thread_block_tile import GemmBlock


def clear_sums(tile: ConvTile) -> tirx.Buffer:
    """Registers ``[block][pixel][4]`` of zeros, for a thread's share of the tile."""
    count = tile.thread_blocks * tile.thread_pixels
    sums = T.alloc_buffer((count * LANES,), "float32", scope="local")
    for number in range(count):
        zero4(sums, number)
    return sums


def multiply(gemm: GemmBlock, weights: WeightStage, data: DataStage) -> tirx.Buffer:
    """Emit the whole main loop.

    Returns
    -------
    tirx.Buffer
        Registers ``[block][pixel][4]`` of the thread with its part of the sums.
    """
    tile, sums = gemm.tile, clear_sums(gemm.tile)
    pixels = [gemm.place.pixel + j * tile.pixel_threads for j in range(tile.thread_pixels)]

    def add(_: Index, half: int) -> None:
        def read(quad: Index) -> list[tuple[tirx.Buffer, Index]]:
            return [(data.shared[half], quad * tile.pixels + pixel) for pixel in pixels]

        add_step(gemm, sums, weights, half, read)

    run_steps([weights, data], gemm.split * gemm.steps, gemm.steps, add)
    return sums


def add_step(
    gemm: GemmBlock,
    sums: tirx.Buffer,
    weights: WeightStage,
    half: int,
    read: Callable[[Index], list[tuple[tirx.Buffer, Index]]],
) -> None:
    """Add the thread's quads of a step to its sums.

    Parameters
    ----------
    gemm : GemmBlock
        The block.
    sums : tirx.Buffer
        Registers.
    weights : WeightStage
        The weights.
    half : int
        Half of the shared memory with the step's weights.
    read : Callable
        From a quad of the step to the place of the four inputs of each pixel of the thread.
    """
    tile, place = gemm.tile, gemm.place
    inputs = T.alloc_buffer((tile.thread_pixels * LANES,), "float32", scope="local")
    outputs = T.alloc_buffer((tile.thread_blocks * LANES,), "float32", scope="local")
    share = tile.quads // tile.parts
    with T.unroll(share) as number:
        quad = place.part * share + number
        for j, (source, at) in enumerate(read(quad)):
            copy4(inputs, j, source, at)
        with T.unroll(LANES) as k:
            with T.unroll(tile.thread_blocks) as i:
                block = place.block + i * tile.block_threads
                at = block * weights.stride + quad * LANES + k
                copy4(outputs, i, weights.shared[half], at)
            _add_products(tile, sums, outputs, inputs, k)


def _add_products(
    tile: ConvTile, sums: tirx.Buffer, outputs: tirx.Buffer, inputs: tirx.Buffer, k: Index
) -> None:
    """Multiply one input lane of all pixels with all blocks."""
    with T.unroll(tile.thread_blocks) as i:
        with T.unroll(tile.thread_pixels) as j:
            with T.unroll(LANES) as lane:
                at = (i * tile.thread_pixels + j) * LANES + lane
                product = outputs[i * LANES + lane] * inputs[j * LANES + k]
                T.buffer_store(sums, sums[at] + product, [at])
