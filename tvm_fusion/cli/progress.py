# SPDX-License-Identifier: Apache-2.0
"""One line on a terminal at standard error: what a command does, how far it is, for how long.

It is there before anything slow is imported, and goes when the command writes something.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

Report = Callable[[str, int, int], None]
"""Told what is being done, how many parts of it are, and the number of all of them."""

TICK = 0.5
"""Seconds between two movements of the clock."""

_BAR = 20
_ERASE = "\r\x1b[2K"


class _Line:
    """The line, and the thread that moves its clock where that may disturb what goes on."""

    def __init__(self, text: str, has_clock: bool) -> None:
        self.name, self.has_clock = text, has_clock
        self._text, self._done, self._total = text, 0, 0
        self._begin = time.monotonic()
        self._turn = threading.Lock()
        self._is_over = threading.Event()
        self._draw()
        threading.Thread(target=self._tick, name="tvm_fusion.clock", daemon=True).start()

    def tell(self, text: str, done: int = 0, total: int = 0) -> None:
        """Show another text, and how far it is."""
        self._text, self._done, self._total = text, done, total
        self._draw()

    def erase(self) -> None:
        """Take the line from the terminal."""
        with self._turn:
            self._is_over.set()
            sys.stderr.write(_ERASE)
            sys.stderr.flush()

    def _tick(self) -> None:
        while not self._is_over.wait(TICK):
            if self.has_clock:
                self._draw()

    def _draw(self) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
        clock = f" {minutes}:{seconds:02d}"
        bar = ""
        if self._total:
            full = _BAR * min(self._done, self._total) // self._total
            bar = f" [{'=' * full}{' ' * (_BAR - full)}]"
        room = shutil.get_terminal_size().columns - len(bar + clock) - 1
        with self._turn:
            if not self._is_over.is_set():
                sys.stderr.write(f"{_ERASE}{self._text[: max(0, room)]}{bar}{clock}")
                sys.stderr.flush()


_line: _Line | None = None


def begin(text: str, clock: bool) -> None:
    """Show what the process does, until :func:`end`; nothing if standard error is no terminal."""
    global _line
    end()
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        _line = _Line(text, clock)


def end() -> None:
    """Take the line away; whoever writes to a terminal calls this first."""
    global _line
    if _line is not None:
        _line.erase()
        _line = None


@contextlib.contextmanager
def progress_bar(clock: bool = False) -> Iterator[Report]:
    """Show a bar on a terminal at standard error while the block runs.

    ``clock``: whether a clock moves beside it. Where the block measures it would disturb, and moves
    only when something is reported.
    """
    is_mine = _line is None
    if is_mine:
        begin("starting", clock)
    line = _line
    if line is None:
        yield lambda text, done, total: None
        return
    before, line.has_clock = line.has_clock, clock
    try:
        yield line.tell
    finally:
        line.has_clock = before
        if is_mine:
            end()
        else:
            line.tell(line.name)
