# SPDX-License-Identifier: Apache-2.0
"""Race of whole models on a GPU: ours, ours without passes for reductions, stock TVM, PyTorch.

    python examples/benchmarks/models_gpu.py [--quick] [--only bert_base] [--resume] [--minutes 30]
    python examples/benchmarks/models_gpu.py --dry-run        # no GPU needed

Needs a CUDA GPU and PyTorch, which allocates the inputs and times; Triton, and ONNX Runtime with
its CUDA provider, may be absent. No network. The outputs of every engine are compared with those of
ONNX Runtime on the CPU first, and a wrong one is not timed. The gain by the passes, which
Panamera's Table 3 reports as 21 % in the mean, is the time without them over the time with them.
Writes results/GPU/models_gpu.json and .png. Exit code: 0, or 1 if our outputs are wrong or a model
does not compile, or 2 if there is no GPU, or the architecture of --dry-run does not exist.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import onnx
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import FOLDER, output_file  # noqa: E402
from examples.benchmarks.gpu import machine, report  # noqa: E402
from examples.benchmarks.gpu.clock import Clock, CudaClock  # noqa: E402
from examples.benchmarks.gpu.compare import Trial, clear, race  # noqa: E402
from examples.benchmarks.gpu.engine import Engine  # noqa: E402
from examples.benchmarks.gpu.protocol import Plan, Rotation, Verdict, reason  # noqa: E402
from examples.benchmarks.gpu.with_tvm import command_line  # noqa: E402
from examples.benchmarks.gpu.with_tvm.model_case import (  # noqa: E402
    ModelCase,
    gpu_target,
    judge,
    launches,
    optimize,
    our_phases,
    reference,
)
from examples.benchmarks.gpu.with_tvm.model_engines import model_engines  # noqa: E402
from examples.benchmarks.gpu.with_tvm.relax_build import cuda_texts  # noqa: E402
from examples.zoo import ZOO  # noqa: E402
from tvm_fusion.cli.progress import progress_bar  # noqa: E402
from tvm_fusion.compiler.phases import stock_phases  # noqa: E402
from tvm_fusion.compiler.pipeline import build  # noqa: E402

OURS, WITHOUT = "tvm-fusion", "without reduction passes"
MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "bert_base": ZOO["bert_base"],
    "gpt2": ZOO["gpt2"],
    "wide_and_deep": lambda: ZOO["wide_and_deep"](batch=512),
    "mobilenet_v3_large": ZOO["mobilenet_v3_large"],
    "vgg_16": ZOO["vgg_16"],
    "resnet_50": ZOO["resnet_50"],
}
QUICK = ("bert_base", "mobilenet_v3_large")
INPUT_SETS = 4

Results = dict[str, list[Verdict]]


def parser() -> argparse.ArgumentParser:
    """Options of the benchmark."""
    options = argparse.ArgumentParser(description="Race whole models on a GPU.")
    options.add_argument("--quick", action="store_true", help="fewer models and samples")
    options.add_argument("--only", nargs="+", choices=MODELS, metavar="NAME", help="of models")
    command_line.add_options(options, "model")
    options.add_argument(
        "--output", type=output_file, metavar="FILE", help="default: under results/, by GPU"
    )
    return options


def dry_run(names: Sequence[str], arch: str) -> int:
    """Compile all models to CUDA text in three ways; 1 if one of ours does not compile."""
    table = Table(title=f"Kernels that a call launches, for {arch}")
    for heading in ("model", OURS, WITHOUT, "stock TVM", "lines of CUDA", "seconds"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    ways = (our_phases(arch), our_phases(arch, reductions=False), stock_phases(gpu_target(arch)))
    failed: list[str] = []
    with progress_bar() as progress:
        for number, name in enumerate(names):
            progress(name, number, len(names))
            case, row, lines, start = ModelCase(name, MODELS[name]()), [name], 0, time.monotonic()
            for way, plan in zip((OURS, WITHOUT, "stock TVM"), ways, strict=True):
                try:
                    optimised = optimize(case, plan, arch)
                    row.append(str(launches(optimised)))
                    if way == OURS:
                        texts = cuda_texts(build(optimised, gpu_target(arch)))
                        lines = sum(text.count("\n") for text in texts)
                except Exception as error:  # all of them are to be listed
                    failed.append(f"{name}, {way}: {reason(error)}")
                    row.append("failed")
            table.add_row(*row, str(lines), f"{time.monotonic() - start:.0f}")
    console = command_line.make_console()
    console.print(table)
    command_line.show_presence(model_engines(arch), console)
    for line in failed:
        console.print(f"FAILED {line}")
    return 1 if any(f", {OURS}: " in line for line in failed) else 0


def measure_model(
    case: ModelCase, engines: Sequence[Engine], clock: Clock, plan: Plan
) -> list[Verdict]:
    """Race the engines on one model; every launch of a round has other inputs."""
    clear(engines, clock)
    sets = [case.tensors(seed, clock.device) for seed in range(INPUT_SETS)]
    turns = Rotation(sets=INPUT_SETS, launches=INPUT_SETS, flush=True)
    trial = Trial(case, sets, judge(reference(case, 0)), turns, graphs=True)
    return race(trial, engines, clock, plan)


def measure_all(
    names: Sequence[str],
    engines: Sequence[Engine],
    clock: Clock,
    plan: Plan,
    settings: dict[str, Any],
    options: argparse.Namespace,
) -> Results:
    """Race on all models; the file is written after each."""
    results = load(options.output, settings) if options.resume else {}
    missing = [name for name in names if name not in results]
    deadline = time.monotonic() + 60 * (options.minutes or float("inf"))
    with progress_bar() as progress:
        for number, name in enumerate(missing):
            if time.monotonic() > deadline:
                break
            progress(f"{name} ({number + 1} of {len(missing)})", number, len(missing))
            try:
                results[name] = measure_model(ModelCase(name, MODELS[name]()), engines, clock, plan)
            except Exception as error:  # a model too large must not end the race
                results[name] = [Verdict(engine.title, reason(error)) for engine in engines]
            record = {"settings": settings, "results": {k: to_json(v) for k, v in results.items()}}
            report.save(options.output, record)
    return {name: results[name] for name in names if name in results}


def to_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Record of a model."""
    return {"verdicts": [asdict(verdict) for verdict in verdicts], "gain": gain(verdicts)}


