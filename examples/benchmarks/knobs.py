# SPDX-License-Identifier: Apache-2.0
"""Distance of the cost model's knobs from the best of the whole space.

    python examples/benchmarks/knobs.py [--only "3x3 64 @56"] [--threads 1 2] [--sample 100]

For each layer and fused pair, all settings of the space are built and timed, or the default and a
random sample of the others. They take turns in one process, in a new random order each round; after
the first rounds only the default and the fastest continue. As in a network, the input was just
written by all threads in shares of rows, and the weights have not been used recently.

Prints a table and writes results/CPU/knobs.json with every setting's time, which
tests/schedules/cpu/cost/test_cost_model.py compares with the choice of the current model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from rich.console import Console
from rich.table import Table
from tvm import te, tirx
from tvm.target import Target

from schedules.compute.conv2d import conv2d, fused_conv2d
from schedules.cpu import TEMPLATES
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.rule import CPUTemplate
from schedules.cpu.cost.conv2d_knobs import Conv2DKnobs
from schedules.cpu.cost.cost_model import estimate
from schedules.cpu.cost.fused_conv2d_knobs import FusedConv2DKnobs
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, to_json
from tvm_fusion.cli.output import FILE_WIDTH, json_text
from tvm_fusion.cli.progress import progress_bar
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.machine.host import host_info
from tvm_fusion.runtime.thread_pool import Crew
from tvm_fusion.tuning.measure import planes, writer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.layers import PAIRS  # noqa: E402

FIRST_ROUNDS = 5
"""Rounds of all settings, before most of them are left out."""
FINALISTS = 24
FINAL_SECONDS = 4.0
WEIGHT_BYTES = 48 << 20
"""Bytes of all copies of a kernel's weights, more than the last-level cache of most machines."""

Knobs = Conv2DKnobs | FusedConv2DKnobs


