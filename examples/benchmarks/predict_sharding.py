# SPDX-License-Identifier: Apache-2.0
"""Embedding tables on two ranks: the sharding predicted to be fastest, and measured ones.

    python examples/benchmarks/predict_sharding.py [--tasks 20] [--rounds 15]

A task is 18 to 34 tables of random sizes and skews, a fifth of them with 20 lookups or more. Two
ranks of one thread each, which gloo connects, measure what a rank has of the machine and their
all-to-alls. From that ``shard`` predicts the six sharders of Table 5.3 of the dissertation and its
search; the one that it puts first is the choice. Then the ranks run all of them in turns: lookups
of all samples in a rank's tables, the all-to-all of the results, that of the gradients, and the
updates of the rows. Writes results/CPU/predict_sharding.json: how much longer than the best of
all the choice takes, beside each sharder alone and the difference of even and odd rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.benchmarks.predict_lookups import (  # noqa: E402
    BATCHES,
    WIDTHS,
    Launch,
    backward,
    draw_batches,
    forward,
    keep_freed_memory,
    tables_in,
)
from examples.benchmarks.prediction.gloo_ranks import (  # noqa: E402
    RANKS,
    THREADS,
    connected,
    start_ranks,
)
from schedules.cost.machine import load_machine  # noqa: E402
from tvm_fusion.distributed.collective_curves import (  # noqa: E402
    GROUP_KINDS,
    ProcessGroup,
    measure_collectives,
)
from tvm_fusion.machine.host import host_info
from tvm_fusion.prediction.calibrate.calibration import measured_limits  # noqa: E402
from tvm_fusion.prediction.collectives import Collectives, collectives_of  # noqa: E402
from tvm_fusion.prediction.sharding import (  # noqa: E402
    EmbeddingTable,
    Sharding,
    ShardingTask,
    shard,
)

MODULE = "examples.benchmarks.predict_sharding"
TABLES = 13 * RANKS
ARENA = 512 << 20  # bytes of all tables
MOST = 96 << 20  # bytes of rows that an iteration reads
HEAVY = 0.2  # share of tables with at least 20 lookups
TURNS = 3  # Turns of all tasks.
CLOSE = 1.1  # times the best that count as good as it


def draw_task(seed: int) -> Launch:
    """Draw tables and batches of all ranks; the same for the same seed."""
    random = np.random.default_rng([seed, TABLES])
    while True:
        count = round(TABLES * random.uniform(0.7, 1.3))
        bags = RANKS * int(2 ** random.uniform(6, 10))
        rows = [int(10 ** random.uniform(3, 6)) for _ in range(count)]
        widths = [int(random.choice(WIDTHS)) for _ in range(count)]
        heavy = random.random(count) < HEAVY
        few, many = 2 ** random.uniform(0, 4, count), random.uniform(20, 100, count)
        lookups = np.where(heavy, many, few).tolist()
        held = sum(4 * e * d for e, d in zip(rows, widths, strict=True))
        read = sum(4 * bags * n * d for n, d in zip(lookups, widths, strict=True))
        if held <= ARENA and read <= MOST:
            return Launch(rows, widths, draw_batches(random, bags, rows, lookups))


def predicted(seed: int, machine: Path) -> tuple[Sharding, ...]:
    """Shardings of a task, the one that is predicted to be fastest first."""
    launch = draw_task(seed)
    tables = tuple(
        EmbeddingTable(str(number), data.rows, data.width, data.count / data.bags, data)
        for number, data in enumerate(launch.lookups[0])
    )
    bags = len(launch.batches[0][0][1])
    curves = collectives_of(machine)
    return shard(ShardingTask(tables, bags // RANKS, load_machine(machine), RANKS, curves), seed)


def splits(launch: Launch, ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Elements of the tables' results that this rank sends to each rank, and gets from each."""
    samples = len(launch.batches[0][0][1]) // RANKS
    widths = [0] * RANKS
    for rank, width in zip(ranks, launch.widths, strict=True):
        widths[rank] += width
    return [samples * widths[dist.get_rank()]] * RANKS, [samples * width for width in widths]


