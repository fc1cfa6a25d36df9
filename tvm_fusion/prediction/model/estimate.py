# SPDX-License-Identifier: Apache-2.0
"""Estimated time of our GPU kernels, which have not been measured.

Reductions in one pass have a model of their own, :mod:`schedules.cost.kernels.gpu_kernels`. Any
other kernel is assumed to reach the share of its roofline that the library's kernel for the same
operator and sizes reaches of its own, and to fill the machine in whole waves of blocks.
"""

from __future__ import annotations

from schedules.cost import registry
from schedules.cost.kernel_call import KernelCall
from schedules.cost.kernels.gpu_kernels import HIGH, LOW, REDUCE, has_latencies
from schedules.cost.kernels.roofline import roofline
from schedules.cost.machine import Machine
from schedules.cost.prediction import Prediction


def estimate(call: KernelCall, like: KernelCall, machine: Machine) -> Prediction:
    """Estimate the time of one of our kernels.

    Parameters
    ----------
    call : KernelCall
        Its own FLOPs and bytes.
    like : KernelCall
        The library's kernel.
    machine : Machine
        The GPU.

    Raises
    ------
    PredictionError
        If the machine lacks a figure.
    """
    if call.op == REDUCE and has_latencies(machine):
        return registry.predict(call, machine)
    library = registry.predict(like, machine)
    least, bound = roofline(call, machine)
    taken = library.device_seconds
    # What the library's kernel takes beyond its roofline is, for a small kernel, a constant.
    beyond = max(0.0, taken - library.roofline_seconds)
    scaled = least * taken / library.roofline_seconds if library.roofline_seconds else beyond
    seconds = max(machine.launch_floor, least, min(scaled, least + beyond))
    model = f"estimate, as {like.op} by {library.model}"
    return Prediction(seconds, LOW * seconds, HIGH * seconds, bound, least, model, False)
