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
    frames: list[FrameType | None] = []

    def handle(number: int, frame: FrameType | None) -> None:
        frames.append(frame)
        if len(frames) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    except BaseException:
        _end(handle, before, frames)
        raise
    _end(handle, before, frames)


def _end(handle: Any, before: Callable[..., Any], frames: list[FrameType | None]) -> None:
    """Give SIGINT its handler back, and call that for a signal that came."""
    if signal.getsignal(signal.SIGINT) is handle:
        signal.signal(signal.SIGINT, before)
    if frames:
        try:
            before(signal.SIGINT, frames[0])
        except BaseException as interrupt:
            raise interrupt from None  # whatever TVM made of it
