# SPDX-License-Identifier: Apache-2.0
"""Report of a predicted timeline: totals, idle time by cause, the critical path, and pictures."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ..errors import PredictionError
from ..paths import written_aside
from .timeline.execution_graph import HOST
from .timeline.path import (
    CAUSES,
    active_seconds,
    critical_path,
    idle_seconds,
    streams,
)
from .timeline.timelines import RankTimeline, Timeline

_TOP = 12
"""Rows of the critical path that a table shows."""


@dataclass(frozen=True)
class RankReport:
    """Figures of one rank, in seconds."""

    rank: int
    trace: str  # Name of its file.
    seconds: float  # Predicted time from its start to its end.
    measured: float | None  # The same in the trace; None for a graph that was changed.
    active: float  # Time in which a kernel runs, without waits for other ranks.
    stream: int | None  # Stream with most work; None without a device.
    idle: dict[str, float]
    """Idle time of that stream by cause: ``host``, ``other rank``, ``other stream``, ``end``."""


@dataclass(frozen=True)
class PathRow:
    """Operator's share of the critical path."""

    op: str  # Operator.
    where: str  # ``host``, ``device`` or ``collective``.
    seconds: float  # Sum.
    count: int  # Number of its parts.


@dataclass(frozen=True)
class TimelineReport:
    """Report of ranks that ran together."""

    name: str  # What ran.
    seconds: float  # Time from the first rank's start to the last rank's end.
    ranks: tuple[RankReport, ...]  # Figures of each rank.
    path: tuple[PathRow, ...]  # Critical path, the largest share first.


@dataclass(frozen=True)
class Answer:
    """Prediction of a changed run."""

    change: str  # What was changed.
    seconds: float  # Time from the first rank's start to the last rank's end.
    gain: float  # Seconds that it saves.
    critical: PathRow  # Largest share of the critical path now.
    notes: tuple[str, ...]  # What the answer rests on: models, and kernels without one.


def report(
    name: str, timeline: Timeline, measured: Sequence[float] | None = None
) -> TimelineReport:
    """Summarise a timeline; ``measured`` are seconds of each rank."""
    each = measured if measured is not None else [None] * len(timeline.ranks)
    ranks = tuple(_rank_report(rank, time) for rank, time in zip(timeline.ranks, each, strict=True))
    return TimelineReport(name, timeline.seconds, ranks, _path_rows(timeline))


def _rank_report(rank: RankTimeline, measured: float | None) -> RankReport:
    used = [stream for stream in streams(rank) if stream != HOST]
    idle = idle_seconds(rank, used[0]) if used else {}
    return RankReport(
        rank.graph.rank,
        rank.graph.name,
        rank.seconds,
        measured,
        active_seconds(rank),
        used[0] if used else None,
        idle,
    )


def _path_rows(timeline: Timeline) -> tuple[PathRow, ...]:
    rows: dict[tuple[str, str], list[float]] = {}
    for segment in critical_path(timeline):
        row = rows.setdefault((segment.op, segment.where), [0.0, 0])
        row[0] += segment.seconds
        row[1] += 1
    found = [PathRow(op, where, time, int(count)) for (op, where), (time, count) in rows.items()]
    return tuple(sorted(found, key=lambda row: -row.seconds))


def tables(result: TimelineReport) -> RenderableType:
    """Tables of the ranks and of the critical path."""
    return Group(_rank_table(result), _path_table(result))


def _rank_table(result: TimelineReport) -> Table:
    table = Table(title=f"{result.name}: {_ms(result.seconds)}")
    for heading in ("rank", "predicted", "measured", "error", "active", *_headings()):
        table.add_column(heading, justify="right")
    for rank in result.ranks:
        error = f"{rank.seconds / rank.measured - 1:+.1%}" if rank.measured else ""
        measured = _ms(rank.measured) if rank.measured else ""
        idle = [_ms(rank.idle[cause]) if rank.idle else "" for cause in CAUSES]
        table.add_row(str(rank.rank), _ms(rank.seconds), measured, error, _ms(rank.active), *idle)
    return table


def _headings() -> list[str]:
    return [f"idle: {cause}" for cause in CAUSES]


def _path_table(result: TimelineReport) -> Table:
    table = Table(title="critical path")
    for heading in ("operator", "where"):
        table.add_column(heading)
    for heading in ("time", "share", "parts"):
        table.add_column(heading, justify="right")
    total = sum(row.seconds for row in result.path) or 1.0
    for row in result.path[:_TOP]:
        share = f"{row.seconds / total:.1%}"
        table.add_row(row.op, row.where, _ms(row.seconds), share, str(row.count))
    rest = result.path[_TOP:]
    if rest:
        time = sum(row.seconds for row in rest)
        count = sum(row.count for row in rest)
        table.add_row(f"{len(rest)} others", "", _ms(time), f"{time / total:.1%}", str(count))
    return table


