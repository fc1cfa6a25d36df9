# SPDX-License-Identifier: Apache-2.0
"""Predicted times of networks on this CPU, and the times that were then measured.

    tvm-fusion calibrate
    python examples/benchmarks/predict_cpu.py [--only resnet_18] [--resume]

Each network is predicted before it is compiled and run; of several rounds of runs, a second after
one another, the fastest counts, because other users of the machine slow down some. Prints a table
and writes results/CPU/predict_cpu.json: errors of the whole run and of each kernel, as GMAE, the
geometric mean of absolute errors, and MAPE, their mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tvm_fusion.cli.output import FILE_WIDTH, json_text
from tvm_fusion.cli.progress import progress_bar
from tvm_fusion.machine.host import host_info
from tvm_fusion.prediction.machines import find_machine
from tvm_fusion.prediction.model.check import CheckedModel, check_model, geometric_error, mean_error
from tvm_fusion.runtime.thread_pool import choose_threads

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.models import MODELS  # noqa: E402
from examples.zoo import ZOO  # noqa: E402

NAMES = (*MODELS, "vgg_16", "mobilenet_v3_large", "bert_base", "gpt2", "wide_and_deep")
Results = dict[str, dict[str, Any]]


def summary(checked: CheckedModel) -> dict[str, Any]:
    """Figures of one network, in milliseconds and shares, and its kernels in microseconds."""
    prediction = checked.prediction
    pairs = list(zip(prediction.kernels, checked.measured, checked.errors, strict=True))
    convolutions = [error for row, _, error in pairs if "conv2d" in row.op]
    return {
        "predicted_ms": prediction.seconds * 1e3,
        "low_ms": prediction.low * 1e3,
        "high_ms": prediction.high * 1e3,
        "measured_ms": checked.seconds * 1e3,
        "error": checked.error,
        "kernels": len(pairs),
        "convolutions": len(convolutions),
        "convolutions_gmae": geometric_error(convolutions),
        "convolutions_mape": mean_error(convolutions),
        "inside_interval": checked.inside,
        "rows": [
            [row.op, row.operator, round(row.seconds * 1e6, 2), round(measured * 1e6, 2)]
            for row, measured, _ in pairs
        ],
    }


def totals(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Errors over all networks."""
    ends = [float(result["error"]) for result in results.values()]
    rows = [row for result in results.values() for row in result["rows"]]
    errors = [predicted / measured - 1 for op, _, predicted, measured in rows if "conv2d" in op]
    return {
        "end_to_end_gmae": geometric_error(ends),
        "end_to_end_mape": mean_error(ends),
        "convolutions_gmae": geometric_error(errors),
        "convolutions_mape": mean_error(errors),
        "inside_interval": statistics.fmean(_inside(results)),
    }


def _inside(results: Mapping[str, Mapping[str, Any]]) -> Iterable[float]:
    return (float(result["inside_interval"]) for result in results.values())


def results_table(results: Results) -> Table:
    """One row a network."""
    all_ = totals(results)
    table = Table(
        title="Predicted before they ran",
        caption=f"Whole runs: MAPE {all_['end_to_end_mape']:.1%}, GMAE "
        f"{all_['end_to_end_gmae']:.1%}; convolutions: MAPE {all_['convolutions_mape']:.1%}, GMAE "
        f"{all_['convolutions_gmae']:.1%}; {all_['inside_interval']:.0%} of the kernels inside "
        "their intervals.",
    )
    table.add_column("network")
    for heading in ("predicted ms", "measured ms", "error", "convolutions", "GMAE", "inside"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result['predicted_ms']:.3f}",
            f"{result['measured_ms']:.3f}",
            f"{result['error']:+.1%}",
            str(result["convolutions"]),
            f"{result['convolutions_gmae']:.1%}" if result["convolutions"] else "",
            f"{result['inside_interval']:.0%}",
        )
    return table


def main() -> int:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    options.add_argument("--threads", type=int, help="default: all physical cores")
    options.add_argument("--runs", type=int, default=30, help="timed runs (default: 30)")
    options.add_argument("--rounds", type=int, default=5, help="the fastest counts (default: 5)")
    options.add_argument("--resume", action="store_true", help="keep what the file already has")
    options.add_argument("--output", type=output_file, default=str(CPU_FOLDER / "predict_cpu.json"))
    chosen = options.parse_args()
    threads = choose_threads(chosen.threads)
    machine = find_machine("native", threads)
    settings = {"machine": host_info(), "threads": threads, "figures": machine.to_json()["figures"]}
    results: Results = {}
    if chosen.resume and chosen.output.exists():
        stored = json.loads(chosen.output.read_text())
        same = stored["settings"] == json.loads(json_text(settings))
        results = stored["results"] if same else {}
    with progress_bar() as progress:
        for number, name in enumerate(name for name in chosen.only if name not in results):
            progress(name, number, len(chosen.only))
            model = ZOO[name]()
            checked = check_model(model, threads=threads, runs=chosen.runs, rounds=chosen.rounds)
            results[name] = summary(checked)
            data = {"settings": settings, "totals": totals(results), "results": results}
            save(chosen.output, data)
    console = Console()
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    console.print(results_table({name: results[name] for name in NAMES if name in results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
