# SPDX-License-Identifier: Apache-2.0
"""Accuracy of the kernel models on data that they were not trained on.

    PREDICT_DATA=DIR python examples/benchmarks/predict.py [--all-rows]

Predicts the held-out fifth of the sizes of each sweep (``--all-rows``: all of them, of a folder
that was never trained on), whole language models, and times the predictor itself. Prints a table
and writes ``results/predict.json`` and ``results/predict.png``. Without ``PREDICT_DATA`` only the
predictor's own time is measured, and what ``results/CPU`` hold is checked: how many kernels of a
network lie in the intervals of the others, and how often the faster of two alternatives is named.
What was left out is said.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.benchmarks.prediction import choices, intervals, joint, whole_models  # noqa: E402
from examples.benchmarks.prediction.data import (  # noqa: E402
    OPS,
    Sweep,
    conv2d_sweep,
    data_folder,
    errors,
    gemm_fp16_sweep,
    gemm_sweep,
    row_sweeps,
)
from examples.benchmarks.prediction.fit_links import check as check_links  # noqa: E402
from examples.benchmarks.prediction.whole_models import session_spread  # noqa: E402
from schedules.cost.decisions import predict  # noqa: E402
from schedules.cost.elementwise import LAYER_NORM, SOFTMAX  # noqa: E402
from schedules.cost.gemm import CONV2D, GEMM  # noqa: E402
from schedules.cost.kernel_call import KernelCall, element_bytes  # noqa: E402
from schedules.cost.learned import (  # noqa: E402
    FOLDER,
    find_joint,
    find_model,
    limits,
    load_model,
    seconds,
)
from schedules.cost.machine import load_machine  # noqa: E402
from tvm_fusion.paths import written_aside
from tvm_fusion.prediction.cluster import Cluster  # noqa: E402
from tvm_fusion.prediction.training import GPTTraining, predict_training  # noqa: E402

RESULTS = Path(__file__).with_name("results")
KERNELS = {kernel.name: kernel for kernel in (GEMM, CONV2D, SOFTMAX, LAYER_NORM)}
AS_MEASURED = {
    "as_measured": "sizes and place in the sweep",
    "as_measured_by_sizes": "sizes alone",
    "as_measured_by_sizes_at_best": "sizes alone, each kernel exact",
}
"""Knowledge by which launches are predicted as they were measured, harness included."""


def learned(sweep: Sweep, machine: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Predicted seconds and intervals of launches on one machine, and the model's name."""
    kernel = KERNELS[sweep.kernel]
    found = find_model(sweep.kernel, sweep.dtype, machine)
    if found is None:
        raise SystemExit(f"no model of {sweep.kernel} {sweep.dtype} on {machine}")
    model, name = found
    bounds = limits(load_machine(machine), sweep.dtype)
    width = {"float32": 4, "float16": 2}[sweep.dtype]
    predicted, base, _ = seconds(kernel, model, sweep.sizes, bounds, width)
    at = np.searchsorted(model.edges, base)
    return predicted, predicted * model.below[at], predicted * model.above[at], name


