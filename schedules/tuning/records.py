# SPDX-License-Identifier: Apache-2.0
"""Records of tuned kernels: JSON lines, one winner each.

A line names its template with the template's version, the workload, the knobs, the CPU (LLVM's name
for it, or a target with what a system hides of it; bits of a vector, threads), the machine, the
version of TVM, the times of the default and of the winner in seconds, the trials that it took, and
the date. A record of a form (:mod:`schedules.cpu.conv2d.forms`) also has the time of each form.
Only template, version, workload and CPU decide whether a record counts, and then only if its knobs
are in the workload's space: a record of a stranger can choose a slow kernel at worst, and nothing
in it is executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from .template import Space


LONGEST_LINE = 1 << 16
_SHOWN = 3
CPU_KIND = "llvm"
GPU_KINDS = ("cuda", "opencl")

AnySpace: TypeAlias = "Space[Any, Any, Any]"


class Key(NamedTuple):
    """Conditions under which a record counts: all must be equal."""

    workload: str  # JSON with sorted keys.
    cpu: str
    """LLVM's name of the CPU or a target, the architecture of a CUDA device, or ``opencl:`` and the
    name of a device."""
    vector_bits: int
    threads: int
    """``vector_bits`` and ``threads``: width of its vectors, and threads of a kernel; of a GPU, of
    a warp's registers, and its multiprocessors."""


@dataclass(frozen=True)
class Record:
    """The winner of one tuned kernel."""

    template: str  # Name of the template.
    version: int  # Its version.
    workload: Mapping[str, Any]
    knobs: Mapping[str, Any]
    """``workload`` and ``knobs``: both as JSON."""
    cpu: str
    """LLVM's name of the CPU or a target, the architecture of a CUDA device, or ``opencl:`` and the
    name of a device."""
    vector_bits: int
    threads: int
    """``vector_bits`` and ``threads``: width of its vectors, and threads of a kernel; of a GPU, of
    a warp's registers, and its multiprocessors."""
    default_seconds: float
    best_seconds: float
    """``default_seconds`` and ``best_seconds``: times of the default and of these knobs; equal
    where the default stays."""
    trials: int  # Settings that were measured.
    machine: str = ""
    tvm: str = ""
    date: str = ""
    """``machine``, ``tvm`` and ``date``: name of the processor, version of TVM, and date in ISO
    8601."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each form by its name; empty for knobs."""

    @classmethod
    def of_key(
        cls,
        key: Key,
        space: AnySpace,
        knobs: Any,
        seconds: tuple[float, float] = (1.0, 1.0),
        trials: int = 0,
        **origin: Any,
    ) -> Record:
        """Make the record of a setting of a space.

        Parameters
        ----------
        key : Key
            Key of the workload on its target.
        space : Space
            The template.
        knobs : dataclass
            Setting of the space.
        seconds : tuple of float
            Times of the default and of the setting.
        trials : int
            Settings that were measured.
        **origin
            The other fields of a record.
        """
        return cls(
            template=space.name,
            version=space.version,
            workload=json.loads(key.workload),
            knobs=json.loads(json.dumps(asdict(knobs))),
            cpu=key.cpu,
            vector_bits=key.vector_bits,
            threads=key.threads,
            default_seconds=seconds[0],
            best_seconds=seconds[1],
            trials=trials,
            **origin,
        )

    @property
    def key(self) -> Key:
        """Key under which the record counts."""
        return Key(canonical(self.workload), self.cpu, self.vector_bits, self.threads)

    @property
    def gain(self) -> float:
        """Time of the default over that of the winner."""
        return self.default_seconds / self.best_seconds

    def to_line(self) -> str:
        """Write the record as a line of JSON without its end."""
        fields = asdict(self)
        if not self.times:
            del fields["times"]
        return canonical({"kind": self.kind, **fields})

    @property
    def kind(self) -> str:
        """Kind of the target: ``cuda`` or ``opencl`` for templates of GPU kernels."""
        if not self.template.startswith("gpu."):
            return CPU_KIND
        return "opencl" if self.cpu.partition(":")[0] == "opencl" else "cuda"

    def about(self, source: str) -> dict[str, Any]:
        """Return what reports say of it; ``source`` is the name of its file."""
        return {
            "template": self.template,
            "knobs": dict(self.knobs),
            "gain": self.gain,
            "source": source,
            "date": self.date,
        }


def canonical(value: Mapping[str, Any]) -> str:
    """Write JSON with sorted keys: the same text for equal values."""
    return json.dumps(value, sort_keys=True)


