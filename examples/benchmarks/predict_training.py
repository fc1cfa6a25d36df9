# SPDX-License-Identifier: Apache-2.0
"""Predicted and measured steps of PyTorch trainings on this CPU.

    python examples/benchmarks/predict_training.py [--only mlp cnn] [--rounds 15]

Each training has four batch sizes. A step of each is timed without profiler; then PyTorch's
profiler records some steps, and each operator takes its mean in the half of them nearest to the
median step, without what the profiler adds to the events inside it. Predicted are, with the
overheads of the host from the traces of the other models: steps whose operators take the times of
their own trace, and steps of a batch whose operators take times between those of the other three
batch sizes, so that nothing of that batch is known. All is measured in three turns; beside the
errors stands the difference of the first and the last. Writes results/CPU/predict_training.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
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
TURNS = 3  # of all trainings
TRACED = 9  # steps that are recorded
WARMED = 2  # of them those that do not count
TINY = 2000  # operators by which the cost of the profiler is measured
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
    times : list of float
        Median seconds of a step in each turn.
    overheads : Overheads
        Overheads in its traces.
    graph : ExecutionGraph
        A step of them.
    """

    name: str
    batch: int
    times: list[float]
    overheads: Overheads
    graph: ExecutionGraph

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return float(np.median(self.times))


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


def record(step: Step, path: Path, cost: float) -> TracedRun:
    """Trace of some steps, and its overheads without ``cost`` seconds an event."""
    with _profiler() as profiler:
        for _ in range(TRACED):
            step()
    profiler.export_chrome_trace(str(path))
    (run,) = load_traces(path, ProfilerCost(cost / MICRO))
    return run


def _profiler() -> torch.profiler.profile:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    )


def event_cost() -> float:
    """Seconds that the profiler adds to an event: by operators on one element."""
    one = torch.zeros(1)

    def step() -> None:
        for _ in range(TINY):
            one.add_(one)

    plain = time_steps(step, TRACED)
    with _profiler():
        traced = time_steps(step, TRACED)
    return max(traced - plain, 0.0) / TINY


def typical_step(graphs: Sequence[ExecutionGraph], count: int) -> ExecutionGraph:
    """The second of some steps, with operators of their mean times in the middle half of all.

    The sum of the operators' medians would be less than the median of a step. Of each trace of
    ``count`` steps the first two do not count.

    Raises
    ------
    ValueError
        If the steps do not call the same operators.
    """
    length = len(graphs[0].ops) // count
    steps = [g.ops[at : at + length] for g in graphs for at in range(0, len(g.ops), length)]
    if len(steps) != count * len(graphs) or any(_names(s) != _names(steps[0]) for s in steps):
        raise ValueError(f"{graphs[0].name}: {count} steps do not call the same operators")
    counted = [step for number, step in enumerate(steps) if number % count >= WARMED]
    times = np.array([[kernel.seconds for op in step for kernel in op.kernels] for step in counted])
    order, outer = np.argsort(times.sum(axis=1)), len(times) // 4
    means = iter(times[order[outer : len(order) - outer]].mean(axis=0).tolist())
    second = replace(graphs[0], ops=steps[1])
    return map_kernels(second, lambda kernel, _: replace(kernel, seconds=next(means)))


def _names(ops: Sequence[Op]) -> list[str]:
    return [op.name for op in ops]


def measure(names: Sequence[str], rounds: int, folder: Path) -> list[Measured]:
    """Time and record every step, in turns, so that each meets the machine in the same states."""
    cases = [(name, batch) for name in names for batch in TRAININGS[name][2]]
    cost = event_cost()
    print(f"the profiler adds {cost / MICRO:.2f} us to an event")
    times: dict[Any, list[float]] = defaultdict(list)
    runs: dict[Any, list[TracedRun]] = defaultdict(list)
    for turn in range(TURNS):
        for name, batch in cases:
            step = training_step(name, batch)
            times[name, batch].append(time_steps(step, rounds))
            path = folder / f"{name}-{batch}.{turn}.json"
            runs[name, batch].append(record(step, path, cost))
            print(f"{name} {batch}: {1e3 * times[name, batch][-1]:.2f} ms", flush=True)
    return [
        Measured(
            *case,
            times[case],
            Overheads().merge(run.overheads for run in runs[case]),
            without_profiler(typical_step([run.graphs[0] for run in runs[case]], TRACED), cost),
        )
        for case in cases
    ]


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
    names = [_names(known[size].ops) for size in sizes]
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
        overheads = Overheads().merge(one.overheads for one in cases if one.name != own.name)
        others = {
            one.batch: one.graph for one in cases if one.name == own.name and one.batch != own.batch
        }
        found["own_trace"].append(simulate([own.graph], overheads).seconds)
        unseen = between(own.batch, others)
        found["other_batches"].append(simulate([unseen], overheads).seconds)
        found["operators_alone"].append(sum(_seconds(own.graph)))
    return found


def results_of(cases: Sequence[Measured]) -> dict[str, Any]:
    """Errors of all predictions, beside those of a second measurement."""
    measured = [case.seconds for case in cases]
    found = predictions(cases)
    return {
        "cases": [f"{case.name} {case.batch}" for case in cases],
        "measured_ms": [1e3 * seconds for seconds in measured],
        "predicted_ms": {by: [1e3 * one for one in times] for by, times in found.items()},
        **{by: errors(times, measured) for by, times in found.items()},
        "repeat": errors([case.times[-1] for case in cases], [case.times[0] for case in cases]),
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
    options.add_argument("--rounds", type=int, default=15, help="steps that are timed in a turn")
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
