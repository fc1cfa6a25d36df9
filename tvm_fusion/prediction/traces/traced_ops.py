# SPDX-License-Identifier: Apache-2.0
"""Operators of a Kineto trace with their runtime calls, and what each call launched or awaited."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .gloo import launch_collectives
from .kineto import DeviceEvent, HostEvent, KinetoTrace

SLACK = 2.0
"""Microseconds by which clocks of host and device may differ."""

_WAITS = ("Synchronize",)


@dataclass(slots=True)
class TracedCall:
    """Runtime call that launches something, or waits."""

    event: HostEvent  # The call.
    device: DeviceEvent | None = None  # What it launches.
    waits: bool = False  # Whether the host stands still in it until the device is done.
    awaited: tuple[int, ...] = ()
    """Correlations of what the host, or what the launched kernel, waits for on other streams."""
    free: float = 0.0  # End of what it waited for, in microseconds.


@dataclass(slots=True)
class TracedOp:
    """Operator that no other operator called."""

    event: HostEvent  # The operator; a runtime call outside of all operators stands for itself.
    calls: list[TracedCall] = field(default_factory=list)
    """Its runtime calls that launch or wait, in order."""
    nested: list[HostEvent] = field(default_factory=list)  # All events inside it.
    follows: bool = True
    """Whether it began after the end of all operators before it, whichever threads they ran on."""
    gap: float | None = None
    """Microseconds between it and the operator before it; None for the first."""
    before: int = 0  # Calls of Python functions in that gap.
    events: tuple[int, ...] = ()  # Events inside it, before each of its calls and after the last.
    awaited: tuple[int, ...] = ()
    """Correlations of collectives on the host's threads that the host waits for before it; the gap
    is without that."""


def traced_ops(trace: KinetoTrace) -> list[TracedOp]:
    """Operators in order of their start, on threads that run operators.

    Launches without a kernel are counted among the trace's problems.
    """
    launch_collectives(trace)
    ops = list(_outermost(trace))
    _link_calls(trace, ops)
    ops = [op for op in ops if op.event.kind != "runtime" or op.calls]
    _find_waits(trace, ops)
    _count_events(trace, ops)
    return ops


def _find_waits(trace: KinetoTrace, ops: list[TracedOp]) -> None:
    """Find where the host waits for collectives that its threads run, which no event tells.

    At the operator after its call or after a gap in which it ended; where the execution trace says
    what it writes, at the first operator that reads that.
    """
    pending: dict[int, tuple[TracedCall, DeviceEvent, TracedOp]] = {}
    before: dict[int, TracedOp] = {}
    for op in ops:
        previous = before.get(op.event.thread)
        reads = {storage for event in (op.event, *op.nested) for storage in event.reads}
        for correlation, (call, device, caller) in list(pending.items()):
            writes = reads.intersection(call.event.writes)
            may_wait = caller is previous or not call.event.writes
            waited = previous is not None and previous.event.end < device.end
            if device.end <= op.event.start + SLACK and (writes or may_wait and waited):
                op.awaited += (correlation,)
                del pending[correlation]
        for call in op.calls:
            if call.device is not None and call.device.on_host:
                pending[call.event.correlation] = call, call.device, op
        before[op.event.thread] = op


def _count_events(trace: KinetoTrace, ops: list[TracedOp]) -> None:
    """Find what lies between operators, and count the events between their calls."""
    latest: float | None = None
    threads: dict[int, float] = {}
    for op in ops:
        event = op.event
        python = trace.python.get(event.thread, ())
        starts = sorted(nested.start for nested in op.nested)
        if latest is not None:
            op.follows = event.start >= latest
            begin = latest if op.follows else threads.get(event.thread, event.start)
            free = (trace.device_events[awaited].end for awaited in op.awaited)
            op.gap = max(event.start - max([begin, *free]), 0.0)
            op.before = _between(python, begin, event.start)
        begin, counts = event.start, []
        ends = [*((call.event.start, call.event.end) for call in op.calls), (event.end, event.end)]
        for stop, resume in ends:
            counts.append(_between(python, begin, stop) + _between(starts, begin, stop))
            begin = resume
        op.events = tuple(counts)
        threads[event.thread] = event.end
        latest = event.end if latest is None else max(latest, event.end)


def _between(starts: Sequence[float], begin: float, end: float) -> int:
    return max(bisect.bisect_left(starts, end) - bisect.bisect_left(starts, begin), 0)


def _outermost(trace: KinetoTrace) -> Iterator[TracedOp]:
    """Outermost operators, and runtime calls outside of operators."""
    threads = {event.thread for event in trace.host if event.kind == "op"}
    current: dict[int, TracedOp] = {}
    for event in trace.host:
        if event.thread not in threads:
            continue
        outer = current.get(event.thread)
        if outer is not None and event.start < outer.event.end:
            outer.nested.append(event)
        elif event.kind != "annotation":
            current[event.thread] = op = TracedOp(event)
            yield op


def _link_calls(trace: KinetoTrace, ops: list[TracedOp]) -> None:
    """Find what each runtime call launches and waits for, in the order of the calls."""
    calls = [
        (event, op)
        for op in ops
        for event in ((op.event, *op.nested) if op.event.kind == "op" else [op.event])
        if event.kind == "runtime" or event.correlation in trace.device_events
    ]
    calls.sort(key=lambda pair: pair[0].start)
    devices = {**trace.queued, **trace.device_events}
    launched: dict[int, list[int]] = {}
    for correlation, queued in trace.queued.items():
        launched.setdefault(queued.stream, []).append(correlation)
    event_waits: set[int] = set()
    ends: dict[int, float] = {}
    for event, op in calls:
        if event.end <= ends.get(event.thread, -1.0) and not _launches_more(event, op, trace):
            continue
        device = trace.device_events.get(event.correlation)
        if device is not None:
            call = TracedCall(event, device, _is_blocking(event, device))
            if event.thread in event_waits:
                call.awaited = _ended(devices, launched, device.start, {device.stream})
                event_waits.discard(event.thread)
            call.free = device.end
            launched.setdefault(device.stream, []).append(event.correlation)
            op.calls.append(call)
            ends[event.thread] = event.end
        elif "StreamWaitEvent" in event.name:
            event_waits.add(event.thread)
        elif any(word in event.name for word in _WAITS):
            awaited = _ended(devices, launched, event.end, set())
            free = max((devices[id_].end for id_ in awaited), default=0.0)
            op.calls.append(TracedCall(event, None, True, awaited, free))
        elif "LaunchKernel" in event.name and trace.device_events:
            trace.count_problem(
                "launches without their kernel",
                f"{event.name} at {event.start:.0f} us (correlation {event.correlation})",
            )


def _launches_more(event: HostEvent, op: TracedOp, trace: KinetoTrace) -> bool:
    """True if a call inside the last launch launches something else."""
    known = bool(op.calls) and op.calls[-1].event.correlation == event.correlation
    return not known and event.correlation in trace.device_events


def _is_blocking(event: HostEvent, device: DeviceEvent) -> bool:
    """True if the host waited for a copy: its memory is pageable, or the call is no async one."""
    may_block = "Pageable" in device.name or "Async" not in event.name
    return device.copies and may_block and device.end <= event.end + SLACK


def _ended(
    devices: dict[int, DeviceEvent], launched: dict[int, list[int]], time: float, but: set[int]
) -> tuple[int, ...]:
    """Last launched kernel of each stream that had ended at a time, without some streams."""
    ended = []
    for stream, correlations in launched.items():
        if stream in but:
            continue
        for correlation in reversed(correlations):
            if devices[correlation].end <= time + SLACK:
                ended.append(correlation)
                break
    return tuple(ended)
