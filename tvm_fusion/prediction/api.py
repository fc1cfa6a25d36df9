# SPDX-License-Identifier: Apache-2.0
"""Predictions as functions: of traced runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import PredictionError
from .report import Answer, TimelineReport, report
from .timeline.execution_graph import ExecutionGraph
from .timeline.timelines import Timeline
from .traces.chakra import link, read_execution_trace
from .traces.gloo import name_groups
from .traces.kineto import KinetoTrace, json_items, read_kineto
from .traces.overheads import Overheads, ProfilerCost, measure_overheads
from .traces.traced_graph import measured_seconds, traced_graph
from .traces.traced_ops import traced_ops
from .what_if import Scenario


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

    def scenario(self, overheads: Overheads | None = None) -> Scenario:
        """The run as one that can be changed, with its own or with given overheads."""
        costs = overheads or replace(self.overheads, prior=0.0)
        return Scenario(self.graphs, costs, self.device)


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
        Operators whose overheads are not known, and taken from the line of all others.
    answers : tuple of Answer
        One for each change that was asked for.
    """

    run: TracedRun
    timeline: Timeline
    report: TimelineReport
    unknown: tuple[str, ...]
    answers: tuple[Answer, ...] = ()


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
    files = [path] if path.is_file() else _trace_files(path)
    kinds = {file: _format(file) for file in files}
    structures = [file for file, kind in kinds.items() if kind == "nodes"]
    traces = [read_kineto(file) for file, kind in kinds.items() if kind == "traceEvents"]
    if not traces:
        raise PredictionError(
            f"{path}: no Kineto trace; expected files .json or .json.gz with 'traceEvents'"
        )
    _link(traces, structures)
    ranked = {rank: trace for trace in traces if (rank := _rank(trace)) is not None}
    together = len(traces) > 1 and len(ranked) == len(traces)
    if not together:
        for trace in traces:
            others = (trace.world or 1) - 1
            if others:
                reason = "missing ranks: collectives take their measured times, waits included"
                trace.problems[reason] = [others, f"any but rank {_rank(trace) or 0}"]
        alone = [(trace.path.name, {_rank(trace) or 0: trace}) for trace in traces]
        return tuple(_run(name, ranks, profiler_cost) for name, ranks in alone)
    _refuse_missing(path, ranked)
    return (_run(path.name, dict(sorted(ranked.items())), profiler_cost),)


def predict_traces(
    run: TracedRun, overheads: Overheads | None = None, what_if: Sequence[str] = ()
) -> TracePrediction:
    """Simulate a traced run with its own or with given overheads, as it is and changed.

    Parameters
    ----------
    run : TracedRun
        What was traced.
    overheads : Overheads, optional
        Overheads of another run on the same host.
    what_if : sequence of str
        Changes in the form of :func:`tvm_fusion.prediction.what_if.change`.

    Raises
    ------
    PredictionError
        If its ranks do not meet in their collectives, or a change cannot be made.
    """
    scenario = run.scenario(overheads)
    timeline = scenario.simulate()
    ops = (op.name for graph in run.graphs for op in graph.ops)
    unknown = tuple(overheads.unknown(ops)) if overheads is not None else ()
    answers = (scenario.change(text).answer(text, timeline.seconds) for text in what_if)
    found = report(run.name, timeline, run.measured)
    return TracePrediction(run, timeline, found, unknown, tuple(answers))


def _trace_files(folder: Path) -> list[Path]:
    files = [file for file in folder.glob("*.json*") if file.name.endswith((".json", ".json.gz"))]
    return sorted(files)


def _format(file: Path) -> str:
    """Field that tells the format: ``traceEvents`` of Kineto, ``nodes`` of an execution trace."""
    for name, _ in json_items(file, "traceEvents", "nodes"):
        if name in ("traceEvents", "schemaVersion"):
            return "traceEvents"
        if name in ("nodes", "schema"):
            return "nodes"
    raise PredictionError(f"{file}: neither a Kineto trace nor an execution trace of PyTorch")


def _link(traces: list[KinetoTrace], structures: list[Path]) -> None:
    """Add what execution traces know to the Kineto traces of the same stem or rank."""
    for file in structures:
        execution = read_execution_trace(file)
        partner = next((trace for trace in traces if _key(trace.path) == _key(file)), None)
        if partner is None:
            raise PredictionError(
                f"{file}: an execution trace has no times; expected the Kineto trace of the same "
                "step beside it, with the same name up to the first dot"
            )
        link(execution, partner)


def _key(path: Path) -> str:
    found = _RANK.search(path.name)
    return f"rank {int(found[1])}" if found else path.name.split(".")[0]


_RANK = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)


def _rank(trace: KinetoTrace) -> int | None:
    found = _RANK.search(trace.path.name)
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
    name_groups(list(traces.values()))
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
