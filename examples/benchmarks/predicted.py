# SPDX-License-Identifier: Apache-2.0
"""Predicted times of five networks on a CPU that need not be at hand.

    python examples/benchmarks/predicted.py [--cpu znver5] [--clock 3.75] [--kernels] [--json]

Each kernel is predicted twice: by the cost model (``schedules/cpu/cost``), and with the
multiply-adds of its hottest loop at the rate that llvm-mca gives for them, the other terms being
the model's. What the model does not know (pooling, additions, the classifier) takes the time of its
bytes. llvm-mca counts as a share of the CPU's peak, because its model of znver5 is that of znver4,
whose units are half as wide. Winograd's algorithm and depthwise layers are the model's in both
columns, as is everything where llvm-mca is not installed or does not know the CPU. Pairs are fused
as the cross-compiler decides, which assumes smaller caches than the predictions do.

Results of networks.py on the same CPU, if there are any, stand beside the predictions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
import tvm
from rich.console import Console
from rich.table import Table
from tvm import relax
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.cost_model import (
    Estimate,
    default_conv2d_knobs,
    default_fused_knobs,
    estimate,
)
from schedules.cpu.cost.nest_cost import MEMORY, bandwidth, fits
from schedules.cpu.cost.winograd_knobs import WinogradShape, best_plan
from schedules.workload.conv2d import Conv2DKernel
from tvm_fusion.bench.profiler import Described, kernel_costs
from tvm_fusion.bench.shortfall import useful_share
from tvm_fusion.cli.json_text import json_text
from tvm_fusion.cli.output import FILE_WIDTH, progress_bar
from tvm_fusion.compiler import pipeline
from tvm_fusion.onnx.frontend import import_onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.assembly import Loop, loops  # noqa: E402
from examples.benchmarks.campaign import FOLDER  # noqa: E402
from examples.benchmarks.mca import ModelError, find_mca, predict  # noqa: E402
from examples.models import MODELS  # noqa: E402

Caches = tuple[int, int, int]
CACHES: dict[str, Caches] = {
    "znver3": (32 << 10, 512 << 10, 32 << 20),
    "znver4": (32 << 10, 1 << 20, 32 << 20),
    "znver5": (48 << 10, 1 << 20, 32 << 20),
}
"""Bytes of L1, L2 and L3, by AMD's documents."""


@dataclass(frozen=True)
class Prediction:
    """One call of a kernel.

    Parameters
    ----------
    operator : str
        Its operation.
    model, mca : float
        Predicted cycles of the busiest core, by the cost model and with llvm-mca's loop.
    share : float | None
        Share of the multiply-add bound in its hottest loop by llvm-mca; None without one.
    """

    operator: str
    model: float
    mca: float
    share: float | None


def predictions(
    model: onnx.ModelProto, target: Target, cpu: CPUInfo, program: str | None
) -> list[Prediction]:
    """All kernels of a model in the order of their calls.

    Parameters
    ----------
    model : onnx.ModelProto
        The network.
    target, cpu : Target, CPUInfo
        The CPU, for the code and for the cost model.
    program : str | None
        llvm-mca, if installed.
    """
    plan = pipeline.phases(target, pipeline.Options())
    schedule = {"schedule": plan.pop("schedule")}
    mod = pipeline.run_phases(import_onnx(model).mod, target, plan)
    costs, calls = kernel_costs(mod), list(_calls(mod))
    shares: Mapping[str, float] = {}
    if program is not None:
        shares = _shares(pipeline.run_phases(mod, target, schedule), target, program)
    return [_prediction(costs[name], shares.get(name), cpu) for name in calls if name in costs]


def _calls(mod: tvm.IRModule) -> Iterator[str]:
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = binding.value
            if isinstance(call, relax.Call) and call.args:
                if isinstance(call.args[0], tvm.ir.GlobalVar):
                    yield call.args[0].name_hint


def _shares(mod: tvm.IRModule, target: Target, program: str) -> dict[str, float]:
    """Of each function, the share of the multiply-add bound in its hottest loop."""
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


def _prediction(described: Described, share: float | None, cpu: CPUInfo) -> Prediction:
    kernel = described.kernel
    if kernel is None:
        cycles = _moving(described, cpu)
        return Prediction(described.operator, cycles, cycles, None)
    if kernel.winograd:
        layer = kernel.layers[0]
        size = layer.output_size(int(kernel.height or 1), int(kernel.width or 1))
        shape = WinogradShape.of(
            layer, kernel.batch or 1, size, kernel.winograd, kernel.lanes, kernel.dtype
        )
        cycles = best_plan(shape, cpu).cycles
        return Prediction(described.operator, cycles, cycles, None)
    choose = default_conv2d_knobs if len(kernel.layers) == 1 else default_fused_knobs
    found = estimate(kernel, choose(kernel, cpu), cpu)
    if share is None or kernel.layers[-1].is_depthwise:
        return Prediction(described.operator, found.cycles, found.cycles, None)
    cycles = _with_loop(kernel, found, share, cpu)
    return Prediction(described.operator, found.cycles, cycles, share)


