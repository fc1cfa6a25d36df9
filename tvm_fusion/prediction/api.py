# SPDX-License-Identifier: Apache-2.0
"""Predictions as functions: of traced runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import PredictionError
from .kineto import KinetoTrace, read_kineto
from .overheads import Overheads, ProfilerCost, measure_overheads
from .report import TimelineReport, report
from .timeline.execution_graph import ExecutionGraph
from .timeline.ranks import Timeline, simulate
from .traced_graph import measured_seconds, traced_graph
from .traced_ops import traced_ops


@dataclass(frozen=True)
class TracedRun:
    """Traces of ranks that ran together.

    Parameters
    ----------
    name : str
        Name of the run.
    graphs : tuple of ExecutionGraph
        Graph of each rank.
    measured : tuple of float
        Seconds of each rank in its trace.
    overheads : Overheads
        Overheads measured in these traces.
    device : str
        Name of the device.
    warnings : tuple of str
        Events that could not be used: file, reason, count and the first of them.
    """

    name: str
    graphs: tuple[ExecutionGraph, ...]
    measured: tuple[float, ...]
    overheads: Overheads
    device: str
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class TracePrediction:
    """Predicted timeline of a traced run.

    Parameters
    ----------
    run : TracedRun
        What was traced.
    timeline : Timeline
        What was simulated.
    report : TimelineReport
        Its figures.
    unknown : tuple of str
        Operators whose overheads are not known, and taken from the mean of others.
    """

    run: TracedRun
    timeline: Timeline
    report: TimelineReport
    unknown: tuple[str, ...]


def load_traces(
    path: str | Path, profiler_cost: ProfilerCost | None = None
) -> tuple[TracedRun, ...]:
    """Read a trace, or all traces of a folder.

    Traces with ranks, by their content or by ``rank3`` in their names, ran together; each of the
    others is a run of its own.

    Parameters
    ----------
    path : str or Path
        File or folder of Kineto traces, ``.json`` or ``.json.gz``.
    profiler_cost : ProfilerCost, optional
        What the profiler adds to each event, to be subtracted from the overheads.

    Raises
    ------
    PredictionError
        If there are none, one cannot be read, or ranks are missing.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(_trace_files(path))
    if not files:
        raise PredictionError(f"{path}: no Kineto traces; expected files .json or .json.gz")
    traces = [(_rank(trace), trace) for trace in map(read_kineto, files)]
    ranked = {rank: trace for rank, trace in traces if rank is not None}
    together = len(files) > 1 and len(ranked) == len(files)
    if not together:
        return tuple(_run(trace.path.name, {0: trace}, profiler_cost) for _, trace in traces)
    _refuse_missing(path, ranked)
    return (_run(path.name, dict(sorted(ranked.items())), profiler_cost),)


def predict_traces(
    run: TracedRun, overheads: Overheads | None = None
) -> TracePrediction:
    """Simulate a traced run with its own or with given overheads.

    Raises
    ------
    PredictionError
        If its ranks do not meet in their collectives.
    """
    timeline = simulate(run.graphs, overheads or replace(run.overheads, prior=0.0))
    ops = (op.name for graph in run.graphs for op in graph.ops)
    unknown = tuple(overheads.unknown(ops)) if overheads is not None else ()
    return TracePrediction(run, timeline, report(run.name, timeline, run.measured), unknown)


def _trace_files(folder: Path) -> list[Path]:
    return [
        file
        for file in folder.glob("*.json*")
        if file.name.endswith((".json", ".json.gz")) and ".et." not in file.name
    ]


def _rank(trace: KinetoTrace) -> int | None:
    found = re.search(r"rank[-_.]?(\d+)", trace.path.name, re.IGNORECASE)
    return trace.rank if trace.rank is not None else int(found[1]) if found else None


def _refuse_missing(path: Path, ranked: dict[int, KinetoTrace]) -> None:
    world = max([rank + 1 for rank in ranked] + [trace.world or 0 for trace in ranked.values()])
    missing = sorted(set(range(world)) - set(ranked))
    if missing:
        names = ", ".join(map(str, missing))
        raise PredictionError(f"{path}: no trace of rank {names} of {world}")


def _run(
    name: str, traces: dict[int, KinetoTrace], profiler_cost: ProfilerCost | None
) -> TracedRun:
    ops = {rank: traced_ops(trace) for rank, trace in traces.items()}
    overheads = [measure_overheads(traces[rank], ops[rank], profiler_cost) for rank in traces]
    return TracedRun(
        name,
        tuple(traced_graph(traces[rank], ops[rank], rank) for rank in traces),
        tuple(measured_seconds(traces[rank], ops[rank]) for rank in traces),
        Overheads().merge(overheads),
        next(iter(traces.values())).device,
        tuple(warning for trace in traces.values() for warning in trace.warnings()),
    )

