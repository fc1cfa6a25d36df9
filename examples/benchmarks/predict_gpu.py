# SPDX-License-Identifier: Apache-2.0
"""Predicted share of the bandwidth of our GPU reductions, from their machine code; needs no GPU.

    python examples/benchmarks/predict_gpu.py [--machine h100 h200] [--only 'paper*']
    python examples/benchmarks/predict_gpu.py --goals

Compiles each case for the architecture of each machine, and predicts the time of its kernel by
``schedules/cost/gpu_kernels.py``: from its grid, its registers, and the instructions
before, in and after its main loop. **Nothing here is measured.** The share is that of the bandwidth
that long reads reach on the machine. Writes results/reductions_gpu_predicted.json.

With ``--goals`` prints what is predicted for each goal of the kernels on an H100 and an H200,
beside what is known of the peers, and writes nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from rich.table import Table
from tvm import tirx
from tvm.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
import tvm_fusion  # noqa: E402
from examples.benchmarks import reduction_cases  # noqa: E402
from examples.benchmarks.campaign import FOLDER, output_file, save  # noqa: E402
from examples.benchmarks.gpu import sass  # noqa: E402
from examples.benchmarks.gpu.offline import kernel_cases  # noqa: E402
from examples.benchmarks.gpu.warp_paths import block_cycles  # noqa: E402
from examples.benchmarks.gpu.with_tvm import command_line  # noqa: E402
from examples.benchmarks.gpu.with_tvm.onnx_case import onnx_model  # noqa: E402
from examples.benchmarks.gpu.with_tvm.relax_build import our_passes, our_reduce, relax_module  # noqa: E402
from examples.benchmarks.reduction_cases import Case  # noqa: E402
from examples.zoo import ZOO  # noqa: E402
from schedules.cost.decisions import predict as predict_call  # noqa: E402
from schedules.cost.gpu_kernels import WARP, StreamingKernel, StreamingTime, predict_streaming
from schedules.cost.machine import Machine, load_machine  # noqa: E402
from schedules.gpu.attention.warpgroup_attention import WarpgroupAttentionTile  # noqa: E402
from schedules.gpu.core.machine import GPUInfo  # noqa: E402
from schedules.gpu.core.machine_costs import COSTS  # noqa: E402
from schedules.gpu.core.tensor_core import MATRIX_TYPES  # noqa: E402
from schedules.gpu.gemm.matmul.warpgroup_tile import fastest_tile  # noqa: E402
from tvm_fusion.cli.progress import progress_bar  # noqa: E402
from tvm_fusion.codegen.nvrtc import Resources, compile_cuda, resources  # noqa: E402
from tvm_fusion.compiler import pipeline  # noqa: E402
from tvm_fusion.compiler.targets import resolve  # noqa: E402
from tvm_fusion.errors import EngineError  # noqa: E402
from tvm_fusion.onnx.frontend import import_onnx  # noqa: E402
from tvm_fusion.prediction.machines import gpu_target  # noqa: E402
from tvm_fusion.prediction.model.compiled import lower_to_gpu_kernels  # noqa: E402

# Architectures of the schedule and of the machine code: NVRTC 13 knows none before sm_75.
MACHINES = {
    "v100": ("sm_70", "sm_75"),
    "a100-sxm-40": ("sm_80", "sm_80"),
    "h100": ("sm_90", "sm_90"),
    "h200": ("sm_90", "sm_90"),
}
CASES = ("paper2", "paper4", "sweep/float32 2^*[02468]")
_TAGGED = "LDG.E.64.STRONG.GPU"
OUTPUT = FOLDER / "reductions_gpu_predicted.json"
GOAL_MACHINES = ("h100", "h200")


def scheduled_kernel(case: Case, arch: str) -> tirx.PrimFunc:
    """The function of the kernel of a case, as our passes make it.

    Raises
    ------
    EngineError
        If it takes several.
    """
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    with target:
        mod = tvm.transform.Sequential(our_passes())(relax_module(case, our_reduce))
    return _only_kernel(mod, case.name)


def _only_kernel(mod: tvm.IRModule, name: str) -> tirx.PrimFunc:
    found = [func for _, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)]
    if len(found) != 1:
        raise EngineError(f"{name} takes {len(found)} kernels; only one can be predicted")
    return found[0].with_attr("global_symbol", "main")


Compiled = tuple[dict[str, int], str, Resources]
"""Grid, listing of the machine code, and resources of a kernel."""


@functools.lru_cache(maxsize=2)
def compiled(case: Case, arch: str, code_arch: str) -> Compiled:
    """The kernel of a case."""
    return _machine_code(scheduled_kernel(case, arch), arch, code_arch)


def _machine_code(func: tirx.PrimFunc, arch: str, code_arch: str) -> Compiled:
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    text = tirx.build(func, target=target).imports[0].inspect_source()
    [listing] = sass.sass(text, code_arch).values()
    [used] = resources(compile_cuda(text, code_arch)).values()
    return _grid(func), listing, used


def read_kernel(case: Case, machine: Machine) -> StreamingKernel:
    """Read off the grid and the machine code of a case's kernel what the prediction needs."""
    return _read(*compiled(case, *MACHINES[machine.name]), machine)


