# SPDX-License-Identifier: Apache-2.0
"""Collectives of gloo, which threads of their own run, as kernels of streams.

An operator ``c10d::allreduce_`` hands its tensors to such a thread and returns; the thread records
an annotation ``gloo:all_reduce``, and operators with which it copies. Each thread is a stream, and
the operator the call that launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .collective_kind import collective_kind
from .gloo_groups import PREFIX, elements, group_arguments
from .kineto import DeviceEvent, HostEvent, KinetoTrace

_CALLS = "c10d::"
_EACH_RANK = ("all_gather",)
"""Kinds whose result is as large as the operands of all ranks."""


def launch_collectives(trace: KinetoTrace) -> None:
    """Move the collectives of gloo from the threads of a trace to streams.

    One whose operator is not found is counted among the trace's problems.
    """
    found = [event for event in trace.host if event.name.startswith(PREFIX)]
    if not found:
        return
    calls = [event for event in trace.host if event.name.startswith(_CALLS)]
    threads = {event.thread for event in found} - {call.thread for call in calls}
    trace.host = [
        event
        for event in trace.host
        if event.thread not in threads and not event.name.startswith(PREFIX)
    ]
    used = [*trace.device_events, *trace.queued, *(event.correlation for event in trace.host)]
    number = max(used, default=0)
    # Two threads may begin out of order; the number is given when the operator is called.
    for event in sorted(found, key=lambda one: (one.record_function, one.start)):
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
    own = group_arguments(trace, event, call)
    ranks = len(own.get("Process Group Ranks", ())) or trace.world or 1
    kind = collective_kind(event.name)
    sent = elements(event.shapes)
    received = sent * ranks if kind in _EACH_RANK else sent
    if kind == "all_to_all" and call.shapes:
        received = elements(call.shapes[:1])
    dtype = str(event.types[0]) if event.types else ""
    arguments = {"In msg nelems": sent, "Out msg nelems": received, "dtype": dtype}
    return {"Collective name": kind, **arguments, **own}
