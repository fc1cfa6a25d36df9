# SPDX-License-Identifier: Apache-2.0
"""Embedding lookups: how often a batch uses each row, and the times by their traffic.

A batch that uses few rows often finds them in a cache; one that uses each row once does not. The
rows are counted by their uses in 17 bins of 1, 2-3, 4-7, ... uses, the last one of 65,536 and more
(dissertation, section 5.4.3.1).

B bags, T tables of E rows of width D, L lookups a bag; without data every row of a table is equally
likely. (Dissertation, section 4.3.2.1.1. The weights' traffic is that of L rows, where the print
has one; and the hit rate is that of single rows, where the print has the chance that all L of a bag
hit.)

On a CPU PyTorch's lookups are predicted by how often a batch uses each row. Tables of a launch are
looked up one after the other, and each has its own time. The least takes each byte from the level
of the memory that holds it, if the caches keep the rows used most; trees correct it, trained on
lookups of random tables that were measured (``examples/benchmarks/predict_lookups.py``). Backward
is the gradient of the rows and their update by plain SGD, as of a sparse ``EmbeddingBag``: every
thread reads all indices and updates the rows of its own equal part of the table, so that the thread
whose rows are used most takes longest; and it reads gradients that the other threads have just
written, at the machine's ``bandwidth.exchange``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from schedules.errors import PredictionError

from .kernel_call import KernelCall, Prediction, element_bytes
from .learned import find_model
from .machine import Machine, known_machines, load_machine

BINS = 17
LINE = 64
"""Bytes of a cache line, of which a row takes whole ones."""

ROW_RANGES = 64
"""Equal ranges of a table's rows in which lookups are counted."""

_ALL_LAST = 4 << BINS  # So many mean uses put every row into the last bin.
_SPARSE = 16  # Rows a lookup from which on sorting is faster than counting in a table.
_TAIL = 12  # standard deviations of a Poisson distribution that are summed up


