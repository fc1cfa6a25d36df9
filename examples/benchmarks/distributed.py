# SPDX-License-Identifier: Apache-2.0
"""Stencils on one rank and on two, each rank a process of MPI.

    python examples/benchmarks/distributed.py [--only NAME ...] [--rounds 3] [--peers [PYTHON]]

Three jobs take turns: one rank with one thread, one rank with two threads, two ranks with one
thread each. All of them compute the same bits. With --peers those engines of stencil_peers.py that
PYTHON can import, by default this interpreter, take turns with them, too, on two cores each. Prints
a table and writes results/CPU/distributed.json.

Beside them a job measures what the memory gives one rank and both. Of that, and of the time of one
rank with one thread, the time of two ranks is predicted (``tvm_fusion.distributed.simulate``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tvm import tirx

from schedules.cost.machine import Figure, Machine
from schedules.cpu.core.machine import CPUInfo
from tvm_fusion import distributed
from tvm_fusion.cli.output import FILE_WIDTH
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.distributed.local_program import LocalProgram
from tvm_fusion.distributed.network_figures import processor_of
from tvm_fusion.distributed.rank_rates import rank_rates
from tvm_fusion.distributed.simulate import simulate
from tvm_fusion.errors import DistributedError
from tvm_fusion.machine.host import host_info

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks import stencil_peers  # noqa: E402
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.stencils import STENCILS  # noqa: E402


@dataclass(frozen=True)
class Case:
    """A stencil on an image.

    Parameters
    ----------
    stencil : str
        Its name.
    rows, cols : int
        Extents of its output.
    steps : int
        How often it is applied in a run, with an exchange every so many steps as the model chooses.
    dtype : str
        Type of its pixels.
    """

    stencil: str
    rows: int
    cols: int
    steps: int = 1
    dtype: str = "float32"


CASES = {
    "blur": Case("blur", 8192, 8192),
    "blur_wide": Case("blur", 256, 262144),
    "convolution": Case("convolution", 4096, 4096),
    "cvt_color": Case("cvt_color", 4096, 4096),
    "gaussian": Case("gaussian", 4096, 4096),
    "pipeline": Case("pipeline", 4096, 4096),
    "sobel": Case("sobel", 8192, 8192),
    "heat2d": Case("heat2d", 4096, 4096, steps=100),
    "heat3d": Case("heat3d", 256, 256, steps=100),
    "wave2d": Case("wave2d", 4096, 4096, steps=50),
    **{
        f"{name}_uint8": Case(name, 4096, 4096, dtype="uint8")
        for name in ("convolution", "cvt_color", "gaussian", "pipeline", "sobel")
    },
}
PREDICTED = "predicted_ms"
JOBS = {"1 rank, 1 thread": (1, 1), "1 rank, 2 threads": (1, 2), "2 ranks": (2, 1)}
"""Ranks and threads of each."""

SMALL = "TVM_FUSION_SMALL_STENCILS"
"""Environment variable; where it is set, images have 48 x 48 elements, and runs are short."""

_RUN_SECONDS = 1.0
_MOST_RUNS = 50


def case_of(name: str) -> Case:
    """The case of a name, at its size or at a small one."""
    case = CASES[name]
    if SMALL in os.environ:
        return replace(case, rows=48, cols=48, steps=min(case.steps, 3))
    return case


REPEATED: dict[str, str | dict[str, str]] = {
    "heat2d": "A",
    "heat3d": "A",
    "wave2d": {"A": "next", "V": "speed"},
}
"""Inputs of stencils that take an output in the next step."""


def function_of(case: Case) -> tirx.PrimFunc:
    """The loop nests of a case."""
    pixels = {} if case.dtype == "float32" else {"dtype": case.dtype}
    return STENCILS[case.stencil](case.rows, case.cols, **pixels)


def compile_case(case: Case, ranks: int, threads: int, **options: Any) -> distributed.Program:
    """Compile a stencil for some ranks, with further options."""
    if repeat := REPEATED.get(case.stencil):
        options = {"repeat": repeat, "exchange_every": "auto"} | options
    return distributed.compile(function_of(case), ranks, threads=threads, **options)


def serve(name: str, ranks: int, threads: int) -> None:
    """Run a case on this rank; the first rank prints what was measured, as JSON."""
    case = case_of(name)
    with distributed.session(ranks, threads=threads) as world:
        program = compile_case(case, ranks, threads)
        local = program.on(world)
        fill(local)
        local(case.steps)
        checksum = sum(
            _checksum(output.owned, output.region[0][0]) for output in local.outputs.values()
        )
        fill(local)
        runs = _times(world, lambda: local(case.steps))
        exchange = _times(world, lambda: _exchange(world, program, local))
        checksums = world.all_gather(np.array(checksum, np.uint64))
        if world.rank == 0:
            results = {
                "run_ms": statistics.median(runs) * 1e3,
                "exchange_us": statistics.median(exchange) * 1e6,
                "runs": len(runs),
                "bytes": program.distribution.bytes,
                "messages": len(program.distribution.exchange.messages),
                "exchange_every": program.distribution.deep,
                "checksum": int(checksums.sum(dtype=np.uint64)),
            }
            print(json.dumps(results))


def serve_rates() -> None:
    """Measure what this rank computes and moves; the first rank prints it, as JSON."""
    with distributed.session(2, threads=1) as world:
        rates = rank_rates(world)
        if world.rank == 0:
            print(json.dumps(rates))


def fill(local: LocalProgram) -> None:
    """Give each row of the inputs values that do not depend on who owns it."""
    for number, buffer in enumerate(local.plan.nest.inputs):
        held = local.input(buffer.name)
        for row, values in enumerate(held.owned, start=held.region[0][0]):
            random = np.random.default_rng((number, row))
            levels = random.random(values.shape, np.float32)
            values[...] = levels if buffer.dtype == "float32" else 256 * levels


def _checksum(rows: np.ndarray, first: int) -> int:
    """Sum of checksums of rows, each with its number, so that it can be added over ranks."""
    numbers = (zlib.crc32(row.tobytes(), first + k) for k, row in enumerate(rows))
    return sum(numbers) % (1 << 62)


def _times(world: distributed.World, run: Callable[[], object]) -> list[float]:
    """Seconds of runs that all ranks begin together, each that of the slowest rank."""
    seconds: list[float] = []
    longest = 0.0 if SMALL in os.environ else _RUN_SECONDS
    while not seconds or (sum(seconds) < longest and len(seconds) < _MOST_RUNS):
        world.barrier()
        begin = time.perf_counter()
        run()
        mine = np.array(time.perf_counter() - begin)
        seconds.append(float(world.all_gather(mine).max()))
    return seconds


def _exchange(world: distributed.World, program: distributed.Program, local: Any) -> None:
    """The exchange of a step, without its kernels."""
    exchange = program.distribution.exchange
    world.start(exchange, local.buffers)
    world.finish(exchange)


def launch(ranks: int, arguments: Sequence[str], job: str, python: str = sys.executable) -> str:
    """Run Python with some arguments on ranks of MPI; return what they print.

    ``mpiexec`` is the one beside the interpreter, else that of the path.

    Raises
    ------
    DistributedError
        If there is no ``mpiexec``, or the job fails.
    """
    beside = Path(python).with_name("mpiexec")
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    if launcher is None:
        raise DistributedError("there is no mpiexec; install it by: pip install 'tvm-fusion[mpi]'")
    root = Path(__file__).resolve().parents[2]
    # Its mpicc comes first.
    path = os.pathsep.join([str(beside.parent), os.environ.get("PATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "PATH": path}
    done = subprocess.run(
        [launcher, "-n", str(ranks), python, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise DistributedError(f"{job} failed: {done.stderr[-500:]}")
    return done.stdout


def run_job(name: str, ranks: int, threads: int) -> dict[str, Any]:
    """Measure a case by a job of MPI.

    Raises
    ------
    DistributedError
        If the job fails.
    """
    job = ["--job", name, "--ranks", str(ranks), "--threads", str(threads)]
    printed = launch(ranks, [__file__, *job], f"the job {name} of {ranks} ranks")
    return json.loads(printed.splitlines()[-1])


def run_rates() -> dict[str, float]:
    """Measure what two ranks compute and move, by a job of MPI.

    Raises
    ------
    DistributedError
        If the job fails.
    """
    printed = launch(2, [__file__, "--rates"], "the job of rates")
    return json.loads(printed.splitlines()[-1])


def predicted_ms(case: Case, alone: dict[str, Any], rates: dict[str, float], every: int) -> float:
    """Milliseconds of two ranks, of the time of one rank and of the memory that they share."""
    named = {name: Figure(value, "measured beside it") for name, value in rates.items()}
    rounds = case.steps / every
    scaling = simulate(
        function_of(case),
        processor_of(Machine("ranks-2", "cpu", "this CPU", named)),
        [1, 2],
        one_rank=alone["run_ms"] / rounds / 1e3,
        cache_bytes=CPUInfo.from_target(resolve("native", 1)).l2_bytes,
        repeat=REPEATED.get(case.stencil),
        exchange_every=every,
    )
    return scaling.points[1].seconds * rounds * 1e3


def engines_of(python: str) -> list[str]:
    """The engines of ``stencil_peers.py`` that an interpreter can import.

    Raises
    ------
    DistributedError
        If there is none.
    """
    printed = launch(1, [stencil_peers.__file__, "--list"], "the list of peers", python)
    engines = json.loads(printed.splitlines()[-1])
    if not engines:
        raise DistributedError(
            f"{python} can import none of {', '.join(stencil_peers.ENGINES)}; install them by: "
            "pip install 'tvm-fusion[peers]', in an environment of its own"
        )
    return engines


def run_peer(engine: str, name: str, python: str) -> float | None:
    """Milliseconds of a case by a peer; None if it cannot express the case, or fails."""
    case = case_of(name)
    sizes = map(str, (case.rows, case.cols, case.steps))
    job = ["--engine", engine, "--stencil", case.stencil, "--sizes", *sizes, "--dtype", case.dtype]
    try:
        printed = launch(
            stencil_peers.RANKS[engine],
            [stencil_peers.__file__, *job],
            f"{name} by {engine}",
            python,
        )
    except DistributedError as error:
        print(error, file=sys.stderr)
        return None
    return json.loads(printed.splitlines()[-1])["run_ms"]


def measure(name: str, rounds: int, peers: Sequence[str] = (), python: str = "") -> dict[str, Any]:
    """Let the jobs of a case, and peers, take turns; medians of their rounds.

    Raises
    ------
    DistributedError
        If a job fails, or computes other bits than the first.
    """
    turns_of: dict[str, list[dict[str, Any]]] = {title: [] for title in JOBS}
    rates: list[dict[str, float]] = []
    raced: dict[str, list[Any]] = {peer: [] for peer in peers}
    for _ in range(rounds):
        for title, (ranks, threads) in JOBS.items():
            turns_of[title].append(run_job(name, ranks, threads))
        rates.append(run_rates())
        for peer in list(raced):
            raced[peer].append(run_peer(peer, name, python))
            if raced[peer][-1] is None:
                del raced[peer]
    checksums = {turn["checksum"] for turns in turns_of.values() for turn in turns}
    if len(checksums) > 1:
        raise DistributedError(f"the jobs of {name} compute different bits")
    jobs: dict[str, dict[str, Any]] = {}
    for title, turns in turns_of.items():
        jobs[title] = {
            "run_ms": statistics.median(turn["run_ms"] for turn in turns),
            "exchange_us": statistics.median(turn["exchange_us"] for turn in turns),
            "bytes": turns[0]["bytes"],
            "messages": turns[0]["messages"],
            "exchange_every": turns[0]["exchange_every"],
            "turns_ms": [turn["run_ms"] for turn in turns],
        }
    figures = {key: statistics.median(turn[key] for turn in rates) for key in rates[0]}
    alone = jobs["1 rank, 1 thread"]
    every = jobs["2 ranks"]["exchange_every"]
    jobs["2 ranks"][PREDICTED] = predicted_ms(case_of(name), alone, figures, every)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    result = {
        "case": vars(case_of(name)),
        "date": date,
        "rounds": rounds,
        "jobs": jobs,
        "rates": figures,
    }
    if raced:
        result["peers"] = {
            peer: {"run_ms": statistics.median(turns), "turns_ms": turns}
            for peer, turns in raced.items()
        }
    return result


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    """One row a case."""
    table = Table(title="Stencils over ranks, medians in ms")
    ratios = ("to 1 thread", "to 2 threads")
    headings = ("case", "size", *JOBS, "predicted", *ratios, "exchange us", "bytes")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number > 1 else "left")
    for name, result in results.items():
        single, two, ranks = (result["jobs"][title] for title in JOBS)
        case = result["case"]
        steps = f" x {case['steps']} steps" if case["steps"] > 1 else ""
        table.add_row(
            name,
            f"{case['rows']} x {case['cols']}{steps}",
            *(f"{job['run_ms']:.2f}" for job in (single, two, ranks)),
            f"{ranks[PREDICTED]:.2f}" if PREDICTED in ranks else "",
            f"{single['run_ms'] / ranks['run_ms']:.2f}x",
            f"{two['run_ms'] / ranks['run_ms']:.2f}x",
            f"{ranks['exchange_us']:.0f}",
            str(ranks["bytes"]),
        )
    return table


def table_of_peers(results: dict[str, dict[str, Any]]) -> Table:
    """One row a case that peers have run; ratios to two ranks of ours."""
    table = Table(title="Stencils on two cores beside peers, medians in ms")
    titles = stencil_peers.TITLES
    for number, heading in enumerate(("case", "2 ranks", *titles.values(), "best to ours")):
        table.add_column(heading, justify="right" if number else "left")
    for name, result in results.items():
        if "peers" in result:
            ours = result["jobs"]["2 ranks"]["run_ms"]
            peers = {peer: one["run_ms"] for peer, one in result["peers"].items()}
            cells = [
                f"{peers[peer]:.2f} ({peers[peer] / ours:.2f}x)" if peer in peers else ""
                for peer in titles
            ]
            table.add_row(name, f"{ours:.2f}", *cells, f"{min(peers.values()) / ours:.2f}x")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, or be a rank of one."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--rounds", type=int, default=3, help="turns of each job")
    options.add_argument("--output", type=output_file, default=str(CPU_FOLDER / "distributed.json"))
    options.add_argument(
        "--peers", nargs="?", const=sys.executable, metavar="PYTHON", help="race peers, too"
    )
    options.add_argument("--job", choices=list(CASES), help=argparse.SUPPRESS)
    options.add_argument("--rates", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    chosen = options.parse_args(arguments)
    if chosen.job:
        serve(chosen.job, chosen.ranks, chosen.threads)
        return 0
    if chosen.rates:
        serve_rates()
        return 0
    peers = engines_of(chosen.peers) if chosen.peers else []
    kept = json.loads(chosen.output.read_text()) if chosen.output.exists() else {}
    results = kept.get("results", {})
    for name in chosen.only:
        results[name] = measure(name, chosen.rounds, peers, chosen.peers or "")
        ordered = {case: results[case] for case in CASES if case in results}
        save(chosen.output, {"machine": host_info(), "results": ordered})
    console = Console(width=FILE_WIDTH if not sys.stdout.isatty() else None)
    console.print(table_of(ordered))
    if any("peers" in result for result in ordered.values()):
        console.print(table_of_peers(ordered))
    ratios = [
        result["jobs"]["1 rank, 2 threads"]["run_ms"] / result["jobs"]["2 ranks"]["run_ms"]
        for result in ordered.values()
    ]
    console.print(f"2 ranks to 1 rank with 2 threads: {statistics.geometric_mean(ratios):.2f}x")
    ranks = [result["jobs"]["2 ranks"] for result in ordered.values()]
    errors = [abs(one[PREDICTED] / one["run_ms"] - 1) for one in ranks if PREDICTED in one]
    if errors:
        console.print(f"error of predictions: {100 * statistics.median(errors):.1f} % (median)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