class Iteration:
    """Iteration of this rank with its part of a task's tables, on each of the batches.

    Parameters
    ----------
    launch : Launch
        All tables, and the batches of all ranks.
    ranks : sequence of int
        Rank of each table.
    arena : torch.Tensor
        Memory in which the rank's tables lie.
    """

    def __init__(self, launch: Launch, ranks: Sequence[int], arena: torch.Tensor) -> None:
        me = dist.get_rank()
        own = [number for number, rank in enumerate(ranks) if rank == me]
        batches = [[batch[number] for number in own] for batch in launch.batches]
        part = Launch(
            [launch.rows[number] for number in own],
            [launch.widths[number] for number in own],
            batches,
        )
        tables = tables_in(arena, part)
        self._runs = [(forward(tables, batch), backward(tables, batch)) for batch in batches]
        self._sent, self._received = splits(launch, ranks)

    def __call__(self, batch: int) -> None:
        """Look up, exchange both ways, and update."""
        lookups, updates = self._runs[batch]
        found = [run()[0] for run in lookups]
        mine = torch.cat(found, dim=1).flatten() if found else torch.empty(0)
        rows, gradients = torch.empty(sum(self._received)), torch.empty_like(mine)
        dist.all_to_all_single(rows, mine, self._received, self._sent)
        dist.all_to_all_single(gradients, rows, self._sent, self._received)
        for run in updates:
            run()


