# SPDX-License-Identifier: Apache-2.0
"""Choices of the model for two ranks, beside the alternatives, in one job of MPI.

    python examples/benchmarks/distributed_choices.py [--only NAME ...] [--rounds 15] [--files DIR]

Stencils: whether the interior is computed while messages travel, and how many steps an exchange is
for. Networks: where rows are exchanged. Halos, of exchanges.py: whether they are packed into shared
memory, packed and sent by MPI, or sent from where they lie. All alternatives take turns, each on
two ranks of one thread. Prints how far the choice is from the best of them, and writes
results/CPU/distributed_choices.json. With --files, compiled networks are kept there and used again;
with --network, a file of `tvm-fusion calibrate --network` chooses for halos.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tvm_fusion import distributed
from tvm_fusion.cli.output import FILE_WIDTH
from tvm_fusion.machine.host import host_info

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.benchmarks.distributed import (  # noqa: E402
    CASES,
    REPEATED,
    case_of,
    compile_case,
    fill,
    launch,
)
from examples.benchmarks.distributed_networks import CASES as NETWORKS  # noqa: E402
from examples.benchmarks.distributed_networks import compiled  # noqa: E402
from examples.benchmarks.exchanges import HALOS, route_turns  # noqa: E402

OVERLAPS = ("never", "always")
STEPS = (1, 2, 4, 8, 16)
"""Numbers of steps between two exchanges that are compared; they divide that of a run."""
EXCHANGES = ("always", "once", "auto")
DEFAULT = ("blur", "gaussian", "heat2d", "heat3d", "resnet_18", "mobilenet_v2", *HALOS)

Run = Callable[[], object]


def stencil_runs(name: str, world: distributed.World) -> tuple[dict[str, Run], dict[str, str]]:
    """A run of each alternative, and which one the model chooses of each kind."""
    case = case_of(name)
    repeated = case.stencil in REPEATED
    options: dict[str, dict[str, Any]] = {f"overlap {how}": {"overlap": how} for how in OVERLAPS}
    chosen = {}
    if repeated:
        steps = compile_case(case, 2, 1).distribution.deep
        chosen["every"] = f"every {steps}" if steps > 1 else "overlap never"
        counts = sorted({*STEPS, steps} - {1})
        options = {title: given | {"exchange_every": 1} for title, given in options.items()}
        options |= {f"every {count}": {"exchange_every": count} for count in counts}
    runs: dict[str, Run] = {}
    for title, given in options.items():
        local = compile_case(case, 2, 1, **given).on(world)
        fill(local)
        runs[title] = functools.partial(local, max(STEPS) if repeated else 1)
    program = compile_case(case, 2, 1, **({"exchange_every": 1} if repeated else {}))
    overlaps = any(piece.is_interior for pieces in program.pieces for piece in pieces)
    return runs, chosen | {"overlap": f"overlap {OVERLAPS[overlaps]}"}


def network_runs(
    files: dict[str, str], world: distributed.World
) -> tuple[dict[str, Run], dict[str, str]]:
    """A run of each alternative; the model's choice is one of its own."""
    runs: dict[str, Run] = {}
    for exchange, path in files.items():
        model = distributed.load(path).on(world)
        x = {
            spec.name: np.random.default_rng(0).random(tuple(map(int, spec.shape)), np.float32)
            for spec in model.inputs
        }
        runs[exchange] = functools.partial(model, **x)
    return runs, {"exchange": "auto"}


def serve(names: Sequence[str], rounds: int, files: dict[str, str], network: Path | None) -> None:
    """Measure cases on this rank; the first rank prints the milliseconds of all turns, as JSON."""
    results = {}
    with distributed.session(2, threads=1, network=network) as world:
        for name in names:
            if name in HALOS:
                turns, route = route_turns(world, HALOS[name], rounds)
                chosen = {"packing": route}
            else:
                runs, chosen = network_runs(files, world) if files else stencil_runs(name, world)
                turns = run_turns(runs, rounds, world)
            results[name] = {"chosen": chosen, "turns_ms": turns}
        if world.rank == 0:
            print(json.dumps(results))