@dataclass(frozen=True)
class TableLookups:
    """Lookups of a batch in a table of float32 rows.

    Raises
    ------
    PredictionError
        If a size is not positive or beyond any memory, or the bins or ranges do not hold all
        lookups.
    """

    bags: int  # Sums of rows, B.
    rows: int
    width: int
    """``rows`` and ``width``: rows of the table, E, and elements of one, D."""
    count: int  # Lookups of all bags together, B * L.
    used: tuple[float, ...] = ()
    uses: tuple[float, ...] = ()
    """``used`` and ``uses``: (17,) each: rows of each bin of uses, and the lookups in them. Empty
    for rows that are equally likely."""
    ranges: tuple[float, ...] = ()
    """(64,) lookups in equal ranges of the rows; empty for rows that are equally likely."""

    def __post_init__(self) -> None:
        for name in ("bags", "rows", "width"):
            if not 1 <= getattr(self, name) < 1 << 53:
                raise PredictionError(
                    f"lookups: {name} is {getattr(self, name)}; expected 1 to 2**53 - 1"
                )
        is_binned = len(self.used) == len(self.uses) and len(self.used) in (0, BINS)
        if not (is_binned and 0 <= self.count < 1 << 96):
            raise PredictionError(f"lookups: expected a count from 0 on, and {BINS} bins")
        for name, parts in (("bins", self.uses), ("ranges", self.ranges)):
            if parts and abs(sum(parts) - self.count) > 1e-6 * max(1, self.count):
                raise PredictionError(
                    f"lookups: {sum(parts):g} of {self.count} lookups are in the {name}"
                )

    @staticmethod
    def of(
        indices: Sequence[int] | np.ndarray,
        offsets: Sequence[int] | np.ndarray,
        rows: int,
        width: int,
    ) -> TableLookups:
        """Count the uses of rows in a batch.

        Parameters
        ----------
        indices : array of int
            (lookups,) rows, bag by bag.
        offsets : array of int
            (bags,) positions in ``indices`` at which the bags begin.
        rows, width : int
            Rows of the table and elements of one.

        Raises
        ------
        PredictionError
            If an index is no row, or the offsets do not ascend from 0.
        """
        indices, offsets = np.asarray(indices), np.asarray(offsets)
        for name, array in (("indices", indices), ("offsets", offsets)):
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise PredictionError(
                    f"{name} of shape {array.shape}; expected a vector of integers"
                )
        if not offsets.size or offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
            raise PredictionError("offsets must begin with 0 and never descend")
        if offsets[-1] > indices.size:
            raise PredictionError(f"offset {offsets[-1]} lies after all {indices.size} indices")
        if indices.size and not 0 <= indices.min() <= indices.max() < rows:
            raise PredictionError(
                f"indices from {indices.min()} to {indices.max()}; expected rows 0 to {rows - 1}"
            )
        each = _uses(indices, rows)
        bins = np.minimum(np.frexp(each)[1] - 1, BINS - 1)
        used = np.bincount(bins, minlength=BINS)
        uses = np.bincount(bins, each, minlength=BINS)
        used_, uses_ = (tuple(map(float, bins)) for bins in (used, uses))
        ranges = np.bincount(indices.astype(np.int64) * ROW_RANGES // rows, minlength=ROW_RANGES)
        counted = tuple(map(float, ranges))
        return TableLookups(len(offsets), rows, width, indices.size, used_, uses_, counted)

    def busiest(self, parts: int) -> float:
        """Share of the lookups in the busiest of some equal parts of the rows, 64 at most."""
        parts = max(min(parts, ROW_RANGES), 1)
        if not self.ranges or not self.count:
            return 1 / parts
        part = np.arange(ROW_RANGES) * parts // ROW_RANGES
        return float(np.bincount(part, self.ranges).max() / self.count)

    @property
    def reuse_factors(self) -> tuple[float, ...]:
        """Share of the used rows in each bin of uses."""
        used, _ = self.histogram
        return tuple(used / max(used.sum(), 1e-300))

    @property
    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """(17,) rows and (17,) lookups of each bin, expected ones if rows are equally likely."""
        if self.used:
            return np.array(self.used), np.array(self.uses)
        return _uniform(self.rows, self.count)

    @property
    def row_bytes(self) -> int:
        """Bytes of the cache lines of a row."""
        return -(-4 * self.width // LINE) * LINE

    @property
    def bytes(self) -> int:
        """Bytes of the table."""
        return self.rows * self.row_bytes


def _uses(indices: np.ndarray, rows: int) -> np.ndarray:
    """Uses of each row that is used, in no order."""
    if rows > _SPARSE * indices.size:
        return np.unique(indices, return_counts=True)[1]
    each = np.bincount(indices)
    return each[each > 0]


def _uniform(rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Expected bins of lookups of equally likely rows: their uses follow a Poisson law."""
    mean = count / rows
    if not count or mean > _ALL_LAST:
        last = np.eye(BINS)[-1]
        return last * (rows if count else 0), last * count
    reach = _TAIL * math.sqrt(mean) + 20
    each = np.arange(1, int(mean + reach) + 1)
    logarithm = each * math.log(mean) - mean - np.cumsum(np.log(each))
    expected = rows * np.exp(logarithm)
    bins = np.minimum(np.frexp(each)[1] - 1, BINS - 1)
    used = np.bincount(bins, expected, minlength=BINS)
    uses = np.bincount(bins, expected * each, minlength=BINS)
    return used, uses * (count / uses.sum())


def missing_bytes(tables: Sequence[TableLookups], capacity: float) -> float:
    """Bytes of rows that a cache lacks if it keeps the rows of all tables that are used most."""
    used, uses, row = (np.concatenate(parts) for parts in zip(*map(_bytes, tables), strict=True))
    heat = np.divide(uses, used, out=np.zeros(len(used)), where=used > 0) / row
    order = np.argsort(-heat, kind="stable")
    size = (used * row)[order]
    free = capacity - (np.cumsum(size) - size)
    kept = np.clip(np.divide(free, size, out=np.ones(len(size)), where=size > 0), 0, 1)
    return float(((1 - kept) * (uses * row)[order]).sum())


def _bytes(table: TableLookups) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return *table.histogram, np.full(BINS, float(table.row_bytes))


LEVELS = ("L2", "L3", "memory")
CACHES = ("L1", "L2", "L3")
CALL = 4e-6
"""Seconds of one table's call, about; the trees know better."""

SCAN = 75
"""Cycles in which a thread that updates rows reads an index, about."""

EXCHANGES = 8
"""Times of a copy between cores that rows read and written one by one take, about."""

_INDEX_BYTES = 8
_PAGE = 4096
_BAG_SPREAD = 0.5, 3.0  # CPUs on which no lookups were measured.
_LEAST = 1e-4  # share of bytes below which they do not count
RANGES = ("bags", "rows", "width", "lookups")


def base_seconds(table: TableLookups, machine: Machine, is_backward: bool) -> float:
    """Least seconds of a table's lookups, by the level that holds each byte."""
    levels = [float(table.count * table.row_bytes)]
    levels += [missing_bytes([table], machine[f"capacity.{cache}"]) for cache in CACHES[1:]]
    from_level = [levels[0] - levels[1], levels[1] - levels[2], levels[2]]
    streamed = float(table.bags * table.row_bytes + _INDEX_BYTES * table.count)
    scanned = 0.0
    if is_backward:  # gradients of all lookups are written and read, the rows read and written
        streamed += 2 * levels[0]
        slowest = table.busiest(_threads(machine)) * _threads(machine)
        from_level = [2 * size * slowest for size in from_level]
        scanned = SCAN * table.count / machine["clock"]
        scanned += EXCHANGES * levels[0] / _exchange(machine)
    bandwidths = [machine[f"bandwidth.{level}"] for level in LEVELS]
    seconds = sum(size / each for size, each in zip(from_level, bandwidths, strict=True))
    return CALL + scanned + seconds + streamed / machine["bandwidth.L3"]


def _exchange(machine: Machine) -> float:
    """Bytes/s of what another core has just written; a single thread reads what it wrote itself.

    Where a file of ``calibrate`` lacks it, that of its family, and if that is unknown, too, enough
    for as much as a pass over L3.
    """
    known = machine.get("bandwidth.exchange", 0.0) or _family_exchange(machine.name)
    if _threads(machine) == 1:
        known = 0.0
    return known or EXCHANGES * machine["bandwidth.L3"]


@lru_cache(maxsize=16)
def _family_exchange(name: str) -> float:
    return load_machine(name).get("bandwidth.exchange", 0.0) if name in known_machines() else 0.0


def _threads(machine: Machine) -> int:
    return int(machine.get("multiprocessors", 1))


def features(table: TableLookups, launch: Sequence[TableLookups], machine: Machine) -> np.ndarray:
    """(features,) of a table in a launch: sizes, what each cache lacks, and uses by bins."""
    return np.concatenate(
        [size_features(table, launch, machine), reuse_features(table, launch, machine)]
    )


def size_features(
    table: TableLookups, launch: Sequence[TableLookups], machine: Machine
) -> np.ndarray:
    """Features that need no data: sizes, and bytes over those of the caches."""
    moved = sum(other.count * other.row_bytes for other in launch)
    held = sum(other.bytes for other in launch)
    own = table.count * table.row_bytes
    sizes = [table.bags, table.rows, table.row_bytes, table.count, table.count / table.bags, own]
    sizes += [table.bytes, table.bags * table.row_bytes, held, moved]
    sizes += [table.bytes / machine[f"capacity.{cache}"] for cache in CACHES]
    sizes += [_exchange(machine)]
    return np.log2(np.maximum(np.array(sizes, np.float64), _LEAST))


def reuse_features(
    table: TableLookups, launch: Sequence[TableLookups], machine: Machine
) -> np.ndarray:
    """Features of the data: bytes that each cache lacks, distinct rows and pages, and the bins.

    Others of the launch, looked up since the last batch, may have taken the caches.
    """
    used, uses = table.histogram
    moved = max(float(table.count * table.row_bytes), 1.0)
    distinct = float(used.sum() * table.row_bytes)
    others = float(sum(other.histogram[0].sum() * other.row_bytes for other in launch))
    pages = max(table.bytes / _PAGE, 1.0)
    touched = -pages * np.expm1(-distinct / _PAGE / pages) if distinct < _PAGE * 1e6 else pages
    lacking = [missing_bytes([table], machine[f"capacity.{cache}"]) / moved for cache in CACHES]
    over = [size / machine[f"capacity.{cache}"] for size in (distinct, others) for cache in CACHES]
    logs = np.log2(np.maximum([*lacking, distinct / moved, touched, *over], _LEAST))
    return np.concatenate(
        [logs, lacking, [table.busiest(_threads(machine))], uses / max(table.count, 1)]
    )


def sizes_of(table: TableLookups) -> np.ndarray:
    """(ranges,): each of ``RANGES``."""
    return np.array([table.bags, table.rows, table.width, table.count / table.bags])


def predict_cpu_lookups(
    tables: Sequence[TableLookups],
    machine: Machine,  # CPU.
    is_backward: bool,  # Whether rows are updated.
    # Other lookups of the batch that pass through the same caches, such as those of other ranks.
    beside: Sequence[TableLookups] = (),
) -> Prediction:
    """Predict lookups in some tables, one after the other.

    Raises ``PredictionError`` if the machine lacks a figure of its memories.
    """
    launch = (*tables, *beside)
    predictions = [_predict_bags(table, launch, machine, is_backward) for table in tables]
    slowest = max(predictions, key=lambda found: found.seconds)
    seconds, low, high, roofline = (
        sum(getattr(found, name) for found in predictions)
        for name in ("seconds", "low", "high", "roofline_seconds")
    )
    in_range = all(found.in_range for found in predictions)
    return Prediction(seconds, low, high, slowest.bound, roofline, slowest.model, in_range)


def _predict_bags(
    table: TableLookups, launch: Sequence[TableLookups], machine: Machine, is_backward: bool
) -> Prediction:
    base = base_seconds(table, machine, is_backward)
    kernel = "lookup_backward" if is_backward else "lookup"
    found = find_model(kernel, "float32", machine.name)
    bound = "latency" if CALL > base / 2 else "memory"
    if found is None or found[1].endswith("unseen"):
        low, high = (base * end for end in _BAG_SPREAD)
        return Prediction(base, low, high, bound, base - CALL, "lookup traffic", False)
    model, name = found
    seconds = base * float(np.exp(model.trees(features(table, launch, machine)[None]))[0])
    sizes = sizes_of(table)
    in_range = bool(((model.low <= sizes) & (sizes <= model.high)).all())
    at = int(np.searchsorted(model.edges, base))
    spread = 1.0 if in_range else 2.0
    low, high = seconds * model.below[at] ** spread, seconds * model.above[at] ** spread
    return Prediction(
        seconds, float(low), float(high), bound, min(base - CALL, seconds), name, in_range
    )


_SECTOR = 32
_ROWS_PER_BLOCK = 32
_ACHIEVED = 0.83  # Share of the data sheet's bandwidth, where no stream was measured.
_SPREAD = 0.8, 1.25  # Uniform lookups; real ones repeat rows and are faster.


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

    Raises ``PredictionError`` if the call lacks a size, or the machine a figure of its memories.
    """
    is_backward = call.op.endswith("backward")
    tables = tables_of(call)
    if machine.kind == "cpu":
        return predict_cpu_lookups(tables, machine, is_backward)
    block = call.size("rows_per_block", _ROWS_PER_BLOCK)
    return _predict(machine, tables, block, is_backward)


def tables_of(call: KernelCall) -> list[TableLookups]:
    """Tables of an ``embedding_bag``, whose rows are equally likely.

    Raises ``PredictionError`` if the call lacks a size.
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
