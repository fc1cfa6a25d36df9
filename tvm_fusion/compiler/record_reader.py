# SPDX-License-Identifier: Apache-2.0
"""Reading of files of records (:mod:`schedules.tuning.records`), which may come from strangers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from schedules.tuning.records import LONGEST_LINE, Record, Records, parse_record

from ..errors import RecordWarning, TuningError

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

    Raises
    ------
    TuningError
        If the file cannot be read.
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

    Raises
    ------
    TuningError
        If there is no such file or folder.
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

    Parameters
    ----------
    files : sequence of Path
        Files of JSON lines; their bad lines are skipped with one warning a file.
    versions : mapping
        Templates that exist, with their versions. Records of others are ignored, with one
        warning for all.

    Raises
    ------
    TuningError
        If a file cannot be read.
    """
    found: list[tuple[str, Record]] = []
    ignored = 0
    for file in files:
        read = read_records(file)
        current = [one for one in read if versions.get(one.template) == one.version]
        ignored += len(read) - len(current)
        found += [(file.name, one) for one in reversed(current)]
    if ignored:
        warnings.warn(
            f"{ignored} tuning records are for other versions of the templates, and are "
            "ignored; run tvm-fusion tune again",
            RecordWarning,
            stacklevel=2,
        )
    return Records(found)
