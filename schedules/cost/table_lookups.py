# SPDX-License-Identifier: Apache-2.0
"""Lookups of one batch in one embedding table, and how often it uses each row.

A batch that uses few rows often finds them in a cache; one that uses each row once does not. The
rows are counted by their uses in 17 bins of 1, 2-3, 4-7, ... uses, the last one of 65,536 and more
(dissertation, section 5.4.3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedules.errors import PredictionError

BINS = 17
LINE = 64
"""Bytes of a cache line, of which a row takes whole ones."""

RANGES = 64
"""Equal ranges of a table's rows in which lookups are counted."""

_ALL_LAST = 4 << BINS  # with so many mean uses or more, every row is in the last bin
_SPARSE = 16  # with so many rows a lookup or more, sorting is faster than counting in a table
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
        ranges = np.bincount(indices.astype(np.int64) * RANGES // rows, minlength=RANGES)
        counted = tuple(map(float, ranges))
        return TableLookups(len(offsets), rows, width, indices.size, used_, uses_, counted)

    def busiest(self, parts: int) -> float:
        """Share of the lookups in the busiest of some equal parts of the rows, 64 at most."""
        parts = max(min(parts, RANGES), 1)
        if not self.ranges or not self.count:
            return 1 / parts
        part = np.arange(RANGES) * parts // RANGES
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
