# SPDX-License-Identifier: Apache-2.0
"""Collectives of gloo, which threads of their own run, as kernels of streams, and their groups.

An operator ``c10d::allreduce_`` hands its tensors to such a thread and returns; the thread records
an annotation ``gloo:all_reduce``, and operators with which it copies. Each thread is a stream, and
the operator the call that launches.

A trace tells the groups that a rank belongs to, and seldom the group of a collective. Each group
has threads of its own, made when the group is, so that their numbers ascend in its order. Which
threads belong to which group follows from what the ranks of a group must agree on: how often each
collective is called in it, and on how many elements.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .kineto import DeviceEvent, HostEvent, KinetoTrace, ProcessGroup

_KINDS = {
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "alltoallbase": "all_to_all",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgatherintotensor": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}
_PREFIXES = re.compile("^(nccl:|gloo:|c10d::)")


def collective_kind(name: str) -> str:
    """Kind of a collective by any of its names: ``nccl:all_to_all``, ``alltoallv`` and others."""
    bare = re.sub("[^a-z0-9]", "", _PREFIXES.sub("", name.lower()))
    if bare in _KINDS:
        return _KINDS[bare]
    found = [kind for part, kind in _KINDS.items() if part in bare]
    return found[0] if found else "send" if "sendrecv" in bare else bare


PREFIX = "gloo:"
"""Prefix of the annotations of gloo's threads."""

THREADS = 2
"""Threads of a group, by PyTorch's default."""

_MOST_WAYS = 20_000
_UNEQUAL = ("all_to_all", "send", "recv")
"""Kinds of which ranks may pass different numbers of elements."""
_NAME, _RANKS = "Process Group Name", "Process Group Ranks"

_Calls = Counter[tuple[str, int]]
_CALLS = "c10d::"
_EACH_RANK = ("all_gather",)
"""Kinds whose result is as large as the operands of all ranks."""


@dataclass(frozen=True)
class _Way:
    """Way to give the threads of a rank to its groups, and the calls of each group of several.

    Odd are neighbours in number of two groups, and others of one: a group makes its threads
    together.
    """

    groups: dict[int, ProcessGroup]
    calls: dict[str, _Calls]
    odd: int

    @property
    def order(self) -> tuple[int, int]:
        """Order of trial: most collectives between ranks, then the fewest odd threads."""
        return -sum(calls.total() for calls in self.calls.values()), self.odd


def name_groups(traces: Sequence[KinetoTrace]) -> None:
    """Tell gloo's collectives of all ranks their groups, in the arguments of their events.

    Where no trace names them and no way to share the threads out makes the ranks agree, all
    collectives stay in one group, and each trace has a problem that says so.
    """
    open_ = [trace for trace in traces if len(trace.groups) > 1 and _unnamed(trace)]
    if len(traces) < 2 or len(open_) < len(traces):
        return
    ways = [sorted(_ways(trace), key=lambda way: way.order) for trace in open_]
    chosen = _agreeing(ways, {}) if all(ways) else None
    for number, trace in enumerate(open_):
        events = _unnamed(trace)
        if chosen is None:
            first = events[0]
            reason = "collectives of gloo of unknown groups, taken as of one"
            trace.problems[reason] = [len(events), f"{first.name} at {first.start:.0f} us"]
            continue
        for event in events:
            event.collective = {_NAME: chosen[number].groups[event.thread].name}


def group_arguments(trace: KinetoTrace, event: HostEvent, call: HostEvent) -> Mapping[str, Any]:
    """Name and ranks of the group of a collective and its call, as far as they are known."""
    inside = (
        one
        for one in _named(trace)
        if one.thread == call.thread and call.start <= one.start < call.end
    )
    found = next((one.collective for one in (event, *inside) if one.collective), {})
    name = str(found.get(_NAME, ""))
    ranks = next((group.ranks for group in trace.groups if group.name == name), ())
    return {key: value for key, value in ((_NAME, name), (_RANKS, ranks)) if value}


def _named(trace: KinetoTrace) -> list[HostEvent]:
    return [event for event in trace.host if _NAME in (event.collective or {})]


def _unnamed(trace: KinetoTrace) -> list[HostEvent]:
    """Collectives of gloo without a group; none where others of the trace have theirs."""
    return [] if _named(trace) else [one for one in trace.host if one.name.startswith(PREFIX)]