def _read(grid: dict[str, int], listing: str, used: Resources, machine: Machine) -> StreamingKernel:
    code = sass.instructions(listing)
    threads = _product(grid, "threadIdx")
    l2 = machine["latency.L2"] * machine["clock"]
    slow = {"ATOMG": l2, "MEMBAR": l2, "LDG": l2}
    # What loads of the input wait for memory is not the code's, nor what is read meanwhile.
    hidden = {**slow, "LDG": 0}
    # A block's words are half a trip on the way; the reads of another that waits for them come once
    # a trip, half of one later on average, and half of one back.
    waiting = {**slow, _TAGGED: 1.5 * l2}

    def cycles(places: range, latencies: dict[str, float], waits: bool = True) -> float:
        warps = range(0, min(threads, 2 * WARP), WARP)
        return block_cycles(code, places, latencies, warps, waits)

    loads = sass.input_range(code)
    body = sass.main_range(code) or loads
    start = min(loads.start, body.start)
    turn = [code[place] for place in body]
    splits = grid["blockIdx.x"] if "blockIdx.y" in grid else 1
    # Tickets are drawn before the main loop ends, or else behind it, as other updates are.
    is_early = any("INC" in instruction.opcode for instruction in code[: body.stop])
    return StreamingKernel(
        blocks=_product(grid, "blockIdx"),
        threads=threads,
        registers=used.registers,
        shared_bytes=used.shared,
        turn_bytes=sum(instruction.loaded_bytes for instruction in turn),
        flight_bytes=sass.bytes_before_use(turn),
        turn_instructions=len(turn),
        start_cycles=cycles(range(start), slow),
        head_cycles=cycles(range(start, body.start), hidden, waits=False),
        turn_cycles=cycles(body, hidden, waits=False),
        finish_cycles=cycles(range(body.stop, len(code)), waiting),
        contenders=1 if is_early else splits,
        head_contenders=splits if is_early else 1,
    )


def _grid(func: tirx.PrimFunc) -> dict[str, int]:
    """Extents by the names of the axes of grid and block."""
    extents: dict[str, int] = {}

    def visit(statement: tirx.AttrStmt) -> None:
        if statement.attr_key == "thread_extent":
            extents[str(statement.node.thread_tag)] = int(statement.value)

    tvm_ffi.structural_walk(func.body, [(tirx.AttrStmt, visit)])
    return extents


def _product(grid: dict[str, int], part: str) -> int:
    total = 1
    for name, extent in grid.items():
        total *= extent if name.startswith(part) else 1
    return total


def predict(case: Case, machine: Machine) -> tuple[StreamingKernel, StreamingTime]:
    """Compile the kernel of a case for a machine, and predict it."""
    kernel = read_kernel(case, machine)
    return kernel, predict_streaming(kernel, case.bytes, machine, case.input_bytes)


def predictions(cases: Sequence[Case], names: Sequence[str]) -> dict[str, Any]:
    """Predictions of cases on machines, as the file holds them."""
    by_case: dict[str, Any] = {}
    with progress_bar() as progress:
        for number, case in enumerate(cases):
            progress(case.name, number, len(cases))
            by_machine = {}
            for name in names:
                kernel, time = predict(case, load_machine(name))
                by_machine[name] = {"kernel": asdict(kernel), "predicted": asdict(time)}
            by_case[case.name] = {"bytes": case.bytes, "form": case.form, "machines": by_machine}
    return by_case


