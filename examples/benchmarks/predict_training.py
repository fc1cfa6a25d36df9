# SPDX-License-Identifier: Apache-2.0
"""Predicted and measured steps of PyTorch trainings on this CPU.

    python examples/benchmarks/predict_training.py [--only mlp cnn] [--rounds 15]
    python examples/benchmarks/predict_training.py --ranks 2   # DDP and sharded tables, over gloo

Each training has four batch sizes. A step of each is timed without profiler; then PyTorch's
profiler records some steps, and each operator takes its mean in the half of them nearest to the
median step, without what the profiler adds to the events inside it. Predicted are, with the
overheads of the host from the traces of the other models: steps whose operators take the times of
their own trace, and steps of a batch whose operators take times between those of the other three
batch sizes, so that nothing of that batch is known. All is measured in three turns; beside the
errors stands the difference of the first and the last. Writes results/CPU/predict_training.json,
or predict_training_ranks.json: steps of two ranks of one thread each, half of the batch on each
(``prediction/rank_trainings.py``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.benchmarks.predict_traces import errors  # noqa: E402
from examples.benchmarks.prediction.timed_steps import (  # noqa: E402
    TRACED,
    event_cost,
    profiler,
    time_steps,
)
from examples.benchmarks.prediction.trainings import (  # noqa: E402
    TRAININGS,
    Step,
    training_step,
)
from tvm_fusion.machine.host import host_info
from tvm_fusion.prediction.api import TracedRun, load_traces  # noqa: E402
from tvm_fusion.prediction.timeline.edits import map_kernels  # noqa: E402
from tvm_fusion.prediction.timeline.execution_graph import (  # noqa: E402
    HOST,
    ExecutionGraph,
    Kernel,
    Op,
)
from tvm_fusion.prediction.timeline.timelines import simulate  # noqa: E402
from tvm_fusion.prediction.traces.overheads import Overheads, ProfilerCost  # noqa: E402

THREADS = 2
TURNS = 3  # Turns of all trainings.
WARMED = 2  # Turns that do not count.
MOST_SLOPE = 1.5  # Slope of the logarithm of an operator's time over that of the batch.
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
    graphs : list of ExecutionGraph
        A step of them, of each rank.
    """

    name: str
    batch: int
    times: list[float]
    overheads: Overheads
    graphs: list[ExecutionGraph]

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return float(np.median(self.times))


def record(step: Step, path: Path, cost: float) -> TracedRun:
    """Trace of some steps, and its overheads without ``cost`` seconds an event."""
    with profiler() as found:
        for _ in range(TRACED):
            step()
    found.export_chrome_trace(str(path))
    (run,) = load_traces(path, ProfilerCost(cost / MICRO))
    return run


