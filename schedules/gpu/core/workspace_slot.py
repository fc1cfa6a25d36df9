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
has a slot. On CUDA waiting ends with an error after about half a minute.

The next use of a slot is ordered after all previous accesses to it: releasing, claiming and finding
it each have a fence. On OpenCL the device needs ``cl_khr_int64_base_atomics``.

The header of a workspace has three lines of the cache: the names, of two words each; the lock; the
number of finished tiles of each slot. All are zero between calls.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules.tir.branch import when
from schedules.tir.index_math import i64

from .intrinsics import (
    acquire,
    address_number,
    draw_ticket,
    launch_number,
    publish,
    read_now,
    try_lock,
    wait_a_moment,
)
from .machine import GPUInfo

# More than the priorities of streams: grids of one priority start one after the other, so that one
# of those that have a slot has started all its blocks, and ends.
PLACES = 8
LINE_WORDS = 32
# Odd, and far from any ratio of addresses, so that different launches have different names.
_STREAM_FACTOR = 0x61C8864680B583EB
_LAUNCH_FACTOR = 0x2545F4914F6CDD1D
LOCK = LINE_WORDS
_FINISHED = 2 * LINE_WORDS
HEADER_WORDS = 3 * LINE_WORDS


class LaunchPlace:
    """The slot of the launch, in shared memory.

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
    """

    def __init__(
        self, gpu: GPUInfo, workspace: tirx.Buffer, output: tirx.Expr, stream: tirx.Expr
    ) -> None:
        self._gpu = gpu
        self._words = T.decl_buffer(workspace.shape, "int32", data=workspace.data)
        self._names = T.decl_buffer((PLACES,), "int64", data=workspace.data)
        named = address_number(gpu, output) + stream * i64(_STREAM_FACTOR)
        self._name = T.bind(named + launch_number(gpu) * i64(_LAUNCH_FACTOR))
        self._place = T.alloc_buffer((1,), "int32", scope="shared")
        IRBuilder.name("place", self._place)

    @property
    def number(self) -> tirx.Expr:
        """Number of the slot; a barrier follows :meth:`take`.

        Its bound, which TVM knows of the mask but not of a load, keeps indices narrow.
        """
        return tirx.bitwise_and(self._place[0], tirx.const(PLACES - 1, "int32")).astype("int64")

    def take(self) -> None:
        """Find or claim the slot, on one thread of the block."""
        zero = tirx.const(0, "int32")
        lock = T.address_of(self._words[LOCK])
        found, locked, turn = (T.alloc_buffer((1,), "int32", scope="local") for _ in range(3))
        T.buffer_store(found, tirx.const(-1, "int32"), [0])
        T.buffer_store(locked, zero, [0])
        T.buffer_store(turn, zero, [0])
        with T.While(found[0] < zero):
            names = self._read_names()
            T.buffer_store(found, _find(names, self._name), [0])
            with T.If(tirx.EQ(locked[0], zero)):
                with T.Then(), when(found[0] < zero, _find(names, i64(0)) >= zero):
                    T.buffer_store(locked, try_lock(self._gpu, lock), [0])
                with T.Else():
                    self._claim(names, found)
                    T.buffer_store(locked, zero, [0])
                    publish(self._gpu, lock, zero)
            with when(found[0] < zero, tirx.EQ(locked[0], zero)):
                T.buffer_store(turn, turn[0] + tirx.const(1, "int32"), [0])
                wait_a_moment(self._gpu, turn[0])
        acquire(self._gpu)  # the slot's old content has been read before it is overwritten
        T.buffer_store(self._place, found[0], [0])

    def give_back(self, tiles: int) -> None:
        """Count a finished tile, whose partial results have been read, on one thread of a block.

        The slot is free when all ``tiles`` are finished.
        """
        if tiles == 1:
            self._free()
            return
        counter = T.address_of(self._words[i64(_FINISHED) + self.number])
        finished = draw_ticket(self._gpu, counter, tiles)
        with when(tirx.EQ(finished, tirx.const(tiles - 1, "int32"))):
            self._free()

    def _read_names(self) -> list[tirx.Expr]:
        places = [T.address_of(self._names[place]) for place in range(PLACES)]
        return [T.bind(read_now(self._gpu, place)) for place in places]

    def _claim(self, names: list[tirx.Expr], found: tirx.Buffer) -> None:
        """Put the name into a free slot, if there is one, unless it has a slot by now."""
        zero = tirx.const(0, "int32")
        with when(found[0] < zero):
            T.buffer_store(found, _find(names, i64(0)), [0])
            with when(found[0] >= zero):
                publish(self._gpu, T.address_of(self._names[found[0]]), self._name)

    def _free(self) -> None:
        publish(self._gpu, T.address_of(self._names[self.number]), i64(0))


def _find(names: list[tirx.Expr], wanted: tirx.Expr) -> tirx.Expr:
    """The number of a name, -1 if it is not there."""
    found = tirx.const(-1, "int32")
    for number, name in enumerate(names):
        found = tirx.Select(tirx.EQ(name, wanted), tirx.const(number, "int32"), found)
    return found