def _ways(trace: KinetoTrace) -> Iterator[_Way]:
    """All ways in which threads in their order belong to groups in theirs."""
    calls: dict[int, _Calls] = {}
    for event in _unnamed(trace):
        kind = collective_kind(event.name)
        size = 0 if kind in _UNEQUAL else elements(event.shapes)
        calls.setdefault(event.thread, Counter())[kind, size] += 1
    threads = sorted(calls)
    count = math.comb(len(threads) + len(trace.groups) - 1, len(threads))
    for chosen in _ascending(len(threads), len(trace.groups)) if count <= _MOST_WAYS else ():
        groups = dict(zip(threads, (trace.groups[at] for at in chosen), strict=True))
        by_group: dict[str, _Calls] = {
            one.name: Counter() for one in trace.groups if len(one.ranks) != 1
        }
        for thread, group in groups.items():
            if group.name in by_group:
                by_group[group.name] += calls[thread]
        pairs = zip(threads, threads[1:], chosen, chosen[1:], strict=False)
        odd = sum((b - a == 1) != (one == other) for a, b, one, other in pairs)
        yield _Way(groups, by_group, odd)


def _ascending(count: int, groups: int, first: int = 0) -> Iterator[tuple[int, ...]]:
    """Numbers of groups that never descend, each at most as often as a group has threads."""
    if not count:
        yield ()
        return
    for group in range(first, groups):
        for own in range(1, min(THREADS, count) + 1):
            for rest in _ascending(count - own, groups, group + 1):
                yield (group,) * own + rest


def _agreeing(ways: Sequence[Sequence[_Way]], known: Mapping[str, _Calls]) -> list[_Way] | None:
    """One way a rank, so that the ranks of each group make the same calls in it."""
    if not ways:
        return []
    for way in ways[0]:
        shared = way.calls.keys() & known.keys()
        if all(way.calls[name] == known[name] for name in shared):
            rest = _agreeing(ways[1:], {**known, **way.calls})
            if rest is not None:
                return [way, *rest]
    return None


def elements(shapes: Any) -> int:
    """Elements of all tensors of a shape, or of a nested list of shapes."""
    if not isinstance(shapes, tuple) or not shapes:
        return 0
    if all(isinstance(size, int) for size in shapes):
        return math.prod(shapes)
    return sum(map(elements, shapes))


def launch_collectives(trace: KinetoTrace) -> None:
    """Move the collectives of gloo from the threads of a trace to streams.

    One whose operator is not found is counted among the trace's problems.
    """
    events = [event for event in trace.host if event.name.startswith(PREFIX)]
    if not events:
        return
    calls = [event for event in trace.host if event.name.startswith(_CALLS)]
    threads = {event.thread for event in events} - {call.thread for call in calls}
    trace.host = [
        event
        for event in trace.host
        if event.thread not in threads and not event.name.startswith(PREFIX)
    ]
    used = [*trace.device_events, *trace.queued, *(event.correlation for event in trace.host)]
    number = max(used, default=0)
    # Two threads may begin out of order; the number is given when the operator is called.
    for event in sorted(events, key=lambda one: (one.record_function, one.start)):
        call = _call_of(event, calls)
        if call is None:
            where = f"{event.name} at {event.start:.0f} us"
            trace.count_problem("collectives of gloo without the operator that calls them", where)
            continue
        calls.remove(call)
        number += 1
        call.correlation = number
        collective = _arguments(trace, event, call)
        trace.device_events[number] = DeviceEvent(
            event.name,
            False,
            event.thread,
            event.start,
            event.end,
            collective=collective,
            on_host=True,
        )


def _call_of(event: HostEvent, calls: list[HostEvent]) -> HostEvent | None:
    kind = collective_kind(event.name)
    return next(
        (
            call
            for call in calls
            if collective_kind(call.name) == kind and call.start <= event.start
        ),
        None,
    )


def _arguments(trace: KinetoTrace, event: HostEvent, call: HostEvent) -> Mapping[str, Any]:
    """Arguments under the names that NCCL's kernels have; bytes are of all tensors of a rank."""
    of_group = group_arguments(trace, event, call)
    ranks = len(of_group.get("Process Group Ranks", ())) or trace.world or 1
    kind = collective_kind(event.name)
    sent = elements(event.shapes)
    received = sent * ranks if kind in _EACH_RANK else sent
    if kind == "all_to_all" and call.shapes:
        received = elements(call.shapes[:1])
    dtype = str(event.types[0]) if event.types else ""
    arguments = {"In msg nelems": sent, "Out msg nelems": received, "dtype": dtype}
    return {"Collective name": kind, **arguments, **of_group}
