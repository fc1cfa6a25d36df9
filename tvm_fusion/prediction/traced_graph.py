# SPDX-License-Identifier: Apache-2.0
"""Execution graph of a traced rank: its operators with kernels, waits and collectives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .kineto import DeviceEvent, HostEvent, KinetoTrace
from .overheads import HOST_WORK, MICRO, call_name, own_time
from .timeline.execution_graph import HOST, Collective, ExecutionGraph, Kernel, Launch, Op, Wait
from .traced_ops import TracedCall, TracedOp

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
_BYTES = {
    "double": 8, "long": 8, "longint": 8, "int64": 8, "float": 4, "int": 4, "int32": 4,
    "float32": 4, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "float16": 2,
    "short": 2, "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1, "unsignedchar": 1,
}  # fmt: skip


def traced_graph(trace: KinetoTrace, ops: list[TracedOp], rank: int) -> ExecutionGraph:
    """Graph of a trace; its kernels take the times that were measured.

    Of a run on the CPU each operator is one kernel of the host.
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
        self._on_host = not trace.device_events
        self._sequence: Counter[str] = Counter()
        self._next = 0

    def op(self, traced: TracedOp) -> Op:
        """Operator of a trace; a gap that is work of the host stays as it is."""
        event, gap = traced.event, traced.gap
        steps: list[Launch | Wait] = []
        begin = event.start
        for call in traced.calls:
            steps += self._host_work(event.name, call.event.start - begin)
            steps += self._host_work(call.event.name, own_time(call))
            steps.append(self._step(call, traced))
            begin = call.event.end
        steps += self._host_work(event.name, event.end - begin)
        known = 0.0 if gap is None else gap * MICRO if gap >= HOST_WORK else None
        counts, before = traced.events, traced.before
        return Op(event.name, tuple(steps), event.thread, traced.follows, known, before, counts)

    def _host_work(self, name: str, micros: float) -> list[Launch | Wait]:
        """Work of the host inside an operator: long, or any on a CPU alone."""
        if micros < HOST_WORK and not self._on_host:
            return []
        self._next -= 1
        return [Launch(Kernel(self._next, name, micros * MICRO, HOST), name)]

    def _step(self, call: TracedCall, op: TracedOp) -> Launch | Wait:
        device = call.device
        if device is None:
            return Wait(call.awaited, call_name(call))
        kernel = Kernel(
            call.event.correlation,
            device.name,
            (device.end - device.start) * MICRO,
            device.stream,
            call.awaited,
            self._collective(device, op, call.event),
        )
        return Launch(kernel, call_name(call), call.waits)

    def _collective(self, device: DeviceEvent, op: TracedOp, call: HostEvent) -> Collective | None:
        if not re.search("nccl|rccl", device.name, re.IGNORECASE):
            return None
        outer = (op.event, *op.nested)
        around = [event for event in outer if event.start <= call.start < event.end]
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


def collective_kind(name: str) -> str:
    """Kind of a collective by any of its names: ``nccl:all_to_all``, ``alltoallv`` and others."""
    bare = re.sub("[^a-z0-9]", "", name.lower().removeprefix("nccl:").removeprefix("c10d::"))
    if bare in _KINDS:
        return _KINDS[bare]
    found = [kind for part, kind in _KINDS.items() if part in bare]
    return found[0] if found else "send" if "sendrecv" in bare else bare


def _annotated(around: list[HostEvent]) -> str:
    names = [event.name for event in around if event.name.startswith(("nccl:", "c10d::"))]
    return names[-1] if names else ""


def _ranks(args: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(rank) for rank in re.findall(r"\d+", str(args.get("Process Group Ranks", ""))))


def _message_bytes(args: Mapping[str, Any], around: list[HostEvent]) -> float:
    """Bytes of the larger message of a rank, from its arguments, or the operands of the call."""
    each = _BYTES.get(str(args.get("dtype", "")).lower().replace(" ", ""), 0)
    counts = [args.get("In msg nelems"), args.get("Out msg nelems")]
    elements = max((count for count in counts if isinstance(count, int)), default=0)
    if each and elements:
        return float(each * elements)
    for event in reversed(around):
        if event.shapes and event.types and all(isinstance(s, int) for s in event.shapes[0]):
            size = 1
            for dim in event.shapes[0]:
                size *= dim
            return float(size * _BYTES.get(str(event.types[0]).replace(" ", ""), 4))
    return 0.0
