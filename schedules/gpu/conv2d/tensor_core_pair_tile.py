# SPDX-License-Identifier: Apache-2.0
"""Tiles of a fused pair of convolutions on tensor cores, and predicted times of its kernels.

All times are estimates of :mod:`schedules.gpu.core.machine_costs`, measured on no GPU.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

from schedules.workload.conv2d import ITEM_BYTES, ConvLayer, FusedConv2DWorkload

from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.tensor_core import CHUNK, MATRIX_TYPES, MatrixType
from ..gemm.implicit_gemm import Index
from ..gemm.matmul.tensor_core_tile import (
    ELEMENTS,
    LINE,
    MOST_STAGES,
    TILES,
    SharedTile,
    TensorTile,
    tile_of_sizes,
)
from ..gemm.matmul.warpgroup_conv2d import WindowSizes, fastest_window_tile

_LEAST_STAGES = 2
_PRODUCT_BYTES = 2048.0  # Bytes of factors that a multiprocessor multiplies in a cycle.
_ELEMENT = 5.0  # instructions for each element of a depthwise layer, as compiled for 3x3
_ALONE = 10.0  # the same, more in a kernel of its own
_TAP = {2: 4.6, 4: 2.7}  # the same for each tap, by the bytes of an element: halves are converted
_DEPTHWISE_REGISTERS = 168
_LANES = 128.0  # instructions of a multiprocessor in a cycle
PANEL = 4
"""Chunks of a line of a panel, and of a stage."""
PAIR_TYPES = {
    **{dtype: MATRIX_TYPES[dtype] for dtype in ("float16", "bfloat16", "float32")},
    "uint8": MatrixType("uint8", "int8"),
}
"""Types of the products, by that of the data: float32 is rounded to TF32, bytes have weights of
int8."""
NARROW = TensorTile(64, 32, 16, 32)
"""A tile of few channels."""


ZEROS = 128
"""Bytes of zeros behind an intermediate with a halo: one chunk in each bank."""


@dataclass(frozen=True)
class PanelTile(SharedTile):
    """Lines of which four chunks, a panel, lie beside each other.

    Each phase of a store touches all banks: four lanes with eight elements each of a line, which
    are four chunks of 16-bit floats, eight of float32 stored in two turns, or two of bytes, and the
    lanes with the next lines. So do copies of eight chunks of one line. For that, panels swap
    neighbouring lines in turn, and chunks by twos before single ones.
    """

    def place(self, line: Index, chunk: Index) -> Index:
        """Byte of a chunk."""
        panel = chunk // PANEL
        odd, line = panel % 2, line ^ (panel % 2)
        mixed = chunk % PANEL ^ (line & 2) ^ (line // 4 % 2) ^ odd
        return ((panel * self.lines + line) * PANEL + mixed) * CHUNK

    def stored(self, lane: Index, line: Index, first: Index, turn: int = 0) -> Index:
        """Byte of what a lane stores in a turn.

        A warp has eight lines and 32 elements of each from ``first`` on; a lane has eight of them.
        """
        own = lane % 4 * ELEMENTS
        chunk = first // self.chunk + own // self.chunk + turn
        return self.place(line + lane // 4, chunk) + own % self.chunk * (CHUNK // self.chunk)


@dataclass(frozen=True)
class PairTile:
    """Partition of a pair: a block has all channels of some pixels of all images.

    Parameters
    ----------
    first : TensorTile | None
        Tile of the first product, whose rows are the block's pixels and, before a layer that is not
        pointwise, those around them; None for a depthwise first layer.
    second : TensorTile
        Tile of the second product, whose rows are the block's pixels, with as many threads.
    channels : int
        Channels between the layers, rounded up.
    pixels : int
        Pixels of the intermediate, rounded up.
    """

    first: TensorTile | None
    second: TensorTile
    channels: int
    pixels: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.second.threads

    @property
    def mid(self) -> PanelTile:
        """The intermediate, with a line of channels for each pixel."""
        return PanelTile(self.pixels, self.channels, False, True, self.second.type.chunk, True)

    @property
    def mid_bytes(self) -> int:
        """Shared memory of the intermediate."""
        return self.mid.nbytes + ZEROS

    @property
    def stages_bytes(self) -> int:
        """Shared memory of the stages of either product."""
        second = self.second.stages * second_stage_bytes(self.second)
        return max(second, self.first.stages * self.first.stage_bytes if self.first else 0)

    @property
    def registers(self) -> int:
        """Registers of a thread: an estimate of those of either product or a depthwise layer."""
        first = self.first.registers if self.first else _DEPTHWISE_REGISTERS
        return max(self.second.registers, first)


def second_stage_bytes(tile: TensorTile) -> int:
    """Shared memory of a stage of the second product, of which only the weights are loaded."""
    return tile.columns * tile.depth * tile.type.itemsize


def unsupported(layer1: ConvLayer, layer2: ConvLayer, dtype: str = "float16") -> str | None:
    """Reason why tensor cores take no such pair, whatever its sizes; None if they may."""
    least = max(32, LINE // ITEM_BYTES[dtype])  # a step has channels of one tap
    if layer2.groups != 1:
        return "the second layer has groups; the kernel reduces over all its input channels"
    if not layer2.is_pointwise:
        if layer2.strides != (1, 1) or any(
            layer2.padding[axis] + layer2.padding[axis + 2]
            != (layer2.kernel[axis] - 1) * layer2.dilation[axis]
            for axis in range(2)
        ):
            return "the second layer changes the size of the image; on tensor cores it must not"
        if layer2.in_channels % least:
            return f"the second layer is not pointwise, and its inputs are no multiple of {least}"
        if layer1.is_depthwise:
            return "the first layer is depthwise; on tensor cores the second has to be pointwise"
    if layer1.groups != 1 and not layer1.is_depthwise:
        return "the first layer has groups; the kernel takes dense and depthwise ones"
    block = CHUNK // ITEM_BYTES[dtype]
    if min(layer1.out_channels, layer2.out_channels) <= block:
        return f"a layer has at most {block} output channels, too few for tensor cores"
    return None


@functools.lru_cache(maxsize=256)
def choose_pair_tile(
    pair: FusedConv2DWorkload, gpu: GPUInfo, tf32: bool = False
) -> PairTile | None:
    """The tile with the least predicted time; None if tensor cores do not take the pair.

    They take one of float32 only if its factors may be rounded to TF32 (``tf32``).
    """
    if not gpu.has_tensor_cores or pair.dtype not in PAIR_TYPES:
        return None
    if pair.dtype == "float32" and not tf32:
        return None
    if min(math.prod(pair.mid_size), math.prod(pair.out_size)) < 2:  # products of vectors
        return None
    if unsupported(pair.layer1, pair.layer2, pair.dtype) is not None:
        return None
    tiles = [tile for each in candidates(pair) if (tile := _with_stages(each, gpu)) is not None]
    return min(tiles, key=lambda tile: fused_product_cycles(pair, tile, gpu), default=None)


def candidates(pair: FusedConv2DWorkload) -> list[PairTile]:
    """All tiles, without stages."""
    sized = [tile.of_type(PAIR_TYPES[pair.dtype]) for tile in (*TILES, NARROW)]
    channels, around = pair.layer1.out_channels, 0
    if not pair.layer2.is_pointwise:
        around = sum(halo(pair.layer2, pair.mid_size[1]))
    tiles = []
    for first, second in itertools.product(sized, repeat=2):
        pixels = second.rows + around
        if pair.layer1.is_depthwise:
            if first is second:
                tiles.append(PairTile(None, second, _rounded(channels, second.depth), pixels))
        # Blocks without a halo do not overlap.
        elif first.threads == second.threads and (around or second.rows % first.rows == 0):
            rounded = _rounded(channels, max(first.columns, second.depth))
            tiles.append(PairTile(first, second, rounded, _rounded(pixels, first.rows)))
    return tiles


def _rounded(extent: int, part: int) -> int:
    return -(-extent // part) * part


def halo(layer: ConvLayer, width: int) -> tuple[int, int]:
    """Pixels before and behind a pixel, as they lie in memory, that a layer reads."""
    before = layer.padding[0] * width + layer.padding[1]
    reach = [(layer.kernel[axis] - 1) * layer.dilation[axis] for axis in range(2)]
    return before, max(0, reach[0] * width + reach[1] - before)


def _with_stages(tile: PairTile, gpu: GPUInfo) -> PairTile | None:
    """The tile with as many stages as fit."""
    room = gpu.shared_bytes - tile.mid_bytes
    second = replace(tile.second, stages=min(MOST_STAGES, room // second_stage_bytes(tile.second)))
    first = tile.first and tile.first.with_stages(room)
    if any(product.stages < _LEAST_STAGES for product in (first, second) if product):
        return None
    return replace(tile, first=first, second=second)


def fused_product_cycles(pair: FusedConv2DWorkload, tile: PairTile, gpu: GPUInfo) -> float:
    """Predicted cycles of the one kernel with a tile."""
    layer1, layer2, first, second = pair.layer1, pair.layer2, tile.first, tile.second
    if first is None:
        elements = tile.channels * second.rows
        work = elements * _depthwise_instructions(layer1, pair.item_bytes) / _LANES
        before = _Work(work, work + COSTS.step_latency)
    else:
        count = tile.pixels // first.rows * (tile.channels // first.columns)
        before = _product(layer1, first, first.rows + first.columns).times(count)
    behind = _product(layer2, second, second.columns)
    block = before.then(behind.times(-(-layer2.out_channels // second.columns)))
    blocks = -(-pair.batch * math.prod(pair.out_size) // second.rows)
    resident = _resident(tile.registers * tile.threads, tile.mid_bytes + tile.stages_bytes)
    return _run(block, blocks, resident, _transfer(pair.bytes_fused(), gpu), gpu)


def separate_product_cycles(pair: FusedConv2DWorkload, gpu: GPUInfo) -> float:
    """Predicted cycles of two kernels, which write and read the intermediate.

    Those of float32 round their factors to TF32.
    """
    mid, (data, out) = pair.mid_bytes(), _ends(pair)
    moved = data + mid, mid + out * (2 if pair.residual else 1)
    sizes = (pair.height, pair.width), pair.mid_size
    kernels = (
        _layer_cycles(layer, pair.batch, size, each, pair.dtype, gpu)
        for layer, size, each in zip((pair.layer1, pair.layer2), sizes, moved, strict=True)
    )
    return sum(kernels) + COSTS.launch


def _ends(pair: FusedConv2DWorkload) -> tuple[int, int]:
    """Bytes of the data and of the result of a pair."""
    images = pair.batch * pair.item_bytes
    data = images * pair.height * pair.width * pair.layer1.in_channels
    return data, images * math.prod(pair.out_size) * pair.layer2.out_channels


def _layer_cycles(
    layer: ConvLayer, images: int, size: tuple[int, int], moved: int, dtype: str, gpu: GPUInfo
) -> float:
    """Predicted cycles of one layer's kernel on images of a size.

    It moves some bytes and its weights.
    """
    pixels = images * math.prod(layer.output_size(*size))
    transfer = _transfer(moved + layer.weight_elements() * ITEM_BYTES[dtype], gpu)
    if layer.is_depthwise:
        each = _ALONE + _depthwise_instructions(layer, ITEM_BYTES[dtype])
        work = layer.out_channels * pixels * each / (_LANES * gpu.multiprocessors)
        return max(transfer, work) + COSTS.block_latency
    kind = PAIR_TYPES[dtype]
    tile = tile_of_sizes(1, pixels, layer.out_channels, gpu).of_type(kind)
    tile = tile.with_stages(gpu.shared_bytes)
    blocks = -(-layer.out_channels // tile.columns) * -(-pixels // tile.rows)
    resident = _resident(tile.registers * tile.threads, tile.stages * tile.stage_bytes)
    block = _product(layer, tile, tile.rows + tile.columns)
    cycles = _run(block, blocks, resident, transfer, gpu)
    # One block holds the channels.
    is_small = min(layer.in_channels, layer.out_channels) <= kind.chunk
    if layer.groups > 1 or is_small or not gpu.has_warpgroup_products:
        return cycles
    sizes = WindowSizes.of_layer(layer, images, size, kind.chunk)
    by_warpgroups, _ = fastest_window_tile(sizes, gpu)
    return min(cycles, max(transfer, by_warpgroups))


def _depthwise_instructions(layer: ConvLayer, itemsize: int) -> float:
    return _ELEMENT + _TAP[itemsize] * math.prod(layer.kernel)


def _resident(registers: int, shared_bytes: int) -> int:
    """Blocks of so many registers and bytes that a multiprocessor runs at once."""
    return min(COSTS.register_file // registers, COSTS.shared_bytes // shared_bytes)


@dataclass(frozen=True)
class _Work:
    """Cycles of a block: of a busy multiprocessor, and if the block is alone."""

    busy: float
    alone: float

    def times(self, count: int) -> _Work:
        return _Work(count * self.busy, count * self.alone)

    def then(self, other: _Work) -> _Work:
        return _Work(self.busy + other.busy, self.alone + other.alone)


def _product(layer: ConvLayer, tile: TensorTile, loaded: int) -> _Work:
    """Work of a tile of a layer's product, of which so many rows and columns are loaded."""
    steps = -(-layer.in_channels * math.prod(layer.kernel) // tile.depth)
    size = tile.type.itemsize
    products = tile.rows * tile.columns * tile.depth * size / _PRODUCT_BYTES
    busy = max(products, loaded * tile.depth * size / COSTS.l2_bytes)
    alone = max(busy, COSTS.step_latency / (tile.stages - 1))
    return _Work(steps * busy, steps * alone + COSTS.step_latency)


def _run(block: _Work, blocks: int, resident: int, transfer: float, gpu: GPUInfo) -> float:
    """Cycles of a kernel: of its blocks, and of the transfer that others do not hide."""
    share = -(-blocks // gpu.multiprocessors)
    rounds = -(-share // max(1, resident))
    work = max(share * block.busy, rounds * block.alone)
    hidden = min(work, transfer) * (1 - 1 / max(1, min(resident, share)))
    return work + transfer - hidden + COSTS.block_latency


def _transfer(moved: int, gpu: GPUInfo) -> float:
    """Cycles of moving some bytes, once each."""
    rate = COSTS.l2_bytes if moved <= COSTS.l2_capacity else COSTS.memory_bytes
    return moved / (rate * gpu.multiprocessors)
