# SPDX-License-Identifier: Apache-2.0
"""Kineto traces of PyTorch's profiler, read piece by piece: events of the host and of the device.

Of CPU, NVIDIA and AMD alike. All times are microseconds, as in the file, from its first event.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

from tvm_fusion.errors import PredictionError

_CHUNK = 1 << 20
_MAX_VALUE = 64 << 20
"""Characters of the longest value that is taken into memory."""

_SPACES = " \t\r\n"


def json_items(path: Path, *arrays: str) -> Iterator[tuple[str, Any]]:
    """Read a file, plain or gzip, of one JSON object, with the elements of some arrays one by one.

    Yields name and value of each field; of the fields ``arrays`` its name and an element each time.

    Raises ``PredictionError`` if the file is empty, cut off, no JSON object, or holds a value of
    more than 64 MB: the message names the file and how many elements were read before.
    """
    count = 0
    try:
        with _open(path) as file:
            reader = _Reader(file)
            reader.expect("{")
            while reader.peek() != "}":
                name = reader.value()
                reader.expect(":")
                if name in arrays and reader.peek() == "[":
                    reader.expect("[")
                    while reader.peek() != "]":
                        yield str(name), reader.value()
                        count += 1
                        reader.separator("]")
                    reader.expect("]")
                else:
                    yield str(name), reader.value()
                reader.separator("}")
    except (ValueError, EOFError, zlib.error, OSError, RecursionError) as error:
        reason = "the file is empty" if path.exists() and not path.stat().st_size else error
        raise PredictionError(
            f"{path}: cannot be read after {count} elements of {' or '.join(arrays)}: {reason}"
        ) from None


def _open(path: Path) -> IO[str]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8")


class _Reader:
    """Position in a text that is read in chunks."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._decode = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """Return the next character that is no space."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACES:
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                raise ValueError("it is cut off")

    def expect(self, character: str) -> None:
        """Skip a character that must come next."""
        found = self.peek()
        if found != character:
            raise ValueError(f"found {found!r}; expected {character!r}")
        self._at += 1

    def separator(self, end: str) -> None:
        """Skip a comma, unless the end comes next."""
        if self.peek() != end:
            self.expect(",")

    def value(self) -> Any:
        """Return the next value, whatever it is."""
        self.peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                # A number at the end of the chunk may go on in the next one.
                if end < len(self._text):
                    self._at = end
                    return value
                if not self._more():
                    raise ValueError("it is cut off")
            except json.JSONDecodeError as error:
                if not self._more():
                    cut = error.pos >= len(self._text) - 1 or "Unterminated" in error.msg
                    raise ValueError("it is cut off" if cut else error.msg) from None
            if len(self._text) - self._at > _MAX_VALUE:
                raise ValueError(f"a value of more than {_MAX_VALUE >> 20} MB")

    def _more(self) -> bool:
        """Read on; each time twice as much of a value that does not fit."""
        rest = self._text[self._at :]
        chunk = self._file.read(max(_CHUNK, len(rest)))
        self._text, self._at = rest + chunk, 0
        return bool(chunk)


_HOST_KINDS = {
    "cpu_op": "op",
    "Operator": "op",
    "operator": "op",
    "user_annotation": "annotation",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "hip_runtime": "runtime",
    "hip_driver": "runtime",
    "Runtime": "runtime",
}
BATCHED = "fbgemm::"
"""Prefix of operators that look up several tables at once, whose sizes are among their operands."""

WITH_VALUES = (BATCHED, "aten::conv", "aten::_conv", "aten::_embedding_bag_backward")
"""Beginnings of operators of which operands that are no tensors are kept."""

_DEVICE_KINDS = {"kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset"}
_COLLECTIVE_ARGS = (
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "dtype",
    "In split size",
    "Out split size",
    "Process Group Name",
    "Process Group Ranks",
)


class ProcessGroup(NamedTuple):
    """Process group that a rank belongs to."""

    name: str  # Name, the same on all ranks.
    ranks: tuple[int, ...]  # Its ranks; empty for all.