def load(path: Path, settings: dict[str, Any]) -> Results:
    """Results in a file, if they were taken with the same settings."""
    stored = command_line.stored_results(path, settings) or {}
    return {
        name: [report.read_verdict(entry) for entry in record["verdicts"]]
        for name, record in stored.items()
    }


def gain(verdicts: Sequence[Verdict]) -> float | None:
    """Time without the passes for reductions relative to the time with them."""
    times = {v.engine: v.device.median for v in verdicts if v.device is not None}
    return times[WITHOUT] / times[OURS] if OURS in times and WITHOUT in times else None


def results_table(results: Mapping[str, Sequence[Verdict]], title: str) -> Table:
    """One row a model: milliseconds of each engine on the device and until the result is there."""
    engines = list(dict.fromkeys(v.engine for verdicts in results.values() for v in verdicts))
    table = Table(title=title)
    for heading in ("model", *engines, "gain"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    gains = []
    for name, verdicts in results.items():
        cells = {verdict.engine: cell(verdict) for verdict in verdicts}
        found = gain(verdicts)
        gains += [found] if found else []
        row = [name, *(cells.get(engine, "") for engine in engines)]
        table.add_row(*row, f"{found:.2f}x" if found else "")
    mean = f"; geometric mean of the gains {statistics.geometric_mean(gains):.2f}x" if gains else ""
    table.caption = (
        "Milliseconds of a call on the device, median, from a CUDA graph unless marked *, and on "
        f"the host until the result is there; kernels of a call; gain by our passes{mean}."
    )
    return table


def cell(verdict: Verdict) -> str:
    """Table cell of one engine on one model."""
    if verdict.problem or verdict.device is None:
        return "wrong" if verdict.problem.startswith("EngineError: wrong") else "none"
    text = f"{verdict.device.median * 1e3:.3f}" + ("" if verdict.how == "graph" else " *")
    text += f", host {verdict.host.median * 1e3:.3f}" if verdict.host else ""
    return text + (f" ({verdict.details['kernels']})" if "kernels" in verdict.details else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser().parse_args(arguments)
    names = options.only or (QUICK if options.quick else tuple(MODELS))
    if options.dry_run:
        if command_line.refuses(options.arch):
            return command_line.NO_GPU
        return dry_run(names, options.arch)
    if command_line.lacks_gpu():
        return command_line.NO_GPU
    return measure(names, options)


def measure(names: Sequence[str], options: argparse.Namespace) -> int:
    """Race on this machine's GPU, and show the results."""
    plan = replace(Plan(repeats=0), samples=20) if options.quick else Plan(repeats=0)
    plan = replace(plan, samples=options.samples or plan.samples)
    clock, arch = CudaClock(), machine.arch()
    settings = {"machine": machine.describe(), "plan": asdict(plan)}
    gpu = machine.folder_name(settings["machine"]["gpu"].get("name", ""))
    options.output = options.output or FOLDER / gpu / "models_gpu.json"
    engines = command_line.chosen(model_engines(arch), options.engines)
    results = measure_all(names, engines, clock, plan, settings, options)
    title = f"Models on {settings['machine']['gpu']['name']}"
    console = command_line.make_console()
    console.print(results_table(results, title))
    report.draw_models(results, title, options.output.with_suffix(".png"))
    for name, verdicts in results.items():
        for verdict in verdicts:
            if verdict.problem:
                console.print(f"{name}, {verdict.engine}: {verdict.problem}")
    console.print(f"Written to {options.output}")
    ours = [v for verdicts in results.values() for v in verdicts if v.engine == OURS]
    return 1 if any(verdict.problem for verdict in ours) else 0


if __name__ == "__main__":
    raise SystemExit(main())
