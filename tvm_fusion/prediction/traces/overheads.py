# SPDX-License-Identifier: Apache-2.0
"""Host overheads T1 to T5, measured in traces, saved, and shared between models.

After section 4.3.3 of the dissertation, with corrections: means keep their tail, what a call waits
for is no overhead, T1 depends on the operator before, too, and all on the events inside of them:
nested operators, and calls of Python functions where the profiler recorded those.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from schedules.cost.machine import read_json

from ...errors import PredictionError
from ...paths import written_aside
from ..timeline.execution_graph import Op
from .kineto import KinetoTrace
from .traced_ops import TracedCall, TracedOp

HOST_WORK = 1000.0
"""Microseconds that are work of the host, no overhead: reading data, loading or tuning kernels."""

MICRO = 1e-6
_FORMAT = "tvm-fusion overheads 1"
_TABLES = ("t1 pair", "t1", "t2", "t3", "t4", "t5", "whole", "delay")
_MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class ProfilerCost:
    """Time that the profiler adds to what it records."""

    host: float = 0.0  # Microseconds of each event of the host; 2 in the dissertation.
    device: float = 0.0
    """Microseconds of each event of the device, spent in its launch; 4 in the dissertation."""


@dataclass
class Mean:
    """Sums from which means and a line of times over events follow, and which can be added."""

    count: float = 0.0  # Number of times.
    micros: float = 0.0  # Sum of the times, in microseconds.
    events: float = 0.0  # Sum of the events that the profiler recorded in them.
    squares: float = 0.0
    products: float = 0.0
    """``squares`` and ``products``: sums of events squared, and of events times microseconds."""

    def add(self, micros: float, events: int = 0) -> None:
        """Add a time."""
        self.merge(Mean(1, micros, events, events * events, events * micros))

    def merge(self, other: Mean) -> None:
        """Add the times of another."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def line(self) -> tuple[float, float]:
        """Least-squares line through the times: microseconds of no event, and of each event."""
        if not self.count:
            return 0.0, 0.0
        spread = self.squares - self.events**2 / self.count
        slope = 0.0
        if spread > 1e-9 * self.squares:
            slope = max((self.products - self.events * self.micros / self.count) / spread, 0.0)
        return max((self.micros - slope * self.events) / self.count, 0.0), slope

    def above(self, line: tuple[float, float], prior: float) -> float:
        """Mean by which the times, and ``prior`` more on the line, exceed a line."""
        excess = self.micros - line[0] * self.count - line[1] * self.events
        return excess / (self.count + prior)


_SUMS = tuple(entry.name for entry in fields(Mean))


@dataclass
class Overheads:
    """Overheads of operators and runtime calls on one machine.

    Each is estimated as a line over the events inside it, which holds for unknown operators too,
    plus what the operator, then the pair of operators, takes more.
    """

    tables: dict[str, dict[str, Mean]] = field(
        default_factory=lambda: {name: {} for name in _TABLES}
    )
    """Sums by name: of ``t1 pair`` by ``"previous -> operator"``, of ``t4`` and ``delay`` by
    runtime call, of others by operator."""
    origins: list[str] = field(default_factory=list)  # Traces that they were measured in.
    prior: float = 2.0
    """Number of an operator's measured times that weigh as much as the line of all operators; 0 for
    a prediction of the traces that they were measured in."""
    _lines: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    def t1(self, previous: str, op: Op) -> float:
        """Time between two operators: by the operator, and by the pair."""
        estimate = self._estimate("t1", op.name, op.before)
        pair = self.tables["t1 pair"].get(f"{previous} -> {op.name}")
        if pair is None:
            return estimate * MICRO
        base, slope = self._line("t1")
        known = self.tables["t1"][op.name].above((base, slope), self.prior)
        return max(estimate + pair.above((base + known, slope), self.prior), 0.0) * MICRO

    def t2(self, op: Op) -> float:
        """Time of an operator before its first runtime call."""
        return self._estimate("t2", op.name, _events(op, 0)) * MICRO

    def t3(self, op: Op) -> float:
        """Time of an operator after its last runtime call."""
        return self._estimate("t3", op.name, op.events[-1] if op.events else 0) * MICRO

    def t4(self, call: str) -> float:
        """Time of a runtime call, without what it waits for."""
        return self._estimate("t4", call, 0) * MICRO

    def t5(self, op: Op, step: int) -> float:
        """Time between two runtime calls of an operator."""
        return self._estimate("t5", op.name, _events(op, step)) * MICRO

    def whole(self, op: Op) -> float:
        """Time of an operator that launches nothing."""
        return self._estimate("whole", op.name, _events(op, 0)) * MICRO

    def delay(self, call: str) -> float:
        """Time from a launching call's begin to its kernel's start; half of T4 if unknown."""
        if call in self.tables["delay"]:
            return self._estimate("delay", call, 0) * MICRO
        return self.t4(call) / 2

    def add(self, table: str, name: str, micros: float, events: int = 0) -> None:
        """Add a measured time."""
        self.tables[table].setdefault(name, Mean()).add(max(micros, 0.0), events)
        self._lines.clear()

    def merge(self, others: Iterable[Overheads]) -> Overheads:
        """Overheads of all that these and others were measured in."""
        merged = Overheads()
        for one in (self, *others):
            merged.origins += one.origins
            for table, entries in one.tables.items():
                for name, entry in entries.items():
                    merged.tables[table].setdefault(name, Mean()).merge(entry)
        return merged

    def unknown(self, ops: Iterable[str]) -> list[str]:
        """Operators that were in none of the traces."""
        tables = ("t1", "t2", "whole")
        return sorted({op for op in ops if not any(op in self.tables[name] for name in tables)})

    def save(self, path: Path) -> None:
        """Write a JSON file; one that exists is replaced."""
        tables = {
            table: {name: [getattr(entry, part) for part in _SUMS] for name, entry in means.items()}
            for table, means in self.tables.items()
        }
        data = {"format": _FORMAT, "sums": _SUMS, "origins": self.origins, "tables": tables}
        with written_aside(path, PredictionError) as aside:
            aside.write_text(json.dumps(data, indent=1))

    def _line(self, table: str) -> tuple[float, float]:
        if table not in self._lines:
            total = Mean()
            for entry in self.tables[table].values():
                total.merge(entry)
            self._lines[table] = total.line()
        return self._lines[table]

    def _estimate(self, table: str, name: str, events: int) -> float:
        line = self._line(table)
        entry = self.tables[table].get(name)
        more = entry.above(line, self.prior) if entry is not None else 0.0
        return max(line[0] + line[1] * events + more, 0.0)


