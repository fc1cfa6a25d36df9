# SPDX-License-Identifier: Apache-2.0
"""Embedding lookups on GPUs by their traffic, if every row of a table is equally likely.

B bags, T tables of E rows of width D, L lookups a bag. (Dissertation, section 4.3.2.1.1. The
weights' traffic is that of L rows, where the print has one; and the hit rate is that of single
rows, where the print has the chance that all L of a bag hit.)
"""

from __future__ import annotations

import math

from ..kernel_call import KernelCall, element_bytes
from ..machine import Machine
from ..prediction import Prediction

_SECTOR = 32
_ROWS_PER_BLOCK = 32
_ACHIEVED = 0.83  # of the data sheet's bandwidth, where no stream was measured
_SPREAD = 0.8, 1.25  # on uniform lookups; real ones repeat rows and are faster


def hit_rate(b: int, e: int, lookups: int, cached: float) -> float:
    """Share of B * L uniform lookups in E rows that find their row in a cache of some rows.

    Rows that all fit miss once each; others miss X times, and then in (E - X) / E of the lookups.
    """
    count = b * lookups
    distinct = -e * math.expm1(count * math.log1p(-1 / e)) if e > 1 else 1.0
    cached = min(cached, e)
    misses = distinct if distinct <= cached else cached + (count - cached) * (e - cached) / e
    return 1 - misses / count


def bag_traffic(
    lookups: int, row_bytes: int, hits: float, is_backward: bool
) -> tuple[float, float]:
    """Bytes of one bag from memory and from L2, from the bytes of a row of the table."""
    row = _sectors(row_bytes)
    weights = _sectors(2 * lookups * row_bytes) if is_backward else lookups * row
    memory = _sectors(4 * lookups) + row + (1 - hits) * weights
    return memory, 32 + 64 + hits * weights


def _sectors(size: int) -> int:
    return math.ceil(size / _SECTOR) * _SECTOR


def predict_embedding_bag(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict lookups in T tables in one launch, forward or (``embedding_bag_backward``) backward.

    Raises
    ------
    PredictionError
        If the call lacks a size, or the machine a figure of its memories.
    """
    if machine.kind != "gpu":
        return None
    b, t, e, lookups, d = (call.size(name) for name in ("B", "T", "E", "L", "D"))
    block = call.size("rows_per_block", _ROWS_PER_BLOCK)
    row = d * element_bytes(call.dtype)
    return _predict(machine, b, t, e, lookups, row, block, call.op.endswith("backward"))


def predict_gather(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict L rows of width D read from a table of E."""
    if machine.kind != "gpu":
        return None
    e, lookups, d = (call.size(name) for name in ("E", "L", "D"))
    row = d * element_bytes(call.dtype)
    return _predict(machine, lookups, 1, e, 1, row, _ROWS_PER_BLOCK, False)


def _predict(machine: Machine, b, t, e, lookups, row, block, is_backward) -> Prediction:
    tables = min(max(block * machine["multiprocessors"] / b, 1.0), t)
    hits = hit_rate(b, e, lookups, machine["capacity.L2"] / (tables * row))
    memory, cache = bag_traffic(lookups, row, hits, is_backward)
    peak = machine["bandwidth.memory"]
    streamed = machine.get("time.elementwise.bandwidth", _ACHIEVED * peak)
    floor = machine.get("launch_floor", 0.0)
    kernel = b * t * (memory / streamed + cache / machine["bandwidth.L2"])
    seconds = floor + kernel
    least = b * t * memory / peak
    bound = "latency" if floor > kernel else "memory"
    low, high = (seconds * end for end in _SPREAD)
    return Prediction(seconds, low, high, bound, least, "embedding traffic", False)
