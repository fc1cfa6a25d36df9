# SPDX-License-Identifier: Apache-2.0
"""Number of channels in a block of the layout NCHW[x]c, by device."""

from __future__ import annotations

from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.gpu.core.machine import KINDS
from schedules.gpu.gemm.implicit_gemm import LANES


def channel_lanes(target: Target, dtype: str = "float32") -> int:
    """Lanes of a channel block.

    On a CPU they fill a vector register. On a GPU they are 4, the 16 bytes that a thread loads at
    once, while neighbouring threads process neighbouring pixels.
    """
    return LANES if target.kind.name in KINDS else CPUInfo.from_target(target).lanes(dtype)