def answer_table(name: str, seconds: float, answers: Sequence[Answer]) -> Table:
    """Table of what changes of a run of so many seconds bring: time, gain, critical, origin."""
    table = Table(title=f"what if, {name}")
    for heading in ("change", "time", "gain", "critical now", "rests on"):
        table.add_column(heading, justify="right" if heading in ("time", "gain") else "left")
    for answer in answers:
        gain = f"{answer.gain / seconds:+.1%}"
        critical = f"{answer.critical.op} ({answer.critical.where}, {_ms(answer.critical.seconds)})"
        notes = "; ".join(answer.notes)
        table.add_row(answer.change, _ms(answer.seconds), gain, critical, notes)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write a timeline as a Chrome trace (.json, .json.gz) or as a picture (.png, .svg, .pdf).

    Raises ``PredictionError`` if the name has another ending, matplotlib is missing, or the file
    cannot be written.
    """
    if path.name.endswith((".json", ".json.gz")):
        text = json.dumps({"traceEvents": chrome_events(timeline), "displayTimeUnit": "ms"})
        data = text.encode()
        with written_aside(path, PredictionError) as aside:
            aside.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    elif path.suffix in (".png", ".svg", ".pdf"):
        _draw(timeline, path)
    else:
        raise PredictionError(
            f"{path.name}: expected a name that ends with .json, .json.gz, .png, .svg or .pdf"
        )


def chrome_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Events for chrome://tracing and Perfetto: a process a rank, a row a thread and a stream."""
    events: list[dict[str, Any]] = []
    begin = timeline.start
    for rank in timeline.ranks:
        process = rank.graph.rank
        events.append(_meta("process_name", process, 0, f"rank {process}"))
        threads = {op.thread: f"host thread {op.thread}" for op in rank.graph.ops}
        rows = {run.kernel.stream for run in rank.kernels.values()} - {HOST}
        rows_of = {stream: f"stream {stream}" for stream in sorted(rows)}
        events += [
            _meta("thread_name", process, row, name)
            for names, prefix in ((threads, "host "), (rows_of, "stream "))
            for row, name in ((f"{prefix}{key}", name) for key, name in names.items())
        ]
        for host in rank.host:
            op = rank.graph.ops[host.op]
            events.append(
                _event("op", op.name, process, f"host {op.thread}", host.start, host.end, begin)
            )
        for run in rank.kernels.values():
            if run.kernel.stream == HOST:
                continue
            row, end = f"stream {run.kernel.stream}", run.end or run.ready
            if run.ready > run.start:
                events.append(
                    _event("wait", "wait for ranks", process, row, run.start, run.ready, begin)
                )
            events.append(_event("kernel", run.kernel.name, process, row, run.ready, end, begin))
    return events


def _meta(kind: str, process: int, row: Any, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}


def _event(
    kind: str, name: str, process: int, row: str, start: float, end: float, begin: float
) -> dict[str, Any]:
    times = {"ts": (start - begin) * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "cat": kind, "name": name, "pid": process, "tid": row, **times}


_COLOURS = {"op": "tab:gray", "wait": "tab:red", "kernel": "tab:blue"}


def _draw(timeline: Timeline, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PredictionError(
            "a picture needs matplotlib: pip install 'tvm-fusion[bench]', or write a .json"
        ) from None
    events = [event for event in chrome_events(timeline) if event["ph"] == "X"]
    rows = sorted({(event["pid"], event["tid"]) for event in events}, reverse=True)
    figure = Figure(figsize=(12, 1 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for height, row in enumerate(rows):
        for kind, colour in _COLOURS.items():
            bars = [
                (event["ts"] / 1e3, event["dur"] / 1e3)
                for event in events
                if (event["pid"], event["tid"]) == row and event["cat"] == kind
            ]
            axes.broken_barh(bars, (height - 0.4, 0.8), color=colour)
    axes.set_yticks(range(len(rows)), [f"rank {rank}, {row}" for rank, row in rows])
    axes.set_xlabel("ms (blue: kernels, red: wait for other ranks, gray: operators)")
    with written_aside(path, PredictionError) as aside:
        figure.savefig(aside, format=path.suffix[1:])
