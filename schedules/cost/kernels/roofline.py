# SPDX-License-Identifier: Apache-2.0
"""Roofline: a kernel takes as long as its arithmetic at the peak, or its bytes at the bandwidth."""

from __future__ import annotations

from ..kernel_call import KernelCall
from ..machine import Machine


def roofline(call: KernelCall, machine: Machine) -> tuple[float, str]:
    """Return the least seconds of a launch, and its bound, ``compute`` or ``memory``.

    (Dissertation, section 4.3.2.1.2.)

    Raises
    ------
    PredictionError
        If the machine has no peak for the dtype, or no bandwidth of its memory.
    """
    arithmetic = call.flops / machine.peak_flops(call.dtype) if call.flops else 0.0
    traffic = call.moved_bytes / machine["bandwidth.memory"]
    return max(arithmetic, traffic), "compute" if arithmetic > traffic else "memory"