def measured(launch: Launch, ways: Sequence[Sequence[int]], rounds: int) -> np.ndarray:
    """(rounds, ways, batches) seconds of the slowest rank; all ranks begin together.

    As in a training, the iteration before it had the same sharding: its rows are in the caches.
    """
    arena = torch.full((ARENA // 4,), 1e-3)
    iterations = [Iteration(launch, ways_ranks, arena) for ways_ranks in ways]
    times = torch.zeros(rounds + 1, len(ways), BATCHES, dtype=torch.float64)
    for index in np.ndindex(*times.shape):
        if index[2] == 0:
            iterations[index[1]](BATCHES - 1)
        dist.barrier()
        begin = time.perf_counter()
        iterations[index[1]](index[2])
        times[index] = time.perf_counter() - begin
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times[1:].numpy()


def measure_machine(folder: Path) -> None:
    """Write the file of a machine: limits of a rank beside the others, and their all-to-alls."""
    machine = measured_limits(THREADS)
    kinds = {"all_to_all": GROUP_KINDS["all_to_all"]}
    curves: Collectives = measure_collectives(ProcessGroup("gloo"), kinds=kinds, transport="gloo")
    if dist.get_rank() == 0:
        (folder / "machine.json").write_text(json.dumps(machine.to_json()))
        curves.save(folder / "machine.json")


def measure_ways(folder: Path, rounds: int) -> None:
    """Time the ways of ``ways.json``, by seed, and write ``times.json``.

    All tasks take turns, since other work may slow the machine for a minute.
    """
    keep_freed_memory()
    by_seed: dict[str, list[np.ndarray]] = defaultdict(list)
    tasks = json.loads((folder / "ways.json").read_text())
    with torch.no_grad():
        for _ in range(TURNS):
            for seed, ways in tasks.items():
                by_seed[seed].append(measured(draw_task(int(seed)), ways, rounds))
                if dist.get_rank() == 0:
                    each = 1e3 * typical(by_seed[seed][-1])
                    print(f"task {seed}: {each.min():.2f} to {each.max():.2f} ms", flush=True)
    if dist.get_rank() == 0:
        times = {seed: np.concatenate(turns).tolist() for seed, turns in by_seed.items()}
        (folder / "times.json").write_text(json.dumps(times))


def typical(times: np.ndarray) -> np.ndarray:
    """(ways,) mean over the batches of the first decile: other work only lengthens times."""
    return np.percentile(times, 10, axis=0).mean(axis=1)


def judged(shardings: Sequence[Sharding], times: np.ndarray) -> dict[str, Any]:
    """Loss of a task's choice against the best, and that of each sharder alone.

    Parameters
    ----------
    shardings : sequence of Sharding
        The choice first.
    times : np.ndarray
        (rounds, ways, batches) seconds of the distinct ways in order of their first sharding.
    """
    number = {ranks: index for index, ranks in enumerate(distinct(shardings))}
    seconds = typical(times)
    halves = [typical(times[half::2]) for half in (0, 1)]
    loss = {
        sharding.sharder: 100 * float(seconds[number[sharding.ranks]] / seconds.min() - 1)
        for sharding in shardings
    }
    return {
        "choice": shardings[0].sharder,
        "loss_percent": loss[shardings[0].sharder],
        "best_ms": 1e3 * float(seconds.min()),
        "loss_of_each_percent": loss,
        "predicted_ms": {sharding.sharder: 1e3 * sharding.seconds for sharding in shardings},
        "measured_ms": {
            sharding.sharder: 1e3 * float(seconds[number[sharding.ranks]]) for sharding in shardings
        },
        "repeat_percent": 100 * float(np.median(np.abs(halves[1] / halves[0] - 1))),
    }


def distinct(shardings: Sequence[Sharding]) -> list[tuple[int, ...]]:
    """Ranks of the tables in each way, once."""
    return list(dict.fromkeys(one.ranks for one in shardings))


def summary(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Tasks in which each sharder and the choice are within 10 % of the best, and their losses."""
    losses = {
        name: [task["loss_of_each_percent"][name] for task in tasks.values()]
        for name in sorted(next(iter(tasks.values()))["loss_of_each_percent"])
    }
    losses["choice"] = [task["loss_percent"] for task in tasks.values()]
    errors = [
        abs(task["predicted_ms"][name] / task["measured_ms"][name] - 1)
        for task in tasks.values()
        for name in task["predicted_ms"]
    ]
    return {
        "tasks": len(tasks),
        "close_to_the_best": {
            name: sum(loss <= 100 * (CLOSE - 1) for loss in each) for name, each in losses.items()
        },
        "mean_loss_percent": {name: float(np.mean(each)) for name, each in losses.items()},
        "mape_percent": 100 * float(np.mean(errors)),
        "repeat_percent": float(np.median([task["repeat_percent"] for task in tasks.values()])),
    }


def table_of(found: Mapping[str, Any]) -> Table:
    """Tasks within 10 % of the best, and the mean loss, by sharder."""
    table = Table("sharder", f"within 10 % of the best, of {found['tasks']}", "mean loss %")
    for name, count in found["close_to_the_best"].items():
        table.add_row(name, str(count), f"{found['mean_loss_percent'][name]:.1f}")
    return table


def run(tasks: int, rounds: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Measure the machine, predict all tasks, measure their shardings, and judge each."""
    start_ranks(MODULE, folder, ["--step", "machine"])
    shardings = {str(seed): predicted(seed, folder / "machine.json") for seed in range(tasks)}
    ways = {seed: distinct(found) for seed, found in shardings.items()}
    (folder / "ways.json").write_text(json.dumps(ways))
    start_ranks(MODULE, folder, ["--step", "ways", "--rounds", str(rounds)])
    times = json.loads((folder / "times.json").read_text())
    return {seed: judged(found, np.array(times[seed])) for seed, found in shardings.items()}


def main() -> int:
    """Choose, measure, and write how far the choices are from the best; or be one of the ranks."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path, nargs="?", help="of a rank's files; for ranks")
    options.add_argument("--step", choices=["machine", "ways"], help="for ranks")
    options.add_argument("--tasks", type=int, default=20)
    options.add_argument("--rounds", type=int, default=15, help="in each of three turns")
    options.add_argument(
        "--output", type=output_file, default=str(CPU_FOLDER / "predict_sharding.json")
    )
    chosen = options.parse_args()
    if chosen.step:
        with connected(chosen.folder):
            if chosen.step == "machine":
                measure_machine(chosen.folder)
            else:
                measure_ways(chosen.folder, chosen.rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tasks = run(chosen.tasks, chosen.rounds, Path(folder))
    results = summary(tasks)
    settings = {"machine": host_info(), "torch": torch.__version__}
    settings |= {"ranks": RANKS, "threads": THREADS, "rounds": TURNS * chosen.rounds}
    save(chosen.output, {"settings": settings, "results": results, "tasks": tasks})
    Console(width=100).print(table_of(results))
    print(f"predicted iterations: MAPE {results['mape_percent']:.1f} %")
    print(f"even and odd rounds differ by {results['repeat_percent']:.1f} % in the median")
    return 0


if __name__ == "__main__":
    sys.exit(main())
