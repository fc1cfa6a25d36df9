# SPDX-License-Identifier: Apache-2.0
"""Race of our GPU reductions with TVM's, PyTorch, torch.compile, CuPy's CUB, XLA and cuBLAS.

    python examples/benchmarks/reductions_gpu.py [--quick] [--only 'paper*'] [--resume]
    python examples/benchmarks/reductions_gpu.py --thresholds     # measures the rules' limits
    python examples/benchmarks/reductions_gpu.py --dry-run        # no GPU needed

Needs a CUDA GPU and PyTorch, which allocates the inputs and times; every other engine may be
absent. No network. Writes results/GPU/reductions_gpu.json and .png, and subgraphs_gpu.png: the
paper's sub-graphs (its Figure 11) with and without CUDA graphs. Exit code: 0, or 1 if one of our
results is wrong or not repeatable, or 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks import reduction_cases  # noqa: E402
from examples.benchmarks.campaign import FOLDER, output_file  # noqa: E402
from examples.benchmarks.gpu import machine, report  # noqa: E402
from examples.benchmarks.gpu.clock import Clock, CudaClock  # noqa: E402
from examples.benchmarks.gpu.compare import compare  # noqa: E402
from examples.benchmarks.gpu.cupy_cub import CupyCub  # noqa: E402
from examples.benchmarks.gpu.engine import Engine  # noqa: E402
from examples.benchmarks.gpu.protocol import Plan, Verdict, reason  # noqa: E402
from examples.benchmarks.gpu.report import Result  # noqa: E402
from examples.benchmarks.gpu.torch_compile import TorchCompile  # noqa: E402
from examples.benchmarks.gpu.torch_eager import TorchEager  # noqa: E402
from examples.benchmarks.gpu.torch_mv import TorchMV  # noqa: E402
from examples.benchmarks.gpu.with_tvm import command_line  # noqa: E402
from examples.benchmarks.gpu.with_tvm.ours import Ours  # noqa: E402
from examples.benchmarks.gpu.with_tvm.relax_build import (  # noqa: E402
    build,
    cuda_texts,
    our_passes,
    our_reduce,
    relax_module,
)
from examples.benchmarks.gpu.with_tvm.tvm_default import TVMDefault  # noqa: E402
from examples.benchmarks.gpu.with_tvm.variants import (  # noqa: E402
    Forced,
    gain,
    threshold_cases,
    variants,
)
from examples.benchmarks.gpu.xla import XLA  # noqa: E402
from examples.benchmarks.reduction_cases import Case  # noqa: E402
from schedules.workload.reduce import FINISHES  # noqa: E402
from tvm_fusion.cli.progress import progress_bar  # noqa: E402
from tvm_fusion.codegen.nvrtc import compile_cuda, compiler  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """Options of the benchmark."""
    options = argparse.ArgumentParser(description="Race GPU reductions.")
    options.add_argument("--quick", action="store_true", help="fewer cases, samples and finishes")
    options.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="of case names")
    command_line.add_options(options, "case")
    options.add_argument("--thresholds", action="store_true", help="force splits and finishes")
    options.add_argument("--assemble", action="store_true", help="with --dry-run: to machine code")
    options.add_argument(
        "--output", type=output_file, metavar="FILE", help="default: under results/, by GPU"
    )
    return options


def engines(arch: str, quick: bool, words: Sequence[str] | None) -> list[Engine]:
    """All engines, or those whose title holds one of the words; ours come first."""
    finishes = FINISHES[:1] if quick else FINISHES
    every: list[Engine] = [Ours(arch, finish) for finish in finishes]
    every += [TVMDefault(arch), TorchEager(), TorchCompile()]
    every += [] if quick else [TorchCompile(cooperative=True)]
    every += [CupyCub(), XLA(), TorchMV()]
    return command_line.chosen(every, words)


def dry_run(cases: Sequence[Case], known: Sequence[Engine], arch: str, assemble: bool) -> int:
    """List cases and engines, and compile our kernels to CUDA text; 1 if one does not compile."""
    table = Table(title=f"Cases and our kernels for {arch}")
    for heading in ("case", "form", "inputs", "MB", "kernels", "lines"):
        table.add_column(heading)
    failed = []
    for case in cases:
        inputs = f"{case.inputs} x {case.dtype}{list(case.shape)}"
        try:
            texts = cuda_texts(build(relax_module(case, our_reduce), our_passes(), arch))
            if assemble:
                for text in texts:
                    compile_cuda(text, arch)
        except Exception as error:  # all of them are to be listed
            failed.append(f"{case.name}: {reason(error)}")
            texts = []
        kernels = sum(text.count("__global__ void") for text in texts) // 2
        lines = sum(text.count("\n") for text in texts)
        size = f"{case.bytes / 1e6:.4g}"
        table.add_row(case.name, case.form, inputs, size, str(kernels), str(lines))
    console = command_line.make_console()
    console.print(table)
    command_line.show_presence(known, console)
    console.print(f"compiler: {compiler() or 'none'}")
    for line in failed:
        console.print(f"FAILED {line}")
    console.print(f"{len(cases)} cases, {sum(case.bytes for case in cases) / 1e9:.1f} GB")
    return 1 if failed else 0


def race(
    cases: Sequence[Case],
    engines_of: Callable[[Case], Sequence[Engine]],
    clock: Clock,
    plan: Plan,
    settings: dict[str, Any],
    options: argparse.Namespace,
) -> list[Result]:
    """Measure all cases; the file is written after each."""
    done = load(options.output, settings, cases) if options.resume else []
    known = {result.case.name for result in done}
    missing = [case for case in cases if case.name not in known]
    deadline = time.monotonic() + 60 * (options.minutes or float("inf"))
    with progress_bar() as progress:
        for number, case in enumerate(missing):
            if time.monotonic() > deadline:
                break
            progress(f"{case.name} ({number + 1} of {len(missing)})", number, len(missing))
            found, state = engines_of(case), machine.gpu_state()
            try:
                verdicts = compare(case, found, clock, plan)
            except Exception as error:  # a case too large must not end the race
                verdicts = [Verdict(engine.title, reason(error)) for engine in found]
            done.append(Result(case, tuple(verdicts), state))
            record = {"settings": settings, "results": [result.to_json() for result in done]}
            report.save(options.output, record)
    return done


def load(path: Path, settings: dict[str, Any], cases: Sequence[Case]) -> list[Result]:
    """Results in a file, if they were taken with the same settings."""
    stored = command_line.stored_results(path, settings) or []
    by_name = {case.name: case for case in cases}
    return [
        Result.from_json(record, by_name[record["case"]["name"]])
        for record in stored
        if record["case"]["name"] in by_name
    ]


def thresholds_table(results: Sequence[Result]) -> Table:
    """Table with one row a case: the rule's own choice beside the fastest forced one."""
    table = Table(title="Forced decisions beside the rule's own")
    for heading in ("case", "rule, us", "fastest", "us", "rule takes"):
        table.add_column(heading)
    for result in results:
        times = [(v.engine, v.device.median) for v in result.verdicts if v.device is not None]
        if not times or times[0][0] != result.verdicts[0].engine:
            table.add_row(result.case.name, "none", "", "", result.verdicts[0].problem)
            continue
        best, ratio = gain(times)
        own, least = times[0][1] * 1e6, dict(times)[best] * 1e6
        table.add_row(result.case.name, f"{own:.1f}", best, f"{least:.1f}", f"{ratio:.2f}x")
    return table


