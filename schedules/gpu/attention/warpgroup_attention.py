# SPDX-License-Identifier: Apache-2.0
"""Kernel of an attention of warpgroups, for sm_90a and factors of float16 and bfloat16.

Source: J. Shah and others, *FlashAttention-3: Fast and Accurate Attention with Asynchrony and
Low-precision*, 2024, sections 3.1 and 3.2. One thread copies queries once, then tiles of keys and
values. Each warpgroup has 64 queries::

    scores = queries x keys of the first tile; weights = softmax(scores)
    for each following tile:
        scores = queries x keys              # asynchronous
        output += weights x values before    # asynchronous, goes on during the softmax
        wait for the scores; exponentials, maximum and sum of each row
        wait for the output; rescale it; weights = exponentials
    output += weights x values; output / sum -> memory

Weights are the left factor in the registers in which a thread has the scores. The two warpgroups
share all keys; while one computes exponentials, the other one multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.tir.extents import constant
from schedules.tir.index_math import ceildiv, i64, simplified

from ..core.kernel_function import resident_blocks, unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..core.tensor_core import MATRIX_TYPES
from ..core.warpgroup import DEPTH, LINE, ROWS, STEP, WARPGROUP, WarpgroupCore
from ..gemm.matmul.matmul_tile_sizes import assumed_size
from ..gemm.matmul.tensor_core_tile import factor_dtype
from ..gemm.matmul.warpgroup_matmul import Factor
from ..gemm.matmul.warpgroup_tile import lies_in_memory
from ..pointwise.point_kernel import Views
from .attention_pattern import AttentionFunction
from .score_registers import RowSoftmax
from .tensor_core_attention import TensorAttentionTile

_MOST_STAGES = 4
_MOST_LENGTH = 128  # Longer keys or values would give a thread too many sums.
_SCORE_CYCLES = 1 / 16  # Cycles of a multiprocessor for the exponential of a score.
_STEP_CYCLES = 700.0  # Cycles that neither warpgroup hides of the other's waits, a guess.


@dataclass(frozen=True)
class WarpgroupAttentionTile:
    """Partition of some queries among the warpgroups of a block."""

    depth: int
    columns: int
    """``depth`` and ``columns``: elements of a key and of a value, rounded up to a multiple of
    64."""
    dtype: str  # Type of the factors.
    warpgroups: int = 2  # Warpgroups, of 64 queries each.

    @property
    def keys(self) -> int:
        """Keys that the block visits at a time: as many as registers have room for."""
        return 128 if self.columns <= 64 else 64

    @property
    def rows(self) -> int:
        """Queries of the block."""
        return self.warpgroups * ROWS

    @property
    def warp_rows(self) -> int:
        """Queries of a warp."""
        return ROWS * COSTS.warp // WARPGROUP

    @property
    def query_bytes(self) -> int:
        """Shared memory of the queries."""
        return self.rows * self.depth // DEPTH * LINE

    @property
    def key_bytes(self) -> int:
        """Shared memory of a tile of keys."""
        return self.keys * self.depth // DEPTH * LINE

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a tile of keys and values."""
        return self.key_bytes + self.columns * self.keys // DEPTH * LINE

    @property
    def stages(self) -> int:
        """Stages in the shared memory of a multiprocessor."""
        room, parts = COSTS.opt_in_shared_bytes, (self.stage_bytes, self.query_bytes)
        most = range(_MOST_STAGES, 1, -1)
        return next(n for n in most if WarpgroupCore.shared_bytes(n, *parts) <= room)

    def cycles(self, batches: int, m: int, n: int, gpu: GPUInfo) -> float:
        """Predicted cycles; a block visits all keys, and has a multiprocessor for itself."""
        share = -(-batches * -(-m // self.rows) // gpu.multiprocessors)
        scores = self.rows * self.keys
        products = scores * (self.depth + self.columns) / COSTS.warpgroup_products
        copied = self.stage_bytes / COSTS.l2_bytes
        step = max(products, scores * _SCORE_CYCLES, copied) + _STEP_CYCLES
        return share * (-(-n // self.keys) * step + COSTS.block_latency)


def choose_warpgroup_attention(
    attention: AttentionFunction, single: TensorAttentionTile | None, gpu: GPUInfo
) -> WarpgroupAttentionTile | None:
    """The tile, or None if single warps with theirs take less time, or must compute it.

    Warpgroups take queries, keys and values of 16 bits that are copied as they lie in memory. There
    must be a key wherever there is a query.
    """
    if single is None or not gpu.has_warpgroup_products:
        return None
    factors = (attention.query, attention.key, attention.value)
    depth, columns, n = map(constant, (attention.depth, attention.columns, attention.n))
    dtype = factor_dtype(attention.query)
    if not depth or not columns or dtype is None or max(depth, columns) > _MOST_LENGTH:
        return None
    has_keys = n if n is not None else tvm_ffi.structural_equal(attention.m, attention.n)
    if not has_keys or not all(lies_in_memory(each, MATRIX_TYPES[dtype]) for each in factors):
        return None
    depth, columns = (-(-length // DEPTH) * DEPTH for length in (depth, columns))
    tile = WarpgroupAttentionTile(depth, columns, dtype)
    batches, m, n = map(assumed_size, (attention.batches, attention.m, attention.n))
    cycles = tile.cycles(batches, m, n, gpu), single_cycles(single, batches, m, n, gpu)
    return tile if cycles[0] <= cycles[1] else None


def single_cycles(tile: TensorAttentionTile, batches: int, m: int, n: int, gpu: GPUInfo) -> float:
    """Predicted cycles of single warps, by ``mma.sync``."""
    blocks = batches * -(-m // tile.rows)
    resident = max(1, COSTS.register_file // (COSTS.thread_registers * tile.threads))
    share = -(-blocks // gpu.multiprocessors)
    rounds = -(-share // resident)
    step = tile.rows * tile.keys * (tile.depth + tile.columns) / COSTS.warp_products
    alone = max(step, COSTS.step_latency)
    return -(-n // tile.keys) * max(share * step, rounds * alone) + rounds * COSTS.block_latency


def write_warpgroup_attention(
    func: tirx.PrimFunc, attention: AttentionFunction, tile: WarpgroupAttentionTile, gpu: GPUInfo
) -> tirx.PrimFunc:
    """The function with one launch, of a block for each tile of queries."""
    blocks = simplified(i64(attention.batches) * ceildiv(attention.m, tile.rows))
    threads = tile.warpgroups * WARPGROUP + WarpgroupCore.producers()

    def body() -> None:
        with unless_empty(blocks):
            factors = (
                Factor(attention.query, tile.rows, 0),
                Factor(attention.key, tile.keys, 0),
                Factor(attention.value, tile.columns, tile.key_bytes),
            )
            with (
                T.launch_thread("blockIdx.x", blocks) as block,
                resident_blocks(gpu, 1),
                T.launch_thread("threadIdx.x", threads) as thread,
            ):
                views = Views.declare(func, gpu)
                _write_block(attention, tile, factors, views, block, thread)

    return write_kernels(func, body).with_attr(attributes.RULE, "Attention (warpgroups)")


def _write_block(
    attention: AttentionFunction,
    tile: WarpgroupAttentionTile,
    factors: tuple[Factor, Factor, Factor],
    views: Views,
    block: tirx.Expr,
    thread: tirx.Expr,
) -> None:
    """Emit the body of a block: the queries with the number ``block``, counted over the batch."""
    query, key, value = factors
    batch, first = attention.place(block, tile.rows)
    tiles = T.bind(attention.tiles(first, tile.rows, tile.keys))
    kind, layout = MATRIX_TYPES[tile.dtype], (tile.stages, tile.stage_bytes, tile.warpgroups)
    core = WarpgroupCore(kind, *layout, thread, 1, i64(0), tile.query_bytes)
    own = T.bind(first + i64(thread // COSTS.warp * tile.warp_rows))
    softmax = RowSoftmax(core, attention, tile, views, [*batch, own], thread % COSTS.warp)
    weights = T.alloc_buffer((tile.keys // 4,), "uint32", scope="local")
    dtype = "uint32"
    group = T.bind((thread // WARPGROUP * int(query.layout.place(ROWS))).astype(dtype))

    def keep(place: tirx.Expr, filled: tirx.Expr) -> None:
        for k in range(tile.depth // DEPTH):
            query.fetch(core, [*batch, first], i64(k * DEPTH), _at(place, query, k), filled)

    def fetch(step: tirx.Expr, stage: tirx.Expr, filled: tirx.Expr) -> None:
        begin = T.bind(step * i64(tile.keys))
        for k in range(tile.depth // DEPTH):
            key.fetch(core, [*batch, begin], i64(k * DEPTH), _at(stage, key, k), filled)
        for k in range(tile.keys // DEPTH):
            depth = begin + i64(k * DEPTH)
            value.fetch(core, [*batch, i64(0)], depth, _at(stage, value, k), filled)

    def multiply_keys(stage: tirx.Expr) -> None:
        for k in range(tile.depth // DEPTH):
            left = query.layout, _at(core.kept + group, query, k)
            core.multiply(softmax.scores, left, (key.layout, _at(stage, key, k)), sets=k == 0)

    def multiply_values(stage: tirx.Expr) -> None:
        words = DEPTH // STEP * 4
        for k in range(tile.keys // DEPTH):
            left = [weights[k * words + r] for r in range(words)]
            place = _at(stage + tirx.const(value.begin, dtype), value, k)
            core.multiply(softmax.output, left, (value.layout, place))

    def weigh(step: tirx.Expr, settle: Callable[[], None]) -> None:
        softmax.weigh(T.bind(step * i64(tile.keys)))
        settle()
        softmax.rescale()
        for k in range(0, tile.keys, STEP):
            softmax.pack(k, weights, k // STEP * 4)

    softmax.begin()
    products, results = (multiply_keys, multiply_values), (softmax.scores, softmax.output)
    core.run_chained(tiles, keep, fetch, products, results, weights, weigh, softmax.finish)


def _at(begin: tirx.Expr, factor: Factor, block: int) -> tirx.Expr:
    """Byte of a tile's elements from ``64 * block`` on along the reduced axis."""
    return begin + tirx.const(block * factor.layout.rows * LINE, begin.ty.dtype)