def parse_line(line: bytes) -> dict[str, Any]:
    """Read one JSON object.

    Raises
    ------
    ValueError
        If the line is anything else, or holds a number that is not finite.
    """
    found = parse_json(line)
    if not isinstance(found, dict):
        raise ValueError(f"the line holds {type(found).__name__}; expected an object")
    return found


def parse_json(line: bytes) -> Any:
    """Read one JSON value.

    Raises
    ------
    ValueError
        If the line is too long or no JSON, or holds a number that is not finite.
    """
    if len(line) > LONGEST_LINE:
        raise ValueError(f"the line is longer than {LONGEST_LINE} bytes")
    try:
        return json.loads(line.decode(), parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("the line is nested too deeply") from error


def parse_record(line: bytes) -> Record:
    """Read a record from a line.

    Raises
    ------
    ValueError
        If it is no record; the message says why.
    """
    fields = parse_line(line)
    target_kind = fields.pop("kind", None)
    if target_kind not in (CPU_KIND, *GPU_KINDS):
        raise ValueError("the kind of the target is not 'llvm', 'cuda' or 'opencl'")
    times = _read_times(fields.pop("times", {}))
    checks = _CHECKS.keys()
    if fields.keys() != checks:
        names = sorted(fields.keys() ^ checks)
        raise ValueError(f"the fields {', '.join(map(repr, names[:_SHOWN]))} are missing or extra")
    for name, expected in _CHECKS.items():
        value = fields[name]
        if expected is float and type(value) is int and value < 1 << 53:
            value = fields[name] = float(value)
        if type(value) is not expected:
            raise ValueError(f"{name} is {value!r:.50}; expected {expected.__name__}")
    for name in ("default_seconds", "best_seconds"):
        if not _is_time(fields[name]):
            raise ValueError(f"{name} is {fields[name]!r}; expected a positive number")
    for name in ("version", "vector_bits", "threads"):
        if fields[name] < 1:
            raise ValueError(f"{name} is {fields[name]}; expected a positive number")
    if fields["trials"] < 0:
        raise ValueError(f"trials is {fields['trials']}; expected none or more")
    record = Record(**fields, times=times)
    if record.kind != target_kind:
        raise ValueError(
            f"{record.template!r} is not a template for targets of kind {target_kind!r}"
        )
    return record


def _read_times(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not all(map(_is_time, value.values())):
        raise ValueError(f"times is {value!r:.50}; expected positive numbers by name")
    return {name: float(seconds) for name, seconds in value.items()}


def _is_time(value: Any) -> bool:
    number = type(value) is float or (type(value) is int and value < 1 << 53)
    return number and math.isfinite(value) and value > 0


_CHECKS: dict[str, type] = {
    "template": str,
    "version": int,
    "workload": dict,
    "knobs": dict,
    "cpu": str,
    "vector_bits": int,
    "threads": int,
    "default_seconds": float,
    "best_seconds": float,
    "trials": int,
    "machine": str,
    "tvm": str,
    "date": str,
}


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


class Records:
    """Records to choose knobs by.

    Parameters
    ----------
    records : iterable of Record
        The most trusted first; of equals in a file the last one counts.
    """

    def __init__(self, records: Iterable[tuple[str, Record]] = ()) -> None:
        self._by_key: dict[Key, tuple[str, Record]] = {}
        for source, record in records:
            self._by_key.setdefault(record.key, (source, record))

    def __len__(self) -> int:
        return len(self._by_key)

    def lookup(
        self, key: Key, spaces: Sequence[AnySpace], workload: Any, machine: Any
    ) -> tuple[AnySpace, Any, Record, str] | None:
        """Find the space and the setting of a workload, the record, and the name of its file."""
        source, record = self._by_key.get(key, ("", None))
        if record is None:
            return None
        space = next((one for one in spaces if one.name == record.template), None)
        if space is None or space.version != record.version:
            return None
        try:
            setting = space.read_knobs(record.knobs)
        except ValueError:
            return None
        if not space.contains(workload, setting, machine):
            return None
        return space, setting, record, source

    def find(
        self, key: Key, templates: Sequence[AnySpace], workload: Any, machine: Any
    ) -> tuple[Any, Any, str] | None:
        """Find the template and the knobs of a workload, and the record's text for reports."""
        found = self.lookup(key, templates, workload, machine)
        if found is None:
            return None
        template, knobs, record, source = found
        return template, knobs, canonical(record.about(source))