def layer(
    kernel: int, inputs: int, outputs: int, stride: int = 1, activation: str = "relu"
) -> ConvLayer:
    """A convolution with the padding that keeps the size; depthwise if ``outputs`` is 0."""
    return ConvLayer(
        in_channels=inputs,
        out_channels=outputs or inputs,
        kernel=(kernel, kernel),
        strides=(stride, stride),
        padding=(kernel // 2,) * 4,
        groups=1 if outputs else inputs,
        activation=Activation(activation),
    )


# Layers of ResNets and MobileNets with the height of their input, and pairs of MobileNets.
SINGLES: dict[str, tuple[ConvLayer, int]] = {
    "3x3 64 @56": (layer(3, 64, 64), 56),
    "3x3 128 @28": (layer(3, 128, 128), 28),
    "3x3 256 @14": (layer(3, 256, 256), 14),
    "3x3 512 @7": (layer(3, 512, 512), 7),
    "3x3 64-128 s2 @56": (layer(3, 64, 128, 2), 56),
    "1x1 64-256 @56": (layer(1, 64, 256), 56),
    "1x1 512-128 @28": (layer(1, 512, 128), 28),
    "1x1 256-1024 @14": (layer(1, 256, 1024), 14),
    "1x1 256-512 s2 @56": (layer(1, 256, 512, 2, "none"), 56),
    "1x1 16-96 @112": (layer(1, 16, 96, activation="relu6"), 112),
    "1x1 24-144 @56": (layer(1, 24, 144, activation="relu6"), 56),
    "1x1 160-960 @7": (layer(1, 160, 960, activation="relu6"), 7),
    "3x3 3-32 s2 @224": (layer(3, 3, 32, 2, "relu6"), 224),
    "dw 3x3 32 @112": (layer(3, 32, 0), 112),
    "dw 3x3 96 s2 @112": (layer(3, 96, 0, 2), 112),
    "dw 5x5 240 @28": (layer(5, 240, 0), 28),
}
FUSED = ("mv1_1", "mv1_3", "mv1_5", "mv1_7-11", "mv2_2_1", "mv2_3_2", "mv2_6_2")


def kernels(lanes: int) -> dict[str, Conv2DKernel]:
    """All kernels by name; the layer that reads the image has NCHW data."""
    packed = f"NCHW{lanes}c"
    by_name = {}
    for name, (single, height) in SINGLES.items():
        plain = single.in_channels < lanes
        by_name[name] = Conv2DKernel(
            layers=(single,),
            batch=1,
            height=height,
            width=height,
            data_layout="NCHW" if plain else packed,
            out_layout=packed,
        )
    for name in FUSED:
        pair = PAIRS[name].workload
        by_name[name] = Conv2DKernel(
            layers=(pair.layer1, pair.layer2),
            batch=1,
            height=pair.height,
            width=pair.width,
            data_layout=packed,
            out_layout=packed,
        )
    return by_name


def packed_function(kernel: Conv2DKernel) -> tirx.PrimFunc:
    """The kernel as legalization makes it: data, weights and biases in turn, output."""
    lanes, plain = kernel.lanes, kernel.data_layout == "NCHW"
    size = kernel.height, kernel.width
    first = kernel.layers[0].in_channels
    shape = (1, first, *size) if plain else (1, -(-first // lanes), *size, lanes)
    inputs = [te.placeholder(shape, name="data")]
    for number, single in enumerate(kernel.layers):
        blocks = -(-single.out_channels // lanes)
        if single.is_depthwise:
            weight: tuple[int, ...] = (blocks, *single.kernel, lanes)
        elif plain:
            weight = (blocks, single.in_channels, *single.kernel, 1, lanes)
        else:
            weight = (blocks, -(-single.in_channels // lanes), *single.kernel, lanes, lanes)
        inputs.append(te.placeholder(weight, name=f"weight{number}"))
        inputs.append(te.placeholder((blocks, lanes), name=f"bias{number}"))
    compute: Callable[..., te.Tensor] = conv2d if len(kernel.layers) == 1 else fused_conv2d
    output = compute(*inputs, None, *kernel.layers, kernel.data_layout, kernel.out_layout)
    func = te.create_prim_func([*inputs, output])
    return func.with_attr("tvm_fusion.workload", to_json(kernel))


def template_of(kernel: Conv2DKernel) -> CPUTemplate:
    """Template of a kernel."""
    return TEMPLATES["cpu.conv2d" if len(kernel.layers) == 1 else "cpu.fused_conv2d"]


def settings(kernel: Conv2DKernel, cpu: CPUInfo, sample: int, seed: int) -> list[Knobs]:
    """All settings, the default first; a ``sample`` of the others if that is not 0."""
    default, *others = template_of(kernel).space(kernel, cpu)
    if 0 < sample < len(others):
        others = random.Random(seed).sample(others, sample)
    return [default, *others]


def build(
    kernel: Conv2DKernel, chosen: Sequence[Knobs], target: Target
) -> list[Callable[..., None]]:
    """One function for each setting; two compilers work at a time."""
    func, template = packed_function(kernel), template_of(kernel)

    def compiled(knobs: Knobs) -> Callable[..., None]:
        return tvm.compile(template.write(func, kernel, knobs, target).mod, target)["main"]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compiled, chosen))


def measure(
    kernel: Conv2DKernel,
    functions: Sequence[Callable[..., None]],
    write: Callable[..., None],
    seconds: float,
    seed: int,
) -> list[float]:
    """Median seconds of each function; the first one always takes part in the last rounds."""
    func = packed_function(kernel)
    generator = np.random.default_rng(seed)
    shapes = [[int(extent) for extent in param.shape] for param in func.params]
    arrays = [generator.standard_normal(shape, dtype="float32") for shape in shapes]
    arguments = [tvm.runtime.tensor(array) for array in arrays]
    data = arguments[0]._create_view(tuple(planes(shapes[0])))
    weights = range(1, len(arrays) - 1, 2)
    copies = min(200, max(2, WEIGHT_BYTES // sum(arrays[place].nbytes for place in weights)))
    rotation = cycle(
        [[tvm.runtime.tensor(arrays[place]) for place in weights] for _ in range(copies)]
    )
    times: list[list[float]] = [[] for _ in functions]
    shuffler = random.Random(seed)

    def turn(order: list[int]) -> None:
        shuffler.shuffle(order)
        for number in order:
            for place, weight in zip(weights, next(rotation), strict=True):
                arguments[place] = weight
            write(data)
            start = time.perf_counter()
            functions[number](*arguments)
            times[number].append(time.perf_counter() - start)

    for _ in range(FIRST_ROUNDS):
        turn(list(range(len(functions))))
    medians = [statistics.median(found) for found in times]
    fastest = sorted(range(1, len(functions)), key=medians.__getitem__)[:FINALISTS]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        turn([0, *fastest])
    return [statistics.median(found) for found in times]


def race(name: str, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time the settings of one kernel."""
    target = resolve("native", threads)
    cpu = CPUInfo.from_target(target)
    kernel = kernels(cpu.lanes("float32"))[name]
    chosen = settings(kernel, cpu, options.sample, options.seed)
    functions = build(kernel, chosen, target)
    shape = [int(extent) for extent in packed_function(kernel).params[0].shape]
    write = tvm.compile(writer(planes(shape), "float32", threads), target)["main"]
    seconds = Crew(threads).run(measure, kernel, functions, write, options.seconds, options.seed)
    return {
        "kernel": json.loads(to_json(kernel)),
        "threads": threads,
        "cpu": asdict(cpu),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "columns": [*asdict(chosen[0]), "seconds", "estimate"],
        "settings": [
            [*asdict(knobs).values(), taken, estimate(kernel, knobs, cpu).seconds]
            for knobs, taken in zip(chosen, seconds, strict=True)
        ],
    }


def column(result: dict[str, Any], name: str) -> list[float]:
    """One column of the settings of a result."""
    at = result["columns"].index(name)
    return [setting[at] for setting in result["settings"]]


def text_of(machine: dict[str, Any], results: dict[str, dict[str, Any]]) -> str:
    """JSON with one setting a line."""
    text = json_text({"machine": machine, "results": results})
    row = re.compile(r"\n {8}\[\n(.*?)\n {8}\]", re.DOTALL)  # a list in "settings"
    return row.sub(lambda found: "\n        [" + " ".join(found[1].split()) + "]", text) + "\n"


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's correlation."""
    first, second = (np.argsort(np.argsort(values)).astype(float) for values in (left, right))
    return float(np.corrcoef(first, second)[0, 1])


def loss(result: dict[str, Any]) -> float:
    """Relative loss of the default against the best setting."""
    times = column(result, "seconds")
    return times[0] / min(times) - 1


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One row for each kernel and number of threads."""
    grid = Table(title="Default knobs against the best of their space")
    for title in ("kernel", "threads", "settings", "default", "best", "loss", "estimate", "rank"):
        grid.add_column(title, justify="left" if title == "kernel" else "right")
    for name, result in results.items():
        times, estimates = column(result, "seconds"), column(result, "estimate")
        grid.add_row(
            name.rpartition(",")[0],
            str(result["threads"]),
            str(len(times)),
            f"{times[0] * 1e6:.1f} us",
            f"{min(times) * 1e6:.1f} us",
            f"{loss(result):.1%}",
            f"{estimates[0] * 1e6:.1f} us",
            f"{rank_correlation(times, estimates):.2f}",
        )
    losses = [loss(result) for result in results.values()]
    grid.caption = f"Loss: median {statistics.median(losses):.1%}, worst {max(losses):.1%}."
    return grid


def main() -> int:
    """Time all kernels and write the file after each."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*SINGLES, *FUSED]
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--sample", type=int, default=0, help="settings beside the default")
    options.add_argument("--seconds", type=float, default=FINAL_SECONDS, help="of each final")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--resume", action="store_true", help="keep what the file already has")
    options.add_argument(
        "--output", type=output_file, default=str(CPU_FOLDER / "knobs.json"), metavar="FILE"
    )
    chosen = options.parse_args()
    machine = host_info()
    results: dict[str, dict[str, Any]] = {}
    if chosen.resume and chosen.output.exists():
        results = json.loads(chosen.output.read_text())["results"]
    todo = [
        (name, threads)
        for threads in chosen.threads
        for name in chosen.only
        if f"{name}, {threads}" not in results
    ]
    with progress_bar() as progress:
        for done, (name, threads) in enumerate(todo):
            progress(f"{name}, {threads} threads", done, len(todo))
            results[f"{name}, {threads}"] = race(name, threads, chosen)
            save(chosen.output, text_of(machine, results))
    console = Console()
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    console.print(table(results))
    console.print(f"{machine['cpu']}; written to {chosen.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