def table(by_case: dict[str, Any], names: Sequence[str]) -> Table:
    """One row a case: the share on each machine, and the figures of the last machine's kernel."""
    result = Table(title="Predicted share of the reachable bandwidth; nothing is measured")
    for heading in ("case", "MB", *names, "us", "blocks", "waves", "KiB in flight", "instr./byte",
                    "finish, us"):  # fmt: skip
        result.add_column(heading, justify="left" if heading == "case" else "right")
    for name, case in by_case.items():
        last = case["machines"][names[-1]]
        time = last["predicted"]
        result.add_row(
            name,
            f"{case['bytes'] / 1e6:.4g}",
            *(f"{case['machines'][each]['predicted']['share']:.0%}" for each in names),
            f"{time['seconds'] * 1e6:.1f}",
            str(last["kernel"]["blocks"]),
            f"{time['waves']:.2f}",
            f"{time['flight_bytes'] / 1024:.0f}",
            f"{time['instructions_per_byte']:.2f}",
            f"{time['finish_seconds'] * 1e6:.2f}",
        )
    return result


@dataclass(frozen=True)
class Goal:
    """A goal of the kernels on one device."""

    text: str  # The goal.
    predicted: Callable[[Machine], str]  # What is predicted for it on a machine.
    source: str  # What says so.


def of_reductions(pattern: str, machine: Machine) -> str:
    """Shares of the bandwidth, and paces beside PyTorch's, of the cases with some name.

    What is shorter than a megabyte takes a launch and its latencies, and no share of anything.
    """
    shares, paces = [], []
    for case in reduction_cases.select(only=[pattern]):
        _, time = predict(case, machine)
        shares += [time.share] if case.bytes > 1e6 else []
        model = onnx_model(kernel_cases.reduction(case))
        library = tvm_fusion.predict(model, machine.name, engine="pytorch")
        paces.append(library.kernel_seconds / (time.seconds + machine["launch_floor"]))
    return f"{_range(shares, '.0%')}; {_range(paces, '.2f')} times PyTorch's pace"


def of_kernel(case: kernel_cases.KernelCase, machine: Machine) -> str:
    """Share of the bandwidth of a kernel whose blocks keep their rows, and its pace."""
    arch, code_arch = MACHINES[machine.name]
    model = onnx_model(case)
    mod = pipeline.optimize(import_onnx(model, None).mod, resolve(f"cuda -arch={arch}"))
    kernel = _read(*_machine_code(_only_kernel(mod, case.name), arch, code_arch), machine)
    time = predict_streaming(kernel, case.bytes, machine, case.input_bytes)
    library = tvm_fusion.predict(model, machine.name, engine="pytorch").kernel_seconds
    pace = library / (time.seconds + machine["launch_floor"])
    return f"{time.share:.0%}; {pace:.2f} times PyTorch's pace"


def of_product(extent: int, machine: Machine) -> str:
    """Share of the peak of a square product of float16 by warpgroups, and of cuBLAS's."""
    gpu = GPUInfo.from_target(gpu_target(machine))
    extents = extent, extent, extent
    cycles = fastest_tile(1, *extents, MATRIX_TYPES["float16"], gpu).cycles(1, *extents, gpu)
    case = kernel_cases.product("product", *extents)
    return _of_peak(case, cycles, machine, "cuBLAS")


def of_attention(batch: int, heads: int, tokens: int, width: int, machine: Machine) -> str:
    """Share of the peak of an attention of float16 by warpgroups, and of PyTorch's."""
    gpu = GPUInfo.from_target(gpu_target(machine))
    tile = WarpgroupAttentionTile(width, width, "float16")
    case = kernel_cases.attention("attention", batch, heads, tokens, width)
    return _of_peak(case, tile.cycles(batch * heads, tokens, tokens, gpu), machine, "SDPA")


def _of_peak(case: kernel_cases.KernelCase, cycles: float, machine: Machine, peer: str) -> str:
    products = COSTS.warpgroup_products * machine["multiprocessors"]
    model = onnx_model(case)
    library = tvm_fusion.predict(model, machine.name, engine="pytorch")
    peak = machine["peak_flops.float16"]
    rates = {"": case.flops / 2 / products / cycles * peak}
    rates[f"{peer} "] = case.flops / library.kernel_seconds
    return "; ".join(
        f"{name}{rate / peak:.0%} of the peak, {rate / 1e12:.0f} TFLOP/s"
        for name, rate in rates.items()
    )


def of_network(builder: str, sizes: dict[str, int], machine: Machine) -> str:
    """Milliseconds of the kernels of a network in float16, ours and those of eager PyTorch."""
    model = ZOO[builder](**sizes)
    ours, library = (
        tvm_fusion.predict(model, machine.name, engine=engine, precision="fp16").kernel_seconds
        for engine in ("tvm_fusion", "pytorch")
    )
    return f"{ours * 1e3:.2f} ms; PyTorch {library * 1e3:.2f} ms"


