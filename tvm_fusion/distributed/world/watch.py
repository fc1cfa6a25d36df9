# SPDX-License-Identifier: Apache-2.0
"""Watch over the ranks of a node, a process that outlives them; it runs this file by its path.

A launcher ends a job one of whose processes was killed, by killing all others: none of them can say
which rank was the first, or what it did. So each rank writes what it does to memory that the watch
shares (:class:`NodeRecord`), and the watch prints that of the rank that is gone.

Only the standard library is imported, so that the process starts in a hundredth of a second.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

SLOT = 256  # bytes of a rank
_HEADER = 64  # a cache line: that of a slot holds nothing of another one
_MOST = 4  # ranks that are named
_OPEN, _LEFT = b"\1", b"\0"
_START_SECONDS = 2.0  # Seconds in which processes start, beside the timeout.
_PATIENCE = 20  # milliseconds between looks at ranks that are about to leave


class NodeRecord:
    """Board of what the ranks of a node do, in a file that they share."""

    def __init__(
        self,
        path: str,  # The file, of :func:`record_bytes`.
        slot: int = -1,  # The number of the process among those of the node; -1 for a reader.
    ) -> None:
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 - open as long as the record
        self._memory = mmap.mmap(self._file.fileno(), 0)
        self._slot = slot
        self._begin = _HEADER + slot * SLOT
        self._text = memoryview(self._memory)[self._begin + 1 : self._begin + SLOT]

    def enter(self) -> None:
        """Note that this rank is in its session."""
        self._memory[self._begin : self._begin + 1] = _OPEN

    def leave(self) -> None:
        """Note that this rank left its session; its end is no failure any more."""
        self._memory[self._begin : self._begin + 1] = _LEFT

    def say(self, text: bytes) -> None:
        """Note what this rank does; ``text`` is made by :func:`slot_text`."""
        self._text[:] = text

    @property
    def text(self) -> memoryview:
        """Memory of what this rank does."""
        return self._text

    def is_open(self, slot: int) -> bool:
        """Return whether a rank is in its session."""
        begin = _HEADER + slot * SLOT
        return self._memory[begin : begin + 1] == _OPEN

    def said(self, slot: int) -> str:
        """Return what a rank does."""
        begin = _HEADER + slot * SLOT
        return self._memory[begin + 1 : begin + SLOT].rstrip(b"\0").decode(errors="replace")

    def claim(self) -> bool:
        """Return whether this is the first failure of the node, the one to be told."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            first = self._memory[:1] == b"\0"
            self._memory[:1] = b"\1"
            return first
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the memory and the file."""
        self._text.release()
        self._memory.close()
        self._file.close()


def record_bytes(ranks: int) -> bytes:
    """Content of a new file of :class:`NodeRecord`."""
    return bytes(_HEADER + ranks * SLOT)


def slot_text(text: str) -> bytes:
    """A text as :meth:`NodeRecord.say` takes it."""
    return text.encode()[: SLOT - 1].ljust(SLOT - 1, b"\0")


def main(pid: int, rank: int, timeout: float) -> None:
    """Watch first the start of one rank, then, if it is told so, all ranks of the node."""
    message = _read_message(pid, rank, timeout)
    if message:
        _watch(message)


def _read_message(pid: int, rank: int, timeout: float) -> dict[str, Any]:
    """Wait for the rank's word that its session has begun; without one, end it."""
    # Higher ranks wait a little longer, so that the first one alone tells what all know.
    patience = timeout + _START_SECONDS + 0.15 * min(rank, 10)
    if not select.select([sys.stdin], [], [], patience)[0]:
        _print(f"rank {rank} waited {timeout:g} s for the other ranks to begin their session")
        os.kill(pid, signal.SIGKILL)
    line = sys.stdin.readline()
    return json.loads(line) if line else {}


def _watch(message: Mapping[str, Any]) -> None:
    record = NodeRecord(message["path"])
    poll, slots = select.poll(), {}
    for slot, pid in enumerate(message["pids"]):
        descriptor = os.pidfd_open(pid)
        poll.register(descriptor, select.POLLIN)
        slots[descriptor] = slot
    poll.register(sys.stdin, select.POLLIN)
    print(flush=True)  # all ranks may go on
    patience = None
    while patience is None or any(map(record.is_open, slots.values())):
        for descriptor, _ in poll.poll(patience):
            poll.unregister(descriptor)
            if descriptor == sys.stdin.fileno():
                patience = _PATIENCE  # this process' own rank ended its session, or is gone
            elif record.is_open(first := slots.pop(descriptor)):
                pids = enumerate(message["pids"])
                gone = {slot for slot, pid in pids if record.is_open(slot) and _is_gone(pid)}
                _tell(record, message, sorted({first, *gone}))
                return


def _is_gone(pid: int) -> bool:
    """Return whether a process has ended or is about to: it has no memory any more."""
    try:
        os.readlink(f"/proc/{pid}/exe")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        pass
    return False


def _tell(record: NodeRecord, message: Mapping[str, Any], gone: Sequence[int]) -> None:
    """Tell of the ranks that are gone: where it is seen late, the launcher has killed others, too.

    Their order is not known: the launcher may hear of a rank's end before its process has ended.
    """
    time.sleep(0.02)  # a rank that aborts the job has told why, or is about to
    if not record.claim():
        return
    ranks, size = message["ranks"], message["size"]
    if len(gone) == 1:
        _print(f"rank {ranks[gone[0]]} of {size} was killed or crashed, {record.said(gone[0])}")
        return
    each = "; ".join(f"rank {ranks[slot]} {record.said(slot)}" for slot in gone[:_MOST])
    more = f"; and {len(gone) - _MOST} more" if len(gone) > _MOST else ""
    _print(f"{len(gone)} of {size} ranks were killed or crashed: {each}{more}")


def _print(text: str) -> None:
    print(f"tvm-fusion: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
