# SPDX-License-Identifier: Apache-2.0
"""Reading of JSON files of strangers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from schedules.errors import PredictionError


def read_json(path: Path, largest: int, what: str) -> Any:
    """Read a JSON file, if it is not too large to be what it should be.

    Parameters
    ----------
    path : Path
        The file.
    largest : int
        Bytes that it may have.
    what : str
        Its kind, for the message: ``file of tables``.

    Raises
    ------
    PredictionError
        If it cannot be read, is larger, or is not JSON: the message names the file.
    """
    try:
        if path.stat().st_size > largest:
            raise PredictionError(f"{path}: larger than any {what}")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise PredictionError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise PredictionError(f"{path}: not JSON: {error}") from None
