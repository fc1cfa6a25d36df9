# SPDX-License-Identifier: Apache-2.0
"""Folder of a tuning job: the winners in ``records.jsonl``, and a log of all trials beside them.

Every line is one write under a lock, so that several jobs can share a folder. Reading takes no
lock: a line that is half written is no record yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from schedules.tuning.records import Key, Record, canonical, parse_line

from ..compiler.record_reader import TRIALS, bounded_lines, read_lines
from ..errors import TuningError

RECORDS = "records.jsonl"
LOCKS = ("filelock",)
EXTRA = ("xgboost", *LOCKS)


def require_extra(packages: Sequence[str] = EXTRA) -> None:
    """Check that packages of the extra ``tune`` are installed, by default those of a job.

    Raises
    ------
    TuningError
        If one is not.
    """
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise TuningError(
            f"tuning needs {' and '.join(missing)}; install the extra with: "
            "pip install 'tvm-fusion[tune]'"
        )


class Database:
    """The folder of a job; it is made if it does not exist.

    Parameters
    ----------
    folder : Path
        The folder.

    Raises
    ------
    TuningError
        If it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(None, "the folder is not writable")
        except OSError as error:
            raise TuningError(
                f"cannot write the database {str(folder)!r}: {error.strerror or error}"
            ) from error

    def add_record(self, record: Record) -> None:
        """Append a winner."""
        append_line(self.folder / RECORDS, record.to_line())

    def add_trial(self, key: Key, about: Mapping[str, Any]) -> None:
        """Append a trial: ``template``, ``version``, ``knobs``, and ``ratio`` or ``failure``."""
        append_line(self.folder / TRIALS, canonical({"task": task_id(key), **about}))

    def records(self) -> dict[Key, Record]:
        """Read the winners; of those of one key the last."""
        path = self.folder / RECORDS
        if not path.exists():
            return {}
        return {line.record.key: line.record for line in read_lines(path) if line.record}

    def trials(self, key: Key) -> list[dict[str, Any]]:
        """Read the log of one task; lines that are no trials are skipped."""
        path = self.folder / TRIALS
        if not path.exists():
            return []
        task, matching = task_id(key), []
        with path.open("rb") as file:
            for line in bounded_lines(file):
                with contextlib.suppress(ValueError):
                    trial = parse_line(line)
                    if trial.get("task") == task and is_trial(trial):
                        matching.append(trial)
        return matching


def task_id(key: Key) -> str:
    """Short name of a task, the same for equal keys."""
    return hashlib.sha256(canonical(key._asdict()).encode()).hexdigest()[:16]


def is_trial(trial: Mapping[str, Any]) -> bool:
    """Return whether the fields of a trial have the right types."""
    ratio = trial.get("ratio")
    measured = isinstance(ratio, float) and math.isfinite(ratio) and ratio > 0
    return (
        isinstance(trial.get("template"), str)
        and isinstance(trial.get("version"), int)
        and isinstance(trial.get("knobs"), dict)
        and (measured or isinstance(trial.get("failure"), str))
    )


def append_line(path: Path, text: str) -> None:
    """Append one line to a file that other processes append to as well.

    Raises
    ------
    TuningError
        If the file cannot be written.
    """
    from filelock import FileLock

    try:
        with FileLock(lock_of(path)), path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end:  # a writer that was killed may have left half a line
                file.seek(end - 1)
                text = text if file.read(1) == b"\n" else f"\n{text}"
            file.write(f"{text}\n".encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TuningError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def lock_of(path: Path) -> Path:
    """Return the lock of a file, which lies beside it."""
    return path.with_name(f".{path.name}.lock")


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Wait until no other job of this user measures on this machine, and keep others waiting."""
    from filelock import FileLock

    with FileLock(measuring_lock()):
        yield


def measuring_lock() -> Path:
    """Return the lock that a job of this user holds while it measures."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir(), f"tvm-fusion-measure-{user}.lock")
