# SPDX-License-Identifier: Apache-2.0
"""Timelines of one rank and of all: Algorithms 3 and 4 of the dissertation.

The host runs ahead of the device. A kernel starts when it is launched, its stream is free and what
it waits for has ended; the host stands still only in calls that wait.

Each rank of several runs so. A collective starts on a rank when that rank is ready, and ends on all
ranks of its group together. Kernels that do not wait for it run beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from tvm_fusion.errors import PredictionError

from .execution_graph import HOST, Collective, ExecutionGraph, HostCosts, Kernel, Launch, Op

KERNEL_GAP = 1e-6
"""Least time between two kernels of a stream, and of a node of a launched graph."""


@dataclass(slots=True)
class KernelRun:
    """Kernel on the timeline."""

    kernel: Kernel
    op: int  # Index of its operator.
    launched: float  # Time at which the device knows of it.
    start: float = 0.0
    end: float | None = None
    """``start`` and ``end``: time on the device; ``end`` is None until it is known."""
    bound: str = "host"
    """Event that its start waited for: ``host``, ``stream`` (the kernel before it) or ``other
    stream``."""
    source: int | None = None  # Kernel that it waited for.
    ready: float = 0.0  # Time at which the last rank of its collective has started; else its start.
    last_rank: int | None = None  # Rank that started a collective last.
    waits: int = 0  # Waits of the host before its launch.


@dataclass(frozen=True, slots=True)
class HostRun:
    """Time of the host on an operator."""

    op: int  # Index of the operator.
    start: float
    end: float
    """``start`` and ``end``: begin, after T1, and end."""


@dataclass(frozen=True, slots=True)
class HostWait:
    """Wait of the host for a kernel."""

    start: float
    end: float
    """``start`` and ``end``: begin and end."""
    kernel: int  # Kernel that ended last.
    op: int  # Index of the operator.


@dataclass
class RankTimeline:
    """Timeline of one rank."""

    graph: ExecutionGraph  # What ran.
    kernels: dict[int, KernelRun] = field(default_factory=dict)
    """Kernels by id, in order of launch."""
    host: list[HostRun] = field(default_factory=list)  # Operators in order.
    waits: list[HostWait] = field(default_factory=list)  # Waits of the host that took time.
    host_end: float = 0.0  # End of the host's last operator.

    @property
    def end(self) -> float:
        """End of the last operator or kernel."""
        return max([self.host_end, *(run.end or 0.0 for run in self.kernels.values())])

    @property
    def seconds(self) -> float:
        """Time from the rank's start to its end."""
        return self.end - self.graph.start


