# SPDX-License-Identifier: Apache-2.0
"""Race of coalesced reductions on the CPU with numpy and with TVM's own pipeline.

    python examples/benchmarks/reductions_cpu.py [--threads 2] [--only NAME ...] [--quick]

Three processes take turns: numpy, which reduces on one thread whatever the machine has; TVM's
default pipeline for the CPU on the same reduction as a plain Relax operator; and the op
``coalesced_reduce`` with its rule. Prints a table and writes results/CPU/reductions_cpu.json.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tvm_fusion.bench.race import TOLERANCE, Plan
from tvm_fusion.cli.output import FILE_WIDTH
from tvm_fusion.cli.progress import progress_bar
from tvm_fusion.machine.host import host_info
from tvm_fusion.runtime.host_arrays import relative_error

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the module beside this one.
from examples.benchmarks.campaign import CPU_FOLDER, geometric_mean, output_file, save  # noqa: E402

PLAN = Plan(rounds=5, runs=100, turn_seconds=0.04, budget_seconds=0.5)
WARM_SECONDS = 0.02  # an idle processor takes milliseconds to speed up
ENGINES = ("tvm-fusion", "numpy", "stock TVM")


@dataclass(frozen=True)
class Case:
    """One reduction.

    Parameters
    ----------
    name : str
        Its name in the table.
    shape : tuple[int, ...]
        Shape of each input.
    dtype : str
        Type of the inputs.
    operator : str
        ``sum``, ``mean``, ``max``, ``and`` or ``argmax``.
    axes : tuple[int, ...]
        Reduced axes.
    producer : str
        Element-wise producer: nothing, ``cast`` to float32, ``exp``, or ``mul`` by a second input.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    operator: str
    axes: tuple[int, ...]
    producer: str = ""

    @property
    def arity(self) -> int:
        """Number of inputs."""
        return 2 if self.producer == "mul" else 1

    @property
    def input_bytes(self) -> int:
        """Bytes of all inputs."""
        return self.arity * math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def inputs(self) -> list[np.ndarray]:
        """Fresh random inputs."""
        generator = np.random.default_rng(0)
        return [self._draw(generator) for _ in range(self.arity)]

    def _draw(self, generator: np.random.Generator) -> np.ndarray:
        if self.dtype == "bool":
            return np.ones(self.shape, "bool")  # nothing ends the search early
        if self.dtype.startswith("int"):
            return generator.integers(-100, 100, self.shape).astype(self.dtype)
        return generator.random(self.shape, "float32").astype(self.dtype)


CASES = [
    Case("all, large", (1 << 25,), "float32", "sum", (0,)),
    Case("all, small", (1 << 16,), "float32", "sum", (0,)),
    Case("all, half", (1 << 24,), "float16", "max", (0,), "cast"),
    Case("all, bool", (1 << 26,), "bool", "and", (0,)),
    Case("x, long rows", (1024, 32768), "float32", "sum", (1,)),
    Case("x, rows of 512", (65536, 512), "float32", "max", (1,)),
    Case("x, short rows", (262144, 49), "float32", "mean", (1,)),
    Case("x, rows of 5", (1_000_000, 5), "float32", "sum", (1,)),
    Case("x, few rows", (8, 151936), "float32", "argmax", (1,)),
    Case("x, exp", (4096, 1024), "float32", "sum", (1,), "exp"),
    Case("x, mul", (1280, 21128), "float32", "sum", (1,), "mul"),
    Case("y, large", (32768, 1024), "float32", "sum", (0,)),
    Case("y, wide", (1280, 21128), "float32", "sum", (0,)),
    Case("y, small", (64, 768), "float16", "sum", (0,), "cast"),
    Case("y, narrow", (4_000_000, 3), "float32", "sum", (0,)),
    Case("y, 100 columns", (131072, 100), "float32", "sum", (0,)),
    Case("y, int64", (16384, 1024), "int64", "max", (0,)),
    Case("y, float64", (8192, 768), "float64", "sum", (0,)),
    Case("R-P-R", (128, 64, 56, 56), "float32", "mean", (0, 2, 3)),
    Case("R-P-R, 7 x 7", (256, 512, 7, 7), "float32", "sum", (0, 2, 3)),
    Case("P-R-P", (8192, 8, 512), "float32", "sum", (1,)),
    Case("P-R-P, narrow", (50000, 40, 16), "float32", "max", (1,)),
]


