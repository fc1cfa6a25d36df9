# SPDX-License-Identifier: Apache-2.0
"""Networks on one rank and on two, each rank a process of MPI.

    python examples/benchmarks/distributed_networks.py [--only NAME ...] [--rounds 4] [--files DIR]

Three jobs take turns: one rank with one thread, one rank with two threads, two ranks with one
thread each. Those of one thread compute the same bits. Beside the time of two ranks stands the one
that is predicted from that of one rank, as `tvm-fusion simulate` does. Prints a table and writes
results/CPU/distributed_networks.json. With --files, compiled models are kept there and used again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

from tvm_fusion import distributed
from tvm_fusion.cli.output import FILE_WIDTH
from tvm_fusion.distributed.build_network import read_network, resolve_ranks
from tvm_fusion.distributed.simulate import simulate_network
from tvm_fusion.errors import DistributedError
from tvm_fusion.machine.host import host_info

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.benchmarks.distributed import JOBS, launch  # noqa: E402
from examples.zoo import ZOO  # noqa: E402

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet_18": ("resnet_18", {}),
    "resnet_50": ("resnet_50", {}),
    "resnet_50_1024": ("resnet_50", {"image_size": 1024}),
    "mobilenet_v2": ("mobilenet_v2", {}),
    "vgg_16": ("vgg_16", {}),
    "unet": ("unet", {}),
    "small": ("unet", {"image_size": 32, "width": 4}),
}
"""Network and sizes of each case; ``small`` is not measured by default."""


def built(name: str) -> onnx.ModelProto:
    """The model of a case."""
    network, sizes = CASES[name]
    return ZOO[network](**sizes)


def compiled(
    name: str, ranks: int, threads: int, folder: Path, exchange: str | None = None
) -> Path:
    """The file of a network for some ranks, compiled unless it is there."""
    path = folder / f"{name}_{ranks}_{threads}{f'_{exchange}' if exchange else ''}.so"
    if not path.exists():
        if exchange is None:
            exchange = "always" if name == "small" else "auto"  # it is too small to gain by ranks
        model = distributed.compile_network(built(name), ranks, threads=threads, exchange=exchange)
        model.save(path)
    return path


def predicted_ms(name: str, one_rank: float) -> float:
    """Predicted milliseconds of two ranks of one thread, from those of one."""
    target = resolve_ranks(2, "native", 1)
    stages = read_network(built(name), target)
    scaling = simulate_network(
        stages, distributed.estimated_processor(target), (2,), one_rank=one_rank / 1e3
    )
    return 1e3 * scaling.points[0].seconds


def run_job(path: Path, ranks: int, threads: int, repeat: int) -> tuple[float, np.ndarray]:
    """Median milliseconds of a network's runs, and its output.

    Raises
    ------
    DistributedError
        If the job fails.
    """
    output = path.with_suffix(".npz")
    command = ["-m", "tvm_fusion.cli", "run", str(path), "--distributed", "--json"]
    command += ["--threads", str(threads), "--repeat", str(repeat), "--output", str(output)]
    printed = launch(ranks, command, f"{path.name} on {ranks} ranks")
    with np.load(output) as arrays:
        result = arrays[arrays.files[0]]
    return json.loads(printed)["latency"]["median_ms"], result


def measure(name: str, rounds: int, repeat: int, folder: Path) -> dict[str, Any]:
    """Let the jobs of a network take turns; medians of their rounds.

    Raises
    ------
    DistributedError
        If a job fails, or two ranks compute other bits than one.
    """
    files = {title: compiled(name, *counts, folder) for title, counts in JOBS.items()}
    turns: dict[str, list[float]] = {title: [] for title in JOBS}
    results: dict[str, np.ndarray] = {}
    alone, *both = JOBS
    for turn in range(rounds):
        # Neither of the two always follows the other: a host may give less after a time of load.
        for title in (alone, *(both if turn % 2 == 0 else reversed(both))):
            milliseconds, results[title] = run_job(files[title], *JOBS[title], repeat)
            turns[title].append(milliseconds)
    one, _, two = (results[title] for title in JOBS)
    if not np.array_equal(one, two):
        raise DistributedError(f"one rank and two compute different bits of {name}")
    segments = distributed.load(files["2 ranks"]).plan.segments
    one_rank = statistics.median(turns["1 rank, 1 thread"])
    return {
        "sizes": CASES[name][1],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rounds": rounds,
        "jobs": {
            title: {"run_ms": statistics.median(times), "turns_ms": times}
            for title, times in turns.items()
        },
        "predicted_ms": predicted_ms(name, one_rank),
        "bytes": sum(segment.bytes for segment in segments),
        "messages": sum(segment.messages for segment in segments),
        "exchanges": sum(segment.messages > 0 for segment in segments),
    }


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    """One row a network."""
    table = Table(title="Networks over ranks, medians in ms")
    headings = ("network", *JOBS, "predicted", "to 1 thread", "to 2 threads", "exchanges", "bytes")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for name, result in results.items():
        one, two, ranks = (result["jobs"][title]["run_ms"] for title in JOBS)
        table.add_row(
            name,
            *(f"{time:.2f}" for time in (one, two, ranks, result["predicted_ms"])),
            f"{one / ranks:.2f}x",
            f"{two / ranks:.2f}x",
            str(result["exchanges"]),
            str(result["bytes"]),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all networks."""
    options = argparse.ArgumentParser(description=__doc__)
    default = [name for name in CASES if name != "small"]
    options.add_argument("--only", nargs="+", choices=list(CASES), default=default)
    options.add_argument("--rounds", type=int, default=4, help="turns of each job")
    options.add_argument("--repeat", type=int, default=20, help="runs of a turn")
    options.add_argument("--files", type=Path, help="folder of the compiled models")
    options.add_argument(
        "--output", type=output_file, default=str(CPU_FOLDER / "distributed_networks.json")
    )
    chosen = options.parse_args(arguments)
    kept = json.loads(chosen.output.read_text()) if chosen.output.exists() else {}
    results = kept.get("results", {})
    with tempfile.TemporaryDirectory() as temporary:
        for name in chosen.only:
            folder = chosen.files or Path(temporary)
            results[name] = measure(name, chosen.rounds, chosen.repeat, folder)
            ordered = {case: results[case] for case in CASES if case in results}
            save(chosen.output, {"machine": host_info(), "results": ordered})
    console = Console(width=FILE_WIDTH if not sys.stdout.isatty() else None)
    console.print(table_of(ordered))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