class RankSimulation:
    """Simulation of one rank that stops where it needs the end of a collective."""

    def __init__(
        self,
        graph: ExecutionGraph,  # What runs.
        costs: HostCosts,  # Overheads.
        # Ids of the collectives whose end the caller gives by :meth:`finish`; others take their own
        # time.
        shared: set[int],
    ) -> None:
        self.timeline = RankTimeline(graph)
        self.arrived: dict[int, KernelRun] = {}
        """Shared collectives that have started and not ended."""
        self.done = False
        self._costs = costs
        self._shared = shared
        self._queues: dict[int, deque[KernelRun]] = {}
        self._fronts: dict[int, KernelRun] = {}
        self._waiting: list[int] = []
        self._host = self._run_host()

    def advance(self) -> None:
        """Run until the host has ended, or waits for a collective that has not."""
        self._run_streams()
        while not self.done and all(self._runs[id_].end is not None for id_ in self._waiting):
            try:
                self._waiting = next(self._host)
            except StopIteration:
                self.done = True
            self._run_streams()

    def finish(self, id_: int, ready: float, last_rank: int, seconds: float) -> None:
        """Set the end of a shared collective that all ranks have started."""
        run = self.arrived.pop(id_)
        run.ready, run.last_rank, run.end = ready, last_rank, ready + seconds

    @property
    def _runs(self) -> dict[int, KernelRun]:
        return self.timeline.kernels

    def _run_host(self) -> Iterator[list[int]]:
        """Run the operators; yields kernels whose end it needs."""
        timeline, costs = self.timeline, self._costs
        fronts: dict[int, float] = {}
        timeline.host_end, previous = timeline.graph.start, ""
        for kernel in timeline.graph.queued:
            self._issue(kernel, 0, timeline.graph.start)
        for index, op in enumerate(timeline.graph.ops):
            front = fronts.get(op.thread, timeline.graph.start)
            now = max(front, timeline.host_end) if op.follows else front
            awaited = [id_ for id_ in op.after if id_ in self._runs]
            if awaited:
                yield awaited
                now = self._wait(awaited, index, now)
            now += costs.t1(previous, op) if op.gap is None else op.gap
            begin = now
            if not op.steps:
                now += costs.whole(op)
            elif op.graph:
                now = self._launch_graph(op, index, now)
            else:
                now = yield from self._run_steps(op, index, now)
            timeline.host.append(HostRun(index, begin, now))
            fronts[op.thread] = now
            timeline.host_end = max(timeline.host_end, now)
            previous = op.name

    def _run_steps(self, op: Op, index: int, now: float) -> Generator[list[int], None, float]:
        """Runtime calls with overheads between; a kernel of the host stands in place of one."""
        costs = self._costs
        calls, idle = 0, True
        for step in op.steps:
            if isinstance(step, Launch) and step.kernel.stream == HOST:
                now = yield from self._run_on_host(step.kernel, index, now)
                idle = False
                continue
            if idle:
                now += costs.t5(op, calls) if calls else costs.t2(op)
            calls, idle = calls + 1, True
            if isinstance(step, Launch):
                self._issue(step.kernel, index, now + costs.delay(step.call))
                awaited = [step.kernel.id] if step.blocking else []
            else:
                known = self._runs if step.after is None else step.after
                awaited = [id_ for id_ in known if id_ in self._runs]
            if awaited:
                yield awaited
                now = self._wait(awaited, index, now)
            now += costs.t4(step.call)
        return now + (costs.t3(op) if idle else 0.0)

    def _run_on_host(
        self, kernel: Kernel, index: int, now: float
    ) -> Generator[list[int], None, float]:
        """Kernel that the host waits for, such as a collective on CPUs."""
        run = self._run_of(kernel, index, now)
        run.start = run.ready = now
        if kernel.id in self._shared:
            self.arrived[kernel.id] = run
            yield [kernel.id]
        else:
            run.end = now + kernel.seconds
        assert run.end is not None, "the caller resumes when it has ended"
        return run.end

    def _launch_graph(self, op: Op, index: int, now: float) -> float:
        """One call for all kernels; each costs a gap of the device."""
        costs = self._costs
        now += costs.t2(op)
        for step in op.steps:
            if isinstance(step, Launch):
                self._issue(step.kernel, index, now + costs.delay(step.call))
        return now + costs.t4(op.steps[0].call) + costs.t3(op)

    def _wait(self, awaited: list[int], index: int, now: float) -> float:
        end, last = max((self._runs[id_].end or 0.0, id_) for id_ in awaited)
        if end <= now:
            return now
        self.timeline.waits.append(HostWait(now, end, last, index))
        return end

    def _issue(self, kernel: Kernel, index: int, launched: float) -> None:
        run = self._run_of(kernel, index, launched)
        self._queues.setdefault(kernel.stream, deque()).append(run)

    def _run_of(self, kernel: Kernel, index: int, launched: float) -> KernelRun:
        run = KernelRun(kernel, index, launched, waits=len(self.timeline.waits))
        self._runs[kernel.id] = run
        return run

    def _run_streams(self) -> None:
        """Start and end every kernel that waits for nothing unknown."""
        moved = True
        while moved:
            moved = False
            for stream, queue in self._queues.items():
                while queue and self._starts(queue[0], self._fronts.get(stream)):
                    run = queue.popleft()
                    self._fronts[stream] = run
                    moved = True
                    if run.kernel.id in self._shared:
                        self.arrived[run.kernel.id] = run
                        break
                    run.ready, run.end = run.start, run.start + run.kernel.seconds

    def _starts(self, run: KernelRun, front: KernelRun | None) -> bool:
        """Set the start of the next kernel of a stream if all that it waits for has ended."""
        others = [self._runs[id_] for id_ in run.kernel.after if id_ in self._runs]
        if any(other.end is None for other in ([front] if front else []) + others):
            return False
        run.start, run.bound, run.source = run.launched, "host", None
        if front is not None and (front.end or 0.0) + KERNEL_GAP > run.start:
            run.start = (front.end or 0.0) + KERNEL_GAP
            run.bound, run.source = "stream", front.kernel.id
        for other in others:
            if (other.end or 0.0) > run.start:
                run.start, run.bound = other.end or 0.0, "other stream"
                run.source = other.kernel.id
        return True


_Key = tuple[str, int]


@dataclass(frozen=True)
class Timeline:
    """Timelines of ranks that ran together."""

    ranks: tuple[RankTimeline, ...]  # Ranks in the order of the graphs.

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
    of_ranks = costs if isinstance(costs, Sequence) else [costs] * len(graphs)
    meetings = _meetings(graphs)
    shared = {
        rank: {members[rank].id for members in meetings.values() if rank in members}
        for rank in (graph.rank for graph in graphs)
    }
    simulations = {
        graph.rank: RankSimulation(graph, own, shared[graph.rank])
        for graph, own in zip(graphs, of_ranks, strict=True)
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
    meetings: dict[_Key, dict[int, tuple[Kernel, str]]] = {}
    present = [graph.rank for graph in graphs]
    if len(set(present)) < len(present):
        raise PredictionError(f"a rank comes twice among {present}")
    for graph in graphs:
        for op in graph.ops:
            for kernel in op.kernels:
                part = kernel.collective
                if part is None:
                    continue
                members = meetings.setdefault((part.group, part.sequence), {})
                if graph.rank in members:
                    raise PredictionError(f"rank {graph.rank}: {part} comes twice, in {op.name}")
                members[graph.rank] = kernel, op.name
    return {
        key: {rank: kernel for rank, (kernel, _) in members.items()}
        for key, members in meetings.items()
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