def typical_step(
    runs: Sequence[Sequence[ExecutionGraph]],
    count: int,
    structure: Sequence[ExecutionGraph] | None = None,
) -> list[ExecutionGraph]:
    """The second of some steps, with operators of their mean times in the middle half of all.

    The sum of the operators' medians would be less than the median of a step. Of each trace of
    ``count`` steps the first two do not count. A collective takes the least time of its ranks,
    which do not wait for another then.

    Parameters
    ----------
    runs : sequence of sequences of ExecutionGraph
        Graph of each rank, of each trace.
    count : int
        Steps of a trace.
    structure : sequence of ExecutionGraph, optional
        Graph of each rank of some steps, of which the second is taken; by default the first run.

    Returns
    -------
    list of ExecutionGraph
        One a rank; all start together.

    Raises
    ------
    ValueError
        If the steps do not call the same operators.
    """
    chosen = structure or runs[0]
    length = [len(graph.ops) // count for graph in runs[0]]
    second = [
        replace(graph, ops=graph.ops[per_step : 2 * per_step], start=0.0)
        for graph, per_step in zip(chosen, length, strict=True)
    ]
    times = []
    for run in runs:
        for step in range(count):
            parts = [
                replace(graph, ops=graph.ops[step * per_step :][:per_step])
                for graph, per_step in zip(run, length, strict=True)
            ]
            alike = all(map(_calls_the_same, parts, second))
            if not alike or any(
                map(lambda g, per_step: len(g.ops) != per_step * count, run, length)
            ):
                raise ValueError(f"{run[0].name}: {count} steps do not call the same operators")
            if step >= WARMED:
                times.append(_intrinsic(parts))
    each = np.array(times)
    order, outer = np.argsort(each.sum(axis=1)), len(each) // 4
    means = iter(each[order[outer : len(order) - outer]].mean(axis=0).tolist())
    return [_retimed(graph, means) for graph in second]


def _calls_the_same(one: ExecutionGraph, other: ExecutionGraph) -> bool:
    kernels = [len(list(graph.kernels)) for graph in (one, other)]
    return _names(one.ops) == _names(other.ops) and kernels[0] == kernels[1]


def _intrinsic(ranks: Sequence[ExecutionGraph]) -> list[float]:
    """Times of the kernels of all ranks; of the n-th collective the least of the ranks."""
    of_ranks = [[kernel.seconds for kernel in graph.kernels] for graph in ranks]
    places = [[n for n, one in enumerate(graph.kernels) if one.collective] for graph in ranks]
    for meeting in zip(*places, strict=True):
        least = min(times[place] for times, place in zip(of_ranks, meeting, strict=True))
        for times, place in zip(of_ranks, meeting, strict=True):
            times[place] = least
    return [seconds for times in of_ranks for seconds in times]


def _retimed(graph: ExecutionGraph, times: Iterator[float]) -> ExecutionGraph:
    return map_kernels(graph, lambda kernel, _: replace(kernel, seconds=next(times)))


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
            times[name, batch].append(float(np.median(time_steps(step, rounds))))
            path = folder / f"{name}-{batch}.{turn}.json"
            runs[name, batch].append(record(step, path, cost))
            print(f"{name} {batch}: {1e3 * times[name, batch][-1]:.2f} ms", flush=True)
    return [_measured(*case, times[case], runs[case], None, cost) for case in cases]


def measure_ranks(names: Sequence[str], rounds: int, folder: Path) -> list[Measured]:
    """The same of two ranks; which operator waits for which collective execution traces tell."""
    from examples.benchmarks.prediction.rank_trainings import run_ranks

    measured = run_ranks(folder, names, rounds, TURNS)
    print(f"the profiler adds {measured.cost / MICRO:.2f} us to an event")
    each = ProfilerCost(measured.cost / MICRO)

    def loaded(case: str) -> TracedRun:
        return load_traces(folder / case, each)[0]

    cases = [(name, batch) for name in names for batch in TRAININGS[name][2]]
    result = []
    for name, batch in cases:
        case = f"{name}-{batch}"
        runs = [loaded(f"{case}.{turn}") for turn in range(TURNS)]
        structure = loaded(f"{case}.structure")
        result.append(_measured(name, batch, measured.steps[case], runs, structure, measured.cost))
    return result


def _measured(
    name: str,
    batch: int,
    times: list[float],
    runs: Sequence[TracedRun],
    structure: TracedRun | None,
    cost: float,
) -> Measured:
    graphs = structure.graphs if structure else None
    step = typical_step([run.graphs for run in runs], TRACED, graphs)
    overheads = Overheads().merge(run.overheads for run in runs)
    return Measured(name, batch, times, overheads, [without_profiler(one, cost) for one in step])


def without_profiler(graph: ExecutionGraph, cost: float) -> ExecutionGraph:
    """The operators of a trace without what the profiler added to the events inside them."""

    def shorter(kernel: Kernel, op: Op) -> Kernel:
        total = sum(one.seconds for one in op.kernels if one.stream == HOST)
        if kernel.stream != HOST or not total:
            return kernel
        left = max(1 - cost * sum(op.events) / total, 0.0)
        return replace(kernel, seconds=kernel.seconds * left)

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


def _host_seconds(graph: ExecutionGraph) -> float:
    return sum(kernel.seconds for kernel in graph.kernels if kernel.stream == HOST)


def _power(low: float, high: float, share: float, ratio: float) -> float:
    if min(low, high) <= 0:
        return max((1 - share) * low + share * high, 0.0)
    slope = np.clip(np.log(high / low), 0.0, MOST_SLOPE * np.log(ratio))
    start = np.log(low) if share <= 1 else np.log(high) - slope
    return float(np.exp(start + share * slope))


def predictions(cases: Sequence[Measured]) -> dict[str, list[float]]:
    """Seconds of every step by each kind of prediction."""
    seconds: dict[str, list[float]] = {"own_trace": [], "other_batches": [], "operators_alone": []}
    for case in cases:
        overheads = Overheads().merge(one.overheads for one in cases if one.name != case.name)
        others = {
            one.batch: one.graphs
            for one in cases
            if one.name == case.name and one.batch != case.batch
        }
        seconds["own_trace"].append(simulate(case.graphs, overheads).seconds)
        unseen = [
            between(case.batch, {batch: graphs[rank] for batch, graphs in others.items()})
            for rank in range(len(case.graphs))
        ]
        seconds["other_batches"].append(simulate(unseen, overheads).seconds)
        seconds["operators_alone"].append(max(map(_host_seconds, case.graphs)))
    return seconds


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
    options.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    options.add_argument("--traces", type=Path, help="folder to keep the traces in")
    options.add_argument("--output", type=output_file)
    chosen = options.parse_args()
    if len(set(chosen.only)) < 2:
        options.error("--only: expected two trainings or more, each predicted by the others")
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.traces or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        how = measure if chosen.ranks == 1 else measure_ranks
        results = results_of(how(chosen.only, chosen.rounds, folder))
    settings = {"machine": host_info(), "torch": torch.__version__}
    settings |= {"threads": THREADS // chosen.ranks, "ranks": chosen.ranks}
    name = "predict_training.json" if chosen.ranks == 1 else "predict_training_ranks.json"
    save(chosen.output or CPU_FOLDER / name, {"settings": settings, "results": results})
    Console(width=100).print(table_of(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
