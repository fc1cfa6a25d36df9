# SPDX-License-Identifier: Apache-2.0
"""Rows of a rank split between its CPU and its devices, all of which compute at once.

Each is given as many rows as it computes in the same time. A CPU takes the longer of its arithmetic
and its memory traffic, a device its operation sequence with the copies of a link. All figures come
from the caller; that CPU and copies share the host's memory is not modelled.

Rows of a repeated function stay on a device from one step to the next. All of them are copied in
before the first step, and out after the last. In between only those are copied that somebody else
computes or reads: another rank, the CPU, or another device of the rank. Where ranks exchange every
few steps, so do the CPU and devices of a rank: a device then computes in each step, by one kernel,
all rows of any of them. What it lacks for some is not read by the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..errors import OpError
from .cost import Processor, Work, work_of
from .distribute import Distribution, join_windows
from .exchange import Region, difference, hull, intersection, region_size, union
from .loop_nest import LoopNest
from .operation_sequence import (
    KeptRows,
    OperationSequence,
    operation_sequence,
    own_regions,
    sequence_seconds,
)
from .partition import integers
from .time_skewing import skewed_seconds


def kept_rows(
    plan: Distribution,  # Parts and messages of all ranks, of a function with ``repeat``.
    rank: int,  # The rank that has the device.
    rows: Region,  # Rows of the device; not empty.
    others: Sequence[Region],  # Rows of the rank's CPU and of its other devices; perhaps empty.
) -> OperationSequence:
    """The sequence of rows that stay on a device.

    Raises ``OpError`` as of :func:`operation_sequence`.
    """
    sequence = operation_sequence(plan.nest, _rows_of_steps(plan, rank, rows), 1)
    [chunk] = sequence.chunks
    mine = {buffer.name: part for buffer, [part] in plan.nest.output_regions(rows).items()}
    chunk = replace(chunk, copied={**chunk.copied, **mine})
    windows = dict(chunk.windows)
    into: list[tuple[str, Region]] = []
    out: list[tuple[str, Region]] = []
    for taker, output in plan.repeat.items():
        made, read = chunk.copied[output], chunk.copied.get(taker)
        both = hull([windows[output], read]) if read else windows[output]
        windows |= {taker: both, output: both}
        if read:
            into += [(taker, region) for region in difference(read, made)]
        wanted = [*_sent(plan, rank, taker), *_reads(plan, rank, taker, others)]
        out += [(output, part) for part in union([intersection(made, part) for part in wanted])]
    join_windows(plan.nest, plan.takers, windows)
    kept = KeptRows(plan.repeat, tuple(into), tuple(out), plan.deep)
    return replace(sequence, chunks=(replace(chunk, windows=windows),), kept=kept)


def halo_bytes(
    sequence: OperationSequence, repeat: Mapping[str, str], itemsizes: Mapping[str, int]
) -> int:
    """Bytes that rows read of the step before and do not compute themselves."""
    [chunk] = sequence.chunks
    return sum(
        region_size(region) * itemsizes[taker]
        for taker, output in repeat.items()
        if taker in chunk.copied
        for region in difference(chunk.copied[taker], chunk.copied[output])
    )


def _sent(plan: Distribution, rank: int, buffer: str) -> list[Region]:
    """Regions of an input that a rank sends before a step."""
    exchanges = [*(transfer.exchange for transfer in plan.before), plan.exchange]
    return [one.region for e in exchanges for one in e.sent_by(rank) if one.buffer == buffer]


def _reads(plan: Distribution, rank: int, buffer: str, others: Sequence[Region]) -> list[Region]:
    """Part of an input that the steps of several ranges of rows read."""
    return [
        region
        for rows in others
        if region_size(rows)
        for read, region in own_regions(plan.nest, _rows_of_steps(plan, rank, rows)).items()
        if read.name == buffer
    ]


def _rows_of_steps(plan: Distribution, rank: int, rows: Region) -> Region:
    """All that is computed between two exchanges, so that the last step has some rows."""
    return hull([computed for computed in plan.steps_of(rank, rows) if region_size(computed)])


CHUNKS = (1, 2, 4, 8, 16, 32)
"""Numbers of chunks that are compared."""

SecondsOfRows: TypeAlias = Callable[[int], float]
"""Predicted seconds of a number of rows; 0 for none, and never fewer for more."""


@dataclass(frozen=True)
class Accelerator:
    """Figures of a device and of its link to the host's memory."""

    rate: float  # Operations per second.
    bandwidth: float  # Bytes per second from and to its own memory.
    link: float
    """Bytes per second of copies from the host, and at the same time of copies to it; infinite
    where the device computes in the host's memory."""
    latency: float  # Seconds of a copy or a kernel beside its bytes and operations.
    overlaps: bool = True  # Whether copies run beside kernels, and not on the cores that compute.
    cores: Processor | None = None
    """Cores of the host, where they are the device and share its memory: instead of ``rate`` and
    ``bandwidth``."""

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
    """Time of rows as measured: a line."""

    fixed: float  # Seconds of the first row without the next.
    a_row: float  # Seconds of each row.

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
    """Measured times of rows, by which they are split."""

    cpu: MeasuredRows  # Times of the CPU.
    devices: tuple[MeasuredRows, ...]  # Times of each device.


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


