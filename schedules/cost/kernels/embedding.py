# SPDX-License-Identifier: Apache-2.0
"""Embedding lookups on GPUs by their traffic, by the data of a batch where it is known.

B bags, T tables of E rows of width D, L lookups a bag; without data every row of a table is equally
likely. (Dissertation, section 4.3.2.1.1. The weights' traffic is that of L rows, where the print
has one; and the hit rate is that of single rows, where the print has the chance that all L of a bag
hit.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from schedules.errors import PredictionError

from ..kernel_call import KernelCall, element_bytes
from ..machine import Machine
from ..prediction import Prediction
from ..table_lookups import TableLookups
from .cpu_lookups import predict_cpu_lookups

_SECTOR = 32
_ROWS_PER_BLOCK = 32
_ACHIEVED = 0.83  # of the data sheet's bandwidth, where no stream was measured
_SPREAD = 0.8, 1.25  # on uniform lookups; real ones repeat rows and are faster


def hit_rate(b: int, e: int, lookups: float, cached: float) -> float:
    """Share of B * L uniform lookups in E rows that find their row in a cache of some rows.

    Rows that all fit miss once each; others miss X times, and then in (E - X) / E of the lookups.
    """
    count = b * lookups
    distinct = -e * math.expm1(count * math.log1p(-1 / e)) if e > 1 else 1.0
    cached = min(cached, e)
    misses = distinct if distinct <= cached else cached + (count - cached) * (e - cached) / e
    return 1 - misses / count


def bag_traffic(
    lookups: float, row_bytes: int, hits: float, is_backward: bool
) -> tuple[float, float]:
    """Bytes of one bag from memory and from L2, from the bytes of a row of the table."""
    row = _sectors(row_bytes)
    weights = _sectors(2 * lookups * row_bytes) if is_backward else lookups * row
    memory = _sectors(4 * lookups) + row + (1 - hits) * weights
    return memory, 32 + 64 + hits * weights


def _sectors(size: float) -> int:
    return math.ceil(size / _SECTOR) * _SECTOR


def predict_lookups(
    tables: Sequence[TableLookups],
    machine: Machine,
    is_backward: bool,
    beside: Sequence[TableLookups] = (),
) -> Prediction:
    """Predict the lookups of a batch in tables of any sizes in one launch, or their gradients.

    Where the tables know how often their rows are used, the caches keep the rows used most.
    ``beside`` are lookups of other ranks, which on a CPU pass through the same caches.

    Raises
    ------
    PredictionError
        If there are no tables, or the machine lacks a figure of its memories.
    """
    if not tables:
        raise PredictionError("lookups in no tables; expected one or more")
    if machine.kind == "cpu":
        return predict_cpu_lookups(tables, machine, is_backward, beside)
    return _predict(machine, tables, _ROWS_PER_BLOCK, is_backward)


def predict_embedding_bag(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict lookups in T tables in one launch, forward or (``embedding_bag_backward``) backward.

    Raises
    ------
    PredictionError
        If the call lacks a size, or the machine a figure of its memories.
    """
    is_backward = call.op.endswith("backward")
    tables = tables_of(call)
    if machine.kind == "cpu":
        return predict_cpu_lookups(tables, machine, is_backward)
    block = call.size("rows_per_block", _ROWS_PER_BLOCK)
    return _predict(machine, tables, block, is_backward)


def tables_of(call: KernelCall) -> list[TableLookups]:
    """Tables of an ``embedding_bag``, whose rows are equally likely.

    Raises
    ------
    PredictionError
        If the call lacks a size.
    """
    b, t, e, lookups, d = (call.size(name) for name in ("B", "T", "E", "L", "D"))
    elements = -(-d * element_bytes(call.dtype) // 4)
    return [TableLookups(b, e, elements, b * lookups)] * t


def predict_gather(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict L rows of width D read from a table of E."""
    if machine.kind != "gpu":
        return None
    e, lookups, d = (call.size(name) for name in ("E", "L", "D"))
    elements = -(-d * element_bytes(call.dtype) // 4)
    table = TableLookups(lookups, e, elements, lookups)
    return _predict(machine, [table], _ROWS_PER_BLOCK, False)


def _predict(
    machine: Machine, tables: Sequence[TableLookups], block: int, is_backward: bool
) -> Prediction:
    peak = machine["bandwidth.memory"]
    streamed = machine.get("time.elementwise.bandwidth", _ACHIEVED * peak)
    floor = machine.get("launch_floor", 0.0)
    bags = max(table.bags for table in tables)
    at_once = min(max(block * machine["multiprocessors"] / bags, 1.0), len(tables))
    kernel = least = 0.0
    for table, count in Counter(tables).items():
        memory, cache = _traffic(table, machine["capacity.L2"] / at_once, is_backward)
        kernel += count * (memory / streamed + cache / machine.cache_bandwidth)
        least += count * memory / peak
    seconds = floor + kernel
    bound = "latency" if floor > kernel else "memory"
    low, high = (seconds * end for end in _SPREAD)
    return Prediction(seconds, low, high, bound, least, "embedding traffic", False)


def _traffic(table: TableLookups, cache: float, is_backward: bool) -> tuple[float, float]:
    """Bytes of a table's lookups from memory and from a share of L2."""
    row = 4 * table.width
    lookups = max(table.count / table.bags, 1e-9)
    if table.used:
        hits = hit_rate_of(table, cache / row)
    else:
        hits = hit_rate(table.bags, table.rows, lookups, cache / row)
    memory, cached = bag_traffic(lookups, row, hits, is_backward)
    return table.bags * memory, table.bags * cached


def hit_rate_of(table: TableLookups, cached: float) -> float:
    """Share of a batch's lookups that find their row in a cache of some rows.

    Each row misses at its first use; the rows used most stay, and others miss at every use.
    """
    used, uses = (bins[::-1] for bins in table.histogram)
    before = np.cumsum(used) - used
    kept = np.clip((cached - before) / np.maximum(used, 1e-300), 0, 1)
    misses = (kept * used + (1 - kept) * uses).sum()
    return float(1 - misses / max(table.count, 1))
