# SPDX-License-Identifier: Apache-2.0
"""Records of tuned kernels: JSON lines, one winner each.

A line names its template with the template's version, the workload, the knobs, the CPU (LLVM's name
for it, bits of a vector, threads), the machine, the version of TVM, the times of the default and of
the winner in seconds, the trials that it took, and the date. Only template, version, workload and
CPU decide whether a record counts, and then only if the template finds its knobs in the workload's
space: a record of a stranger can choose a slow kernel at worst, and nothing in it is executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from .template import Template

RECORD = "tvm_fusion.record"
"""Attribute of a scheduled function: the record that chose its knobs, as JSON."""

LONGEST_LINE = 1 << 16
_SHOWN = 3


class Key(NamedTuple):
    """What must be equal for a record to count.

    Parameters
    ----------
    workload : str
        JSON with sorted keys.
    cpu : str
        LLVM's name of the CPU.
    vector_bits, threads : int
        Width of its vectors, and threads of a kernel.
    """

    workload: str
    cpu: str
    vector_bits: int
    threads: int


@dataclass(frozen=True)
class Record:
    """The winner of one tuned kernel.

    Parameters
    ----------
    template : str
        Name of the template.
    version : int
        Its version.
    workload, knobs : dict
        Both as JSON.
    cpu : str
        LLVM's name of the CPU.
    vector_bits, threads : int
        Width of its vectors, and threads of a kernel.
    default_seconds, best_seconds : float
        Times of the default and of these knobs; equal where the default stays.
    trials : int
        Settings that were measured.
    machine, tvm, date : str
        Name of the processor, version of TVM, and date in ISO 8601.
    """

    template: str
    version: int
    workload: Mapping[str, Any]
    knobs: Mapping[str, Any]
    cpu: str
    vector_bits: int
    threads: int
    default_seconds: float
    best_seconds: float
    trials: int
    machine: str = ""
    tvm: str = ""
    date: str = ""

    @property
    def key(self) -> Key:
        """What must be equal for the record to count."""
        return Key(canonical(self.workload), self.cpu, self.vector_bits, self.threads)

    @property
    def gain(self) -> float:
        """Time of the default over that of the winner."""
        return self.default_seconds / self.best_seconds

    def to_line(self) -> str:
        """Write the record as a line of JSON without its end."""
        return canonical({"kind": "llvm", **asdict(self)})


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
    found = parse_line(line)
    if found.pop("kind", None) != "llvm":
        raise ValueError("the kind of the target is not 'llvm'")
    checks = _CHECKS.keys()
    if found.keys() != checks:
        names = sorted(found.keys() ^ checks)
        raise ValueError(f"the fields {', '.join(map(repr, names[:_SHOWN]))} are missing or extra")
    for name, kind in _CHECKS.items():
        value = found[name]
        if kind is float and type(value) is int and value < 1 << 53:
            value = found[name] = float(value)
        if type(value) is not kind:
            raise ValueError(f"{name} is {value!r:.50}; expected {kind.__name__}")
    for name in ("default_seconds", "best_seconds"):
        if not (math.isfinite(found[name]) and found[name] > 0):
            raise ValueError(f"{name} is {found[name]!r}; expected a positive number")
    for name in ("version", "vector_bits", "threads"):
        if found[name] < 1:
            raise ValueError(f"{name} is {found[name]}; expected a positive number")
    if found["trials"] < 0:
        raise ValueError(f"trials is {found['trials']}; expected none or more")
    return Record(**found)


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

    def find(
        self, key: Key, templates: Sequence[Template[Any, Any, Any]], workload: Any, machine: Any
    ) -> tuple[Template[Any, Any, Any], Any, str] | None:
        """Find the template and the knobs of a workload, and the record's text for reports."""
        source, record = self._by_key.get(key, ("", None))
        if record is None:
            return None
        template = next((one for one in templates if one.name == record.template), None)
        if template is None or template.version != record.version:
            return None
        try:
            knobs = template.read_knobs(record.knobs)
        except ValueError:
            return None
        if not template.contains(workload, knobs, machine):
            return None
        about = {
            "template": record.template,
            "knobs": dict(record.knobs),
            "gain": record.gain,
            "source": source,
            "date": record.date,
        }
        return template, knobs, canonical(about)
