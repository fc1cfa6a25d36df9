# SPDX-License-Identifier: Apache-2.0
"""Time of our GPU kernels, whose operators begin with ``gpu.``; none has been measured.

``gpu.reduce`` is one pass of sister reductions, a :class:`StreamingKernel` whose waits for other
blocks are counted in round trips to the second-level cache::

    head   = head_cycles + head_trips x latency.L2 x clock
    finish = finish_cycles + finish_trips x latency.L2 x clock
    t      = streaming time + (launches - 1) x launch_floor

``gpu.store`` moves bytes by so many blocks, of which each multiprocessor has its share of the
bandwidth::

    t = bytes / (reachable bandwidth x min(1, blocks / multiprocessors)) + launches x launch_floor

A :class:`StreamingKernel` reads its inputs once; its time follows from its machine code and its
grid alone. A thread runs some code, then turns of a main loop, each of which loads some bytes and
waits for them, then some more code. Blocks run in waves, of as many as the multiprocessors hold. By
Little's law a wave moves as many bytes in the latency of memory as it has under way, at most what
memory delivers or the issue of instructions allows; close to both it takes the root of their
squares::

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

from .kernel_call import KernelCall, Prediction
from .machine import PORT_BYTES, Machine

WARP = 32
_ISSUED = 4  # warps a cycle of a multiprocessor
_REGISTERS, _THREADS, _BLOCKS, _SHARED = 65536, 2048, 32, 96 * 1024  # Limits of a multiprocessor.
_REGISTER_UNIT = 8  # registers of a thread are allotted in eights
_TICKET_CYCLES = 1  # Cycles between two updates of one address.


@dataclass(frozen=True)
class StreamingKernel:
    """A launch of a kernel."""

    blocks: int
    threads: int
    """``blocks`` and ``threads``: of the grid, and of a block."""
    registers: int
    shared_bytes: int
    """``registers`` and ``shared_bytes``: registers of a thread, and shared memory of a block."""
    turn_bytes: int  # Bytes that a thread loads in a turn of its main loop.
    flight_bytes: int  # Bytes that are under way before the first one is used.
    turn_instructions: int  # Instructions of a turn.
    start_cycles: float
    head_cycles: float
    turn_cycles: float
    finish_cycles: float
    """``start_cycles``, ``head_cycles``, ``turn_cycles`` and ``finish_cycles``: cycles of a warp
    that runs alone before its first load, from there to the main loop, in a turn of it, and after
    the last one, in the block that has most to do."""
    contenders: int = 1
    head_contenders: int = 1
    """``contenders`` and ``head_contenders``: blocks that update one address after the main loop,
    and before it."""

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor holds."""
        registers = -(-self.registers // _REGISTER_UNIT) * _REGISTER_UNIT * self.threads
        by_shared = _SHARED // self.shared_bytes if self.shared_bytes else _BLOCKS
        return max(1, min(_REGISTERS // registers, _THREADS // self.threads, _BLOCKS, by_shared))


@dataclass(frozen=True)
class StreamingTime:
    """A predicted launch."""

    seconds: float  # Time from the first instruction to the last one, without the launch.
    share: float
    """Share of the reachable bandwidth: the bytes alone would take ``share * seconds``."""
    waves: float  # Blocks by those that run at once.
    flight_bytes: int
    """Bytes under way on a multiprocessor that is full, or has its share of the blocks."""
    instructions_per_byte: float  # Instructions of a lane in the main loop.
    finish_seconds: float  # Time after the last byte of the input has come.


def predict_streaming(
    kernel: StreamingKernel,
    nbytes: float,  # Bytes that it reads and writes.
    machine: Machine,
    loaded: float | None = None,  # Bytes that its turns load; all by default.
) -> StreamingTime:
    """Predict the time of a kernel that moves ``nbytes`` bytes, each of them once.

    Raises ``PredictionError`` if the machine lacks a figure: ``multiprocessors``, ``clock``,
    ``bandwidth.memory``, ``share.read`` (the reachable share of it) and ``latency.memory``
    (seconds).
    """
    clock, count = machine["clock"], int(machine["multiprocessors"])
    reachable = machine["bandwidth.memory"] * machine["share.read"]
    per_byte = kernel.turn_instructions / kernel.turn_bytes
    limit = min(reachable, _ISSUED * WARP * clock * count / per_byte)
    slots = count * kernel.resident
    block_bytes = nbytes / kernel.blocks
    share = block_bytes if loaded is None else loaded / kernel.blocks
    turns = math.ceil(share / (kernel.threads * kernel.turn_bytes))
    latency, start = machine["latency.memory"], kernel.start_cycles / clock
    finish = (kernel.finish_cycles + _TICKET_CYCLES * (kernel.contenders - 1)) / clock
    waits = math.ceil(share / (kernel.threads * kernel.flight_bytes))
    head = kernel.head_cycles + _TICKET_CYCLES * (kernel.head_contenders - 1)
    busy = (waits - 1) * latency + (head + turns * kernel.turn_cycles) / clock
    if kernel.blocks > slots:  # a block follows another one
        busy += start + finish
    whole, last = divmod(kernel.blocks, slots)
    seconds = start + latency + finish + whole * math.hypot(busy, slots * block_bytes / limit)
    if last:
        # A multiprocessor may issue and receive for one block more than the others have.
        most = max(per_byte / (_ISSUED * WARP), 1 / PORT_BYTES) / clock
        seconds += math.hypot(
            busy, max(last * block_bytes / limit, -(-last // count) * block_bytes * most)
        )
    here = min(kernel.resident, -(-kernel.blocks // count))
    return StreamingTime(
        seconds=seconds,
        share=nbytes / reachable / seconds,
        waves=kernel.blocks / slots,
        flight_bytes=here * kernel.threads * kernel.flight_bytes,
        instructions_per_byte=per_byte,
        finish_seconds=finish,
    )


REDUCE, STORE = "gpu.reduce", "gpu.store"

LOW, HIGH = 0.6, 2.5
"""Interval of an estimate, in multiples of it: a guess, which measurements will replace."""

_STREAMING = ("bandwidth.memory", "share.read", "latency.memory", "latency.L2", "clock")
_START_CYCLES = 50.0  # Cycles before the first load.


def predict_gpu_kernel(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict one of our GPU kernels; None if the machine is no GPU, or it has another model.

    Raises ``PredictionError`` if the machine lacks a figure: those of :func:`predict_streaming`,
    ``latency.L2`` and ``launch_floor``.
    """
    if machine.kind != "gpu" or call.op not in (REDUCE, STORE):
        return None
    seconds, least = (_reduce if call.op == REDUCE else _store)(call, machine)
    floor = machine["launch_floor"]
    bound = "memory" if 2 * least > seconds else "latency"
    model = f"estimate, {call.op}"
    seconds += call.sizes["launches"] * floor
    return Prediction(seconds, LOW * seconds, HIGH * seconds, bound, least, model, False)


def has_latencies(machine: Machine) -> bool:
    """Return whether a machine has the figures that ``gpu.reduce`` needs."""
    return all(figure in machine.figures for figure in _STREAMING)


def streaming_kernel(call: KernelCall, machine: Machine) -> StreamingKernel:
    """The kernel of a call ``gpu.reduce`` on a machine."""
    sizes = call.sizes
    trip = machine["latency.L2"] * machine["clock"]
    return StreamingKernel(
        blocks=int(sizes["blocks"]),
        threads=int(sizes["threads"]),
        registers=int(sizes["registers"]),
        shared_bytes=int(sizes["shared_bytes"]),
        turn_bytes=int(sizes["turn_bytes"]),
        flight_bytes=int(sizes["flight_bytes"]),
        turn_instructions=int(sizes["turn_instructions"]),
        start_cycles=_START_CYCLES,
        head_cycles=sizes["head_cycles"] + sizes["head_trips"] * trip,
        turn_cycles=sizes["turn_cycles"],
        finish_cycles=sizes["finish_cycles"] + sizes["finish_trips"] * trip,
        contenders=int(sizes["contenders"]),
    )


def _reduce(call: KernelCall, machine: Machine) -> tuple[float, float]:
    """Seconds without launches, and those of the bytes alone."""
    found = predict_streaming(streaming_kernel(call, machine), call.moved_bytes, machine)
    return found.seconds, found.share * found.seconds


def _store(call: KernelCall, machine: Machine) -> tuple[float, float]:
    reachable = machine["bandwidth.memory"] * machine["share.read"]
    least = call.moved_bytes / reachable
    return least / min(1.0, call.sizes["blocks"] / machine["multiprocessors"]), least
