# SPDX-License-Identifier: Apache-2.0
"""Partition of an attention of few queries, a decoder's step, by predicted cycles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import DataType

from schedules.tir.extents import constant
from schedules.tir.index_math import ceil_power_of_two

from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..gemm.matmul.factor_tiles import operand_lanes
from ..gemm.matmul.matmul_pattern import Operand
from ..pointwise.element_program import Read
from .attention_pattern import AttentionFunction

MOST_QUERIES = 8
_MOST_ROWS = 8  # Rows of a block: queries times heads that share keys.
_MOST_SPLITS = 64  # partial results that the second kernel reads for each element
_LONG = 4096  # keys assumed of a cache of unknown length
THREADS = 128
_IN_FLIGHT = 4  # keys of a group of lanes, and their values
_SUMS = 32  # Sums of a thread above which half as many keys are in flight.
_LEAST_VECTOR = 2  # neighbours of a key in memory


@dataclass(frozen=True)
class DecodeTile:
    """Partition of keys and queries among blocks and threads."""

    axis: int
    heads: int
    """``axis`` and ``heads``: axis of the batch along which keys and values are shared, and its
    extent; 1 if none is."""
    rows: int  # Rows of a block: queries of the heads that share keys.
    vector: int
    vectors: int
    """``vector`` and ``vectors``: elements of a lane's load, and loads of a lane for a key or a
    value."""
    lanes: int  # Lanes that share a key, a power of two.
    keys: int  # Keys that a lane loads at once.
    splits: int  # Blocks that divide the keys.

    @property
    def units(self) -> int:
        """Groups of lanes of a block."""
        return THREADS // self.lanes

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor that the registers allow."""
        each = self.vectors * self.vector
        registers = 40 + self.rows * (each + self.keys + 6) + self.keys * each
        return max(1, COSTS.register_file // (THREADS * registers))

    @property
    def width(self) -> int:
        """Elements of a key that the lanes hold."""
        return self.lanes * self.vectors * self.vector


def choose_decode_tile(attention: AttentionFunction, gpu: GPUInfo) -> DecodeTile | None:
    """Choose the partition with the fewest predicted cycles.

    None where there are more than :data:`MOST_QUERIES`, where keys and values are not stored one
    after the other, or where they are too long.
    """
    queries, depth, columns = map(constant, (attention.m, attention.depth, attention.columns))
    if queries is None or depth is None or columns is None or not 0 < queries <= MOST_QUERIES:
        return None
    vector = _vector(attention)
    lanes = min(32, ceil_power_of_two(-(-max(depth, columns) // max(1, vector))))
    vectors = -(-max(depth, columns) // (lanes * vector)) if vector else 0
    is_plain = not attention.key.rows_first and attention.value.rows_first
    if vector < _LEAST_VECTOR or not is_plain or vectors > 2 or THREADS > gpu.max_threads:
        return None
    shared = [
        (int(extent), axis)
        for axis, extent in enumerate(attention.batch)
        if constant(extent) is not None and attention.shares_keys(axis)
    ]
    heads, axis = max(shared, default=(1, 0))
    rows = heads * queries
    rows = -(-rows // -(-rows // _MOST_ROWS))
    keys = _IN_FLIGHT if rows * vectors * vector <= _SUMS else _IN_FLIGHT // 2
    tile = DecodeTile(axis, heads, rows, vector, vectors, lanes, keys, 1)
    scratch = THREADS * rows * keys * 4 if gpu.warp_size < lanes else 0
    needed = (rows * tile.width + tile.units * (columns + 2)) * 4 + scratch
    if needed > gpu.shared_bytes:
        return None
    return min(_splits(attention, tile), key=lambda each: decode_cycles(attention, each, gpu))


def _splits(attention: AttentionFunction, tile: DecodeTile) -> list[DecodeTile]:
    n = constant(attention.n)
    steps = -(-(_LONG if n is None else n) // (tile.units * tile.keys))
    counts = [1 << k for k in range(_MOST_SPLITS.bit_length()) if 1 << k <= max(1, steps)]
    return [replace(tile, splits=count) for count in counts]


def decode_cycles(attention: AttentionFunction, tile: DecodeTile, gpu: GPUInfo) -> float:
    """Predicted cycles of both kernels: keys and values at the speed of memory, and latencies.

    Unknown extents count as one, an unknown number of keys as 4096.
    """
    n = constant(attention.n) or _LONG
    outputs = (constant(attention.batches) or 1) * (constant(attention.m) or 1)
    groups = -(-outputs // tile.rows)
    item_bytes = sum(_item_bytes(operand) for operand in (attention.key, attention.value)) / 2
    blocks = groups * tile.splits
    loads = 2 * tile.keys * tile.vectors * tile.vector * item_bytes * THREADS
    needed = COSTS.hiding_threads * COSTS.widest_load * COSTS.loads_in_flight
    resident = min(tile.resident, -(-blocks // gpu.multiprocessors))
    speed = COSTS.memory_bytes * min(1.0, resident * loads / needed)
    waves = -(-blocks // (gpu.multiprocessors * resident))
    steps = -(-n // (tile.splits * tile.units * tile.keys))
    moved = steps * tile.units * tile.keys * 2 * tile.width * item_bytes
    cycles = max(1.0, blocks / gpu.multiprocessors) * moved / speed + waves * COSTS.block_latency
    if tile.splits == 1:
        return cycles
    partial = outputs * tile.splits * tile.width * 4 / COSTS.l2_bytes / gpu.multiprocessors
    return cycles + COSTS.launch + COSTS.block_latency + 2 * partial


def _item_bytes(operand: Operand) -> int:
    reads = [step for step in operand.space.steps if isinstance(step, Read)]
    return max((DataType(str(read.buffer.dtype)).bits // 8 or 1 for read in reads), default=4)


def _vector(attention: AttentionFunction) -> int:
    """Neighbours of keys and values that a lane loads at once."""
    widths = []
    for operand in (attention.key, attention.value):
        width = COSTS.widest_load // _item_bytes(operand)
        extent = constant(attention.depth if operand is attention.key else attention.columns)
        assert extent is not None, "lengths of keys and values are known"
        while width > 1 and (extent % width or operand_lanes(operand, width).vector < width):
            width //= 2
        widths.append(width)
    return min(widths)
