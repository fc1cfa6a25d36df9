# SPDX-License-Identifier: Apache-2.0
"""PyTorch's lookups of embedding bags on a CPU, by how often a batch uses each row.

The least time takes each byte from the level of the memory that holds it, if the caches keep the
rows used most; trees correct it, trained on lookups of random tables that were measured
(``examples/benchmarks/predict_lookups.py``). All features are sums over the tables of a launch, so
that tables of different sizes need no model of their own. Backward is the gradient of the rows and
their update by plain SGD, as of a sparse ``EmbeddingBag``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..learned import find_model
from ..machine import Machine
from ..prediction import Prediction
from ..table_lookups import TableLookups, missing_bytes

LEVELS = ("L2", "L3", "memory")
CACHES = ("L1", "L2", "L3")
CALL = 4e-6
"""Seconds of one table's call, about; the trees know better."""

_INDEX_BYTES = 8
_SPREAD = 0.5, 3.0  # of CPUs on which no lookups were measured
_LEAST = 1e-4  # share of bytes below which they do not count
RANGES = ("tables", "bags", "rows", "width", "lookups")


def base_seconds(tables: Sequence[TableLookups], machine: Machine, is_backward: bool) -> float:
    """Least seconds of a launch, by the level that holds each byte."""
    levels = [float(sum(table.count * table.row_bytes for table in tables))]
    levels += [missing_bytes(tables, machine[f"capacity.{cache}"]) for cache in CACHES[1:]]
    from_level = [levels[0] - levels[1], levels[1] - levels[2], levels[2]]
    streamed = float(
        sum(table.bags * table.row_bytes + _INDEX_BYTES * table.count for table in tables)
    )
    if is_backward:  # gradients of all lookups are written and read, the rows read and written
        streamed += 2 * levels[0]
        from_level = [2 * size for size in from_level]
    bandwidths = [machine[f"bandwidth.{level}"] for level in LEVELS]
    seconds = sum(size / each for size, each in zip(from_level, bandwidths, strict=True))
    return CALL * len(tables) + seconds + streamed / machine["bandwidth.L3"]


def features(tables: Sequence[TableLookups], machine: Machine) -> np.ndarray:
    """(features,) of a launch: its sizes, what each cache lacks, and uses by bins."""
    return np.concatenate([size_features(tables, machine), reuse_features(tables, machine)])


def size_features(tables: Sequence[TableLookups], machine: Machine) -> np.ndarray:
    """Features that need no data: sizes, and the tables' bytes over those of the caches."""
    lookups = sum(table.count for table in tables)
    bags = sum(table.bags for table in tables)
    moved = sum(table.count * table.row_bytes for table in tables)
    held = sum(table.bytes for table in tables)
    widest = max(table.row_bytes for table in tables)
    longest = max(table.count / table.bags for table in tables)
    sums = [len(tables), bags, lookups, moved, held, widest, longest]
    sums += [moved / max(lookups, 1), lookups / bags]
    sums += [held / machine[f"capacity.{cache}"] for cache in CACHES]
    return np.log2(np.maximum(np.array(sums, np.float64), _LEAST))


def reuse_features(tables: Sequence[TableLookups], machine: Machine) -> np.ndarray:
    """Features of the data: bytes that each cache lacks, those of distinct rows, and the bins."""
    uses = sum(table.histogram[1] * table.row_bytes for table in tables)
    distinct = float(sum(table.histogram[0].sum() * table.row_bytes for table in tables))
    moved = max(float(np.sum(uses)), 1.0)
    lacking = [missing_bytes(tables, machine[f"capacity.{cache}"]) / moved for cache in CACHES]
    over = [distinct / machine[f"capacity.{cache}"] for cache in CACHES]
    logs = np.log2(np.maximum([*lacking, distinct / moved, *over], _LEAST))
    return np.concatenate([logs, lacking, uses / moved])


def sizes_of(tables: Sequence[TableLookups]) -> np.ndarray:
    """(2, ranges): least and largest of each of ``RANGES``."""
    each = [
        (len(tables), table.bags, table.rows, table.width, table.count / table.bags)
        for table in tables
    ]
    return np.array([np.min(each, axis=0), np.max(each, axis=0)])


def predict_cpu_lookups(
    tables: Sequence[TableLookups], machine: Machine, is_backward: bool
) -> Prediction:
    """Predict lookups in some tables, one after the other.

    Raises
    ------
    PredictionError
        If the machine lacks a figure of its memories.
    """
    base = base_seconds(tables, machine, is_backward)
    kernel = "lookup_backward" if is_backward else "lookup"
    found = find_model(kernel, "float32", machine.name)
    floor = CALL * len(tables)
    bound = "latency" if floor > base / 2 else "memory"
    known = found is not None and not found[1].endswith("unseen")
    if found is None or not known:
        low, high = (base * end for end in _SPREAD)
        return Prediction(base, low, high, bound, base - floor, "lookup traffic", False)
    model, name = found
    seconds = base * float(np.exp(model.trees(features(tables, machine)[None]))[0])
    least, most = sizes_of(tables)
    in_range = bool((model.low <= least).all() and (most <= model.high).all())
    at = int(np.searchsorted(model.edges, base))
    spread = 1.0 if in_range else 2.0
    low, high = seconds * model.below[at] ** spread, seconds * model.above[at] ** spread
    roofline = min(base - floor, seconds)
    return Prediction(seconds, float(low), float(high), bound, roofline, name, in_range)
