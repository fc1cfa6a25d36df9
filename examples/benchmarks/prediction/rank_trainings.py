# SPDX-License-Identifier: Apache-2.0
"""Small trainings of two ranks that gloo connects, timed and recorded by the ranks themselves.

All but the recommendation model are data parallel (DDP): each rank has half of the batch. Of the
recommendation model each rank holds half of the tables and looks up the whole batch in them; an
all-to-all passes the rows to the ranks of their samples, another one their gradients back, and the
dense layers are data parallel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.benchmarks.prediction import timed_steps
from examples.benchmarks.prediction.gloo_ranks import RANKS, connected, start_ranks
from examples.benchmarks.prediction.timed_steps import event_cost, profiler, time_steps
from examples.benchmarks.prediction.trainings import (
    DENSE,
    LOOKUPS,
    ROWS,
    TABLES,
    TRAININGS,
    WIDTH,
    RecommendationModel,
    Step,
    interact,
    sgd_step,
)

STRUCTURE = 3  # steps whose execution trace is recorded, too


@dataclass(frozen=True)
class RankTimes:
    """Times that the ranks measured, beside their traces.

    Parameters
    ----------
    cost : float
        Seconds that the profiler adds to an event.
    steps : dict of str to list of float
        Median seconds of a step in each turn, by ``training-batch``.
    """

    cost: float
    steps: dict[str, list[float]]


class _Exchange(torch.autograd.Function):
    """Slice k of a tensor to rank k; of the gradients the same."""

    @staticmethod
    def forward(_: Any, data: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(data)
        dist.all_to_all_single(received, data.contiguous())
        return received

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient.contiguous())
        return received


class _DenseLayers(nn.Module):
    """Both perceptrons of a recommendation model, and the products between them."""

    def __init__(self, model: RecommendationModel) -> None:
        super().__init__()
        self.bottom, self.top = model.bottom, model.top
        self.register_buffer("pairs", model.pairs)

    def forward(self, dense: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        hidden = self.bottom(dense)
        vectors = torch.cat([hidden.unsqueeze(1), found], dim=1)
        return self.top(interact(hidden, vectors, self.pairs))


class ShardedRecommendationModel(nn.Module):
    """Recommendation model of which each rank holds an equal part of the tables."""

    def __init__(self) -> None:
        super().__init__()
        model = RecommendationModel()
        own = TABLES // RANKS
        self.tables = model.tables[dist.get_rank() * own : (dist.get_rank() + 1) * own]
        self.dense = DistributedDataParallel(_DenseLayers(model))

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """(batch, 10) of (batch, 13) features and (own tables, ranks * batch, lookups) rows."""
        rows = [table(own) for table, own in zip(self.tables, indices, strict=True)]
        mine = torch.stack(rows, dim=1).view(RANKS, len(dense), len(rows), WIDTH)
        found = _Exchange.apply(mine).transpose(0, 1).flatten(1, 2)
        return self.dense(dense, found)


def rank_step(name: str, batch: int) -> Step:
    """A step of a rank of a training, on its half of a batch; the same weights on all ranks."""
    make, inputs, _ = TRAININGS[name]
    torch.manual_seed(0)
    local = batch // RANKS
    if name == "dlrm":
        model: nn.Module = ShardedRecommendationModel()
        data = torch.randn(local, DENSE), torch.randint(ROWS, (TABLES // RANKS, batch, LOOKUPS))
    else:
        model, data = DistributedDataParallel(make()), inputs(local)
    return sgd_step(model, data, local)


def record_rank(step: Step, folder: Path, count: int, structure: bool) -> None:
    """Write the traces of some steps of this rank: of PyTorch's profiler, and of its observer."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"rank{dist.get_rank()}"
    options = {}
    if structure:
        observer = torch.profiler.ExecutionTraceObserver()
        options["execution_trace_observer"] = observer.register_callback(f"{stem}.et.json")
    dist.barrier()
    with profiler(**options) as found:
        for _ in range(count):
            step()
    found.export_chrome_trace(f"{stem}.json")


def measure_rank(folder: Path, names: Sequence[str], rounds: int, turns: int) -> None:
    """Time and record the steps of this rank, in turns; rank 0 writes the times of all."""
    cost = torch.tensor(event_cost())
    dist.all_reduce(cost, dist.ReduceOp.MAX)
    steps: dict[str, list[float]] = {}
    for turn in range(turns):
        for name in names:
            for batch in TRAININGS[name][2]:
                step, case = rank_step(name, batch), f"{name}-{batch}"
                times = torch.tensor(time_steps(step, rounds))
                dist.all_reduce(times, dist.ReduceOp.MAX)
                steps.setdefault(case, []).append(float(times.median()))
                record_rank(step, folder / f"{case}.{turn}", timed_steps.TRACED, False)
                if turn == 0:
                    record_rank(step, folder / f"{case}.structure", STRUCTURE, True)
                if dist.get_rank() == 0:
                    print(f"{name} {batch}: {1e3 * steps[case][-1]:.2f} ms", flush=True)
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps({"cost": float(cost), "steps": steps}))


def run_ranks(folder: Path, names: Sequence[str], rounds: int, turns: int) -> RankTimes:
    """Start the ranks, and return their times; the traces are in the folder.

    Raises
    ------
    RuntimeError
        If a rank fails.
    """
    arguments = ["--rounds", str(rounds), "--turns", str(turns), "--only", *names]
    start_ranks("examples.benchmarks.prediction.rank_trainings", folder, arguments)
    return RankTimes(**json.loads((folder / "times.json").read_text()))


def main() -> int:
    """One rank, whose number is RANK of the environment."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--rounds", type=int, required=True)
    options.add_argument("--turns", type=int, required=True)
    options.add_argument("--only", nargs="+", choices=TRAININGS, required=True)
    chosen = options.parse_args()
    with connected(chosen.folder):
        measure_rank(chosen.folder, chosen.only, chosen.rounds, chosen.turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
