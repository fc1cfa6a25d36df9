# SPDX-License-Identifier: Apache-2.0
"""Slots of a workspace, so that calls of one module may run at the same time on several streams.

A launch is named by its number, which the device has, its stream, and the address of its output. A
pool of memory may give one address to calls on two streams; and a launch that was captured into a
graph keeps address and stream, on whatever stream the graph is replayed, beside launches of today
that have the same ones. Where numbers are missing, as on OpenCL, launches of one stream follow each
other.

The first of the blocks of a launch that has a result claims a slot under that name, under a lock;
the others find it there, and the block that finishes the last tile releases it. A launch for which
no slot is left waits for one; a launch waits for blocks that have not started only if their launch
has a slot.

Who waits for about half a minute gives up: it notes that in the header, then goes on with anything,
so that the kernel ends. Its outputs, and slots and tickets, are then worth nothing; the host sees
the note and sets the workspace to zero (:mod:`tvm_fusion.runtime.memory`). Unless the header
says that the host looks for the note, the kernel ends in a trap instead, on CUDA, and with it
all later ones of the process.

The next use of a slot is ordered after all previous accesses to it: releasing, claiming and finding
it each have a fence. On OpenCL the device needs ``cl_khr_int64_base_atomics``.

A block that has the slot draws a ticket of its tile: long before its results are there, so that
nothing waits for it. The block with the last one combines the results of all, which have drawn
theirs, so that they run and will store them. Tickets begin again after those of two launches, of
which each draws all tickets of its half: the half is the launch's tag
(:mod:`schedules.gpu.core.tagged_words`). Each launch stores all words of its slot and tile, so
those of the launch before have the other tag, and words that were never stored the tag zero. The
words and tickets of the launch before are older, since the slot is given back, by a release, only
after all words were seen, and by the block that drew the last ticket.

Header, tickets and words of a workspace lie as in :mod:`schedules.workload.workspace_layout`.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules.tir.index_math import i64
from schedules.tir.statements import when
from schedules.workload.workspace_layout import (
    FAILED,
    FINISHED,
    HEADER_WORDS,
    LOCK,
    PLACES,
    WATCHED,
    ticket_stride,
)

from .intrinsics import (
    acquire,
    address_number,
    bound_address,
    draw_ticket,
    launch_number,
    publish,
    read_now,
    try_lock,
    wait_a_moment,
)
from .machine import GPUInfo

# Odd, and far from any ratio of addresses, so that different launches have different names.
_STREAM_FACTOR = 0x61C8864680B583EB
_LAUNCH_FACTOR = 0x2545F4914F6CDD1D


class LaunchPlace:
    """The slot of the launch, and the ticket of the block, in shared memory.

    The number of the slot, the tag, and whether the block is the last one, are there after
    :meth:`read`.

    Parameters
    ----------
    gpu : GPUInfo
        The device.
    workspace : tirx.Buffer
        Begins with the header.
    output : tirx.Expr
        Address of an output.
    stream : tirx.Expr
        Number of the launch's stream.
    blocks, tiles : int
        Blocks of a tile, and tiles.
    tile : tirx.Expr
        Tile of the block.
    """

    def __init__(
        self,
        gpu: GPUInfo,
        workspace: tirx.Buffer,
        output: tirx.Expr,
        stream: tirx.Expr,
        blocks: int,
        tiles: int,
        tile: tirx.Expr,
    ) -> None:
        self._gpu = gpu
        self._blocks, self._tiles, self._tile = blocks, tiles, tile
        self._words = T.decl_buffer(workspace.shape, "int32", data=workspace.data)
        self._names = T.decl_buffer((HEADER_WORDS // 2,), "int64", data=workspace.data)
        named = address_number(gpu, output) + stream * i64(_STREAM_FACTOR)
        self._name = T.bind(named + launch_number(gpu) * i64(_LAUNCH_FACTOR))
        self._place = T.alloc_buffer((1,), "int32", scope="shared")
        self._ticket = T.alloc_buffer((1,), "int32", scope="shared")
        IRBuilder.name("place", self._place)
        IRBuilder.name("ticket", self._ticket)
        self._drawn = T.alloc_buffer((1,), "int32", scope="local")
        self._read: tuple[tirx.Expr, tirx.Expr, tirx.Expr] | None = None

    def read(self) -> None:
        """Read what :meth:`take` has found, once for all later uses."""
        place, ticket = T.bind(self._place[0]), T.bind(self._ticket[0])
        address = T.address_of(self._names[_bounded(place)])
        self._read = place, ticket, bound_address(self._gpu, address)

    @property
    def is_read(self) -> bool:
        """Whether :meth:`read` was called."""
        return self._read is not None

    @property
    def number(self) -> tirx.Expr:
        """Number of the slot.

        Its bound, which TVM knows of the mask but not of a load, keeps indices narrow.
        """
        return _bounded(self._known[0])

    @property
    def tag(self) -> tirx.Expr:
        """Tag of the launch, 1 or 2."""
        second = self._known[1] >= tirx.const(self._blocks, "int32")
        return second.astype("int32") + tirx.const(1, "int32")

    @property
    def is_last(self) -> tirx.Expr:
        """Whether the block has the last ticket of its tile."""
        last = (tirx.const(half * self._blocks - 1, "int32") for half in (1, 2))
        return tirx.any(*(tirx.EQ(self._known[1], each) for each in last))

    @property
    def _known(self) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
        assert self._read is not None, "slot and ticket are used before they are read"
        return self._read

    def take(self) -> None:
        """Find or claim the slot and draw a ticket, on one thread of the block."""
        zero = tirx.const(0, "int32")
        lock = T.address_of(self._words[LOCK])
        slot, locked, turn = (T.alloc_buffer((1,), "int32", scope="local") for _ in range(3))
        T.buffer_store(slot, tirx.const(-1, "int32"), [0])
        T.buffer_store(locked, zero, [0])
        T.buffer_store(turn, zero, [0])
        with T.While(slot[0] < zero):
            names = self._read_names()
            T.buffer_store(slot, _find(names, self._name), [0])
            with T.If(tirx.EQ(locked[0], zero)):
                with T.Then(), when(slot[0] < zero, _find(names, i64(0)) >= zero):
                    T.buffer_store(locked, try_lock(self._gpu, lock), [0])
                with T.Else():
                    self._claim(names, slot)
                    T.buffer_store(locked, zero, [0])
                    publish(self._gpu, lock, zero)
            with when(slot[0] < zero, tirx.EQ(locked[0], zero)):
                T.buffer_store(turn, turn[0] + tirx.const(1, "int32"), [0])
                self.wait(turn[0], lambda: T.buffer_store(slot, zero, [0]))
        acquire(self._gpu)  # the slot's old content has been read before it is overwritten
        T.buffer_store(self._place, slot[0], [0])
        at = i64(HEADER_WORDS) + _bounded(slot[0]) * i64(ticket_stride(self._tiles)) + self._tile
        ticket = draw_ticket(self._gpu, T.address_of(self._words[at]), 2 * self._blocks)
        T.buffer_store(self._drawn, ticket, [0])

    def wait(self, turn: tirx.Expr, give_up: Callable[[], None]) -> None:
        """Emit a pause, or what a thread does that gives up."""
        wait_a_moment(self._gpu, turn, self._names, (FAILED // 2, WATCHED // 2), give_up)

    def tell(self) -> None:
        """Tell the block its ticket, on the thread that has drawn it, which need not wait before.

        A barrier lies between this and :meth:`read`.
        """
        T.buffer_store(self._ticket, self._drawn[0], [0])

    def give_back(self) -> None:
        """Count a finished tile, whose words have been read, on one thread of a block.

        The slot is free when all tiles are finished.
        """
        if self._tiles == 1:
            self._free()
            return
        counter = T.address_of(self._words[i64(FINISHED) + self.number])
        finished = draw_ticket(self._gpu, counter, self._tiles, is_ordered=True)
        with when(tirx.EQ(finished, tirx.const(self._tiles - 1, "int32"))):
            self._free()

    def _read_names(self) -> list[tirx.Expr]:
        reads = (read_now(self._gpu, self._names, i64(0), place) for place in range(PLACES))
        return [T.bind(name) for name in reads]

    def _claim(self, names: list[tirx.Expr], slot: tirx.Buffer) -> None:
        """Put the name into a free slot, if there is one, unless it has a slot by now."""
        zero = tirx.const(0, "int32")
        with when(slot[0] < zero):
            T.buffer_store(slot, _find(names, i64(0)), [0])
            with when(slot[0] >= zero):
                publish(self._gpu, T.address_of(self._names[slot[0]]), self._name)

    def _free(self) -> None:
        publish(self._gpu, self._known[2], i64(0))


def _bounded(place: tirx.Expr) -> tirx.Expr:
    return tirx.bitwise_and(place, tirx.const(PLACES - 1, "int32")).astype("int64")


def _find(names: list[tirx.Expr], wanted: tirx.Expr) -> tirx.Expr:
    """The number of a name, -1 if it is not there."""
    found = tirx.const(-1, "int32")
    for number, name in enumerate(names):
        found = tirx.Select(tirx.EQ(name, wanted), tirx.const(number, "int32"), found)
    return found