def _with_loop(kernel: Conv2DKernel, found: Estimate, share: float, cpu: CPUInfo) -> float:
    """Cycles of an estimate whose multiply-adds run at a ``share`` of the peak."""
    peak = kernel.flops() / 2 / kernel.lanes / cpu.fma_per_cycle / cpu.num_cores
    nests = found.nests._replace(multiply_adds=peak / useful_share(kernel, cpu) / share)
    return found.cycles + nests.cycles(cpu.costs) - found.nests.cycles(cpu.costs)


def _moving(described: Described, cpu: CPUInfo) -> float:
    """Cycles in which all cores move the bytes of a kernel, and are woken."""
    cost = described.cost
    near = bandwidth(fits(cost.activation_bytes / cpu.num_cores, cpu), cpu)
    moving = cost.activation_bytes / near + cost.weight_bytes / bandwidth(MEMORY, cpu)
    return moving / cpu.num_cores + cpu.costs.fork


def measured(cpu: str) -> dict[str, float]:
    """Measured milliseconds of the networks on a CPU, by two threads, if there are results."""
    path = FOLDER / cpu / "networks.json"
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    if stored["settings"]["threads"] != 2:
        return {}
    return {name: one["engines"][0]["median_ms"] for name, one in stored["results"].items()}


def networks_table(cpu: str, clock: float, found: Mapping[str, list[Prediction]]) -> Table:
    """One row a network."""
    table = Table(title=f"{cpu} at {clock:g} GHz, two threads, batch 1: predicted ms")
    for heading in ("network", "by the cost model", "with llvm-mca's loops", "measured"):
        table.add_column(heading, justify="left" if heading == "network" else "right")
    known = measured(cpu)
    for name, kernels in found.items():
        table.add_row(
            name,
            f"{sum(kernel.model for kernel in kernels) / clock / 1e6:.2f}",
            f"{sum(kernel.mca for kernel in kernels) / clock / 1e6:.2f}",
            f"{known[name]:.2f}" if name in known else "",
        )
    return table


def kernels_table(name: str, clock: float, kernels: list[Prediction]) -> Table:
    """One row a call of a kernel."""
    table = Table(title=f"{name}: predicted microseconds")
    table.add_column("kernel")
    for heading in ("by the cost model", "with llvm-mca's loop", "of bound"):
        table.add_column(heading, justify="right")
    for kernel in kernels:
        times = (f"{cycles / clock / 1e3:.1f}" for cycles in (kernel.model, kernel.mca))
        share = "" if kernel.share is None else f"{kernel.share:.0%}"
        table.add_row(kernel.operator, *times, share)
    return table


def main() -> int:
    """Print the predictions."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--cpu", choices=CACHES, default="znver5")
    options.add_argument("--clock", type=float, default=3.75, metavar="GHZ", help="default: 3.75")
    options.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    options.add_argument("--llvm-mca", metavar="PATH", help="default: the newest installed")
    options.add_argument("--kernels", action="store_true", help="print every kernel")
    options.add_argument("--json", action="store_true", help="print JSON instead of tables")
    chosen = options.parse_args()
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": chosen.cpu,
                     "num-cores": 2})  # fmt: skip
    info = CPUInfo.from_target(target)
    l1d, l2, l3 = CACHES[chosen.cpu]
    cpu = CPUInfo(info.vector_bits, info.num_vector_registers, True, 2, l1d, l2, l3, chosen.cpu)
    found: dict[str, list[Prediction]] = {}
    with progress_bar() as progress:
        for done, name in enumerate(chosen.only):
            progress(name, done, len(chosen.only))
            model = MODELS[name]()
            try:
                found[name] = predictions(model, target, cpu, find_mca(chosen.llvm_mca))
            except ModelError as error:
                print(f"{error}; the cost model alone is used", file=sys.stderr)
                found[name] = predictions(model, target, cpu, None)
    if chosen.json:
        kernels = {name: [asdict(kernel) for kernel in group] for name, group in found.items()}
        print(json_text({"cpu": chosen.cpu, "clock_ghz": chosen.clock, "cycles": kernels}))
        return 0
    console = Console()
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    if chosen.kernels:
        for name, group in found.items():
            console.print(kernels_table(name, chosen.clock, group))
    console.print(networks_table(chosen.cpu, chosen.clock, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
