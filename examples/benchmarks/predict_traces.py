# SPDX-License-Identifier: Apache-2.0
"""Predictions of traced runs and of collectives, on data that did not make them.

    PREDICT_DATA=DIR python examples/benchmarks/predict_traces.py

DIR holds ``traces`` and ``collectives``. Times of kernels are those of the traces, of collectives
the least of the ranks; what is predicted are host, streams and ranks: the time of each rank of a
DLRM step by the overheads of the other ranks, of inferences by the overheads of other models, and
collectives by the messages that double. Writes results/predict_traces.json. Beside each stand the
errors of the sum of the kernels alone.
"""

from __future__ import annotations

import csv
import gzip
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tvm_fusion.cli.output import FILE_WIDTH, json_text
from tvm_fusion.paths import written_aside
from tvm_fusion.prediction.api import TracedRun, load_traces, predict_traces
from tvm_fusion.prediction.collectives import Curve
from tvm_fusion.prediction.timeline.path import active_seconds
from tvm_fusion.prediction.timeline.timelines import simulate
from tvm_fusion.prediction.traces.overheads import Overheads

RESULTS = Path(__file__).resolve().parent / "results" / "predict_traces.json"
VARIABLE = "PREDICT_DATA"


def errors(predicted: Sequence[float], measured: Sequence[float]) -> dict[str, Any]:
    """Relative errors in percent: geometric mean with 0.04 added, mean, and each."""
    each = np.asarray(predicted, float) / np.asarray(measured, float) - 1
    gmae = float(np.exp(np.log(np.abs(each) + 4e-4).mean()))
    return {
        "gmae_percent": 100 * gmae,
        "mape_percent": 100 * float(np.abs(each).mean()),
        "each_percent": [100 * float(one) for one in each],
    }


def ranks_by_the_others(folder: Path) -> dict[str, Any]:
    """Times of the ranks of one step, each by the overheads of the others."""
    (run,) = load_traces(folder)
    alone = [load_traces(file)[0] for file in sorted(folder.glob("*.kineto.json*"))]
    costs = [_of_others(alone, own) for own in alone]
    timeline = simulate(run.graphs, costs)
    active = [active_seconds(rank) for rank in timeline.ranks]
    own = predict_traces(run).timeline.ranks
    return {
        "ranks": [rank.graph.rank for rank in timeline.ranks],
        "measured_ms": [1e3 * seconds for seconds in run.measured],
        "by_other_ranks": errors([rank.seconds for rank in timeline.ranks], run.measured),
        "by_all_ranks": errors([rank.seconds for rank in own], run.measured),
        "kernels_alone": errors(active, run.measured),
    }


def models_by_the_others(folder: Path) -> dict[str, Any]:
    """Times of inferences, each by the overheads of the other models."""
    runs = load_traces(folder)
    measured = [run.measured[0] for run in runs]
    shared = [predict_traces(run, _of_others(runs, run)).timeline for run in runs]
    simulated = [predict_traces(run).timeline for run in runs]
    return {
        "models": [run.name.split("__")[0] for run in runs],
        "measured_ms": [1e3 * seconds for seconds in measured],
        "by_other_models": errors([one.seconds for one in shared], measured),
        "by_own_overheads": errors([one.seconds for one in simulated], measured),
        "kernels_alone": errors([active_seconds(one.ranks[0]) for one in simulated], measured),
    }


def _of_others(runs: Sequence[TracedRun], own: TracedRun) -> Overheads:
    return Overheads().merge(run.overheads for run in runs if run is not own)


def collectives(path: Path) -> dict[str, Any]:
    """Errors of every curve between the messages that double, from the smallest on."""
    curves = [_curve_errors(*one) for one in _curves(path)]
    each = [curve["gmae_percent"] for curve in curves]
    return {"median_gmae_percent": float(np.median(each)), "worst": max(each), "curves": curves}


def _curves(path: Path) -> Iterator[tuple[tuple[str, ...], np.ndarray, np.ndarray]]:
    """Name, bytes and seconds of each curve; of a message that was timed twice the median."""
    names = "source", "node", "collective", "ranks", "per_node"
    found: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in names)
            found[key][float(row["bytes"])].append(float(row["us"]) * 1e-6)
    for key, times in found.items():
        sizes = np.array(sorted(times))
        yield key, sizes, np.array([np.median(times[size]) for size in sizes])


def _curve_errors(name: tuple[str, ...], sizes: np.ndarray, times: np.ndarray) -> dict[str, Any]:
    fitted = doublings(sizes)
    held_out = np.setdiff1d(np.arange(len(sizes)), fitted)
    curve = Curve(name[2], int(name[3]), tuple(sizes[fitted]), tuple(times[fitted]))
    predictions = [curve.predict(float(size)) for size in sizes[held_out]]
    result = errors([one.seconds for one in predictions], times[held_out])
    del result["each_percent"]
    inside = [
        one.low <= time <= one.high for one, time in zip(predictions, times[held_out], strict=True)
    ]
    return {
        "curve": " ".join(name),
        "model": predictions[0].model,
        "points": len(fitted),
        "held_out": len(held_out),
        **result,
        "in_interval_percent": 100 * float(np.mean(inside)),
    }


def doublings(sizes: np.ndarray) -> np.ndarray:
    """Indices of the first size, and each time of the first one that is twice as large or more."""
    found, least = [], float(sizes[0])
    for index, size in enumerate(sizes):
        if size >= least:
            found.append(index)
            least = 2 * float(size)
    return np.array(found)


def main() -> int:
    """Print and write the errors; without data it says that it was left out."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        print(f"predict_traces: left out; {VARIABLE} names no folder of data", file=sys.stderr)
        return 0
    traces = Path(folder) / "traces"
    result = {
        "dlrm_8xv100": ranks_by_the_others(traces / "dlrm_8xv100"),
        "h100": models_by_the_others(traces / "h100"),
        "mi300": models_by_the_others(traces / "mi300"),
        "collectives": collectives(Path(folder) / "collectives" / "collectives.csv.gz"),
    }
    with written_aside(RESULTS) as path:
        path.write_text(json_text(result) + "\n")
    Console(width=FILE_WIDTH).print(_table(result))
    return 0


def _table(result: dict[str, Any]) -> Table:
    table = Table("what", "by", "GMAE %", "MAPE %")
    for name, section in result.items():
        for by, entry in section.items():
            if isinstance(entry, dict):
                gmae, mape = entry["gmae_percent"], entry["mape_percent"]
                table.add_row(name, by, f"{gmae:.2f}", f"{mape:.2f}")
    found = result["collectives"]
    table.add_row("collectives", "their doublings, median", f"{found['median_gmae_percent']:.2f}")
    table.add_row("collectives", "their doublings, worst", f"{found['worst']:.2f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
