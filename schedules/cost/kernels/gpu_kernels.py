# SPDX-License-Identifier: Apache-2.0
"""Time of our GPU kernels, whose operators begin with ``gpu.``; none has been measured.

``gpu.reduce`` is one pass of sister reductions, a :class:`~schedules.cost.memory_bound`
kernel whose waits for other blocks are counted in round trips to the second-level cache::

    head   = head_cycles + head_trips x latency.L2 x clock
    finish = finish_cycles + finish_trips x latency.L2 x clock
    t      = streaming time + (launches - 1) x launch_floor

``gpu.store`` moves bytes by so many blocks, of which each multiprocessor has its share of the
bandwidth::

    t = bytes / (reachable bandwidth x min(1, blocks / multiprocessors)) + launches x launch_floor
"""

from __future__ import annotations

from ..kernel_call import KernelCall
from ..machine import Machine
from ..memory_bound import StreamingKernel, predict_streaming
from ..prediction import Prediction

REDUCE, STORE = "gpu.reduce", "gpu.store"

LOW, HIGH = 0.6, 2.5
"""Interval of an estimate, in multiples of it: a guess, which measurements will replace."""

_STREAMING = ("bandwidth.memory", "share.read", "latency.memory", "latency.L2", "clock")
_START_CYCLES = 50.0  # before the first load


def predict_gpu_kernel(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict one of our GPU kernels; None if the machine is no GPU, or it has another model.

    Raises
    ------
    PredictionError
        If the machine lacks a figure: those of :func:`.memory_bound.predict_streaming`,
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