def of_estimates(patterns: Sequence[str], machine: Machine) -> str:
    """Count the estimates before compilation that are close to those by machine code."""
    close = []
    for case in reduction_cases.select(only=patterns):
        mod = import_onnx(onnx_model(kernel_cases.reduction(case)), None).mod
        [op] = lower_to_gpu_kernels(mod, gpu_target(machine), pipeline.Options())
        [kernel] = op.kernels
        estimate, (_, time) = predict_call(kernel.call, machine), predict(case, machine)
        close.append(abs(estimate.seconds - time.seconds) < 0.1 * time.seconds)
    return f"{sum(close)} of {len(close)} estimates before compilation"


def _range(values: Sequence[float], form: str) -> str:
    least, most = (format(end(values), form) for end in (min, max))
    return least if least == most else f"{least} to {most}"


_CODE = "machine code; PyTorch's by bytes, as of an element-wise kernel"
_ROWS = "machine code; for QuACK 90 % (softmax) and 89 % (layer norm) are published"
_TILES = "cost model of the tiles, at the clock of the data sheet, which such work lowers"
_LIBRARY = "share of the roofline that the library's kernels reach; eager PyTorch"
_SUMS = {"64": "sweep/float32 2^24", "16": "sweep/float32 2^22"}
_PAPER = {"Table 4": "paper4", "the 12 sub-graphs": "paper2"}
GOALS = (
    *(
        Goal(f"sums of {size} MiB: {goal} % of the bandwidth", partial(of_reductions, case), _CODE)
        for (size, case), goal in zip(_SUMS.items(), (92, 80), strict=True)
    ),
    *(
        Goal(f"{name} of Panamera: fastest peer", partial(of_reductions, case), _CODE)
        for name, case in _PAPER.items()
    ),
    Goal(
        "softmax 8192 x 8192: fastest peer",
        partial(of_kernel, kernel_cases.softmax("softmax", 8192, 8192)),
        _ROWS,
    ),
    Goal(
        "layer norm 8192 x 4096: fastest peer",
        partial(of_kernel, kernel_cases.layer_norm("layer norm", 8192, 4096)),
        _ROWS,
    ),
    Goal("product 4096^3 float16: 0.9 times cuBLAS", partial(of_product, 4096), _TILES),
    Goal(
        "attention 8 x 16 x 2048 x 64: 0.8 times SDPA",
        partial(of_attention, 8, 16, 2048, 64),
        f"{_TILES}; 540 TFLOP/s are published for FlashAttention-3",
    ),
    Goal(
        "ResNet-50 float16, batch 8: torch.compile",
        partial(of_network, "resnet_50", {"batch": 8}),
        _LIBRARY,
    ),
    Goal("BERT-base float16: torch.compile", partial(of_network, "bert_base", {}), _LIBRARY),
    Goal(
        "predictions of reductions: within 10 %",
        partial(of_estimates, [*_SUMS.values(), *_PAPER.values()]),
        "the model of reductions beside machine code",
    ),
)


def goals_table(names: Sequence[str]) -> Table:
    """One row a goal."""
    result = Table(title="Goals, and what is predicted for them; nothing is measured")
    for heading in ("goal", *names, "by"):
        result.add_column(heading)
    machines = [load_machine(name) for name in names]
    with progress_bar() as progress:
        for number, goal in enumerate(GOALS):
            progress(goal.text, number, len(GOALS))
            result.add_row(goal.text, *map(goal.predicted, machines), goal.source)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write the file."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--goals", action="store_true", help="of all kernels, beside the peers")
    options.add_argument("--machine", nargs="+", choices=MACHINES, default=list(MACHINES))
    options.add_argument("--only", nargs="+", default=list(CASES), metavar="PATTERN")
    options.add_argument("--output", type=output_file, default=str(OUTPUT), metavar="FILE")
    chosen = options.parse_args(arguments)
    if chosen.goals:
        names = [name for name in chosen.machine if name in GOAL_MACHINES]
        command_line.make_console().print(goals_table(names))
        return 0
    cases = reduction_cases.select(only=chosen.only)
    if not cases:
        print(f"no case matches {' '.join(chosen.only)}", file=sys.stderr)
        return command_line.NO_GPU
    found = predictions(cases, chosen.machine)
    command_line.make_console().print(table(found, chosen.machine))
    save(chosen.output, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
