# SPDX-License-Identifier: Apache-2.0
"""Critical path of a timeline, and why its streams were idle."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .execution_graph import HOST
from .timelines import HostWait, KernelRun, RankTimeline, Timeline

CAUSES = ("host", "other rank", "other stream", "end")
"""Causes of idle time; ``end`` is that after a stream's last kernel."""


@dataclass(frozen=True)
class PathSegment:
    """Part of the critical path."""

    rank: int
    op: str  # Operator.
    where: str  # ``host``, ``device`` or ``collective``.
    seconds: float  # Length.


def critical_path(timeline: Timeline) -> list[PathSegment]:
    """Path from the end of the last rank back to its start, in order of time.

    Its lengths sum up to that end less the start of the rank on which the path begins.
    """
    ranks = {rank.graph.rank: rank for rank in timeline.ranks}
    rank = max(timeline.ranks, key=lambda one: one.end)
    segments: list[PathSegment] = []
    run = max(rank.kernels.values(), key=lambda one: one.end or 0.0, default=None)
    if run is None or (run.end or 0.0) <= rank.host_end:
        segments += _host_segments(rank, rank.host_end, len(rank.waits))
        run = rank.kernels[rank.waits[-1].kernel] if rank.waits else None
    while run is not None:
        if run.last_rank is not None and run.last_rank != rank.graph.rank:
            rank = ranks[run.last_rank]
            run = _same_collective(rank, run)
        where = "collective" if run.kernel.collective else "device"
        name = rank.graph.ops[run.op].name
        segments.append(PathSegment(rank.graph.rank, name, where, (run.end or 0.0) - run.start))
        if run.source is not None:
            source = rank.kernels[run.source]
            gap = run.start - (source.end or 0.0)
            segments.append(PathSegment(rank.graph.rank, name, where, gap))
            run = source
            continue
        segments += _host_segments(rank, run.start, run.waits)
        run = rank.kernels[rank.waits[run.waits - 1].kernel] if run.waits else None
    return [segment for segment in reversed(segments) if segment.seconds > 0]


def _same_collective(rank: RankTimeline, run: KernelRun) -> KernelRun:
    part = run.kernel.collective
    return next(
        other
        for other in rank.kernels.values()
        if (found := other.kernel.collective) is not None
        and part is not None
        and (found.group, found.sequence) == (part.group, part.sequence)
    )


def _host_segments(rank: RankTimeline, end: float, waits: int) -> Iterator[PathSegment]:
    """Time of the host from its last wait to ``end``, by operator, backwards."""
    begin = rank.waits[waits - 1].end if waits else rank.graph.start
    index = bisect.bisect_left(rank.host, end, key=lambda run: run.start) - 1
    index = max(index, 0)
    while end > begin and rank.host:
        # What lies between two operators belongs to the second.
        before = rank.host[index - 1].end if index else rank.graph.start
        start = max(min(before, end), begin) if index else begin
        name = rank.graph.ops[rank.host[index].op].name
        yield PathSegment(rank.graph.rank, name, "host", end - start)
        end, index = start, index - 1


def active_seconds(rank: RankTimeline) -> float:
    """Time in which at least one kernel of a device runs, without waits for other ranks.

    Without a device that of the kernels of the host, collectives of its threads included.
    """
    runs = list(rank.kernels.values())
    on_device = [run for run in runs if run.kernel.stream != HOST]
    if all(run.kernel.collective for run in on_device):
        on_device = runs
    return sum(end - start for start, end in _union(_busy(on_device)))


def streams(rank: RankTimeline) -> list[int]:
    """Streams of a rank, the one with most work first."""
    work: dict[int, float] = {}
    for run in rank.kernels.values():
        stream = run.kernel.stream
        work[stream] = work.get(stream, 0.0) + (run.end or 0.0) - run.ready
    return sorted(work, key=lambda stream: -work[stream])


def idle_seconds(rank: RankTimeline, stream: int) -> dict[str, float]:
    """Idle time of a stream from the rank's start to its end, by cause."""
    idle = dict.fromkeys(CAUSES, 0.0)
    front = rank.graph.start
    for run in (run for run in rank.kernels.values() if run.kernel.stream == stream):
        waiting = [*_foreign(rank, stream)] if run.start > front else []
        for cause, begin, end in _causes(rank, run, front, waiting):
            idle[cause] += end - begin
        idle["other rank"] += run.ready - run.start
        front = run.end or run.ready
    idle["end"] = rank.end - front
    return idle


def _busy(runs: Iterable[KernelRun]) -> list[tuple[float, float]]:
    return sorted((run.ready, run.end or run.ready) for run in runs)


def _union(intervals: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    current: tuple[float, float] | None = None
    for start, end in intervals:
        if current is not None and start <= current[1]:
            current = current[0], max(current[1], end)
            continue
        if current is not None:
            yield current
        current = start, end
    if current is not None:
        yield current


def _foreign(rank: RankTimeline, stream: int) -> Iterator[HostWait]:
    """Waits of the host for kernels of other streams."""
    return (wait for wait in rank.waits if rank.kernels[wait.kernel].kernel.stream != stream)


def _causes(
    rank: RankTimeline, run: KernelRun, front: float, waits: list[HostWait]
) -> Iterator[tuple[str, float, float]]:
    """Split the gap before a kernel: until its launch, and from its launch to its start."""
    launched = min(max(run.launched, front), run.start)
    time = front
    for wait in waits:
        begin, end = max(wait.start, time), min(wait.end, launched)
        if begin < end:
            yield "host", time, begin
            yield from _of_source(rank.kernels[wait.kernel], begin, end)
            time = end
    yield "host", time, launched
    if run.bound == "other stream" and run.source is not None:
        yield from _of_source(rank.kernels[run.source], launched, run.start)
    else:
        yield "host", launched, run.start


def _of_source(source: KernelRun, begin: float, end: float) -> Iterator[tuple[str, float, float]]:
    """Wait for a kernel of another stream: its own wait for other ranks, and the rest."""
    ready = min(max(source.ready, begin), end) if source.last_rank is not None else begin
    yield "other rank", begin, ready
    yield "other stream", ready, end
