# SPDX-License-Identifier: Apache-2.0
"""Predicted times of five networks on a CPU that need not be at hand.

    python examples/benchmarks/predicted.py [--cpu znver5] [--kernels] [--json]

Each kernel is predicted twice: by ``tvm_fusion.predict``, and with the multiply-adds of its hottest
loop at the rate that llvm-mca gives for them, the other terms being the cost model's. llvm-mca
counts as a share of the CPU's peak, because its model of znver5 is that of znver4, whose units are
half as wide. Only direct convolutions that are not depthwise differ between the columns, and none
where llvm-mca is not installed or does not know the CPU. Pairs are fused as the cross-compiler
decides, which assumes smaller caches than the predictions do.

Results of networks.py on the same CPU, if there are any, stand beside the predictions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
import tvm
from rich.console import Console
from rich.table import Table
from tvm.target import Target

from schedules.cost.machine import Machine
from schedules.cpu.core.machine import MeasuredCPU
from schedules.cpu.cost.cost_model import default_conv2d_knobs, default_fused_knobs, estimate
from schedules.workload.conv2d import Conv2DKernel
from tvm_fusion.bench.kernel_work import useful_share
from tvm_fusion.bench.profiler import kernel_costs
from tvm_fusion.cli.output import FILE_WIDTH, json_text
from tvm_fusion.cli.progress import progress_bar
from tvm_fusion.compiler import pipeline
from tvm_fusion.onnx.frontend import ImportedModel
from tvm_fusion.prediction.machines import cpu_target, find_machine, predicted_cpu
from tvm_fusion.prediction.model.layers import StaticModel
from tvm_fusion.prediction.model.predict_model import predict_on

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.assembly import Loop, loops  # noqa: E402
from examples.benchmarks.campaign import FOLDER  # noqa: E402
from examples.benchmarks.mca import ModelError, find_mca, predict  # noqa: E402
from examples.models import MODELS  # noqa: E402

CPUS = ("znver3", "znver4", "znver5")
Loops = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Prediction:
    """One call of a kernel.

    Parameters
    ----------
    operator : str
        Its operation.
    model, mca : float
        Predicted seconds, by the cost model and with llvm-mca's loop.
    share : float | None
        Share of the multiply-add bound in its hottest loop by llvm-mca; None without one.
    """

    operator: str
    model: float
    mca: float
    share: float | None


def predictions(model: onnx.ModelProto, machine: Machine, program: str | None) -> list[Prediction]:
    """All kernels of a model in the order of their calls; ``program`` is llvm-mca, if installed."""
    static = StaticModel(model)
    found = predict_on(static, machine, "tvm_fusion", records="none")
    known: Loops = {} if program is None else _loops(static.whole, machine, program)
    rows = []
    for kernel in found.kernels:
        share, more = known.get(kernel.kernel, (None, 0.0))
        seconds = kernel.seconds + more / machine["clock"]
        rows.append(Prediction(kernel.operator, kernel.seconds, seconds, share))
    return rows


def _loops(imported: ImportedModel, machine: Machine, program: str) -> Loops:
    """Share of the multiply-add bound in each function's hottest loop, and cycles that it adds."""
    target = cpu_target(machine)
    plan = pipeline.phases(target, pipeline.Options())
    schedule = {"schedule": plan.pop("schedule")}
    mod = pipeline.run_phases(imported.mod, target, plan)
    costs = kernel_costs(mod)
    shares = _shares(pipeline.run_phases(mod, target, schedule), target, program)
    weights = sum(described.cost.weight_bytes for described in costs.values())
    cpu, found = predicted_cpu(machine, target, weights), {}
    for name, described in costs.items():
        kernel = described.kernel
        if kernel and name in shares and not (kernel.winograd or kernel.layers[-1].is_depthwise):
            found[name] = shares[name], _more_cycles(kernel, shares[name], cpu)
    return found


def _more_cycles(kernel: Conv2DKernel, share: float, cpu: MeasuredCPU) -> float:
    """Cycles that an estimate grows by, if its multiply-adds run at a ``share`` of the peak."""
    choose = default_conv2d_knobs if len(kernel.layers) == 1 else default_fused_knobs
    nests = estimate(kernel, choose(kernel, cpu), cpu).nests
    peak = kernel.flops() / 2 / kernel.lanes / cpu.fma_per_cycle / cpu.num_cores
    slower = nests._replace(multiply_adds=peak / useful_share(kernel, cpu) / share)
    return slower.cycles(cpu.costs) - nests.cycles(cpu.costs)


