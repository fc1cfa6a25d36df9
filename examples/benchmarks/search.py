# SPDX-License-Identifier: Apache-2.0
"""Replay of searches on recorded times: nothing is measured, and the result is always the same.

    python examples/benchmarks/search.py [--seeds 3]

results/CPU/knobs.json holds the times of all settings of kernels, or of a sample of them. Our
search, the analytic order, random order and a search by the knobs alone each choose settings from
them. Prints for each CPU which share of the best recorded speed they have reached after 16, 32 and
64 trials beside the default (median and worst kernel), and the rank correlation of the learnt
scores of settings that were not tried with their times after 32 trials; writes that to
results/search.json, and a plot beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from schedules import cpu
from schedules.cpu.core.machine import CPUInfo
from schedules.workload.conv2d import from_json
from tvm_fusion.cli.output import FILE_WIDTH
from tvm_fusion.tuning.search import Search
from tvm_fusion.tuning.tasks import table_of_features

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import output_file, save  # noqa: E402
from examples.benchmarks.knobs import rank_correlation  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
LEAST_SETTINGS = 40
LEAST_HELD_OUT = 16  # Least number for a correlation that means something.
TRIALS = 64
CHECKPOINTS = (16, 32, 64)


@dataclass(frozen=True)
class Recorded:
    """The settings of a kernel with their times, the default of the recording first.

    ``knobs`` is the number of features that are knobs, which come last.
    """

    name: str
    features: np.ndarray
    log_predicted: np.ndarray
    log_times: np.ndarray
    knobs: int


@dataclass(frozen=True)
class Replay:
    """A search on one kernel.

    Parameters
    ----------
    reached : list of float
        Share of the best recorded speed after each trial.
    correlation : float
        Spearman's, of untried settings after 32 trials; NaN without a learnt model.
    """

    reached: list[float]
    correlation: float


def recordings(path: Path) -> Iterator[Recorded]:
    """Kernels of a file with enough settings to search."""
    for name, result in json.loads(path.read_text())["results"].items():
        if len(result["settings"]) >= LEAST_SETTINGS:
            yield _recorded(name, result)


def _recorded(name: str, result: dict[str, Any]) -> Recorded:
    kernel, machine = from_json(json.dumps(result["kernel"])), CPUInfo(**result["cpu"])
    template = cpu.TEMPLATES["cpu.conv2d" if len(kernel.layers) == 1 else "cpu.fused_conv2d"]
    columns = result["columns"][:-2]
    chosen = [
        template.read_knobs(dict(zip(columns, setting, strict=False)))
        for setting in result["settings"]
    ]
    features, log_predicted, knobs = table_of_features(
        [(template, knobs) for knobs in chosen], kernel, machine
    )
    seconds = [setting[-2] for setting in result["settings"]]
    return Recorded(name, features, log_predicted, np.log(seconds), knobs)


def ours(found: Recorded, seed: int) -> Search:
    """The search of the tuning jobs."""
    return Search(found.features, found.log_predicted, seed=seed, knobs=found.knobs)


def knobs_alone(found: Recorded, seed: int) -> Search:
    """The same search without an analytic model."""
    knobs = found.features[:, -found.knobs :]
    return Search(knobs, np.zeros_like(found.log_predicted), seed=seed, knobs=found.knobs)


def replay(recorded: Recorded, search: Search) -> Replay:
    """Let a search choose, and answer it from the record."""
    best = float(recorded.log_times.min())
    search.add(0, 0.0)
    reached: list[float] = []
    correlation = float("nan")
    while search.trials < min(TRIALS, len(recorded.log_times) - 1):
        for index in search.propose():
            search.add(index, float(recorded.log_times[index] - recorded.log_times[0]))
            fastest = recorded.log_times[0] + search.measured[search.best]
            reached.append(float(np.exp(best - fastest)))
        if search.trials == 32:
            correlation = _held_out(recorded, search)
    return Replay(_filled(reached), correlation)


def fixed_order(found: Recorded, order: np.ndarray) -> Replay:
    """Try settings in a given order."""
    best = float(found.log_times.min())
    fastest = np.minimum.accumulate(np.minimum(found.log_times[order], found.log_times[0]))
    return Replay(_filled([float(np.exp(best - time)) for time in fastest]), float("nan"))


def _filled(reached: list[float]) -> list[float]:
    return (reached + [reached[-1]] * TRIALS)[:TRIALS]


def _held_out(recorded: Recorded, search: Search) -> float:
    """Spearman's correlation of scores and times of the settings that were not tried."""
    scores = search.scores()
    rest = [index for index in range(len(search)) if index not in search.measured]
    if scores is None or len(rest) < LEAST_HELD_OUT:
        return float("nan")
    return rank_correlation([*scores[rest]], [*recorded.log_times[rest]])


