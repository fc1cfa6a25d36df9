# SPDX-License-Identifier: Apache-2.0
"""Host overheads T1 to T5, measured in traces, saved, and shared between models.

After section 4.3.3 of the dissertation, with three corrections: means keep their tail, what a call
waits for is no overhead, and T1 depends on the operator before, too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PredictionError
from .kineto import KinetoTrace
from .traced_ops import SLACK, TracedCall, TracedOp

HOST_WORK = 1000.0
"""Microseconds between two operators from which on it is work of the host, no overhead."""

MICRO = 1e-6
_FORMAT = "tvm-fusion overheads 1"
_TABLES = ("t1 pair", "t1", "t2", "t3", "t4", "t5", "whole", "delay")
_MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class ProfilerCost:
    """Time that the profiler adds to what it records.

    Parameters
    ----------
    host : float
        Microseconds of each event of the host; 2 in the dissertation.
    device : float
        Microseconds of each event of the device, spent in its launch; 4 in the dissertation.
    """

    host: float = 0.0
    device: float = 0.0


@dataclass
class Overheads:
    """Means of the overheads of operators and runtime calls on one machine.

    Parameters
    ----------
    tables : dict of str to dict
        Count and sum, in microseconds, by name: of ``t1 pair`` by ``"previous -> operator"``, of
        ``t4`` and ``delay`` by runtime call, of others by operator.
    origins : list of str
        Traces that they were measured in.
    """

    tables: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {name: {} for name in _TABLES}
    )
    origins: list[str] = field(default_factory=list)

    def t1(self, previous: str, op: str) -> float:
        """Time between two operators: of the pair, else of the operator."""
        pair = self._mean("t1 pair", f"{previous} -> {op}")
        return self._known("t1", op) if pair is None else pair

    def t2(self, op: str) -> float:
        """Time of an operator before its first runtime call."""
        return self._known("t2", op)

    def t3(self, op: str) -> float:
        """Time of an operator after its last runtime call."""
        return self._known("t3", op)

    def t4(self, call: str) -> float:
        """Time of a runtime call, without what it waits for."""
        return self._known("t4", call)

    def t5(self, op: str) -> float:
        """Time between two runtime calls of an operator."""
        return self._known("t5", op)

    def whole(self, op: str) -> float:
        """Time of an operator that launches nothing."""
        return self._known("whole", op)

    def delay(self, call: str) -> float:
        """Time from a launching call's begin to its kernel's start; half of T4 if unknown."""
        mean = self._mean("delay", call)
        return self.t4(call) / 2 if mean is None else mean

    def add(self, table: str, name: str, micros: float, count: float = 1) -> None:
        """Add measured times of the same mean."""
        entry = self.tables[table].setdefault(name, [0, 0.0])
        entry[0] += count
        entry[1] += count * max(micros, 0.0)

    def merge(self, others: Iterable[Overheads]) -> Overheads:
        """Overheads of all that these and others were measured in."""
        merged = Overheads()
        for one in (self, *others):
            merged.origins += one.origins
            for table, entries in one.tables.items():
                for name, (count, total) in entries.items():
                    merged.add(table, name, total / count, count)
        return merged

    def unknown(self, ops: Iterable[str]) -> list[str]:
        """Operators that were in none of the traces; they get the mean of all others."""
        tables = ("t1", "t2", "whole")
        return sorted({op for op in ops if not any(op in self.tables[name] for name in tables)})

    def save(self, path: Path) -> None:
        """Write a JSON file; one that exists is replaced."""
        tables = {
            table: {name: [count, total / count] for name, (count, total) in entries.items()}
            for table, entries in self.tables.items()
        }
        data = {"format": _FORMAT, "unit": "us", "origins": self.origins, "tables": tables}
        write_aside(path, json.dumps(data, indent=1))

    def _mean(self, table: str, name: str) -> float | None:
        entry = self.tables[table].get(name)
        return None if entry is None else entry[1] / entry[0] * MICRO

    def _known(self, table: str, name: str) -> float:
        """Mean of a name; of one that was never measured the mean of all, without any 0."""
        mean = self._mean(table, name)
        if mean is not None:
            return mean
        entries = self.tables[table].values()
        count = sum(entry[0] for entry in entries)
        return sum(entry[1] for entry in entries) / count * MICRO if count else 0.0


def write_aside(path: Path, text: str) -> None:
    """Write a text beside a file, then rename it.

    Raises
    ------
    PredictionError
        If it cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise PredictionError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
    finally:
        aside.unlink(missing_ok=True)


