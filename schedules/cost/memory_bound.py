# SPDX-License-Identifier: Apache-2.0
"""Time of a GPU kernel that reads its inputs once, from its machine code and its grid alone.

A thread runs some code, then turns of a main loop, each of which loads some bytes and waits for
them, then some more code. Blocks run in waves, of as many as the multiprocessors hold. By Little's
law a wave moves as many bytes in the latency of memory as it has under way, at most what memory
delivers or the issue of instructions allows; close to both it takes the root of their squares::

    limit = min(reachable bandwidth, issue slots / instructions a byte)
    busy  = head + (waits - 1) x latency of memory + turns x code of a turn
    wave  = (busy^2 + (bytes of its blocks / limit)^2)^(1/2)
    time  = start + latency of memory + sum of the waves + finish of the last block

Nothing is fitted. Latencies of memory are published ones or estimates (the files of the machines
say which); none of it has been compared with a measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .machine import PORT_BYTES, Machine

WARP = 32
_ISSUED = 4  # warps a cycle of a multiprocessor
_REGISTERS, _THREADS, _BLOCKS, _SHARED = 65536, 2048, 32, 96 * 1024  # of a multiprocessor
_REGISTER_UNIT = 8  # registers of a thread are allotted in eights
_TICKET_CYCLES = 1  # between two updates of one address


@dataclass(frozen=True)
class StreamingKernel:
    """A launch of a kernel.

    Parameters
    ----------
    blocks, threads : int
        Of the grid, and of a block.
    registers, shared_bytes : int
        Registers of a thread, and shared memory of a block.
    turn_bytes : int
        Bytes that a thread loads in a turn of its main loop.
    flight_bytes : int
        Those of them that are under way before the first one is used.
    turn_instructions : int
        Instructions of a turn.
    start_cycles, head_cycles, turn_cycles, finish_cycles : float
        Cycles of a warp that runs alone before its first load, from there to the main loop, in a
        turn of it, and after the last one, in the block that has most to do.
    contenders, head_contenders : int
        Blocks that update one address after the main loop, and before it.
    """

    blocks: int
    threads: int
    registers: int
    shared_bytes: int
    turn_bytes: int
    flight_bytes: int
    turn_instructions: int
    start_cycles: float
    head_cycles: float
    turn_cycles: float
    finish_cycles: float
    contenders: int = 1
    head_contenders: int = 1

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor holds."""
        registers = -(-self.registers // _REGISTER_UNIT) * _REGISTER_UNIT * self.threads
        by_shared = _SHARED // self.shared_bytes if self.shared_bytes else _BLOCKS
        return max(1, min(_REGISTERS // registers, _THREADS // self.threads, _BLOCKS, by_shared))


@dataclass(frozen=True)
class StreamingTime:
    """A predicted launch.

    Parameters
    ----------
    seconds : float
        From the first instruction to the last one, without the launch.
    share : float
        Of the reachable bandwidth, in which the bytes alone would take ``share * seconds``.
    waves : float
        Blocks by those that run at once.
    flight_bytes : int
        Bytes under way on a multiprocessor that is full, or has its share of the blocks.
    instructions_per_byte : float
        Of a lane in the main loop.
    finish_seconds : float
        After the last byte of the input has come.
    """

    seconds: float
    share: float
    waves: float
    flight_bytes: int
    instructions_per_byte: float
    finish_seconds: float


def predict_streaming(
    kernel: StreamingKernel, nbytes: float, machine: Machine, loaded: float | None = None
) -> StreamingTime:
    """Predict the time of a kernel that moves ``nbytes`` bytes, each of them once.

    Parameters
    ----------
    kernel : StreamingKernel
        The kernel.
    nbytes : float
        Bytes that it reads and writes.
    machine : Machine
        The GPU.
    loaded : float, optional
        Those of them that its turns load; all of them by default.

    Raises
    ------
    PredictionError
        If the machine lacks a figure: ``multiprocessors``, ``clock``, ``bandwidth.memory``,
        ``share.read`` (the reachable share of it) and ``latency.memory`` (seconds).
    """
    clock, count = machine["clock"], int(machine["multiprocessors"])
    reachable = machine["bandwidth.memory"] * machine["share.read"]
    per_byte = kernel.turn_instructions / kernel.turn_bytes
    limit = min(reachable, _ISSUED * WARP * clock * count / per_byte)
    slots = count * kernel.resident
    own = nbytes / kernel.blocks
    share = own if loaded is None else loaded / kernel.blocks
    turns = math.ceil(share / (kernel.threads * kernel.turn_bytes))
    latency, start = machine["latency.memory"], kernel.start_cycles / clock
    finish = (kernel.finish_cycles + _TICKET_CYCLES * (kernel.contenders - 1)) / clock
    waits = math.ceil(share / (kernel.threads * kernel.flight_bytes))
    head = kernel.head_cycles + _TICKET_CYCLES * (kernel.head_contenders - 1)
    busy = (waits - 1) * latency + (head + turns * kernel.turn_cycles) / clock
    if kernel.blocks > slots:  # a block follows another one
        busy += start + finish
    whole, last = divmod(kernel.blocks, slots)
    seconds = start + latency + finish + whole * math.hypot(busy, slots * own / limit)
    if last:
        # A multiprocessor may issue and receive for one block more than the others have.
        most = max(per_byte / (_ISSUED * WARP), 1 / PORT_BYTES) / clock
        seconds += math.hypot(busy, max(last * own / limit, -(-last // count) * own * most))
    here = min(kernel.resident, -(-kernel.blocks // count))
    return StreamingTime(
        seconds=seconds,
        share=nbytes / reachable / seconds,
        waves=kernel.blocks / slots,
        flight_bytes=here * kernel.threads * kernel.flight_bytes,
        instructions_per_byte=per_byte,
        finish_seconds=finish,
    )