def _shares(mod: tvm.IRModule, target: Target, program: str) -> dict[str, float]:
    """Share of the multiply-add bound in each function's hottest loop."""
    (code,) = pipeline.build(mod, target).mod.imports
    text = str(code.inspect_source("asm"))
    hottest: dict[str, Loop] = {}
    for loop in loops(text):
        if loop.innermost and loop.fmas > 1:
            best = hottest.setdefault(loop.function, loop)
            if loop.fmas > best.fmas:
                hottest[loop.function] = loop
    found = {}
    for function, loop in hottest.items():
        prediction = predict(program, loop, str(target.attrs["mcpu"]), "x86_64")
        found[function] = min(1.0, prediction.bound / prediction.simulated)
    return found


def measured(cpu: str) -> dict[str, float]:
    """Measured milliseconds of the networks on a CPU, by two threads, if there are results."""
    path = FOLDER / cpu / "networks.json"
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    if stored["settings"]["threads"] != 2:
        return {}
    return {name: one["engines"][0]["median_ms"] for name, one in stored["results"].items()}


def networks_table(machine: Machine, networks: Mapping[str, list[Prediction]]) -> Table:
    """One row a network."""
    clock = f"{machine['clock'] / 1e9:.2f} GHz"
    table = Table(title=f"{machine.title} at {clock}, two threads, batch 1: predicted ms")
    for heading in ("network", "by the cost model", "with llvm-mca's loops", "measured"):
        table.add_column(heading, justify="left" if heading == "network" else "right")
    known = measured(machine.name)
    for name, kernels in networks.items():
        table.add_row(
            name,
            f"{sum(kernel.model for kernel in kernels) * 1e3:.2f}",
            _with_loops(kernels),
            f"{known[name]:.2f}" if name in known else "",
        )
    return table


def _with_loops(kernels: list[Prediction]) -> str:
    if all(kernel.share is None for kernel in kernels):
        return ""  # llvm-mca is not there, or does not know the CPU
    return f"{sum(kernel.mca for kernel in kernels) * 1e3:.2f}"


def kernels_table(name: str, kernels: list[Prediction]) -> Table:
    """One row a call of a kernel."""
    table = Table(title=f"{name}: predicted microseconds")
    table.add_column("kernel")
    for heading in ("by the cost model", "with llvm-mca's loop", "of bound"):
        table.add_column(heading, justify="right")
    for kernel in kernels:
        times = (f"{seconds * 1e6:.1f}" for seconds in (kernel.model, kernel.mca))
        share = "" if kernel.share is None else f"{kernel.share:.0%}"
        table.add_row(kernel.operator, *times, share)
    return table


def main() -> int:
    """Print the predictions."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--cpu", choices=CPUS, default="znver5")
    options.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    options.add_argument("--llvm-mca", metavar="PATH", help="default: the newest installed")
    options.add_argument("--kernels", action="store_true", help="print every kernel")
    options.add_argument("--json", action="store_true", help="print JSON instead of tables")
    chosen = options.parse_args()
    machine = find_machine(chosen.cpu, threads=2)
    networks: dict[str, list[Prediction]] = {}
    problems: set[str] = set()
    with progress_bar() as progress:
        for done, name in enumerate(chosen.only):
            progress(name, done, len(chosen.only))
            model = MODELS[name]()
            try:
                networks[name] = predictions(model, machine, find_mca(chosen.llvm_mca))
            except ModelError as error:
                problems.add(f"{error}; the cost model alone is used")
                networks[name] = predictions(model, machine, None)
    for problem in problems:
        print(problem, file=sys.stderr)
    if chosen.json:
        kernels = {name: [asdict(kernel) for kernel in group] for name, group in networks.items()}
        print(json_text({"cpu": chosen.cpu, "seconds": kernels}))
        return 0
    console = Console()
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    if chosen.kernels:
        for name, group in networks.items():
            console.print(kernels_table(name, group))
    console.print(networks_table(machine, networks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
