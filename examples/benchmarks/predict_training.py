# SPDX-License-Identifier: Apache-2.0
"""Predicted and measured steps of PyTorch trainings on this CPU.

    python examples/benchmarks/predict_training.py [--only mlp cnn] [--rounds 15]

Each training has four batch sizes. A step of each is timed without profiler, and recorded once by
PyTorch's profiler. Predicted are, with the overheads of the host from the traces of all other
models: steps whose operators take the times of their own trace, and steps of a batch whose
operators take times between those of the other three batch sizes, so that nothing of that batch is
known. What the profiler adds to an event is taken from the other models, too. Writes
results/CPU/predict_training.json; beside the errors stands the difference of the same step timed
twice.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.benchmarks.campaign import CPU_FOLDER  # noqa: E402
from examples.benchmarks.predict_traces import errors  # noqa: E402
from examples.benchmarks.prediction.trainings import (  # noqa: E402
    TRAININGS,
    Step,
    training_step,
)
from tvm_fusion.cli.json_text import json_text  # noqa: E402
from tvm_fusion.machine.host_info import host_info  # noqa: E402
from tvm_fusion.prediction.api import TracedRun, load_traces  # noqa: E402
from tvm_fusion.prediction.timeline.edits import map_kernels  # noqa: E402
from tvm_fusion.prediction.timeline.execution_graph import ExecutionGraph, Kernel, Op  # noqa: E402
from tvm_fusion.prediction.timeline.ranks import simulate  # noqa: E402
from tvm_fusion.prediction.traces.overheads import Overheads, ProfilerCost  # noqa: E402
from tvm_fusion.written_aside import written_aside  # noqa: E402

THREADS = 2
WARM_UP = 5
TRACED = 3  # steps that are recorded; the one of median time counts
MOST_SLOPE = 1.5  # of the logarithm of an operator's time over that of the batch
MICRO = 1e-6


@dataclass
class Measured:
    """One training at one batch size.

    Parameters
    ----------
    name : str
        Training.
    batch : int
        Batch size.
    halves : tuple of float
        Median seconds of a step, before and after all others were measured.
    run : TracedRun
        Trace of a step, its overheads as the profiler shows them.
    trace : Path
        The trace.
    """

    name: str
    batch: int
    halves: tuple[float, float]
    run: TracedRun
    trace: Path

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return sum(self.halves) / 2

    @property
    def graph(self) -> ExecutionGraph:
        """What ran."""
        return self.run.graphs[0]


def time_steps(step: Step, count: int) -> float:
    """Median seconds of some steps after some others."""
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def record(step: Step, path: Path) -> TracedRun:
    """Record a few steps, and keep the trace of the one of median time."""
    runs = []
    for number in range(TRACED + 1):
        file = path.with_name(f"{path.name}.{number}.json")
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profiler:
            step()
        profiler.export_chrome_trace(str(file))
        runs.append((load_traces(file)[0], file))
    runs = sorted(runs[1:], key=lambda found: found[0].measured[0])  # the first one warms up
    run, file = runs[len(runs) // 2]
    file.rename(path)
    return replace(run, name=path.stem)


def measure(names: Sequence[str], rounds: int, folder: Path) -> list[Measured]:
    """Time and record every step, then time it again."""
    cases = [(name, batch) for name in names for batch in TRAININGS[name][2]]
    first, runs = [], []
    for name, batch in cases:
        step = training_step(name, batch)
        first.append(time_steps(step, rounds))
        runs.append(record(step, folder / f"{name}-{batch}.json"))
        print(f"{name} {batch}: {1e3 * first[-1]:.2f} ms", flush=True)
    second = [time_steps(training_step(name, batch), rounds) for name, batch in cases]
    return [
        Measured(*case, halves, run, folder / f"{run.name}.json")
        for case, halves, run in zip(cases, zip(first, second, strict=True), runs, strict=True)
    ]


def event_cost(others: Sequence[Measured]) -> float:
    """Seconds that the profiler adds to an event, the median over some trainings."""
    each = [(one.run.measured[0] - one.seconds) / events_of(one.graph) for one in others]
    return max(float(np.median(each)), 0.0)


def events_of(graph: ExecutionGraph) -> int:
    """Events that the profiler recorded: operators, and those inside them."""
    return sum(1 + sum(op.events) for op in graph.ops)


def of_others(cases: Sequence[Measured], own: Measured) -> tuple[Overheads, float]:
    """Overheads and the cost of an event from the traces of all other trainings."""
    others = [one for one in cases if one.name != own.name]
    cost = event_cost(others)
    found = [load_traces(one.trace, ProfilerCost(cost / MICRO))[0].overheads for one in others]
    return Overheads().merge(found), cost


def without_profiler(graph: ExecutionGraph, cost: float) -> ExecutionGraph:
    """The operators of a trace without what the profiler added to the events inside them."""

    def shorter(kernel: Kernel, op: Op) -> Kernel:
        share = cost * sum(op.events) / max(sum(1 for _ in op.kernels), 1)
        return replace(kernel, seconds=max(kernel.seconds - share, 0.0))

    return map_kernels(graph, shorter)


def between(batch: int, known: Mapping[int, ExecutionGraph]) -> ExecutionGraph:
    """Graph of a batch size that was not measured, from those of others.

    Each operator's time is a power of the batch between the two nearest sizes, or beyond the
    outermost two.

    Raises
    ------
    ValueError
        If there are fewer than two, or their operators differ.
    """
    sizes = sorted(known)
    names = [[op.name for op in known[size].ops] for size in sizes]
    if len(sizes) < 2 or any(one != names[0] for one in names):
        raise ValueError(f"batches {sizes} do not call the same operators")
    at = min(max(int(np.searchsorted(sizes, batch)) - 1, 0), len(sizes) - 2)
    low, high = sizes[at], sizes[at + 1]
    share = np.log(batch / low) / np.log(high / low)
    least, most = (list(_seconds(known[size])) for size in (low, high))
    times = iter([_power(*pair, share, high / low) for pair in zip(least, most, strict=True)])
    return map_kernels(known[low], lambda kernel, _: replace(kernel, seconds=next(times)))


def _seconds(graph: ExecutionGraph) -> list[float]:
    return [kernel.seconds for op in graph.ops for kernel in op.kernels]


def _power(low: float, high: float, share: float, ratio: float) -> float:
    if min(low, high) <= 0:
        return max((1 - share) * low + share * high, 0.0)
    slope = np.clip(np.log(high / low), 0.0, MOST_SLOPE * np.log(ratio))
    start = np.log(low) if share <= 1 else np.log(high) - slope
    return float(np.exp(start + share * slope))


def predictions(cases: Sequence[Measured]) -> dict[str, list[float]]:
    """Seconds of every step by each kind of prediction."""
    found: dict[str, list[float]] = {"own_trace": [], "other_batches": [], "operators_alone": []}
    for own in cases:
        overheads, cost = of_others(cases, own)
        graph = without_profiler(own.graph, cost)
        others = {
            one.batch: without_profiler(one.graph, cost)
            for one in cases
            if one.name == own.name and one.batch != own.batch
        }
        found["own_trace"].append(simulate([graph], overheads).seconds)
        unseen = between(own.batch, others)
        found["other_batches"].append(simulate([unseen], overheads).seconds)
        found["operators_alone"].append(sum(_seconds(graph)))
    return found


def results_of(cases: Sequence[Measured]) -> dict[str, Any]:
    """Errors of all predictions, beside those of a second measurement."""
    measured = [case.seconds for case in cases]
    found = predictions(cases)
    return {
        "cases": [f"{case.name} {case.batch}" for case in cases],
        "measured_ms": [1e3 * seconds for seconds in measured],
        "traced_ms": [1e3 * case.run.measured[0] for case in cases],
        "predicted_ms": {by: [1e3 * one for one in times] for by, times in found.items()},
        **{by: errors(times, measured) for by, times in found.items()},
        "repeat": errors([case.halves[1] for case in cases], [case.halves[0] for case in cases]),
    }


def table_of(results: Mapping[str, Any]) -> Table:
    """Errors by kind of prediction."""
    table = Table("steps by", "GMAE %", "MAPE %", "worst %")
    for by, entry in results.items():
        if isinstance(entry, dict) and "mape_percent" in entry:
            worst = max(map(abs, entry["each_percent"]))
            figures = (entry["gmae_percent"], entry["mape_percent"], worst)
            table.add_row(by, *(f"{figure:.2f}" for figure in figures))
    return table


def main() -> int:
    """Measure, predict, and write the errors."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    options.add_argument("--rounds", type=int, default=15, help="steps that are timed, twice")
    options.add_argument("--traces", type=Path, help="folder to keep the traces in")
    options.add_argument("--output", type=Path, default=CPU_FOLDER / "predict_training.json")
    chosen = options.parse_args()
    if len(set(chosen.only)) < 2:
        options.error("--only: expected two trainings or more, each predicted by the others")
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.traces or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = results_of(measure(chosen.only, chosen.rounds, folder))
    settings = {"machine": host_info(), "torch": torch.__version__, "threads": THREADS}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(chosen.output) as aside:
        aside.write_text(json_text({"settings": settings, "results": results}) + "\n")
    Console(width=100).print(table_of(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
