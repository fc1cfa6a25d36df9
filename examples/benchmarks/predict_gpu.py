# SPDX-License-Identifier: Apache-2.0
"""Predicted share of the bandwidth of our GPU reductions, from their machine code; needs no GPU.

    python examples/benchmarks/predict_gpu.py [--machine h100 h200] [--only 'paper*']

Compiles each case for the architecture of each machine, and predicts the time of its kernel by
``schedules/cost/gpu_kernels.py``: from its grid, its registers, and the instructions
before, in and after its main loop. **Nothing here is measured.** The share is that of the bandwidth
that long reads reach on the machine. Writes results/reductions_gpu_predicted.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from rich.table import Table
from tvm import tirx
from tvm.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks import reduction_cases  # noqa: E402
from examples.benchmarks.campaign import FOLDER, output_file, save  # noqa: E402
from examples.benchmarks.gpu import sass  # noqa: E402
from examples.benchmarks.gpu.warp_paths import block_cycles  # noqa: E402
from examples.benchmarks.gpu.with_tvm import command_line  # noqa: E402
from examples.benchmarks.gpu.with_tvm.relax_build import our_passes, our_reduce, relax_module  # noqa: E402
from examples.benchmarks.reduction_cases import Case  # noqa: E402
from schedules.cost.gpu_kernels import WARP, StreamingKernel, StreamingTime, predict_streaming
from schedules.cost.machine import Machine, load_machine  # noqa: E402
from tvm_fusion.cli.progress import progress_bar  # noqa: E402
from tvm_fusion.codegen.nvrtc import Resources, compile_cuda, resources  # noqa: E402
from tvm_fusion.errors import EngineError  # noqa: E402

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
    found = [func for _, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)]
    if len(found) != 1:
        raise EngineError(f"{case.name} takes {len(found)} kernels; only one can be predicted")
    return found[0].with_attr("global_symbol", "main")


@functools.lru_cache(maxsize=2)
def compiled(case: Case, arch: str, code_arch: str) -> tuple[dict[str, int], str, Resources]:
    """Grid, listing of the machine code, and resources of the kernel of a case."""
    func = scheduled_kernel(case, arch)
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    text = tirx.build(func, target=target).imports[0].inspect_source()
    [listing] = sass.sass(text, code_arch).values()
    [used] = resources(compile_cuda(text, code_arch)).values()
    return _grid(func), listing, used


def read_kernel(case: Case, machine: Machine) -> StreamingKernel:
    """Read off the grid and the machine code of a case's kernel what the prediction needs."""
    grid, listing, used = compiled(case, *MACHINES[machine.name])
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
    is_early = any("INC" in each.opcode for each in code[: body.stop])
    return StreamingKernel(
        blocks=_product(grid, "blockIdx"),
        threads=threads,
        registers=used.registers,
        shared_bytes=used.shared,
        turn_bytes=sum(each.loaded_bytes for each in turn),
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
    found: dict[str, int] = {}

    def visit(statement: tirx.AttrStmt) -> None:
        if statement.attr_key == "thread_extent":
            found[str(statement.node.thread_tag)] = int(statement.value)

    tvm_ffi.structural_walk(func.body, [(tirx.AttrStmt, visit)])
    return found


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
    found: dict[str, Any] = {}
    with progress_bar() as progress:
        for number, case in enumerate(cases):
            progress(case.name, number, len(cases))
            by_machine = {}
            for name in names:
                kernel, time = predict(case, load_machine(name))
                by_machine[name] = {"kernel": asdict(kernel), "predicted": asdict(time)}
            found[case.name] = {"bytes": case.bytes, "form": case.form, "machines": by_machine}
    return found


def table(found: dict[str, Any], names: Sequence[str]) -> Table:
    """One row a case: the share on each machine, and the figures of the last machine's kernel."""
    result = Table(title="Predicted share of the reachable bandwidth; nothing is measured")
    for heading in ("case", "MB", *names, "us", "blocks", "waves", "KiB in flight", "instr./byte",
                    "finish, us"):  # fmt: skip
        result.add_column(heading, justify="left" if heading == "case" else "right")
    for name, case in found.items():
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write the file."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--machine", nargs="+", choices=MACHINES, default=list(MACHINES))
    options.add_argument("--only", nargs="+", default=list(CASES), metavar="PATTERN")
    options.add_argument("--output", type=output_file, default=str(OUTPUT), metavar="FILE")
    chosen = options.parse_args(arguments)
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
