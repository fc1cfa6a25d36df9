# SPDX-License-Identifier: Apache-2.0
"""Paths that a user gives, files that are written whole, and the folder of a user's caches."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import ArtifactError, TVMFusionError


def as_path(value: Any, error: type[TVMFusionError]) -> Path:
    """The path that a user gave as a string or as an ``os.PathLike``.

    Parameters
    ----------
    value : str or os.PathLike
        What was given.
    error : type
        Class of the exception.

    Raises
    ------
    TVMFusionError
        Of the class ``error``, if it is neither, or a path of bytes.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise error(f"{value!r:.60} is a {type(value).__name__}; expected a path")
    return Path(text)


def user_cache() -> Path:
    """Folder of what this user's runs leave for later ones, ``$XDG_CACHE_HOME/tvm-fusion``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tvm-fusion")


@contextlib.contextmanager
def written_aside(
    path: str | os.PathLike[str], error: type[TVMFusionError] = ArtifactError
) -> Iterator[Path]:
    """Yield a new file, which replaces ``path`` when the block has written it; else it goes away.

    It is on the disk before it replaces anything, so that half of it is not there even if the power
    fails.

    Parameters
    ----------
    path : path
        Destination; an existing file is replaced.
    error : type
        Class of the exception.

    Raises
    ------
    TVMFusionError
        Of the class ``error``, if the block or the system cannot write the file.
    """
    aside = None
    path = as_path(path, error)
    try:
        target = _real(path)
        if not target.name:
            raise OSError(None, "it is a folder")
        aside = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.partial")
        if target.exists() and not target.is_file():
            raise OSError(None, "it exists and is not a file")
        aside.touch()
        yield aside
        with aside.open("ab") as file:
            os.fsync(file.fileno())
        aside.replace(target)
        _write_through(target.parent)
    except OSError as failure:
        reason = failure.strerror or failure
        raise error(f"cannot write {str(path)!r}: {reason}") from failure
    finally:
        if aside is not None:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)


def _real(path: Path) -> Path:
    """The file that symbolic links lead to."""
    try:
        return Path(os.path.realpath(path))
    except ValueError as failure:  # a zero byte
        raise OSError(None, str(failure)) from failure


def _write_through(folder: Path) -> None:
    """Flush a folder to the disk, on file systems that support it."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
