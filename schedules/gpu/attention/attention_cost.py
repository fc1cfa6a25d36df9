# SPDX-License-Identifier: Apache-2.0
"""Gain of an attention by being one kernel.

A block visits all keys, one tile after the other, so that few blocks with many keys leave most of
the device idle. Separate products divide the keys among blocks, and pay with launches and with
scores in memory. The figures are estimates of :mod:`schedules.gpu.core.machine_costs`.
"""

from __future__ import annotations

from ..core.machine import GPUInfo
from ..core.machine_costs import COSTS
from ..gemm.matmul.matmul_tile_sizes import assumed_size
from .attention_pattern import AttentionFunction
from .attention_tile import AttentionTile
from .tensor_core_attention import TensorAttentionTile

_LANES = 128  # products that a multiprocessor adds in a cycle, of float32
_TENSOR_LANES = 1024  # and of float16 on tensor cores
_PASSES = 4  # over the scores: product, softmax in and out, product
_KERNELS = 3
_CLEAR = 2  # an estimate must be off by more to mislead


def gains(
    attention: AttentionFunction, tile: AttentionTile | TensorAttentionTile, gpu: GPUInfo
) -> bool:
    """Return whether one kernel is not clearly slower than separate products and a softmax."""
    sizes = (attention.batches, attention.m, attention.n, attention.depth, attention.columns)
    batches, m, n, depth, columns = map(assumed_size, sizes)
    is_tensor = isinstance(tile, TensorAttentionTile)
    lanes, itemsize = (_TENSOR_LANES, 2) if is_tensor else (_LANES, 4)
    blocks = batches * -(-m // tile.rows)
    work = tile.rows * tile.keys * (tile.depth + tile.columns) / lanes
    steps = -(-n // tile.keys)
    fused = -(-blocks // gpu.multiprocessors) * steps * (work + COSTS.step_latency)
    scores = batches * m * n
    traffic = _PASSES * itemsize * scores / COSTS.l2_bytes
    apart = (traffic + scores * (depth + columns) / lanes) / gpu.multiprocessors
    return fused <= _CLEAR * (apart + _KERNELS * COSTS.launch)