def split_rows(
    extent: int,
    seconds: Sequence[SecondsOfRows],  # Predicted time of each.
) -> tuple[int, ...]:
    """Rows of each of several processors, so that the last one ends as early as possible.

    They sum up to ``extent``; who would only delay the others has none.
    """
    least, most = 0.0, min(time(extent) for time in seconds)
    for _ in range(50):
        middle = (least + most) / 2
        enough = sum(_rows_within(time, extent, middle) for time in seconds) >= extent
        least, most = (least, middle) if enough else (middle, most)
    found = [_rows_within(time, extent, most) for time in seconds]
    while sum(found) > extent:  # Rows are taken from whoever ends last.
        ends = [time(rows) for time, rows in zip(seconds, found, strict=True)]
        last = max(range(len(found)), key=lambda number: (ends[number], number))
        found[last] -= min(found[last], max(1, (sum(found) - extent) // 2))
    return tuple(found)


def check_split(rows: Sequence[int], extent: int, names: Sequence[str]) -> tuple[int, ...]:
    """Rows that a user gives to the CPU and each device.

    Raises ``OpError`` if one is negative or no integer, if there are more or fewer of them than
    there are processors, or if they do not sum up.
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
    candidates = []
    # The best of all counts at any number of rows, so that more rows never take less time.
    for count in {min(count, rows) for count in ([chunks] if chunks else CHUNKS)}:
        each = rows / count
        into, compute, out = figures.stages(
            work.of_rows(each), work.bytes_in(each), work.bytes_out(each)
        )
        first = (into + work.resident / figures.link, compute, out)
        stages = [first, *[(into, compute, out)] * (count - 1)]
        candidates.append((figures.seconds(stages, slots), count))
    return min(candidates)


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
            copied = made = float(halo), 0.0  # They do not depend on the number of rows.
            resident = 0
        return cls(operations, traffic, copied, made, resident)

    def of_rows(self, rows: float) -> Work:
        """Work of a number of rows."""
        return Work(
            math.ceil(_value_on(self.operations, rows)), math.ceil(_value_on(self.traffic, rows))
        )

    def bytes_in(self, rows: float) -> float:
        """Bytes copied to a device for them, without what is copied once."""
        return _value_on(self.into, rows)

    def bytes_out(self, rows: float) -> float:
        """Bytes copied back."""
        return _value_on(self.out, rows)


def _line(counts: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    (low, high), (few, many) = counts, values
    slope = (many - few) / (high - low) if high > low else float(many)
    return many - slope * high, slope


def _value_on(line: tuple[float, float], rows: float) -> float:
    return max(0.0, line[0] + line[1] * rows)
