# SPDX-License-Identifier: Apache-2.0
"""JSON objects too large for memory, read piece by piece."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ...errors import PredictionError

_CHUNK = 1 << 20
_MAX_VALUE = 64 << 20
"""Characters of the longest value that is taken into memory."""

_SPACES = " \t\r\n"


def json_items(path: Path, *arrays: str) -> Iterator[tuple[str, Any]]:
    """Read a file, plain or gzip, of one JSON object, with the elements of some arrays one by one.

    Yields name and value of each field; of the fields ``arrays`` its name and an element each time.

    Raises
    ------
    PredictionError
        If the file is empty, cut off, no JSON object, or holds a value of more than 64 MB: the
        message names the file and how many elements were read before.
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
