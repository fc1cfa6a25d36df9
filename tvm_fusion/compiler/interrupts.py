# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while TVM works: a KeyboardInterrupt, whatever TVM makes of it.

A signal's handler raises wherever the interpreter is, also in functions that TVM's C++ code calls.
There TVM turns the exception into an error of its own, or drops it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raise at the end of the block what the handler of SIGINT raised within, if that was lost.

    Where Python handles no signals (in other threads), or SIGINT has no handler of Python's, the
    block is left as it is.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    raised: list[BaseException] = []

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            before(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    except BaseException as error:
        if raised and not isinstance(error, type(raised[0])):
            raise raised[0] from None
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, before)
    if raised:
        raise raised[0]