def show_sub_graphs(results: Sequence[Result], console: Console, gpu: str, folder: Path) -> None:
    """A table of the sub-graphs of Panamera's Table 2, with and without graphs."""
    found = [result for result in results if result.case.group == "paper2"]
    if found:
        title = f"Sub-graphs of Panamera's Table 2 on {gpu}"
        console.print(report.launches_table(found, title))
        report.draw_bars(found, title, folder / "subgraphs_gpu.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser().parse_args(arguments)
    cases = threshold_cases() if options.thresholds else reduction_cases.all_cases()
    if options.quick and not options.thresholds:
        cases = reduction_cases.select(quick=True)
    cases = [
        case for case in cases if not options.only or reduction_cases.matches(case, options.only)
    ]
    if not cases:
        print(f"no case matches {' '.join(options.only)}", file=sys.stderr)
        return command_line.NO_GPU
    if options.dry_run:
        if command_line.refuses(options.arch):
            return command_line.NO_GPU
        found = engines(options.arch, options.quick, options.engines)
        return dry_run(cases, found, options.arch, options.assemble)
    if command_line.lacks_gpu():
        return command_line.NO_GPU
    return measure(cases, options)


def measure(cases: Sequence[Case], options: argparse.Namespace) -> int:
    """Race on this machine's GPU, and show the results."""
    name = "reductions_gpu_thresholds" if options.thresholds else "reductions_gpu"
    plan = Plan().quick() if options.quick or options.thresholds else Plan()
    plan = replace(plan, samples=options.samples or plan.samples)
    clock, arch = CudaClock(), machine.arch()
    limits = machine.measure_limits(clock)
    settings = {"machine": machine.describe(), "plan": asdict(plan), "limits": asdict(limits)}
    gpu = machine.folder_name(settings["machine"]["gpu"].get("name", ""))
    options.output = options.output or FOLDER / gpu / f"{name}.json"
    found = engines(arch, options.quick, options.engines)

    def engines_of(case: Case) -> Sequence[Engine]:
        if not options.thresholds:
            return found
        return [Forced(arch, variant) for variant in variants(case, arch)]

    results = race(cases, engines_of, clock, plan, settings, options)
    console = command_line.make_console()
    if options.thresholds:
        console.print(thresholds_table(results))
    else:
        title = f"Reductions on {settings['machine']['gpu']['name']}"
        console.print(report.results_table(results, limits.best, title))
        report.draw(results, limits.best, title, options.output.with_suffix(".png"))
        show_sub_graphs(results, console, settings["machine"]["gpu"]["name"], options.output.parent)
    for line in report.problems(results):
        console.print(line)
    console.print(f"copy {limits.copy / 1e9:.0f} GB/s, read {limits.read / 1e9:.0f} GB/s")
    console.print(f"Written to {options.output}")
    wrong = report.failures(results, "" if options.thresholds else "tvm-fusion")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
