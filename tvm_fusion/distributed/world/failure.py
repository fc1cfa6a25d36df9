# SPDX-License-Identifier: Apache-2.0
"""End of a job that failed: one line that says why, on all ranks an exit code that is not 0.

====================================  =========================================================
what happens to a rank in a session   who notices it
====================================  =========================================================
exception, ``sys.exit`` with a code   the rank itself, which aborts the job
``os._exit``                          the rank itself: MPICH's launcher would take 0 for success
signal, crash                         the launcher, which kills all ranks; the watch tells why
hang, ``sys.exit(0)``                 the ranks that wait for it, at their deadline
what all ranks find wrong             all; each leaves by itself, the first one tells why
====================================  =========================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...errors import DistributedError, TVMFusionError
from ...machine.host import launched_rank
from .watch import NodeRecord

_LONGEST = 400  # characters of a reason; its traceback has the rest


class DisagreementError(DistributedError):
    """Error that all ranks find at the same place, so that none waits for another."""


class ExitCallError(BaseException):
    """A call of ``os._exit``, with its code."""


class Watch:
    """The process of :mod:`.watch` that belongs to this rank."""

    def __init__(
        self,
        timeout: float,  # Seconds for the other ranks to begin their session.
    ) -> None:
        rank = str(launched_rank())
        script = Path(__file__).with_name("watch.py")
        # A session of its own: launchers kill by process groups.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(os.getpid()), rank, str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def begin(self, path: str, pids: Sequence[int], ranks: Sequence[int], size: int) -> None:
        """Watch over all ranks of this node from now on; the file is not needed any more."""
        message = {"path": path, "pids": list(pids), "ranks": list(ranks), "size": size}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def end(self) -> None:
        """End the process; it stays while it watches over others."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)


def describe(error: BaseException) -> str | None:
    """Describe what happened to this rank; None for an exit without an error."""
    if isinstance(error, SystemExit):
        return None if error.code in (0, None) else f"ended by sys.exit({error.code!r})"
    if isinstance(error, ExitCallError):
        return f"called os._exit({error})"
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted"
    text = " ".join(str(error).split())[:_LONGEST]
    if isinstance(error, DistributedError):
        return text
    return f"failed: {text}" if isinstance(error, TVMFusionError) else _named(error, text)


def tell(
    record: NodeRecord,
    # ``rank``, ``size``: this rank, and the number of ranks.
    rank: int,
    size: int,
    doing: str,  # The exchange and the ranks that take part, as in the record.
    error: BaseException,  # The reason; its traceback is printed, too, if it is none of ours.
) -> None:
    """Print why the job ends, unless another rank of the node did so already."""
    if not record.claim():
        return
    if isinstance(error, Exception) and not isinstance(error, TVMFusionError):
        traceback.print_exception(error)
    who, text = f"rank {rank} of {size}", describe(error) or ""
    if not isinstance(error, DistributedError):
        print_line(f"{who} {text}, {doing}")
    else:  # its text says where; that of a deadline goes on with what the rank did
        print_line(f"{who} {text}" if text.startswith("waited ") else f"{who}: {text}")


def print_line(text: str) -> None:
    """Print a line of ours, at once."""
    sys.stdout.flush()
    print(f"tvm-fusion: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def guarded_exit(leave: Callable[[int], Any]) -> Any:
    """Call ``leave`` in place of ``os._exit`` in this process, though not in children of it."""
    original, pid = os._exit, os.getpid()

    def replacement(status: int) -> Any:
        if os.getpid() == pid:
            leave(status)
        original(status)

    os._exit = replacement
    try:
        yield
    finally:
        os._exit = original


def _named(error: BaseException, text: str) -> str:
    return f"raised {type(error).__name__}: {text}" if text else f"raised {type(error).__name__}"
