# SPDX-License-Identifier: Apache-2.0
"""Paths that a user gives, and the folder of a user's caches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .errors import TVMFusionError


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
