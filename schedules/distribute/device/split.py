# SPDX-License-Identifier: Apache-2.0
"""Rows of a rank split between its CPU and its devices, all of which compute at once.

Each is given as many rows as it computes in the same time. A CPU takes the longer of its arithmetic
and its memory traffic, a device its operation sequence with the copies of a link. All figures come
from the caller; that CPU and copies share the host's memory is not modelled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...errors import OpError
from ..cost import Processor, Work, work_of
from ..exchange import Region
from ..loop_nest import LoopNest
from ..partition import integers
from ..time_skewing import skewed_seconds
from .kept_rows import halo_bytes
from .operation_sequence import OperationSequence, operation_sequence, sequence_seconds

CHUNKS = (1, 2, 4, 8, 16, 32)
"""Numbers of chunks that are compared."""

SecondsOfRows: TypeAlias = Callable[[int], float]
"""Predicted seconds of a number of rows; 0 for none, and never fewer for more."""


@dataclass(frozen=True)
class Accelerator:
    """Figures of a device and of its link to the host's memory.

    Parameters
    ----------
    rate : float
        Operations per second.
    bandwidth : float
        Bytes per second from and to its own memory.
    link : float
        Bytes per second of copies from the host, and at the same time of copies to it; infinite
        where the device computes in the host's memory.
    latency : float
        Seconds of a copy or a kernel beside its bytes and operations.
    overlaps : bool
        Whether copies run beside kernels, and not on the cores that compute.
    cores : Processor, optional
        Where the device is cores of the host, which share its memory: instead of ``rate`` and
        ``bandwidth``.
    """

    rate: float
    bandwidth: float
    link: float
    latency: float
    overlaps: bool = True
    cores: Processor | None = None

    def stages(self, work: Work, bytes_in: float, bytes_out: float) -> tuple[float, float, float]:
        """Seconds of copy in, kernels and copy out of a chunk."""
        compute = (self.cores or Processor(self.rate, self.bandwidth)).seconds(work)
        of_copy = 0.0 if math.isinf(self.link) else self.latency
        return (
            of_copy + bytes_in / self.link,
            self.latency + compute,
            of_copy + bytes_out / self.link,
        )

    def seconds(self, stages: Sequence[tuple[float, float, float]], slots: int) -> float:
        """Seconds of all chunks, of which ``slots`` have memory at a time."""
        return sequence_seconds(stages, slots)[-1] if self.overlaps else sum(map(sum, stages))


@dataclass(frozen=True)
class MeasuredRows:
    """Time of rows as measured: a line.

    Parameters
    ----------
    fixed : float
        Seconds of the first row without the next.
    a_row : float
        Seconds of each row.
    """

    fixed: float
    a_row: float

    def __call__(self, rows: int) -> float:
        """Seconds of a number of rows."""
        return self.fixed + self.a_row * rows if rows else 0.0

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> MeasuredRows:
        """The line through two measurements of rows and seconds; rows never gain time."""
        (low, short), (high, long) = few, many
        slope = max(0.0, (long - short) / (high - low)) if high > low else long / max(1, high)
        return cls(max(0.0, long - slope * high), max(slope, long / high * 1e-3))


@dataclass(frozen=True)
class MeasuredSplit:
    """Measured times of rows, by which they are split.

    Parameters
    ----------
    cpu : MeasuredRows
        Of the CPU.
    devices : tuple[MeasuredRows, ...]
        Of each device.
    """

    cpu: MeasuredRows
    devices: tuple[MeasuredRows, ...]


def cpu_seconds(
    nest: LoopNest,
    rows: Region,
    itemsizes: Mapping[str, int],
    processor: Processor,
    together: int = 1,
) -> SecondsOfRows:
    """Predicted time of a step of a number of the rows of a rank on its CPU.

    ``together`` steps pass over the memory at once (:mod:`..time_skewing`).
    """
    work = _LinearWork.of(nest, rows, itemsizes)

    def seconds(count: int) -> float:
        if not count:
            return 0.0
        each = work.of_rows(count)
        if together == 1:
            return processor.seconds(each)
        return skewed_seconds([each] * together, processor) / together

    return functools.cache(seconds)


def device_seconds(
    nest: LoopNest,
    rows: Region,
    itemsizes: Mapping[str, int],
    figures: Accelerator,
    chunks: int | None = None,
    slots: int = 2,
    repeat: Mapping[str, str] | None = None,
) -> SecondsOfRows:
    """Predicted time of a number of the rows of a rank on a device, in the best of ``CHUNKS``.

    With ``repeat``, the inputs that take outputs, of a step of rows that stay on the device. What
    others read of them is taken to be as much as they read of others.
    """
    work = _LinearWork.of(nest, rows, itemsizes, repeat)
    chunks = 1 if repeat else chunks
    return functools.cache(lambda count: _best(work, count, figures, chunks, slots)[0])


def choose_chunks(
    nest: LoopNest,
    rows: Region,
    itemsizes: Mapping[str, int],
    figures: Accelerator,
    slots: int = 2,
) -> int:
    """The number of chunks in which a device is predicted to compute rows fastest."""
    work = _LinearWork.of(nest, rows, itemsizes)
    return _best(work, rows[0][1] - rows[0][0], figures, None, slots)[1]


def predicted_seconds(
    nest: LoopNest,
    sequence: OperationSequence,
    itemsizes: Mapping[str, int],
    figures: Accelerator,
) -> float:
    """Predicted time of an operation sequence; of rows that stay on the device, of a step."""
    if sequence.kept is not None:
        copied = sequence.kept.bytes(itemsizes)
        [chunk] = sequence.chunks
        into, compute, out = figures.stages(work_of(nest, chunk.rows, itemsizes), *copied)
        return compute + (into + out) / sequence.kept.steps
    stages = [
        figures.stages(
            work_of(nest, chunk.rows, itemsizes), *sequence.chunk_bytes(number, itemsizes)
        )
        for number, chunk in enumerate(sequence.chunks)
    ]
    return figures.seconds(stages, sequence.slots)


def split_rows(extent: int, seconds: Sequence[SecondsOfRows]) -> tuple[int, ...]:
    """Rows of each of several processors, so that the last one ends as early as possible.

    Parameters
    ----------
    extent : int
        All rows.
    seconds : Sequence[SecondsOfRows]
        Predicted time of each.

    Returns
    -------
    tuple[int, ...]
        They sum up to ``extent``; who would only delay the others has none.
    """
    least, most = 0.0, min(time(extent) for time in seconds)
    for _ in range(50):
        middle = (least + most) / 2
        enough = sum(_rows_within(time, extent, middle) for time in seconds) >= extent
        least, most = (least, middle) if enough else (middle, most)
    found = [_rows_within(time, extent, most) for time in seconds]
    while sum(found) > extent:  # from whoever ends last
        ends = [time(rows) for time, rows in zip(seconds, found, strict=True)]
        last = max(range(len(found)), key=lambda number: (ends[number], number))
        found[last] -= min(found[last], max(1, (sum(found) - extent) // 2))
    return tuple(found)


def check_split(rows: Sequence[int], extent: int, names: Sequence[str]) -> tuple[int, ...]:
    """Rows that a user gives to the CPU and each device.

    Raises
    ------
    OpError
        If one is negative or no integer, if there are more or fewer of them than there are
        processors, or if they do not sum up.
    """
    rows = integers(rows, "rows of the split")
    if len(rows) != len(names):
        raise OpError(
            f"the split {list(rows)} has {len(rows)} numbers of rows; expected {len(names)}: for "
            f"{', '.join(names)}"
        )
    if min(rows) < 0 or sum(rows) != extent:
        raise OpError(
            f"the split {list(rows)} is not a split of {extent} rows between {', '.join(names)}; "
            "expected numbers from 0 that sum up to it"
        )
    return tuple(rows)


def _rows_within(time: SecondsOfRows, extent: int, limit: float) -> int:
    """The most rows that are computed within a time."""
    low, high = 0, extent
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if time(middle) <= limit else (low, middle - 1)
    return low


def _best(
    work: _LinearWork, rows: int, figures: Accelerator, chunks: int | None, slots: int
) -> tuple[float, int]:
    """The least time of some rows, and its number of chunks."""
    if rows == 0:
        return 0.0, 1
    found = []
    # Of all counts at any number of rows, so that more rows never take less time.
    for count in {min(count, rows) for count in ([chunks] if chunks else CHUNKS)}:
        each = rows / count
        into, compute, out = figures.stages(
            work.of_rows(each), work.bytes_in(each), work.bytes_out(each)
        )
        first = (into + work.resident / figures.link, compute, out)
        stages = [first, *[(into, compute, out)] * (count - 1)]
        found.append((figures.seconds(stages, slots), count))
    return min(found)


@dataclass(frozen=True)
class _LinearWork:
    """Work and copies as lines: what a row needs, and what all rows need together (halos)."""

    operations: tuple[float, float]
    traffic: tuple[float, float]
    into: tuple[float, float]
    out: tuple[float, float]
    resident: int

    @classmethod
    def of(
        cls,
        nest: LoopNest,
        rows: Region,
        itemsizes: Mapping[str, int],
        repeat: Mapping[str, str] | None = None,
    ) -> _LinearWork:
        """The lines through half of the rows and all of them."""
        (begin, end), *others = rows
        counts = [max(1, (end - begin) // 2), end - begin]
        points = []
        halo = 0
        for count in counts:
            part = ((begin, begin + count), *others)
            work, sequence = work_of(nest, part, itemsizes), operation_sequence(nest, part)
            once = {n: itemsizes[n] if n in sequence.resident else 0 for n in itemsizes}
            resident, _ = sequence.bytes(once)
            into, out = sequence.bytes(itemsizes)
            if repeat:
                halo = max(halo, halo_bytes(sequence, repeat, itemsizes))
            points.append((work.operations, work.bytes, into - resident, out))
        operations, traffic, copied, made = (
            _line(counts, pair) for pair in zip(*points, strict=True)
        )
        if repeat:
            copied = made = float(halo), 0.0  # of any number of rows
            resident = 0
        return cls(operations, traffic, copied, made, resident)

    def of_rows(self, rows: float) -> Work:
        """Work of a number of rows."""
        return Work(math.ceil(_at(self.operations, rows)), math.ceil(_at(self.traffic, rows)))

    def bytes_in(self, rows: float) -> float:
        """Bytes copied to a device for them, without what is copied once."""
        return _at(self.into, rows)

    def bytes_out(self, rows: float) -> float:
        """Bytes copied back."""
        return _at(self.out, rows)


def _line(counts: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    (low, high), (few, many) = counts, values
    slope = (many - few) / (high - low) if high > low else float(many)
    return many - slope * high, slope


def _at(line: tuple[float, float], rows: float) -> float:
    return max(0.0, line[0] + line[1] * rows)
