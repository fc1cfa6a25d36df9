# SPDX-License-Identifier: Apache-2.0
"""Tasks of a convolution by Winograd's algorithm, and their predicted cost.

The output tiles of all images are cut into groups, and the output channels into chunks; a pair of
group and chunk is the task of one core. It transforms the data of its group, which every chunk
repeats; multiplies, one matrix product a point; and transforms back. In clock cycles of one core:

- each transform takes some cycles a tile, point and channel block;
- the products run at the peak, except for register tiles that are not full;
- weights are a multiple of the direct convolution's, and are read by each task: the first time from
  memory, since those of a whole network pass through the caches between two runs; cores whose
  tasks are of the same chunk get them at the same time.

All tasks are alike, so that a core's time is that of its share, rounded up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from schedules.workload.conv2d import ITEM_BYTES, WORDS, Conv2DKernel, ConvLayer
from schedules.workload.winograd_matrices import TAPS, TILE_SIZES

from ..core.machine import CPUInfo
from ..core.tiles import split_evenly
from .direct_roofline import weights_rate
from .register_tile import MAX_VECTORS, most_pixels, row_cycles

# Largest group: its transformed data and products should not exceed the L2 by far.
MAX_GROUP = 32


def takes_winograd(layer: ConvLayer, size: tuple[int, int], dtype: str, cpu: CPUInfo) -> bool:
    """Return whether the algorithm and its schedule apply to a packed layer on such an image.

    Not to kernels other than 3x3, strides, dilation, groups, other types than float32 and, where
    vectors of 512 bits multiply it faster, bfloat16, and data of fewer channels than a vector has
    lanes, which stay in NCHW.
    """
    in_pairs = cpu.half_dots == "vdpbf16ps" and cpu.multiplies_pairs
    takes_type = dtype == "float32" or (dtype == "bfloat16" and in_pairs)
    if not layer.suits_winograd or not takes_type:
        return False
    return layer.in_channels >= cpu.lanes("float32") and min(layer.output_size(*size)) >= 1


def winograd_sizes(dtype: str) -> tuple[int, ...]:
    """Heights and widths of tiles for a type.

    Of bfloat16, transformed data and weights are rounded once more. On random data the error, root
    mean square, is 1.6 to 2 times that of direct products in tiles of 2x2, and 5 times in 4x4.
    """
    return TILE_SIZES[:1] if dtype == "bfloat16" else TILE_SIZES


def takes_bytes(kernel: Conv2DKernel, cpu: CPUInfo) -> bool:
    """Return whether a convolution of bytes is one that AVX2 multiplies in 16 bits; True of floats.

    Where words of four bytes are multiplied, 16 bits take four times as many instructions.
    """
    in_pairs = cpu.word_channels == WORDS["int16"] and kernel.lanes == cpu.lanes("int32")
    return in_pairs or not kernel.is_quantized


@dataclass(frozen=True)
class WinogradKnobs:
    """Knobs of the template.

    Parameters
    ----------
    group : int
        Output tiles of a task; the last group may have fewer.
    block_chunks : int
        Pieces of the output channel blocks, a divisor of their number.
    pixels, blocks : int
        The register tile of the matrix products: tiles x channel blocks.
    """

    group: int
    block_chunks: int
    pixels: int
    blocks: int


@dataclass(frozen=True)
class WinogradPlan:
    """Knobs, and the cycles of the busiest core that the model predicts for them."""

    knobs: WinogradKnobs
    cycles: float


@dataclass(frozen=True)
class WinogradShape:
    """The extents that a plan depends on.

    Parameters
    ----------
    size : int
        Height and width of an output tile.
    tiles : int
        Output tiles of all images.
    in_blocks, out_blocks, lanes : int
        Channel blocks and their lanes.
    item_bytes : int
        Bytes of an element.
    word : int
        Channels whose products one instruction adds up.
    """

    size: int
    tiles: int
    in_blocks: int
    out_blocks: int
    lanes: int
    item_bytes: int
    word: int = 1

    @property
    def points(self) -> int:
        """Multiplications a tile and pair of channels."""
        return (self.size + TAPS - 1) ** 2

    @classmethod
    def of(
        cls,
        layer: ConvLayer,
        batch: int,
        out_size: tuple[int, int],
        size: int,
        lanes: int,
        dtype: str,
    ) -> WinogradShape:
        """The extents of ``layer`` for an output of ``out_size`` pixels."""
        return cls(
            size=size,
            tiles=batch * -(-out_size[0] // size) * -(-out_size[1] // size),
            in_blocks=-(-layer.in_channels // lanes),
            out_blocks=-(-layer.out_channels // lanes),
            lanes=lanes,
            item_bytes=ITEM_BYTES[dtype],
            word=WORDS.get(dtype, 1),
        )


@lru_cache(maxsize=4096)
def best_plan(shape: WinogradShape, cpu: CPUInfo) -> WinogradPlan:
    """The plan with the fewest predicted cycles; of equals, the one with larger groups."""
    plans = [
        WinogradPlan(knobs, winograd_cycles(shape, knobs, cpu)) for knobs in _candidates(shape, cpu)
    ]
    return min(plans, key=lambda plan: (plan.cycles, -plan.knobs.group))


def winograd_space(shape: WinogradShape, cpu: CPUInfo) -> Iterator[WinogradKnobs]:
    """The groups and chunks that plans are chosen from, with every register tile of some size."""
    for group, chunks in _tasks(shape, cpu):
        blocks = shape.out_blocks // chunks
        for vectors in range(1, min(MAX_VECTORS, blocks) + 1):
            most = min(group, most_pixels(cpu, vectors))
            for pixels in range(max(1, most // 2), most + 1):
                yield WinogradKnobs(group, chunks, pixels, vectors)


def _candidates(shape: WinogradShape, cpu: CPUInfo) -> Iterator[WinogradKnobs]:
    for group, chunks in _tasks(shape, cpu):
        tile = _register_tile(group, shape.out_blocks // chunks, cpu)
        yield WinogradKnobs(group, chunks, *tile)


def _tasks(shape: WinogradShape, cpu: CPUInfo) -> Iterator[tuple[int, int]]:
    """Groups of tiles, and chunks of the channel blocks."""
    least = -(-shape.tiles // MAX_GROUP)
    counts = range(least, min(shape.tiles, least + cpu.num_cores) + 1)
    for group in sorted({-(-shape.tiles // count) for count in counts}):
        for chunks in range(1, min(shape.out_blocks, cpu.num_cores) + 1):
            if shape.out_blocks % chunks == 0:
                yield group, chunks


def _register_tile(group: int, blocks: int, cpu: CPUInfo) -> tuple[int, int]:
    """Tiles and vectors of the cheapest register tile; on a tie, one that needs no second size."""

    def cost(tile: tuple[int, int]) -> tuple[float, int, float, int]:
        pixels, vectors = tile
        sizes = len(set(split_evenly(group, pixels))) * len(set(split_evenly(blocks, vectors)))
        loads = (pixels + vectors) / (pixels * vectors)
        return row_cycles(group, blocks, pixels, vectors, cpu), sizes, loads, -pixels

    return min(
        (
            (pixels, vectors)
            for vectors in range(1, min(MAX_VECTORS, blocks) + 1)
            for pixels in range(1, min(group, most_pixels(cpu, vectors)) + 1)
        ),
        key=cost,
    )


def winograd_cycles(shape: WinogradShape, knobs: WinogradKnobs, cpu: CPUInfo) -> float:
    """Predicted cycles of the busiest core."""
    costs, blocks = cpu.costs, shape.out_blocks // knobs.block_chunks
    tasks = -(-shape.tiles // knobs.group) * knobs.block_chunks
    turns = -(-tasks // cpu.num_cores)
    rows = row_cycles(knobs.group, blocks, knobs.pixels, knobs.blocks, cpu)
    products = shape.in_blocks * shape.lanes / shape.word * rows / costs.winograd_efficiency
    size = shape.size // 2 - 1
    data = costs.winograd_data[size] + (costs.winograd_rounding if shape.word > 1 else 0)
    moves = shape.in_blocks * data + blocks * costs.winograd_inverse[size]
    moves *= knobs.group
    arithmetic = turns * (shape.points * (products + moves) + costs.winograd_task)
    weights = shape.points * shape.in_blocks * blocks * shape.lanes**2 * shape.item_bytes
    memory = weights / weights_rate(min(cpu.num_cores, knobs.block_chunks), cpu)
    cache = (turns - 1) * weights / costs.weight_cache_bytes_per_cycle
    return max(arithmetic + costs.winograd_exposed * (memory + cache), memory)
