# SPDX-License-Identifier: Apache-2.0
"""Predicted times of whole models of eager PyTorch on this CPU, and the times then measured.

    tvm-fusion calibrate --threads 2
    python examples/benchmarks/predict_torch.py [--only resnet50] [--threads 2]

Each model is exported with its batch norms, as PyTorch runs it, predicted, and run in a process of
its own; of several rounds of runs, a second after one another, the fastest counts, because other
users of the machine slow down some. The process keeps the memory that it frees, as one does in
which larger models ran; beside that stands the time of a fresh process, with its page faults. Needs
the extra ``zoo``. Prints a table and writes results/CPU/predict_torch.json; beside the whole runs,
what each kind of operator is predicted and measured to take (the profiler lengthens short ones).
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import resource
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import torch
from rich.console import Console
from rich.table import Table

import tvm_fusion
from schedules.cost.machine import Machine
from tvm_fusion.machine.host import host_info
from tvm_fusion.prediction.calibrate.library_cases import keep_freed_memory
from tvm_fusion.prediction.machines import find_machine
from tvm_fusion.prediction.model.check import mean_error
from tvm_fusion.runtime.thread_pool import choose_threads

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.torch_zoo import TORCH_ZOO, Sample  # noqa: E402

NAMES = ("resnet18", "resnet50", "mobilenet_v2", "vgg11", "densenet121", "bert_eager")
SECONDS = 1.5
"""Most time of the runs of a round."""
PAUSE = 1.0
PROFILED = 5
"""Runs of which the operators are timed."""
KINDS = {
    **dict.fromkeys(("aten::conv2d",), "convolutions"),
    **dict.fromkeys(("aten::linear", "aten::matmul", "aten::mm"), "products"),
    **dict.fromkeys(("aten::batch_norm", "aten::layer_norm", "aten::softmax"), "norms, softmax"),
}
"""Kind of an operator's time; all others are ``others``."""


def exported(sample: Sample) -> onnx.ModelProto:
    """ONNX of a model whose convolutions and batch norms stay apart, as eager PyTorch runs it."""
    file = io.BytesIO()
    torch.onnx.export(
        sample.module,
        tuple(sample.inputs.values()),
        file,
        dynamo=False,
        opset_version=17,
        training=torch.onnx.TrainingMode.PRESERVE,
        input_names=list(sample.inputs),
    )
    return onnx.load_from_string(file.getvalue())


def measured_seconds(sample: Sample, rounds: int, runs: int) -> float:
    """Median of a run, in the fastest of several rounds."""
    inputs = tuple(sample.inputs.values())
    for _ in range(3):
        sample.module(*inputs)
    medians = []
    for number in range(rounds):
        time.sleep(PAUSE if number else 0.0)
        times: list[float] = []
        until = time.perf_counter() + SECONDS
        while len(times) < runs and time.perf_counter() < until:
            begin = time.perf_counter()
            sample.module(*inputs)
            times.append(time.perf_counter() - begin)
        medians.append(statistics.median(times))
    return min(medians)


def page_faults(sample: Sample) -> int:
    """Page faults of a run."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    sample.module(*sample.inputs.values())
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def measured_kinds(sample: Sample) -> dict[str, float]:
    """Milliseconds of each kind of operator in a profiled run."""
    inputs = tuple(sample.inputs.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED):
            sample.module(*inputs)
    found: Counter[str] = Counter()
    for event in profiled.events():
        if event.cpu_parent is None and event.name.startswith("aten::"):
            found[KINDS.get(event.name, "others")] += event.cpu_time_total / 1e3 / PROFILED
    return dict(found)


def predicted_kinds(prediction: Any) -> dict[str, float]:
    """Milliseconds of each kind of operator as predicted."""
    found: Counter[str] = Counter()
    (graph,) = prediction.scenario.graphs
    for op in graph.ops:
        taken = sum(launch.kernel.seconds for launch in op.steps)
        found[KINDS.get(op.name, "others")] += taken * 1e3
    return dict(found)


def loaded(name: str) -> Sample:
    """A model, always of the same weights."""
    torch.manual_seed(0)
    sample = TORCH_ZOO[name](True)
    sample.module.eval()
    return sample


def measured(name: str, threads: int, rounds: int, runs: int) -> dict[str, Any]:
    """Figures of a model's runs in this process, which must be a new one."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        sample = loaded(name)
        fresh, faults = measured_seconds(sample, rounds, runs), page_faults(sample)
        keep_freed_memory()
        seconds = measured_seconds(sample, rounds, runs)
        kinds = measured_kinds(sample)
    times = {"measured_ms": seconds * 1e3, "fresh_process_ms": fresh * 1e3, "page_faults": faults}
    return {**times, "kinds_ms": kinds}


def check(name: str, machine: Machine, *settings: int) -> dict[str, Any]:
    """Predict a model, then run it in a process of its own."""
    with torch.inference_mode():
        model = exported(loaded(name))
    prediction = tvm_fusion.predict(model, machine=machine, engine="pytorch")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        ran = process.submit(measured, name, *settings).result()
    return {
        "predicted_ms": prediction.seconds * 1e3,
        "low_ms": prediction.low * 1e3,
        "high_ms": prediction.high * 1e3,
        "error": prediction.seconds * 1e3 / ran["measured_ms"] - 1,
        "predicted_kinds_ms": predicted_kinds(prediction),
        **ran,
    }


def results_table(results: dict[str, dict[str, Any]]) -> Table:
    """One row a model."""
    errors = [result["error"] for result in results.values()]
    table = Table(title="Eager PyTorch, predicted before it ran", caption=_caption(errors))
    headings = ("model", "predicted ms", "from", "to", "measured ms", "fresh process ms", "error")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, one in results.items():
        keys = ("predicted_ms", "low_ms", "high_ms", "measured_ms", "fresh_process_ms")
        times = (one[key] for key in keys)
        table.add_row(name, *(f"{each:.2f}" for each in times), f"{one['error']:+.1%}")
    return table


def _caption(errors: list[float]) -> str:
    return f"MAPE {mean_error(errors):.1%}"


def main() -> int:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    options.add_argument("--machine", default="native", help="or a file of tvm-fusion calibrate")
    options.add_argument("--threads", type=int, help="default: all physical cores")
    options.add_argument("--runs", type=int, default=20, help="timed runs (default: 20)")
    options.add_argument("--rounds", type=int, default=4, help="the fastest counts (default: 4)")
    options.add_argument(
        "--output", type=output_file, default=str(CPU_FOLDER / "predict_torch.json")
    )
    chosen = options.parse_args()
    threads = choose_threads(chosen.threads)
    machine = find_machine(chosen.machine, threads)
    settings = {"machine": host_info(), "threads": threads, "pytorch": torch.__version__}
    settings["figures"] = machine.to_json()["figures"]
    results: dict[str, dict[str, Any]] = {}
    for name in chosen.only:
        results[name] = check(name, machine, threads, chosen.rounds, chosen.runs)
        save(chosen.output, {"settings": settings, "results": results})
    Console().print(results_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