class NumpyEngine:
    """numpy, a reduction at a time."""

    title = "numpy"

    def load(self, case: Case) -> None:
        """Make the inputs."""
        reduce = getattr(np, "all" if case.operator == "and" else case.operator)
        arrays = case.inputs()
        axis = case.axes[0] if case.operator == "argmax" else case.axes

        def run() -> np.ndarray:
            value = arrays[0]
            if case.producer == "cast":
                value = value.astype("float32")
            elif case.producer == "exp":
                value = np.exp(value)
            elif case.producer == "mul":
                value = value * arrays[1]
            return reduce(value, axis=axis)

        self.run = run

    def output(self) -> np.ndarray:
        """The result."""
        return np.asarray(self.run())

    def turn(self, runs: int, seconds: float) -> list[float]:
        """Seconds of each run."""
        return timed(self.run, runs, seconds)


class TVMEngine:
    """The same as a Relax function, by this package or by TVM's own pipeline."""

    def __init__(self, threads: int, ours: bool) -> None:
        from tvm_fusion.runtime.thread_pool import Crew

        self.ours, self.crew = ours, Crew(threads)

    def load(self, case: Case) -> None:
        """Compile, and make the inputs."""
        import tvm
        import tvm_ffi
        from tvm import relax

        from tvm_fusion.compiler import pipeline, targets

        host = targets.resolve("native", self.crew.threads)
        mod = relax_module(case, self.ours)
        if (
            self.ours
        ):  # reads arrays of numpy where they lie, and writes its result where it is told
            built = pipeline.build_apart(pipeline.optimize(mod, host), host)
            executable = built.executable
            result = mod["main"].ret_ty
            output = tvm.runtime.empty([int(size) for size in result.shape], str(result.dtype))
            given = [*map(tvm_ffi.from_dlpack, case.inputs()), output, *built.weights]
        else:
            executable = tvm.compile(mod, host, relax_pipeline=relax.get_default_pipeline(host))
            given = [tvm.runtime.tensor(array) for array in case.inputs()]
        main = relax.VirtualMachine(executable, tvm.cpu())["main"]
        self.run = lambda: main(*given)

    def output(self) -> np.ndarray:
        """The result."""
        return self.crew.run(self.run).numpy()

    def turn(self, runs: int, seconds: float) -> list[float]:
        """Seconds of each run."""
        return self.crew.run(timed, self.run, runs, seconds)


def relax_module(case: Case, coalesced: bool) -> Any:
    """The reduction as a Relax module, with our op or with TVM's."""
    from tvm import relax

    from relay_passes.op.coalesced_reduce import coalesced_reduce

    names = ("x", "y")[: case.arity]
    params = [relax.Var(name, relax.TensorType(case.shape, case.dtype)) for name in names]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            value = params[0]
            if case.producer == "cast":
                value = builder.emit(relax.op.astype(value, "float32"))
            elif case.producer == "exp":
                value = builder.emit(relax.op.exp(value))
            elif case.producer == "mul":
                value = builder.emit(relax.op.multiply(*params))
            if coalesced:
                value = builder.emit(coalesced_reduce(value, case.operator, case.axes))
            elif case.operator == "argmax":
                value = builder.emit(relax.op.argmax(value, axis=case.axes[0]))
            elif case.operator == "and":  # Relax has no logical reduction
                value = builder.emit(relax.op.min(relax.op.astype(value, "int8"), case.axes))
            else:
                value = builder.emit(getattr(relax.op, case.operator)(value, case.axes))
            output = builder.emit_output(value)
        builder.emit_func_output(output)
    return builder.get()


def serve(pipe: Connection, title: str, threads: int) -> None:
    """Serve one engine's process: load, output, turn, limits."""
    engine: Any = NumpyEngine() if title == "numpy" else TVMEngine(threads, title == ENGINES[0])
    while True:
        method, *arguments = pipe.recv()
        if method == "load":
            pipe.send(engine.load(*arguments))
        elif method == "output":
            pipe.send(engine.output())
        elif method == "limits":
            from tvm_fusion.bench.machine_limits import measure_limits
            from tvm_fusion.compiler import targets

            pipe.send(measure_limits(targets.resolve("native", threads), threads))
        else:
            pipe.send(engine.turn(*arguments))


def timed(run: Callable[[], object], runs: int, seconds: float) -> list[float]:
    """Seconds of each run, after warm-up runs."""
    until = time.perf_counter() + WARM_SECONDS
    run()
    while time.perf_counter() < until:
        run()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while not times or (len(times) < runs and time.perf_counter() < until):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times


class Racer:
    """A process that is stopped between requests, since TVM's threads spin."""

    def __init__(self, title: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, title, threads), daemon=True)
        self.process.start()
        self.title = title

    def call(self, *request: Any) -> Any:
        """Send a request and wait for the answer."""
        self._signal("SIGCONT")
        self.pipe.send(request)
        answer = self.pipe.recv()
        self._signal("SIGSTOP")
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()

    def _signal(self, name: str) -> None:
        if hasattr(signal, name) and self.process.pid is not None:
            os.kill(self.process.pid, getattr(signal, name))