@dataclass(slots=True)
class HostEvent:
    """Event of a thread of the host."""

    name: str  # Operator, runtime function or annotation.
    kind: str  # ``op``, ``runtime`` or ``annotation``.
    thread: int
    start: float
    end: float
    """``start`` and ``end``: microseconds."""
    correlation: int = 0  # Number that a runtime call shares with what it launches; 0 for none.
    external: int = -1
    record_function: int = -1
    """``external`` and ``record_function``: numbers by which an execution trace is linked; -1 for
    none."""
    shapes: tuple = ()
    types: tuple = ()
    """``shapes`` and ``types``: dimensions and element types of the operands."""
    values: tuple = ()  # Operands that are no tensors, by position, of operators ``WITH_VALUES``.
    collective: Mapping[str, Any] | None = None  # Arguments of a collective.
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    """``reads`` and ``writes``: storages of the tensors that go in and come out, from an execution
    trace."""


@dataclass(slots=True)
class DeviceEvent:
    """Kernel or copy on a device."""

    name: str  # Device function, or kind of the copy.
    copies: bool  # Whether it is a copy or a fill.
    stream: int
    start: float
    end: float
    """``start`` and ``end``: microseconds."""
    bytes: float = 0.0  # Bytes of a copy.
    collective: Mapping[str, Any] | None = None  # Arguments of a collective.
    on_host: bool = False  # Whether a thread of the host runs it.


@dataclass
class KinetoTrace:
    """Events of a trace that a prediction needs."""

    path: Path  # File.
    base: float = 0.0  # Time of the first event by the file's clock, in microseconds.
    rank: int | None = None
    world: int | None = None
    """``rank`` and ``world``: rank and number of ranks, where the file says so."""
    device: str = ""  # Name of the device; empty for a run on the CPU.
    host: list[HostEvent] = field(default_factory=list)
    """Events of the host by start; of two that start together the longer comes first."""
    device_events: dict[int, DeviceEvent] = field(default_factory=dict)  # Events by correlation.
    queued: dict[int, DeviceEvent] = field(default_factory=dict)
    """Those that were launched before the trace began, by correlation."""
    groups: tuple[ProcessGroup, ...] = ()
    """Process groups of the rank in the order in which it made them, where the file says so."""
    python: dict[int, array[float]] = field(default_factory=dict)
    """Starts of the calls of Python functions, by thread, where the profiler recorded them."""
    problems: dict[str, list] = field(default_factory=dict)
    """Number of events that could not be used, and the first of them, by reason."""

    @property
    def is_on_host(self) -> bool:
        """Whether no device ran anything."""
        return all(event.on_host for event in self.device_events.values())

    def count_problem(self, reason: str, event: str) -> None:
        """Count an event that cannot be used."""
        self.problems.setdefault(reason, [0, event])[0] += 1

    def warnings(self) -> list[str]:
        """A line for each reason: file, count and first event."""
        return [
            f"{self.path.name}: {count} {reason}; the first: {first}"
            for reason, (count, first) in self.problems.items()
        ]


def read_kineto(path: Path) -> KinetoTrace:
    """Read a Kineto trace, plain or gzip, in memory for the events it keeps.

    Raises ``PredictionError`` if the file is no Kineto trace, cut off, or without operators.
    """
    trace = KinetoTrace(path)
    reader = _EventReader(trace)
    is_trace = False
    for name, value in json_items(path, "traceEvents"):
        if name == "traceEvents":
            is_trace = True
            reader.add(value)
        elif name == "distributedInfo" and isinstance(value, dict):
            trace.rank, trace.world = _rank(value.get("rank")), _rank(value.get("world_size"))
            trace.groups = process_groups(value.get("pg_config"))
        elif name == "deviceProperties" and isinstance(value, list) and value:
            trace.device = str(value[0].get("name", "")) if isinstance(value[0], dict) else ""
    if not is_trace:
        raise PredictionError(f"{path}: no field 'traceEvents'; expected a Kineto trace")
    reader.finish()
    if not any(event.kind == "op" for event in trace.host):
        raise PredictionError(
            f"{path}: no operators among {sum(reader.kinds.values())} events; expected some of "
            "category cpu_op (profile with ProfilerActivity.CPU)"
        )
    return trace


def process_groups(entries: Any) -> tuple[ProcessGroup, ...]:
    """Process groups of objects with ``pg_name`` and ``ranks``; other entries are left out."""
    found = []
    for entry in entries if isinstance(entries, list) else []:
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
            found.append(ProcessGroup(str(entry.get("pg_name")), tuple(ranks)))
    return tuple(found)