def run_turns(
    runs: dict[str, Run], rounds: int, world: distributed.World
) -> dict[str, list[float]]:
    """Milliseconds of runs that take turns."""
    turns: dict[str, list[float]] = {title: [] for title in runs}
    for number in range(rounds + 1):
        for title, run in runs.items():
            run()  # the caches have what it reads
            world.barrier()
            begin = time.perf_counter()
            run()
            mine = np.array(time.perf_counter() - begin)
            slowest = float(world.all_gather(mine).max())
            if number:  # the first round prepares
                turns[title].append(slowest * 1e3)
    return turns


def measure(
    names: Sequence[str], rounds: int, folder: Path, network: Path | None
) -> dict[str, dict[str, Any]]:
    """Let the alternatives of a stencil, of a network or of halos take turns in a job."""
    files = {}
    if names[0] in NETWORKS:
        files = {how: str(compiled(names[0], 2, 1, folder, how)) for how in EXCHANGES}
    job = ["--job", *names, "--rounds", str(rounds), "--compiled", json.dumps(files)]
    job += ["--network", str(network)] if network else []
    printed = launch(2, [__file__, *job], f"the choices of {names[0]}")
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found = json.loads(printed.splitlines()[-1])
    return {name: {"date": date, **result} for name, result in found.items()}


def distances(result: dict[str, Any]) -> dict[str, tuple[str, str, float]]:
    """Chosen and best alternative of each choice, and the ratio of their times."""
    medians = {title: statistics.median(turns) for title, turns in result["turns_ms"].items()}
    compared = {}
    for kind, chosen in result["chosen"].items():
        among = {
            title: seconds
            for title, seconds in medians.items()
            if title.startswith(kind) or kind in ("exchange", "packing") or title == chosen
        }
        if kind == "every":
            among["overlap never"] = medians["overlap never"]
        best = min(among, key=lambda title: among[title])
        compared[kind] = (chosen, best, medians[chosen] / medians[best])
    return compared


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    """One row a choice."""
    table = Table(title="Choices for two ranks, medians in ms")
    for number, heading in enumerate(("case", "alternatives", "chosen", "best", "to the best")):
        table.add_column(heading, justify="right" if number > 3 else "left")
    for name, result in results.items():
        all_of_them = "; ".join(
            f"{title} {statistics.median(turns):.3g}" for title, turns in result["turns_ms"].items()
        )
        for chosen, best, ratio in distances(result).values():
            table.add_row(name, all_of_them, chosen, best, f"{ratio:.3f}x")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, or be a rank of one."""
    options = argparse.ArgumentParser(description=__doc__)
    names = [*CASES, *NETWORKS, *HALOS]
    options.add_argument("--only", nargs="+", choices=names, default=list(DEFAULT))
    options.add_argument("--rounds", type=int, default=15, help="turns of each alternative")
    options.add_argument("--files", type=Path, help="folder of the compiled networks")
    options.add_argument("--network", type=Path, help="file that chooses the routes of halos")
    options.add_argument(
        "--output", type=output_file, default=str(CPU_FOLDER / "distributed_choices.json")
    )
    options.add_argument("--job", nargs="+", choices=names, help=argparse.SUPPRESS)
    options.add_argument("--compiled", type=json.loads, help=argparse.SUPPRESS)
    chosen = options.parse_args(arguments)
    if chosen.job:
        serve(chosen.job, chosen.rounds, chosen.compiled, chosen.network)
        return 0
    kept = json.loads(chosen.output.read_text()) if chosen.output.exists() else {}
    results = kept.get("results", {})
    with tempfile.TemporaryDirectory() as temporary:
        jobs = [[name] for name in chosen.only if name not in HALOS]
        halos = [name for name in chosen.only if name in HALOS]
        for job in [*jobs, halos] if halos else jobs:
            folder = chosen.files or Path(temporary)
            results |= measure(job, chosen.rounds, folder, chosen.network)
            save(chosen.output, {"machine": host_info(), "results": results})
    console = Console(width=FILE_WIDTH if not sys.stdout.isatty() else None)
    console.print(table_of({name: results[name] for name in chosen.only}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