def streaming(sweep: Sweep, machine: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """The same of a streaming operator."""
    tensors = dict(OPS.values())[sweep.kernel]
    predictions = [
        predict(KernelCall(sweep.kernel, {}, "float32", 0, 4 * (tensors - 1) * n, 4 * n), target)
        for target in [load_machine(machine)]
        for n in (sweep.sizes["B"] * sweep.sizes["H"]).tolist()
    ]
    time, low, high = np.array([(f.seconds, f.low, f.high) for f in predictions]).T
    return time, low, high, predictions[0].model


def sweeps(folder: Path) -> Iterator[Sweep]:
    """All sweeps of the folder."""
    for sweep in (gemm_sweep(folder), gemm_fp16_sweep(folder), conv2d_sweep(folder)):
        if sweep is not None:
            yield sweep
    yield from row_sweeps(folder).values()


def kernels(folder: Path, all_rows: bool) -> list[dict[str, Any]]:
    """Errors of each kernel on each machine."""
    rows = []
    for sweep in sweeps(folder):
        chosen = sweep if all_rows else sweep[sweep.held_out()]
        for machine in np.unique(chosen.machine).tolist():
            part = chosen[chosen.machine == machine]
            model = learned if sweep.kernel in KERNELS else streaming
            predicted, low, high, name = model(part, machine)
            inside = (low <= part.seconds) & (part.seconds <= high)
            row = {"kernel": sweep.kernel, "dtype": sweep.dtype, "machine": machine}
            row |= errors(part.seconds, predicted) | {"model": name}
            if part.measured is not None and part.place is not None:
                row["as_measured_by_sizes"] = errors(part.measured, predicted)
                row["as_measured_by_sizes_at_best"] = errors(part.measured, part.seconds)
                late = harness_growth(name) * (part.place - 0.5)
                row["as_measured"] = errors(part.measured, predicted + late)
            rows.append(row | {"inside": round(100 * float(inside.mean()), 1)})
    return rows + list(_together(rows))


def joint_models(folder: Path, all_rows: bool) -> dict[str, Any]:
    """Reports of the joint models, and their errors on sizes as the package has them."""
    reports = {}
    for name, (kernel, read) in joint.KERNELS.items():
        known = find_joint(name)
        if known is None:
            continue
        text = (FOLDER / f"{name}-joint.json").read_text()
        report = {key: json.loads(text)[key] for key in ("left_out", "error_by_distance")}
        rows = []
        for sweep in read(folder):
            chosen = sweep if all_rows else sweep[sweep.held_out()]
            bounds, width = joint.machine_limits(chosen), element_bytes(sweep.dtype)
            predicted = seconds(kernel, known.near, chosen.sizes, bounds, width)[0]
            for machine in np.unique(chosen.machine).tolist():
                mine = chosen.machine == machine
                row = {"machine": machine, "dtype": sweep.dtype}
                rows.append(row | errors(chosen.seconds[mine], predicted[mine]))
        reports[name] = {"now": rows, **report}
    return reports


def gpt_trainings(folder: Path) -> dict[str, dict[str, float]]:
    """Errors of a quarter of the GPT trainings on 8 A100, by tensor, data and pipeline parallel."""
    path = folder / "collectives" / "gpt_training_8xa100.csv"
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        runs = list(csv.DictReader(file))[::4]
    node = Cluster("dgx", load_machine("a100-sxm-80"), 1, 8, 2.5e10, 5e-6, "data sheet")
    names = ["hidden", "heads", "layers", "sequence", "global_batch", "micro_batch"]
    names += ["tensor", "data", "pipeline"]
    measured, predicted, shares = [], [], []
    for run in runs:
        sizes: dict[str, Any] = {name: int(run[name]) for name in names}
        training = GPTTraining(**sizes, recompute=True)
        predicted.append(predict_training(training, node).seconds)
        measured.append(float(run["iteration_ms"]) / 1e3)
        shares.append(f"tensor {training.tensor}")
    part, times, found = np.array(shares), np.array(measured), np.array(predicted)
    groups = {name: part == name for name in sorted(set(shares))}
    groups["all"] = np.ones(len(part), bool)
    return {name: errors(times[mine], found[mine]) for name, mine in groups.items()}


def joint_report(found: dict[str, Any]) -> None:
    """Print the errors of the joint models: of sizes, machines and harnesses that were left out."""
    table = Table("joint model", "left out", "machine", "dtype", "part")
    for heading in ("GMAE %", "MAPE %", "inside %", "median width %", "launches"):
        table.add_column(heading, justify="right")
    for name, report in found.items():
        for split, rows in report["left_out"].items():
            for row in rows:
                texts = (row[x] for x in ("machine", "dtype", "part"))
                figures = (row[x] for x in ("gmae", "mape", "inside", "width", "count"))
                table.add_row(name, split, *texts, *map(str, figures))
    Console().print(table)


def distance_plot(reports: dict[str, Any], path: Path) -> None:
    """Error of the joint models against the distance from what they were taught."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5))
    axes = figure.subplots(1, 2, sharey=True)
    for axis, split in zip(axes, ("sizes", "machines"), strict=True):
        for name, report in reports.items():
            near, error = np.array(report["error_by_distance"][split]).T
            axis.plot(near, error, "o-", label=name)
        axis.set_xlabel(f"distance of the {split} left out, in doublings")
        axis.set_ylabel("MAPE, %")
        axis.legend()
    figure.tight_layout()
    with written_aside(path) as aside:
        figure.savefig(aside, format="png", dpi=100)


def harness_growth(model: str) -> float:
    """Seconds that a launch takes longer at the end of the sweep that a model learned from."""
    report = json.loads((FOLDER / f"{model}.json").read_text())
    return float(report.get("harness_growth_seconds", 0.0))


def _together(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Element-wise operators of one machine together."""
    ours = {name for name, _ in OPS.values()}
    for machine in sorted({row["machine"] for row in rows}):
        mine = [row for row in rows if row["machine"] == machine and row["kernel"] in ours]
        if mine:
            count = np.array([row["count"] for row in mine])
            share = count / count.sum()
            gmae = float(np.exp(share @ np.log([row["gmae"] for row in mine])))
            mape, inside = (float(share @ [row[x] for row in mine]) for x in ("mape", "inside"))
            yield {
                "kernel": "elementwise",
                "dtype": "float32",
                "machine": machine,
                "gmae": round(gmae, 2),
                "mape": round(mape, 2),
                "count": int(count.sum()),
                "model": "streaming",
                "inside": round(inside, 1),
            }


def models(folder: Path) -> list[dict[str, Any]]:
    """Whole language models: measured and predicted seconds, each machine's as if it were new."""
    runs, graphs = whole_models.read_runs(folder), whole_models.read_graphs(folder)
    rows: list[dict[str, Any]] = []
    for run in runs:
        node = "h100" if run.machine == "h100" else "a100"
        transfer = whole_models.interpolated_transfers(folder, node)
        predictor = whole_models.Predictor(run.machine, transfer)
        predicted, low, high = predictor.run(run, graphs[run.graph])
        rows.append(
            {
                "machine": run.machine,
                "graph": run.graph,
                "measured_ms": round(1e3 * run.seconds, 3),
                "predicted_ms": round(1e3 * float(predicted), 3),
                "error": round(100 * (float(predicted) / run.seconds - 1), 1),
                "low_ms": 1e3 * float(low),
                "high_ms": 1e3 * float(high),
            }
        )
    for row, spread in zip(rows, _spreads_of_others(rows), strict=True):
        low, high = row.pop("low_ms") / spread, row.pop("high_ms") * spread
        row["inside"] = bool(low <= row["measured_ms"] <= high)
    return rows


def session_errors(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Logarithms of measured over predicted times of whole models, by machine."""
    found: dict[str, list[float]] = {}
    for row in rows:
        ratio = row["measured_ms"] / row["predicted_ms"]
        found.setdefault(row["machine"], []).append(math.log(ratio))
    return found


def _spreads_of_others(rows: list[dict[str, Any]]) -> list[float]:
    """Spread between sessions of all machines but its own, for each run."""
    errors_ = session_errors(rows)
    others = {
        name: {other: each for other, each in errors_.items() if other != name} for name in errors_
    }
    spreads = {name: session_spread(each) if each else 1.0 for name, each in others.items()}
    return [spreads[row["machine"]] for row in rows]


def resnet_50() -> list[KernelCall]:
    """Convolutions of ResNet-50 at batch 1."""
    calls = [_conv(3, 64, 224, 7, 112)]
    channels, side = 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        out = {64: 56, 128: 28, 256: 14, 512: 7}[width]
        for block in range(blocks):
            calls += [_conv(channels, width, side, 1, side), _conv(width, width, side, 3, out)]
            calls.append(_conv(width, 4 * width, out, 1, out))
            if block == 0:
                calls.append(_conv(channels, 4 * width, side, 1, out))
            channels, side = 4 * width, out
    return calls


def _conv(ic: int, oc: int, side: int, kernel: int, out: int) -> KernelCall:
    sizes = {"B": 1, "IC": ic, "OC": oc, "H": side, "W": side, "OH": out, "OW": out}
    return KernelCall("conv2d", {**sizes, "FH": kernel, "FW": kernel})


def bert_base() -> list[KernelCall]:
    """Kernels of BERT-base at 128 tokens, batch 1."""
    linear = [(128, 768, 768)] * 4 + [(128, 3072, 768), (128, 768, 3072)]
    layer = [KernelCall("gemm", {"M": m, "N": n, "K": k}) for m, n, k in linear]
    layer.append(KernelCall("bmm", {"B": 12, "M": 128, "N": 128, "K": 64}))
    layer.append(KernelCall("bmm", {"B": 12, "M": 128, "N": 64, "K": 128}))
    layer.append(KernelCall("softmax", {"B": 12 * 128, "H": 128}))
    layer += [KernelCall("layer_norm", {"B": 128, "H": 768})] * 2
    layer.append(KernelCall("gelu", {}, read_bytes=4 * 128 * 3072, written_bytes=4 * 128 * 3072))
    return 12 * layer


def predictor_seconds() -> dict[str, float]:
    """Seconds that predicting two networks takes, models read anew."""
    times = {}
    for name, calls in (("resnet_50", resnet_50()), ("bert_base", bert_base())):
        load_model.cache_clear()
        find_model.cache_clear()
        machine = load_machine("a100-40")
        start = time.perf_counter()
        for call in calls:
            predict(call, machine)
        times[name] = round(time.perf_counter() - start, 3)
    return times


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean absolute errors of whole models, by machine, and of four GPUs together."""
    groups: dict[str, list[dict[str, Any]]] = {"all": rows}
    for row in rows:
        is_parallel = row["graph"].split("-")[-1] in ("dp4", "tp4", "pp4_1", "pp4_4")
        groups.setdefault("four GPUs" if is_parallel else row["machine"], []).append(row)
    return {
        name: {
            "mape": round(float(np.mean([abs(row["error"]) for row in group])), 2),
            "worst": round(max(abs(row["error"]) for row in group), 1),
            "inside": round(100 * float(np.mean([row["inside"] for row in group])), 1),
            "count": len(group),
        }
        for name, group in groups.items()
    }


def plot(results: dict[str, Any], path: Path) -> None:
    """Errors of kernels by machine, and predicted beside measured times of whole models."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5))
    left, right = figure.subplots(1, 2)
    names = ["gemm", "conv2d", "softmax", "layer_norm", "elementwise"]
    rows = [row for row in results["kernels"] if row["dtype"] == "float32"]
    machines = sorted({row["machine"] for row in rows})
    for at, machine in enumerate(machines):
        gmae = {row["kernel"]: row["gmae"] for row in rows if row["machine"] == machine}
        left.bar(
            np.arange(len(names)) + at / (len(machines) + 1),
            [gmae.get(name, 0) for name in names],
            1 / (len(machines) + 1),
            label=machine,
        )
    left.set_xticks(np.arange(len(names)) + 0.4, names)
    left.set_ylabel("GMAE of the held-out sizes, %")
    left.legend()
    for machine in sorted({row["machine"] for row in results["models"]}):
        mine = [row for row in results["models"] if row["machine"] == machine]
        right.loglog(
            [row["measured_ms"] for row in mine],
            [row["predicted_ms"] for row in mine],
            "o",
            label=machine,
        )
    ends = right.get_xlim()
    right.loglog(ends, ends, "k-", linewidth=0.5)
    right.set_xlabel("measured, ms")
    right.set_ylabel("predicted, ms")
    right.legend()
    figure.tight_layout()
    with written_aside(path) as aside:
        figure.savefig(aside, format="png", dpi=100)


def report(results: dict[str, Any]) -> None:
    """Print the errors."""
    console = Console()
    table = Table("kernel", "dtype", "machine", "GMAE %", "MAPE %", "inside %", "launches")
    single = {name for name, _ in OPS.values()}
    for row in results["kernels"]:
        if row["kernel"] not in single:
            figures = (f"{row[x]:.2f}" for x in ("gmae", "mape", "inside"))
            names = [row[x] for x in ("kernel", "dtype", "machine")]
            table.add_row(*names, *figures, str(row["count"]))
            for key, given in AS_MEASURED.items():
                if raw := row.get(key):
                    about = f"{row['kernel']} as measured, by {given}"
                    figures = (f"{raw[x]:.2f}" for x in ("gmae", "mape"))
                    table.add_row(about, *names[1:], *figures, "", str(row["count"]))
    console.print(table)
    whole = Table("whole models on", "MAPE %", "worst %", "inside %", "runs")
    for name, group in results["summary"].items():
        whole.add_row(name, *(str(group[x]) for x in ("mape", "worst", "inside", "count")))
    console.print(whole)


def choices_report(found: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print how often the faster alternative is named."""
    table = Table("alternatives that differ by 5 %", "CPU", "named %", "of", "Spearman")
    for cpu, rows in found.items():
        for name, row in rows.items():
            figures = (row[x] for x in ("named_percent", "different", "spearman"))
            table.add_row(name, cpu, *map(str, figures))
    Console().print(table)


def main() -> None:
    """Measure what the data allow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all-rows", action="store_true", help="no row was trained on")
    all_rows = parser.parse_args().all_rows
    results: dict[str, Any] = {"predictor_seconds": predictor_seconds()}
    print("predicting takes, in s:", results["predictor_seconds"])
    results["cpu_intervals"] = {
        path.parent.name: intervals.held_out(intervals.recorded(path.parent))
        for path in sorted(RESULTS.glob("*/predict_cpu.json"))
    }
    print("inside the intervals of other networks, in %:", results["cpu_intervals"])
    results["choices"] = {
        folder.name: choices.choices(folder)
        for folder in sorted(RESULTS.iterdir())
        if folder.is_dir()
    }
    choices_report(results["choices"])
    folder = data_folder()
    if folder is None:
        print("left out: errors of kernels and of whole models (PREDICT_DATA names no folder)")
        return
    results["kernels"] = kernels(folder, all_rows)
    results["models"] = models(folder) if (folder / "gpu_kernels/model_times.csv").is_file() else []
    results["summary"] = summary(results["models"]) if results["models"] else {}
    if results["models"]:
        results["session_spread"] = round(session_spread(session_errors(results["models"])), 3)
        print("whole runs differ from their kernels by a factor of", results["session_spread"])
    report(results)
    results["joint"] = joint_models(folder, all_rows)
    joint_report(results["joint"])
    results["gpt_trainings"] = gpt_trainings(folder)
    print("GPT trainings on 8 A100, errors in %:", results["gpt_trainings"])
    results["links"] = check_links(folder)
    print("NCCL, MAPE of left-out sizes in %:", results["links"])
    if not results["models"]:
        print("left out: whole models (no gpu_kernels/model_times.csv)")
    text = json.dumps(results, indent=1) + "\n"
    with written_aside(RESULTS / "predict.json") as aside:
        aside.write_text(text)
    plot(results, RESULTS / "predict.png")
    distance_plot(results["joint"], RESULTS / "predict_distance.png")


if __name__ == "__main__":
    main()
