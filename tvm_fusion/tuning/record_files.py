# SPDX-License-Identifier: Apache-2.0
"""Files of records: checked, merged, pruned and passed on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from schedules.cpu.core.machine import CPUInfo
from schedules.gpu.core.machine import GPUInfo
from schedules.tuning.records import CPU_KIND, Key, Record, canonical, parse_line, parse_record

from ..compiler.record_reader import (
    SPACES,
    TRIALS,
    bounded_lines,
    read_lines,
    read_records,
    record_files,
)
from ..compiler.targets import arch_of, resolve
from ..errors import TuningError, TVMFusionError
from ..paths import written_aside
from .database import LOCKS, Database, append_line, is_trial, lock_of, require_extra

TRIAL_FIELDS = {"task", "template", "version", "knobs", "ratio", "failure", "reason"}
_MOST_THREADS = 1 << 20
_VECTORS = {512: ["+avx512f"], 256: ["+avx2", "+fma", "-avx512f"], 128: ["-avx2"]}
"""Features of x86-64 by bits of its vectors."""
_NAMELESS = ("generic", "x86-64")
"""Names that LLVM gives to a CPU that it does not know, whatever it can."""


@dataclass(frozen=True)
class Finding:
    """A line that no compilation will use."""

    file: str  # Its file.
    line: int  # Its number.
    reason: str  # Why.


def all_records(path: Path) -> list[Record]:
    """Read the records of a file or a folder; bad lines are skipped with a warning."""
    return [record for file in record_files(path) for record in read_records(file)]


def verify(path: Path) -> tuple[int, list[Finding]]:
    """Check every line of a file or a folder; return how many are good, and the others."""
    good, bad = 0, []
    for file in record_files(path):
        for number, record, reason in read_lines(file):
            why = reason if record is None else fault(record)
            if why:
                bad.append(Finding(str(file), number, why))
            else:
                good += 1
    return good, bad


def fault(record: Record) -> str:
    """Return why a record does not count on its own CPU, or nothing."""
    template = SPACES.get(record.template)
    if template is None:
        return f"there is no template {record.template!r}"
    if template.version != record.version:
        return f"it is for version {record.version} of its template, which has {template.version}"
    if not all(abs(number) <= template.most for number in _integers(record.workload)):
        return f"an extent of its workload is more than {template.most}"
    try:
        machine: CPUInfo | GPUInfo
        if record.kind == CPU_KIND:
            machine = cpu_of(record)
            if machine.vector_bits != record.vector_bits:
                return f"{record.cpu} has vectors of {machine.vector_bits} bits"
        else:
            machine = GPUInfo.named(record.cpu, record.threads)
            if machine.warp_bits != record.vector_bits:
                return f"{record.cpu} has warps of {machine.warp_bits} bits"
        workload = template.read_workload(canonical(record.workload))
        knobs = template.read_knobs(record.knobs)
        legal = template.contains(workload, knobs, machine)
    except (TVMFusionError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        return f"its workload or CPU cannot be used: {error}"
    except ValueError as error:
        return str(error)
    return "" if legal else "its knobs are not in the space of its workload on its CPU"


def cpu_of(record: Record) -> CPUInfo:
    """The CPU of a record, with the vectors that its system let it use."""
    target = resolve(record.cpu, cores=min(record.threads, _MOST_THREADS))
    machine = CPUInfo.from_target(target)
    is_possible = record.vector_bits < machine.vector_bits or record.cpu in _NAMELESS
    if record.vector_bits == machine.vector_bits or not is_possible or arch_of(target) != "x86_64":
        return machine
    features = _VECTORS.get(record.vector_bits, [])
    return CPUInfo.from_target(resolve({**target.export(), "mattr": features}))


def _integers(value: object) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _integers(item)
    elif isinstance(value, int | float):
        yield value


def merge(inputs: Iterable[Path], output: Path) -> int:
    """Write the records of several files to one, the last one of each key; return how many."""
    found: dict[Key, Record] = {}
    for path in inputs:
        found |= {record.key: record for record in all_records(path)}
    _rewrite(output, lambda: list(found.values()))
    return len(found)


def prune(path: Path) -> tuple[int, int]:
    """Leave the last usable record of each key in a file or folder; return those kept and gone."""
    kept = gone = 0
    for file in record_files(path):
        lines = kept_here = 0

        def last(file: Path = file) -> list[Record]:
            nonlocal lines, kept_here
            read = list(read_lines(file))
            lasting = {
                line.record.key: line.record
                for line in read
                if line.record is not None and not fault(line.record)
            }
            lines, kept_here = len(read), len(lasting)
            return list(lasting.values())

        _rewrite(file, last)
        kept, gone = kept + kept_here, gone + lines - kept_here
    return kept, gone


def export(database: Path, output: Path, family: str | None = None) -> int:
    """Write the usable records of a database, of one CPU if it is named; return how many."""
    records = {
        record.key: record
        for record in all_records(database)
        if family in (None, record.cpu) and not fault(record)
    }
    _rewrite(output, lambda: list(records.values()))
    return len(records)


def import_records(database: Path, inputs: Iterable[Path]) -> tuple[int, int]:
    """Append usable records of files to a database; return how many, and how many were refused."""
    require_extra(LOCKS)
    folder = Database(database)
    taken = refused = 0
    for path in inputs:
        for record in all_records(path):
            if fault(record):
                refused += 1
            else:
                folder.add_record(record)
                taken += 1
    return taken, refused


def import_measured(database: Path, file: Path) -> tuple[int, int, int]:
    """Append a file of :mod:`.candidates` to a database: data of a stranger, of which none is run.

    Returns
    -------
    tuple[int, int, int]
        Records and trials taken, and lines refused: no JSON, no trial, or no usable record.
    """
    require_extra(LOCKS)
    folder = Database(database)
    records = trials = refused = 0
    with file.open("rb") as lines:
        for line in bounded_lines(lines):
            try:
                found = parse_line(line)
                if "task" in found:
                    if set(found) - TRIAL_FIELDS or not is_trial(found):
                        raise ValueError("the line is no trial")
                    append_line(folder.folder / TRIALS, canonical(found))
                    trials += 1
                    continue
                record = parse_record(line)
            except ValueError:
                refused += 1
                continue
            if fault(record):
                refused += 1
            else:
                folder.add_record(record)
                records += 1
    return records, trials, refused


def _rewrite(path: Path, records: Callable[[], list[Record]]) -> None:
    """Replace a file under its lock, so that no line that a job appends is lost."""
    require_extra(LOCKS)
    from filelock import FileLock

    with written_aside(path, TuningError) as aside, FileLock(lock_of(path)):
        aside.write_text("".join(f"{record.to_line()}\n" for record in records()))
