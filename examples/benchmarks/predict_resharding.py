# SPDX-License-Identifier: Apache-2.0
"""Another sharding of a traced training: predicted from its trace, and run.

    python examples/benchmarks/predict_resharding.py [--tasks 8] [--rounds 20]

Two ranks of one thread each, which gloo connects, train the embedding tables of the tasks of
``predict_sharding.py``: lookups of all samples in a rank's tables, the all-to-all of the results, a
loss, and all of it backward, with plain SGD. They run the shardings of the greedy sharders of Table
5.3 of the dissertation and the one named ``naive`` in turns, and PyTorch's profiler records steps
of that. From these traces alone, and the all-to-alls measured before, the change ``sharding=``
predicts what the other four take. Writes results/CPU/predict_resharding.json: steps relative to
those of ``naive``, as predicted and as measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.benchmarks.predict_lookups import Launch, keep_freed_memory  # noqa: E402
from examples.benchmarks.predict_sharding import draw_task, splits  # noqa: E402
from examples.benchmarks.predict_traces import errors  # noqa: E402
from examples.benchmarks.prediction.gloo_ranks import (  # noqa: E402
    RANKS,
    THREADS,
    connected,
    start_ranks,
)
from examples.benchmarks.prediction.rank_trainings import record_rank  # noqa: E402
from tvm_fusion.distributed.collective_curves import (  # noqa: E402
    GROUP_KINDS,
    ProcessGroup,
    measure_collectives,
)
from tvm_fusion.machine.host import host_info
from tvm_fusion.prediction.api import load_traces, predict_traces  # noqa: E402
from tvm_fusion.prediction.sharding import EmbeddingTable, assignments  # noqa: E402

MODULE = "examples.benchmarks.predict_resharding"
TRACED = "naive"
STEPS = 5  # Steps that are recorded.


class _Exchange(torch.autograd.Function):
    """Elements for each rank, one after the other; of the gradients the same."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sent, ctx.received = sent, received
        return _all_to_all(mine, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_to_all(gradient.contiguous(), ctx.received, ctx.sent), None, None


def _all_to_all(mine: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    found = torch.empty(sum(received))
    dist.all_to_all_single(found, mine, received, sent)
    return found


class ShardedTables:
    """Training of a rank's part of some tables, always on the same batch.

    Parameters
    ----------
    launch : Launch
        All tables, and the batches of all ranks.
    ranks : sequence of int
        Rank of each table.
    """

    def __init__(self, launch: Launch, ranks: Sequence[int]) -> None:
        me = dist.get_rank()
        own = [number for number, rank in enumerate(ranks) if rank == me]
        self._batch = [launch.batches[0][number] for number in own]
        self._tables = nn.ModuleList(
            nn.EmbeddingBag(launch.rows[n], launch.widths[n], mode="sum", sparse=True) for n in own
        )
        self._optimizer = torch.optim.SGD(self._tables.parameters(), lr=1e-3)
        self._sent, self._received = splits(launch, ranks)

    def __call__(self) -> None:
        """Look up, exchange, and all of it backward."""
        self._optimizer.zero_grad()
        pairs = zip(self._tables, self._batch, strict=True)
        found = torch.cat([table(*batch) for table, batch in pairs], dim=1)
        rows = _Exchange.apply(found.flatten(), self._sent, self._received)
        rows.square().mean().backward()
        self._optimizer.step()


def shardings(launch: Launch) -> dict[str, list[int]]:
    """Rank of each table by each sharder but the random one, which draws other ranks in a trace."""
    data = zip(launch.rows, launch.widths, launch.lookups[0], strict=True)
    tables = [
        EmbeddingTable(str(number), rows, width, lookups.count / lookups.bags)
        for number, (rows, width, lookups) in enumerate(data)
    ]
    return {name: way for name, way in assignments(tables, RANKS).items() if name != "random"}


def measure_tasks(folder: Path, tasks: int, rounds: int) -> None:
    """Measure all-to-alls and the steps of all shardings, and record those of one."""
    keep_freed_memory()
    kinds = {"all_to_all": GROUP_KINDS["all_to_all"]}
    curves = measure_collectives(ProcessGroup("gloo"), kinds=kinds, transport="gloo")
    if dist.get_rank() == 0:
        curves.save(folder / "collectives.json")
    by_seed = {}
    for seed in range(tasks):
        launch = draw_task(seed)
        steps = {n: ShardedTables(launch, r) for n, r in shardings(launch).items()}
        times = torch.zeros(rounds + 1, len(steps), dtype=torch.float64)
        for turn, way in np.ndindex(*times.shape):
            step = list(steps.values())[way]
            step()
            dist.barrier()
            begin = time.perf_counter()
            step()
            times[turn, way] = time.perf_counter() - begin
        dist.all_reduce(times, dist.ReduceOp.MAX)
        typical = np.percentile(times[1:].numpy(), 10, axis=0)
        by_seed[str(seed)] = dict(zip(steps, typical.tolist(), strict=True))
        record_rank(steps[TRACED], folder / f"task{seed}", STEPS, structure=False)
        if dist.get_rank() == 0:
            print(f"task {seed}: {1e3 * typical.min():.2f} to {1e3 * typical.max():.2f} ms")
            sys.stdout.flush()
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps(by_seed))


def predicted(folder: Path, seed: str, names: Sequence[str]) -> dict[str, float]:
    """Steps by other sharders over those of the trace, as predicted from it."""
    (run,) = load_traces(folder / f"task{seed}")
    changes = [f"sharding={name}:{folder / 'collectives.json'}" for name in names]
    found = predict_traces(run, what_if=changes)
    return {
        name: answer.seconds / found.report.seconds
        for name, answer in zip(names, found.answers, strict=True)
    }


def compared(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Errors over all tasks, and each task."""
    tasks = {}
    for seed, seconds in json.loads((folder / "times.json").read_text()).items():
        others = [name for name in seconds if name != TRACED]
        tasks[seed] = {
            "naive_ms": 1e3 * seconds[TRACED],
            "measured": {name: seconds[name] / seconds[TRACED] for name in others},
            "predicted": predicted(folder, seed, others),
        }
    pairs = [
        (task["predicted"][name], task["measured"][name])
        for task in tasks.values()
        for name in task["measured"]
    ]
    results = {"shardings": len(pairs), **errors(*map(list, zip(*pairs, strict=True)))}
    same = [(1.0, real) for _, real in pairs]
    results["as_traced"] = errors(*map(list, zip(*same, strict=True)))
    apart = [(found, real) for found, real in pairs if abs(np.log(real)) > np.log(1.05)]
    right = sum((found > 1) == (real > 1) for found, real in apart)
    results["direction"] = {"apart": len(apart), "right": right}
    return results, tasks


def table_of(results: Mapping[str, Any]) -> Table:
    """Errors of predictions, and of taking all shardings for as fast as the traced one."""
    table = Table("steps by other sharders", "GMAE %", "MAPE %")
    for name, entry in (("predicted", results), ("as the traced one", results["as_traced"])):
        table.add_row(name, f"{entry['gmae_percent']:.1f}", f"{entry['mape_percent']:.1f}")
    return table


def main() -> int:
    """Measure, predict, and write the errors; or be one of the ranks."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path, nargs="?", help="of a rank's files; for ranks")
    options.add_argument("--tasks", type=int, default=8)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument(
        "--output", type=output_file, default=str(CPU_FOLDER / "predict_resharding.json")
    )
    chosen = options.parse_args()
    if chosen.folder:
        with connected(chosen.folder):
            measure_tasks(chosen.folder, chosen.tasks, chosen.rounds)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        arguments = ["--tasks", str(chosen.tasks), "--rounds", str(chosen.rounds)]
        start_ranks(MODULE, folder, arguments)
        results, tasks = compared(folder)
    settings = {"machine": host_info(), "torch": torch.__version__}
    settings |= {"ranks": RANKS, "threads": THREADS, "rounds": chosen.rounds}
    save(chosen.output, {"settings": settings, "results": results, "tasks": tasks})
    Console(width=100).print(table_of(results))
    direction = results["direction"]
    print(
        f"of {direction['apart']} that differ by 5 % from the traced one, {direction['right']} "
        "are predicted to be faster or slower, as they are"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
