# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of a node share: slots through which short parcels go.

MPI copies a message between two ranks of a node twice, into memory that both share and out of it.
Into a slot the sender packs, and out of it the receiver unpacks: two copies instead of four.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from schedules.distribute.rows.exchange_table import SLOT_HEADER, SLOT_SIZE, SLOT_TAKEN

MOST_BYTES = 1024 * 1024
"""Bytes of a parcel that goes through a slot; fewer where many ranks share the memory."""

_LEAST_ROOM = 1024  # bytes
_LEAST_MOST = 256 * 1024  # Bytes of a parcel, however many ranks there are.
_FEWEST = 8  # So many of the longest parcels have room.
_FEWEST_IN_TURN = 4  # Room for two exchanges in turn, and for shorter ones.
_ARENA = 1 << 23  # bytes for all that a rank sends on its node
_LINE = 64  # a cache line: what the sender writes shares none with what the receiver writes
_HEADER = SLOT_HEADER
_SENT, _SIZE, _TAKEN = 0, SLOT_SIZE, SLOT_TAKEN  # places in the header
_IN_ORDER = ("x86_64", "AMD64")
"""Processors that let others see stores in their order. Elsewhere Python has no fence for them."""


class Slot:
    """Place of one message at a time from one rank to another.

    Attributes
    ----------
    data : np.ndarray
        Bytes of the message; the sender's while the slot is empty, else the receiver's.
    address : int
        Address of the header.
    """

    def __init__(
        self,
        memory: memoryview,  # Header, then data; all of it 0 at first.
    ) -> None:
        self.data = np.frombuffer(memory[_HEADER:], np.uint8)
        self.address = int(self.data.ctypes.data) - _HEADER
        self._counts = memory[:_HEADER]  # Counts of messages, modulo 256.
        self._size = memory[_SIZE : _SIZE + 8].cast("Q")

    @property
    def is_full(self) -> bool:
        """True from :meth:`send` to :meth:`take`."""
        return self._counts[_SENT] != self._counts[_TAKEN]

    @property
    def nbytes(self) -> int:
        """Bytes of the message, as the sender has told."""
        return self._size[0]

    def send(self, nbytes: int) -> None:
        """Hand the data to the receiver."""
        self._size[0] = nbytes
        self._counts[_SENT] = (self._counts[_TAKEN] + 1) % 256

    def take(self) -> None:
        """Give the slot back to the sender."""
        self._counts[_TAKEN] = self._counts[_SENT]


class SlotSend:
    """Send through a slot, with those methods of a persistent request of MPI that are called."""

    def __init__(self, slot: Slot, nbytes: int) -> None:
        self._slot, self._nbytes = slot, nbytes

    def Start(self) -> None:  # noqa: N802 - MPI's name
        """Hand what was packed to the receiver."""
        self._slot.send(self._nbytes)

    def Test(self, status: Any = None) -> bool:  # noqa: N802
        """Return whether the receiver has taken it, so that the next one may be packed."""
        return not self._slot.is_full

    def Free(self) -> None:  # noqa: N802
        """Nothing: the slot is that of all such messages of its exchange."""


class SlotReceive:
    """Receive through a slot, request and status of MPI at once."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def Start(self) -> None:  # noqa: N802
        """Nothing: the sender needs no word."""

    def Test(self, status: Any = None) -> bool:  # noqa: N802
        """Return whether a message is there."""
        return self._slot.is_full

    def Get_count(self, datatype: Any = None) -> int:  # noqa: N802
        """Return the bytes of the message."""
        return self._slot.nbytes

    def Free(self) -> None:  # noqa: N802
        """Nothing: the slot is that of all such messages of its exchange."""


class NodeSlots:
    """Slots of all pairs of ranks of a node, in a file that they share.

    Both ranks of a pair first ask for the slots of its exchanges in the same order, and so find
    them at the same places. A slot stays that of an exchange's messages up to a power of two of
    bytes, so that it does not matter which of them a rank prepares anew.

    Attributes
    ----------
    most : int
        Bytes of the longest parcel that goes through a slot, except in turns.
    most_in_turn : int
        Bytes of the longest parcel that goes in turn.
    """

    def __init__(
        self,
        path: str,  # The file, of :func:`shared_file`.
        places: Mapping[int, int],  # Ranks of this node, two or more, numbered from 0.
        rank: int,  # This rank.
    ) -> None:
        with open(path, "r+b") as file:
            self._memory = memoryview(mmap.mmap(file.fileno(), 0))
        self._places, self._rank = places, rank
        self._quota = _ARENA // (len(places) - 1) // _LINE * _LINE
        self.most = min(MOST_BYTES, max(self._quota // _FEWEST, _LEAST_MOST))
        room = 1 << (self._quota // _FEWEST_IN_TURN).bit_length() - 1  # Bytes of a slot.
        self.most_in_turn = min(MOST_BYTES, max(room, _LEAST_MOST))
        self._used: dict[tuple[int, int], int] = {}
        self._slots: dict[tuple[int, int, int, int], Slot | None] = {}

    def outgoing(self, number: int, peer: int, nbytes: int) -> Slot | None:
        """Slot with a number for what this rank sends; None if MPI is to send it."""
        return self._slot(number, self._rank, peer, nbytes)

    def incoming(self, number: int, peer: int, nbytes: int) -> Slot | None:
        """Slot with a number for what this rank receives; None if MPI is to receive it."""
        return self._slot(number, peer, self._rank, nbytes)

    def _slot(self, number: int, source: int, dest: int, nbytes: int) -> Slot | None:
        most = self.most_in_turn if number < 0 else self.most
        if source == dest or nbytes > most or not {source, dest} <= self._places.keys():
            return None
        room = max(_LEAST_ROOM, 1 << (nbytes - 1).bit_length())
        key = number, source, dest, room
        if key not in self._slots:
            self._slots[key] = self._allocate(source, dest, room)
        return self._slots[key]

    def _allocate(self, source: int, dest: int, room: int) -> Slot | None:
        """A new slot; None if the memory of this pair is in use."""
        size = _HEADER + room
        begin = self._used.get((source, dest), 0)
        if begin + size > self._quota:
            return None
        self._used[source, dest] = begin + size
        row, column = self._places[source], self._places[dest]
        begin += self._quota * (row * (len(self._places) - 1) + column - (column > row))
        return Slot(self._memory[begin : begin + size])


@contextmanager
def shared_file(ranks: int) -> Iterator[str]:
    """Path of a file for a node's slots, as long as it is open here; empty where there can be none.

    The file has no name of its own: it goes with the processes that have opened it, however they
    end.
    """
    if ranks < 2 or platform.machine() not in _IN_ORDER:
        yield ""
        return
    try:
        number = os.memfd_create("tvm_fusion")
    except OSError:
        yield ""
        return
    try:
        yield f"/proc/{os.getpid()}/fd/{number}" if _allocate(number, ranks * _ARENA) else ""
    finally:
        os.close(number)


def _allocate(number: int, size: int) -> bool:
    """Give a file its pages, which may lack later; return whether there were as many."""
    try:
        os.posix_fallocate(number, 0, size)
    except OSError:
        return False
    return True
