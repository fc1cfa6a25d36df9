# SPDX-License-Identifier: Apache-2.0
"""Records of tuning jobs that a compilation uses: the user's own, and those of the package.

Files of records (:mod:`schedules.tuning.records`) may come from strangers.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import tvm
from tvm import tirx
from tvm.target import Target

from relay_passes import recorded_forms
from schedules import attributes, cpu, gpu
from schedules.gpu.core.machine import GPUInfo
from schedules.tuning.records import LONGEST_LINE, AnySpace, Record, Records, parse_record

from ..errors import RecordWarning, TuningError
from ..paths import as_path
from .targets import is_gpu

TRIALS = "trials.jsonl"
"""File of a database that logs trials; all other ``*.jsonl`` files hold records."""

_SHOWN = 3


class Line(NamedTuple):
    """A line of a file: its number, its record, and why it has none."""

    number: int
    record: Record | None
    reason: str = ""


def read_lines(path: Path) -> Iterator[Line]:
    """Read a file line by line; the longest line takes no more memory than a record may.

    Raises TuningError if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(bounded_lines(file), 1):
                try:
                    yield Line(number, parse_record(line))
                except ValueError as error:
                    yield Line(number, None, str(error))
    except OSError as error:
        raise TuningError(
            f"cannot read records from {str(path)!r}: {error.strerror or error}"
        ) from error


def bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file, each cut one byte after the longest that is allowed."""
    while line := file.readline(LONGEST_LINE + 1):
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(LONGEST_LINE)):
            pass
        yield line


def read_records(path: Path) -> list[Record]:
    """Read the records of a file; one :class:`RecordWarning` names the lines that hold none."""
    lines = list(read_lines(path))
    bad = [line for line in lines if line.record is None]
    if bad:
        shown = "; ".join(f"line {line.number}: {line.reason}" for line in bad[:_SHOWN])
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        warnings.warn(f"{path} has lines that are not records: {shown}{more}", RecordWarning, 2)
    return [line.record for line in lines if line.record is not None]


def record_files(path: Path) -> list[Path]:
    """Files of records: ``path`` itself, or all in a folder.

    Raises TuningError if there is no such file or folder.
    """
    if os.path.isdir(path):  # noqa: PTH112  false where pathlib raises: a name too long
        return sorted(file for file in path.glob("*.jsonl") if file.name != TRIALS)
    if not os.path.exists(path):  # noqa: PTH110
        raise TuningError(
            f"no records at {str(path)!r}; expected a file of records, a folder that "
            "tvm-fusion tune has filled, or 'none'"
        )
    return [path]


def load_records(files: Sequence[Path], versions: Mapping[str, int]) -> Records:
    """Read files, the most trusted first.

    ``files``: files of JSON lines; their bad lines are skipped with one warning a file.
    ``versions``: templates that exist, with their versions. Records of others are ignored, with one
    warning for all. Raises TuningError if a file cannot be read.
    """
    named: list[tuple[str, Record]] = []
    ignored = 0
    for file in files:
        read = read_records(file)
        current = [one for one in read if versions.get(one.template) == one.version]
        ignored += len(read) - len(current)
        named += [(file.name, one) for one in reversed(current)]
    if ignored:
        warnings.warn(
            f"{ignored} tuning records are for other versions of the templates, and are "
            "ignored; run tvm-fusion tune again",
            RecordWarning,
            stacklevel=2,
        )
    return Records(named)


SHIPPED = Path(__file__).resolve().parents[1] / "database"
"""Folder of the package's own records: one file a CPU, named after it."""

NONE = "none"

SPACES: dict[str, AnySpace] = {**cpu.SPACES, **gpu.TEMPLATES}
"""All that a record can choose from, by name."""


def choose_records(records: str | os.PathLike[str] | None, target: Target) -> Records:
    """Load the records for a target.

    ``records``: a file of records, the folder of a tuning job, ``"none"`` for no records at all, or
    None for those of the package only. ``target``: a resolved target. Returns the user's own win
    over the package's. Raises TuningError if there is no such file or folder.
    """
    if records == NONE:
        return Records()
    files = [] if records is None else record_files(as_path(records, TuningError))
    name = GPUInfo.from_target(target).name if is_gpu(target) else target.attrs["mcpu"]
    shipped = SHIPPED / f"{name}.jsonl"
    files += [shipped] if shipped.exists() else []
    return load_records(files, {name: one.version for name, one in SPACES.items()})


def record_of(func: tirx.PrimFunc) -> dict[str, Any] | None:
    """Return the record that chose the knobs of a scheduled function, if one did.

    It has ``template``, ``knobs``, ``gain``, ``source`` (the name of its file) and ``date``.
    """
    text = func.attrs.get(attributes.RECORD) if func.attrs else None
    return None if text is None else json.loads(str(text))


def used_records(mod: tvm.IRModule) -> list[dict[str, Any]]:
    """Return the records that an optimised module follows.

    Each with the name of its ``function``; those of forms with the layers instead.
    """
    found = recorded_forms(mod)
    for variable, func in mod.functions.items():
        record = record_of(func) if isinstance(func, tirx.PrimFunc) else None
        if record is not None:
            found.append({"function": str(variable.name_hint)} | record)
    return sorted(found, key=lambda record: record["function"])
