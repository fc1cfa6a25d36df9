# SPDX-License-Identifier: Apache-2.0
"""Execution graph of a traced rank: its operators with kernels, waits and collectives."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from schedules.cost.kernel_call import KernelCall

from ..timeline.execution_graph import HOST, Collective, ExecutionGraph, Kernel, Launch, Op, Wait
from .gloo import collective_kind
from .kernel_calls import bytes_of, host_call, kernel_call
from .kineto import DeviceEvent, HostEvent, KinetoTrace
from .overheads import HOST_WORK, MICRO, call_name, own_time
from .traced_ops import SLACK, TracedCall, TracedOp


def traced_graph(trace: KinetoTrace, ops: list[TracedOp], rank: int) -> ExecutionGraph:
    """Graph of a trace; its kernels take the times that were measured.

    Of a run on the CPU each operator is one kernel of the host; with collectives of gloo in it, one
    before, during and after the call of each.
    """
    builder = _Builder(trace, rank)
    built = tuple(map(builder.op, ops))
    begin = ops[0].event.start
    queued = tuple(
        Kernel(id_, event.name, (event.end - max(event.start, begin)) * MICRO, event.stream)
        for id_, event in trace.queued.items()
        if event.end > begin
    )
    start = (trace.base + begin) * MICRO
    return ExecutionGraph(built, rank, start, trace.path.name, queued)


def measured_seconds(trace: KinetoTrace, ops: list[TracedOp]) -> float:
    """Time from the first operator's start to the end of the last operator or kernel."""
    kernels = (call.device.end for op in ops for call in op.calls if call.device)
    end = max([*(op.event.end for op in ops), *kernels])
    return (end - ops[0].event.start) * MICRO


class _Builder:
    def __init__(self, trace: KinetoTrace, rank: int) -> None:
        self._trace = trace
        self._rank = rank
        self._on_host = trace.is_on_host
        self._sequence: Counter[str] = Counter()
        self._written: dict[int, int] = {}
        self._next = 0

    def op(self, traced: TracedOp) -> Op:
        """Operator of a trace; a gap that is work of the host stays as it is."""
        event, gap = traced.event, traced.gap
        steps: list[Launch | Wait] = []
        begin = event.start
        for call in traced.calls:
            steps += self._host_work(event.name, call.event.start - begin)
            work = self._host_work(call.event.name, own_time(call))
            step = self._step(call, traced)
            # A thread of gloo begins while its call still runs.
            steps += [step, *work] if call.device and call.device.on_host else [*work, step]
            begin = call.event.end
        alone = host_call(event, traced.nested) if self._on_host and not steps else None
        steps += self._host_work(event.name, event.end - begin, alone)
        known = 0.0 if gap is None else gap * MICRO if gap >= HOST_WORK else None
        counts, before = traced.events, traced.before
        rest = traced.follows, known, before, counts
        return Op(event.name, tuple(steps), event.thread, *rest, after=traced.awaited)

    def _host_work(
        self, name: str, micros: float, call: KernelCall | None = None
    ) -> list[Launch | Wait]:
        """Work of the host inside an operator: long, or any on a CPU alone."""
        if micros < HOST_WORK and not self._on_host:
            return []
        self._next -= 1
        return [Launch(Kernel(self._next, name, micros * MICRO, HOST, call=call), name)]

    def _step(self, call: TracedCall, op: TracedOp) -> Launch | Wait:
        device = call.device
        if device is None:
            return Wait(call.awaited, call_name(call))
        around = _around(op, call.event)
        part = self._collective(device, around)
        if device.on_host:
            kernel = Kernel(
                call.event.correlation,
                device.name,
                (device.end - device.start) * MICRO,
                device.stream,
                collective=part,
            )
            return Launch(kernel, call_name(call))
        awaited = dict.fromkeys((*call.awaited, *self._read(device, op)))
        if part is not None:
            storages = (storage for event in around for storage in event.writes)
            self._written |= dict.fromkeys(storages, call.event.correlation)
        kernel = Kernel(
            call.event.correlation,
            device.name,
            (device.end - device.start) * MICRO,
            device.stream,
            tuple(awaited),
            part,
            kernel_call(around, device),
        )
        return Launch(kernel, call_name(call), call.waits)

    def _read(self, device: DeviceEvent, op: TracedOp) -> list[int]:
        """Collectives whose output an operator is the first to read, and did not read too early."""
        storages = {storage for event in (op.event, *op.nested) for storage in event.reads}
        ready = [
            storage
            for storage in storages & self._written.keys()
            if self._trace.device_events[self._written[storage]].end <= device.start + SLACK
        ]
        return [self._written.pop(storage) for storage in ready]

    def _collective(self, device: DeviceEvent, around: list[HostEvent]) -> Collective | None:
        if not re.search("nccl|rccl|gloo:", device.name, re.IGNORECASE):
            return None
        args = device.collective or next(
            (event.collective for event in reversed(around) if event.collective), {}
        )
        name = str(args.get("Collective name", "")) or _annotated(around) or device.name
        group = str(args.get("Process Group Name", ""))
        sequence = self._sequence[group]
        self._sequence[group] += 1
        return Collective(
            collective_kind(name), group, sequence, _ranks(args), _message_bytes(args, around)
        )


def _around(op: TracedOp, call: HostEvent) -> list[HostEvent]:
    """Operator and annotations that a runtime call is inside of, the outermost first."""
    outer = (op.event, *op.nested)
    return [
        event
        for event in outer
        if event.kind != "runtime" and event.start <= call.start < event.end
    ]


def _annotated(around: list[HostEvent]) -> str:
    names = [event.name for event in around if event.name.startswith(("nccl:", "c10d::"))]
    return names[-1] if names else ""


def _ranks(args: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(rank) for rank in re.findall(r"\d+", str(args.get("Process Group Ranks", ""))))


def _message_bytes(args: Mapping[str, Any], around: list[HostEvent]) -> float:
    """Bytes of the larger message of a rank, from its arguments, or the operands of the call."""
    each = bytes_of(str(args.get("dtype", "")))
    counts = [args.get("In msg nelems"), args.get("Out msg nelems")]
    elements = max((count for count in counts if isinstance(count, int)), default=0)
    if args.get("dtype") and elements:
        return float(each * elements)
    for event in reversed(around):
        if event.shapes and event.types and all(isinstance(s, int) for s in event.shapes[0]):
            return float(math.prod(event.shapes[0]) * bytes_of(str(event.types[0])))
    return 0.0