class _EventReader:
    """Turns the events of a file into those of a trace."""

    def __init__(self, trace: KinetoTrace) -> None:
        self._trace = trace
        self._shared: dict[Any, Any] = {}
        self.kinds: Counter[str] = Counter()

    def add(self, event: Any) -> None:
        """Keep an event, if it says what the host or the device does."""
        if not isinstance(event, dict):
            self._trace.count_problem("entries that are not events", repr(event)[:80])
            return
        kind = str(event.get("cat"))
        self.kinds[kind] += 1
        known = kind in _HOST_KINDS or kind in _DEVICE_KINDS or kind == "python_function"
        if event.get("ph") != "X" or not known:
            return
        name, start, length = event.get("name"), event.get("ts"), event.get("dur")
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        where = f"{name} at {start} us"
        if not isinstance(name, str) or not _is_number(start) or not _is_number(length):
            self._trace.count_problem("events without name, start or duration", where)
        elif length < 0:
            self._trace.count_problem("events of negative duration", f"{where}: {length} us")
        elif kind in _DEVICE_KINDS:
            self._add_device(kind, sys.intern(name), float(start), float(length), args)
        elif kind == "python_function":
            self._trace.python.setdefault(_thread(event), array("d")).append(start)
        else:
            self._add_host(kind, sys.intern(name), float(start), float(length), event, args)

    def _add_device(self, kind: str, name: str, start: float, length: float, args: dict) -> None:
        correlation = args.get("correlation")
        if not isinstance(correlation, int):
            self._trace.count_problem("kernels without correlation", f"{name} at {start} us")
            return
        copies = kind.lower().removeprefix("gpu_") in ("memcpy", "memset")
        stream = args.get("stream")
        moved = args.get("bytes", 0)
        self._trace.device_events[correlation] = DeviceEvent(
            name,
            copies,
            stream if isinstance(stream, int) else 0,
            start,
            start + length,
            float(moved) if _is_number(moved) else 0.0,
            _collective_args(args),
        )

    def _add_host(
        self, kind: str, name: str, start: float, length: float, event: dict, args: dict
    ) -> None:
        operands = _HOST_KINDS[kind] != "runtime"
        self._trace.host.append(
            HostEvent(
                name,
                _HOST_KINDS[kind],
                _thread(event),
                start,
                start + length,
                _integer(args.get("correlation"), 0),
                _integer(args.get("External id"), -1),
                _integer(args.get("Record function id"), -1),
                self._share(args.get("Input Dims", args.get("Input dims"))) if operands else (),
                self._share(args.get("Input type")) if operands else (),
                self._share(args.get("Concrete Inputs")) if name.startswith(WITH_VALUES) else (),
                _collective_args(args) if operands else None,
            )
        )

    def finish(self) -> None:
        """Sort the events, and count kernels that nobody launched."""
        trace = self._trace
        trace.host.sort(key=lambda event: (event.start, -event.end))
        self._set_aside_queued()
        everything: list[HostEvent | DeviceEvent] = [*trace.host, *trace.device_events.values()]
        everything += trace.queued.values()
        trace.base = min((event.start for event in everything), default=0.0)
        for one in everything:
            one.start -= trace.base
            one.end -= trace.base
        for thread, starts in trace.python.items():
            trace.python[thread] = array("d", sorted(start - trace.base for start in starts))

    def _set_aside_queued(self) -> None:
        """Part the kernels whose launch is not in the trace."""
        trace = self._trace
        launched = {event.correlation for event in trace.host if event.kind == "runtime"}
        orphans = [key for key in trace.device_events if key not in launched]
        for correlation in sorted(orphans, key=lambda key: trace.device_events[key].start):
            event = trace.queued[correlation] = trace.device_events.pop(correlation)
            trace.count_problem(
                "kernels without their launch, taken as launched before the trace began",
                f"{event.name[:80]} at {event.start} us (correlation {correlation})",
            )

    def _share(self, value: Any) -> tuple:
        """The value as tuples, each kept once; traces repeat their shapes."""
        frozen = _frozen(value)
        return self._shared.setdefault(frozen, frozen) if isinstance(frozen, tuple) else ()


def _frozen(value: Any) -> Any:
    """A value of JSON as what can be a key; objects, which no shape or type holds, become None."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return None if isinstance(value, dict) else value


def _collective_args(args: dict) -> Mapping[str, Any] | None:
    if "Collective name" not in args:
        return None
    return {name: args[name] for name in _COLLECTIVE_ARGS if name in args}


def _thread(event: Mapping[str, Any]) -> int:
    thread = event.get("tid")
    return thread if isinstance(thread, int) else hash(str(thread))


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


def _integer(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def _rank(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