def _events(op: Op, index: int) -> int:
    return op.events[index] if index < len(op.events) else 0


def load_overheads(path: Path) -> Overheads:
    """Read what :meth:`Overheads.save` wrote.

    Raises ``PredictionError`` if the file cannot be read, or an entry is no count and mean: the
    message names it.
    """
    data = read_json(path, _MAX_FILE_BYTES, "file of overheads")
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise PredictionError(f"{path}: expected a file of overheads, of format {_FORMAT!r}")
    origins, tables = data.get("origins", []), data.get("tables")
    if not isinstance(origins, list) or not isinstance(tables, Mapping):
        raise PredictionError(f"{path}: expected a list of 'origins' and an object of 'tables'")
    result = Overheads(origins=[str(origin) for origin in origins])
    for table in _TABLES:
        entries: Any = tables.get(table)
        if not isinstance(entries, Mapping):
            raise PredictionError(f"{path}: no table {table!r}")
        for name, entry in entries.items():
            if not _are_sums(entry):
                raise PredictionError(
                    f"{path}: {table} of {name!r} is {entry!r}; expected {', '.join(_SUMS)}"
                )
            result.tables[table][name] = Mean(*map(float, entry))
    return result


def _are_sums(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == len(_SUMS)
        and all(type(value) in (int, float) and 0 <= value < math.inf for value in entry)
        and entry[0] >= 1
    )


def measure_overheads(
    trace: KinetoTrace,
    ops: list[TracedOp],
    # What to subtract; nothing by default, for times as the profiler lets them be.
    cost: ProfilerCost | None = None,
) -> Overheads:
    """Measure the overheads of a trace."""
    cost = cost or ProfilerCost()
    result = Overheads(origins=[trace.path.name])
    previous = ""
    for op in ops:
        name = op.event.name
        if op.gap is not None and op.gap < HOST_WORK:
            micros = op.gap - cost.host * (1 + op.before)
            result.add("t1 pair", f"{previous} -> {name}", micros, op.before)
            result.add("t1", name, micros, op.before)
        previous = name
        if op.calls:
            _measure_calls(result, op, cost)
        else:
            _add(result, "whole", name, op.event.end - op.event.start, op.events[0], cost)
    _measure_delays(result, ops, cost)
    return result


def _measure_calls(result: Overheads, op: TracedOp, cost: ProfilerCost) -> None:
    """T2 to T5 of one operator."""
    name, begin = op.event.name, op.event.start
    for number, (call, events) in enumerate(zip(op.calls, op.events, strict=False)):
        _add(result, "t5" if number else "t2", name, call.event.start - begin, events, cost)
        on_host = call.device is not None and call.device.on_host  # then it is a kernel
        if own_time(call) < HOST_WORK and not on_host:
            recorded = cost.device if call.device else 0.0
            result.add("t4", call_name(call), own_time(call) - recorded)
        begin = call.event.end
    _add(result, "t3", name, op.event.end - begin, op.events[-1], cost)


def _add(
    result: Overheads, table: str, name: str, micros: float, events: int, cost: ProfilerCost
) -> None:
    """Add a time without its events' cost, unless it is work of the host."""
    if micros < HOST_WORK:
        result.add(table, name, micros - cost.host * events, events)


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