def load_overheads(path: Path) -> Overheads:
    """Read what :meth:`Overheads.save` wrote.

    Raises
    ------
    PredictionError
        If the file cannot be read, or an entry is no count and mean: the message names it.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise PredictionError(f"{path}: larger than any file of overheads")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise PredictionError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise PredictionError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise PredictionError(f"{path}: expected a file of overheads, of format {_FORMAT!r}")
    result = Overheads(origins=[str(origin) for origin in data.get("origins", ())])
    for table in _TABLES:
        entries: Any = data.get("tables", {}).get(table)
        if not isinstance(entries, Mapping):
            raise PredictionError(f"{path}: no table {table!r}")
        for name, entry in entries.items():
            if not _is_count_and_mean(entry):
                raise PredictionError(
                    f"{path}: {table} of {name!r} is {entry!r}; expected a count and a mean"
                )
            result.add(table, name, entry[1], entry[0])
    return result


def _is_count_and_mean(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and all(type(value) in (int, float) for value in entry)
        and 0 < entry[0] < math.inf
        and 0 <= entry[1] < math.inf
    )


def measure_overheads(
    trace: KinetoTrace, ops: list[TracedOp], cost: ProfilerCost | None = None
) -> Overheads:
    """Measure the overheads of a trace.

    Parameters
    ----------
    trace : KinetoTrace
        The trace.
    ops : list of TracedOp
        Its operators.
    cost : ProfilerCost, optional
        What to subtract; nothing by default, for times as the profiler lets them be.
    """
    cost = cost or ProfilerCost()
    result = Overheads(origins=[trace.path.name])
    threads: dict[int, float] = {}
    latest, previous = float("-inf"), ""
    for op in ops:
        event = op.event
        before = threads.get(event.thread, latest)
        gap = event.start - (max(before, latest) if op.follows else before)
        if previous and gap < HOST_WORK:
            result.add("t1 pair", f"{previous} -> {event.name}", gap - cost.host)
            result.add("t1", event.name, gap - cost.host)
        threads[event.thread] = event.end
        latest, previous = max(latest, event.end), event.name
        if op.calls:
            _measure_calls(result, op, cost)
        else:
            length = event.end - event.start - cost.host * len(op.nested)
            result.add("whole", event.name, length)
    _measure_delays(result, ops, cost)
    return result


def _measure_calls(result: Overheads, op: TracedOp, cost: ProfilerCost) -> None:
    """T2 to T5 of one operator."""
    name, begin = op.event.name, op.event.start

    def host_time(start: float, end: float) -> float:
        events = sum(start <= event.start < end for event in op.nested if event.kind != "runtime")
        return end - start - cost.host * events

    for number, call in enumerate(op.calls):
        result.add("t5" if number else "t2", name, host_time(begin, call.event.start))
        result.add("t4", call_name(call), own_time(call) - (cost.device if call.device else 0.0))
        begin = call.event.end
    result.add("t3", name, host_time(begin, op.event.end))


def _measure_delays(result: Overheads, ops: list[TracedOp], cost: ProfilerCost) -> None:
    """Times from launch to start of kernels that found their stream idle."""
    fronts: dict[int, float] = {}
    for call in sorted((call for op in ops for call in op.calls), key=lambda c: c.event.start):
        device = call.device
        if device is None:
            continue
        front = fronts.get(device.stream, float("-inf"))
        if front < call.event.start and not call.awaited:
            result.add("delay", call_name(call), device.start - call.event.start - cost.device / 2)
        fronts[device.stream] = max(front, device.end)


def call_name(call: TracedCall) -> str:
    """Name of a runtime call; of a copy that blocks another one."""
    blocks = call.waits and call.device is not None
    return f"{call.event.name} (blocking)" if blocks else call.event.name


def own_time(call: TracedCall) -> float:
    """Microseconds of a runtime call, without what it waits for."""
    event = call.event
    return event.end - (max(event.start, min(call.free, event.end)) if call.waits else event.start)


__all__ = ["SLACK", "Overheads", "ProfilerCost", "load_overheads", "measure_overheads"]