def race(case: Case, racers: Sequence[Racer], plan: Plan) -> dict[str, Any]:
    """Medians and ratios of all engines on one reduction."""
    for racer in racers:
        racer.call("load", case)
    outputs = [racer.call("output") for racer in racers]
    errors = [relative_error([output], [outputs[1]]) for output in outputs]
    turns: list[list[float]] = [[] for _ in racers]
    spent = [0.0] * len(racers)
    for number in range(plan.rounds):
        for place, racer in enumerate(racers):
            if spent[place] > plan.budget_seconds and number > 1:
                continue
            times = racer.call("turn", plan.runs, plan.turn_seconds)
            turns[place].append(statistics.median(times))
            spent[place] += sum(times)
    moved = case.input_bytes + outputs[0].nbytes
    results = []
    for place, racer in enumerate(racers):
        ratios = [theirs / mine for mine, theirs in zip(turns[0], turns[place], strict=False)]
        median = statistics.median(turns[place])
        results.append(
            {
                "title": racer.title,
                "median_ms": median * 1e3,
                "ratio": statistics.median(ratios),
                "gigabytes_per_second": moved / median / 1e9,
                "relative_error": errors[place],
                "rounds": len(turns[place]),
            }
        )
    return {"case": asdict(case), "bytes": moved, "engines": results}


def reductions_table(results: dict[str, dict[str, Any]], memory: float) -> Table:
    """One row a reduction."""
    table = Table(title="Reductions on the CPU, medians in ms")
    for heading in ("reduction", "shape, reduced axes"):
        table.add_column(heading)
    for title in ENGINES:
        table.add_column(title, justify="right")
    headings = ("to numpy", "to stock TVM", "MB", "GB/s", "of memory's", "off numpy")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, result in results.items():
        case, engines = result["case"], result["engines"]
        what = f"{case['dtype']} {list(case['shape'])} {case['operator']} {list(case['axes'])}"
        rate = engines[0]["gigabytes_per_second"] * 1e9
        table.add_row(
            name,
            what,
            *(f"{engine['median_ms']:.3f}" for engine in engines),
            *(f"{engine['ratio']:.2f}x" for engine in engines[1:]),
            f"{result['bytes'] / 1e6:.1f}",
            f"{rate / 1e9:.1f}",
            f"{rate / memory:.0%}",
            f"{float(engines[0]['relative_error']):.1e}",
        )
    ratios = ([engine["ratio"] for engine in r["engines"][1:]] for r in results.values())
    means = [geometric_mean(column) for column in zip(*ratios, strict=True)]
    table.add_section()
    table.add_row("geometric mean", *[""] * 4, *means)
    table.caption = (
        "Ratio: how many times as fast tvm-fusion is, median over rounds in turns; numpy reduces "
        f"on one thread. Memory gives {memory / 1e9:.1f} GB/s to all threads; data in a "
        "cache is faster."
    )
    return table


def main() -> int:
    """Run the benchmark; the exit code is 1 if any output is wrong."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description="Race reductions with numpy and stock TVM.")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--threads", type=int, help="default: all physical cores")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument(
        "--output", type=output_file, default=str(CPU_FOLDER / "reductions_cpu.json")
    )
    options = parser.parse_args()
    machine = host_info()
    threads = options.threads or machine["physical_cores"]
    plan = replace(PLAN, rounds=2, runs=5) if options.quick else PLAN
    results: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack, progress_bar() as progress:
        racers = [Racer(title, threads) for title in ENGINES]
        for racer in racers:
            stack.callback(racer.close)
        before = racers[0].call("limits")
        chosen = [case for case in CASES if case.name in options.only]
        for number, case in enumerate(chosen):
            progress(case.name, number, len(chosen))
            results[case.name] = race(case, racers, plan)
        limits = before.mean(racers[0].call("limits"))
    settings = {"machine": machine, "threads": threads, "plan": asdict(plan)}
    settings["limits"] = asdict(limits)
    save(options.output, {"settings": settings, "results": results})
    console = Console()
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    console.print(reductions_table(results, limits.levels[-1].bandwidth))
    versions = ", ".join(f"{key} {text}" for key, text in machine["packages"].items())
    console.print(f"{machine['cpu']}, {threads} threads, {versions}")
    errors = [r["engines"][0]["relative_error"] for r in results.values()]
    return int(any(not float(error) <= TOLERANCE for error in errors))


if __name__ == "__main__":
    raise SystemExit(main())
