# SPDX-License-Identifier: Apache-2.0
"""Timelines of all ranks: Algorithm 4 of the dissertation, as one event loop.

Each rank runs as in ``critical_path``. A collective starts on a rank when that rank is ready, and
ends on all ranks of its group together. Kernels that do not wait for it run beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import PredictionError
from .critical_path import KernelRun, RankSimulation, RankTimeline
from .execution_graph import Collective, ExecutionGraph, HostCosts, Kernel

_Key = tuple[str, int]


@dataclass(frozen=True)
class Timeline:
    """Timelines of ranks that ran together.

    Parameters
    ----------
    ranks : tuple of RankTimeline
        In the order of the graphs.
    """

    ranks: tuple[RankTimeline, ...]

    @property
    def start(self) -> float:
        """Start of the first rank."""
        return min(rank.graph.start for rank in self.ranks)

    @property
    def end(self) -> float:
        """End of the last rank."""
        return max(rank.end for rank in self.ranks)

    @property
    def seconds(self) -> float:
        """Time from the first start to the last end."""
        return self.end - self.start


def simulate(graphs: Sequence[ExecutionGraph], costs: Sequence[HostCosts] | HostCosts) -> Timeline:
    """Simulate ranks that start at their ``start`` and meet in their collectives.

    A collective takes the least of the times that its ranks give it. One whose other ranks are not
    among the graphs takes its own time.

    Parameters
    ----------
    graphs : sequence of ExecutionGraph
        One a rank.
    costs : HostCosts or sequence of HostCosts
        Overheads, of all ranks or of each.

    Raises
    ------
    PredictionError
        If a rank comes twice, lacks a collective of its group, or ranks meet in different orders.
    """
    if not graphs:
        raise PredictionError("no ranks to simulate")
    each = costs if isinstance(costs, Sequence) else [costs] * len(graphs)
    meetings = _meetings(graphs)
    shared = {
        rank: {members[rank].id for members in meetings.values() if rank in members}
        for rank in (graph.rank for graph in graphs)
    }
    simulations = {
        graph.rank: RankSimulation(graph, own, shared[graph.rank])
        for graph, own in zip(graphs, each, strict=True)
    }
    open_ = dict(meetings)
    while True:
        for simulation in simulations.values():
            simulation.advance()
        met = {key: runs for key, members in open_.items() if (runs := _met(members, simulations))}
        for key, runs in met.items():
            _end_together(runs, simulations)
            del open_[key]
        if not met:
            break
    _refuse_deadlock(open_, simulations)
    return Timeline(tuple(simulation.timeline for simulation in simulations.values()))


def _meetings(graphs: Sequence[ExecutionGraph]) -> dict[_Key, dict[int, Kernel]]:
    """Collectives of two or more of the ranks: their kernels by rank."""
    found: dict[_Key, dict[int, tuple[Kernel, str]]] = {}
    present = [graph.rank for graph in graphs]
    if len(set(present)) < len(present):
        raise PredictionError(f"a rank comes twice among {present}")
    for graph in graphs:
        for op in graph.ops:
            for kernel in op.kernels:
                part = kernel.collective
                if part is None:
                    continue
                members = found.setdefault((part.group, part.sequence), {})
                if graph.rank in members:
                    raise PredictionError(f"rank {graph.rank}: {part} comes twice, in {op.name}")
                members[graph.rank] = kernel, op.name
    return {
        key: {rank: kernel for rank, (kernel, _) in members.items()}
        for key, members in found.items()
        if _is_complete(members, present)
    }


def _is_complete(members: dict[int, tuple[Kernel, str]], present: list[int]) -> bool:
    """True if a collective joins several ranks; refuses one that a rank of its group lacks."""
    first = min(members)
    part = _collective(members[first][0])
    for rank in sorted(set(part.ranks or present) & set(present) - set(members)):
        raise PredictionError(
            f"rank {rank} lacks {part}, which rank {first} calls in {members[first][1]}"
        )
    for rank, (kernel, op) in members.items():
        if _collective(kernel).kind != part.kind and {part.kind, _collective(kernel).kind} != {
            "send",
            "recv",
        }:
            raise PredictionError(
                f"rank {rank} calls {_collective(kernel)} in {op}, where rank {first} calls {part}"
            )
    return len(members) > 1


def _collective(kernel: Kernel) -> Collective:
    assert kernel.collective is not None, "only collectives are asked"
    return kernel.collective


def _met(
    members: dict[int, Kernel], simulations: dict[int, RankSimulation]
) -> dict[int, KernelRun] | None:
    """The started runs of a collective by rank, if all ranks have started it."""
    runs = {rank: simulations[rank].arrived.get(kernel.id) for rank, kernel in members.items()}
    started = {rank: run for rank, run in runs.items() if run is not None}
    return started if len(started) == len(members) else None


def _end_together(runs: dict[int, KernelRun], simulations: dict[int, RankSimulation]) -> None:
    ready, last = max((run.start, rank) for rank, run in runs.items())
    seconds = min(run.kernel.seconds for run in runs.values())
    for rank, run in runs.items():
        simulations[rank].finish(run.kernel.id, ready, last, seconds)


def _refuse_deadlock(
    open_: dict[_Key, dict[int, Kernel]], simulations: dict[int, RankSimulation]
) -> None:
    for members in open_.values():
        rank = next(r for r, k in members.items() if k.id not in simulations[r].arrived)
        raise PredictionError(
            f"rank {rank} never starts {_collective(members[rank])}: the ranks call their "
            "collectives in different orders, or one waits for a kernel behind it"
        )
