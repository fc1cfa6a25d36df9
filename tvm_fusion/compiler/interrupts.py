# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while TVM works: a KeyboardInterrupt, as soon as TVM is left.

A signal's handler raises wherever the interpreter is, also in functions that TVM's C++ code calls.
There TVM turns the exception into an error of its own, or drops it, and prints a warning of what it
leaves unfinished. So the first signal waits until the pass ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Kept:
    """Handler of SIGINT that leaves the first signal to the end of a block.

    ``before``: the handler that it replaces.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before
        self._frames: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._frames.append(frame)
        if len(self._frames) > 1:
            self.before(number, frame)

    def deliver(self) -> None:
        """Call the handler before this one for a signal that came."""
        if not self._frames:
            return
        frame = self._frames.pop()
        try:
            self.before(signal.SIGINT, frame)
        except BaseException as interrupt:
            raise interrupt from None  # whatever TVM made of it


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Call the handler of SIGINT at the end of the block, if the signal comes within.

    From the second signal on it is called at once, too. Where Python handles no signals (in other
    threads), or SIGINT has no handler of Python's, the block is left as it is.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    kept = _Kept(before)
    with _handler(kept):
        try:
            yield
        except BaseException:
            kept.deliver()
            raise
    kept.deliver()


@contextmanager
def interrupts_at_once() -> Iterator[None]:
    """Let signals through in a part of :func:`interrupts_kept` that waits outside of TVM."""
    kept = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not isinstance(kept, _Kept):
        yield
        return
    before: Any = kept
    while isinstance(before, _Kept):
        before.deliver()
        before = before.before
    with _handler(before):
        yield


@contextmanager
def _handler(handler: Callable[..., Any]) -> Iterator[None]:
    """Handle SIGINT by another function, unless the block changes that itself."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, before)