STRATEGIES: dict[str, Callable[[Recorded, int], Replay]] = {
    "ours": lambda found, seed: replay(found, ours(found, seed)),
    "analytic order": lambda found, _: fixed_order(
        found, 1 + np.argsort(found.log_predicted[1:], kind="stable")
    ),
    "random": lambda found, seed: fixed_order(
        found, 1 + np.random.default_rng(seed).permutation(len(found.log_times) - 1)
    ),
    "knobs alone": lambda found, seed: replay(found, knobs_alone(found, seed)),
}


def run(path: Path, seeds: int) -> dict[str, dict[str, list[Replay]]]:
    """Replays of each strategy, by kernel, of one CPU."""
    kernels = list(recordings(path))
    return {
        strategy: {found.name: [search(found, seed) for seed in range(seeds)] for found in kernels}
        for strategy, search in STRATEGIES.items()
    }


def shares(replays: dict[str, list[Replay]], trials: int) -> list[float]:
    """Share of the best after so many trials, of each kernel: the mean over the seeds."""
    return [
        statistics.fmean(one.reached[trials - 1] for one in found) for found in replays.values()
    ]


def correlation(replays: dict[str, list[Replay]]) -> float:
    """Median over kernels of the correlation after 32 trials."""
    means = [statistics.fmean(one.correlation for one in found) for found in replays.values()]
    known = [mean for mean in means if mean == mean]
    return statistics.median(known) if known else float("nan")


def summary(results: dict[str, dict[str, list[Replay]]]) -> dict[str, dict[str, float | None]]:
    """Figures of each strategy: those of the table."""
    by_strategy: dict[str, dict[str, float | None]] = {}
    for strategy, replays in results.items():
        rank = correlation(replays)
        medians = {
            f"median after {trials}": statistics.median(shares(replays, trials))
            for trials in CHECKPOINTS
        }
        worst = {f"worst after {TRIALS}": min(shares(replays, TRIALS))}
        by_strategy[strategy] = {
            **medians,
            **worst,
            "rank after 32": None if rank != rank else rank,
        }
    return by_strategy


def table(name: str, kernels: int, figures: dict[str, dict[str, float | None]]) -> Table:
    """One row a strategy."""
    grid = Table(title=f"{name}, {kernels} kernels: share of the best recorded speed")
    grid.add_column("search")
    for heading in figures["ours"]:
        grid.add_column(heading, justify="right")
    for strategy, values in figures.items():
        cells = ("" if value is None else f"{value:.3f}" for value in values.values())
        grid.add_row(strategy, *cells)
    return grid


def plot(path: Path, results: dict[str, dict[str, dict[str, list[Replay]]]]) -> None:
    """Draw the median share of the best after each trial, one panel a CPU."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(5 * len(results), 4), sharey=True)
    for panel, (name, strategies) in zip(np.atleast_1d(panels), results.items(), strict=True):
        for strategy, replays in strategies.items():
            trials = range(1, TRIALS + 1)
            line = [statistics.median(shares(replays, count)) for count in trials]
            panel.plot(trials, line, label=strategy)
        panel.set(title=name, xlabel="trials", ylabel="share of the best recorded speed")
        panel.grid(alpha=0.3)
    np.atleast_1d(panels)[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> int:
    """Replay all, print the tables, and draw."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument(
        "--output", type=output_file, default=str(RESULTS / "search.json"), metavar="FILE"
    )
    chosen = options.parse_args()
    console = Console()
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    results: dict[str, dict[str, dict[str, list[Replay]]]] = {}
    figures: dict[str, Any] = {}
    for path in sorted(RESULTS.glob("*/knobs.json")):
        name = path.parent.name
        results[name] = run(path, chosen.seeds)
        kernels = len(results[name]["ours"])
        figures[name] = {"kernels": kernels, "searches": summary(results[name])}
        console.print(table(name, kernels, figures[name]["searches"]))
    save(chosen.output, figures)
    plot(chosen.output.with_suffix(".png"), results)
    console.print(f"Written to {chosen.output}, with a plot beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
