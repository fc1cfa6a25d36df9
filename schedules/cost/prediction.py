# SPDX-License-Identifier: Apache-2.0
"""Answer of a kernel model: time, interval, bound, and which model said so; and the roofline."""

from __future__ import annotations

from dataclasses import dataclass

from .kernel_call import KernelCall
from .machine import Machine

_SHARE = 0.4  # of the roofline, of kernels too short to be seen behind the harness: a typical one


@dataclass(frozen=True)
class Prediction:
    """Time of one launch."""

    seconds: float  # Most likely time, as the model's data were timed.
    low: float
    high: float
    """``low`` and ``high``: interval that holds four of five measured times, in seconds."""
    bound: str  # ``compute``, ``memory`` or ``latency``.
    roofline_seconds: float  # Least time by the machine's peak and bandwidth.
    model: str  # Model that said so: ``roofline``, or the name of a kernel model and its origin.
    in_range: bool
    """Whether the sizes lie in the range that the model was fitted to, on this machine."""
    harness: float = 0.0
    latency: float = 0.0
    """``harness`` and ``latency``: where launches were timed one by one, no time is below the
    host's ``harness``, and longer ones hold ``latency`` seconds that are not the kernel's. Zero for
    times of kernels alone."""
    extrapolated: tuple[str, ...] = ()
    """Those of ``machine``, ``type``, ``size`` and ``mask`` that the model was not fitted to."""

    @property
    def roofline_share(self) -> float:
        """Share of the roofline that is reached."""
        return self.roofline_seconds / self.seconds

    @property
    def device_seconds(self) -> float:
        """Seconds of the kernel alone, as a profiler shows them in a run of many launches.

        A kernel that was hidden behind the harness is taken for a typical share of its roofline.
        """
        if not self.harness:
            return self.seconds
        kernel = max(self.seconds - self.latency, self.roofline_seconds)
        hidden = min(kernel, self.roofline_seconds / _SHARE)
        seen = min(max(4 * (self.seconds / self.harness - 1), 0.0), 1.0)
        return seen * kernel + (1 - seen) * hidden


def roofline(call: KernelCall, machine: Machine) -> tuple[float, str]:
    """Return the least seconds of a launch, and its bound, ``compute`` or ``memory``.

    Its arithmetic at the peak, or its bytes at the bandwidth.

    (Dissertation, section 4.3.2.1.2.)

    Raises
    ------
    PredictionError
        If the machine has no peak for the dtype, or no bandwidth of its memory.
    """
    arithmetic = call.flops / machine.peak_flops(call.dtype) if call.flops else 0.0
    traffic = call.moved_bytes / machine["bandwidth.memory"]
    return max(arithmetic, traffic), "compute" if arithmetic > traffic else "memory"
