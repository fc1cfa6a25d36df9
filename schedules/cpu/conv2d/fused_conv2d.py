# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of two fused packed convolutions."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.target import Target

from ..core.machine import CPUInfo
from ..core.rule import CPURule
from ..cost.cost_model import default_fused_knobs
from ..cost.fused_conv2d_knobs import LOOPS, FusedConv2DKnobs
from ..cost.fused_conv2d_limits import takes_plain, unsupported
from .conv2d import packed_kernel
from .fused_nest import fused_conv2d_template
from .planar_knobs import default_planar_knobs, prefers_planar
from .planar_nest import planar_template

__all__ = [
    "LOOPS",
    "FusedConv2D",
    "FusedConv2DKnobs",
    "fused_conv2d_template",
    "takes_plain",
    "unsupported",
]


class FusedConv2D(CPURule):
    """Rule for functions that legalization marked as a fused pair of packed convolutions.

    Takes what :func:`unsupported` does not refuse; returns None for everything else. Pairs from
    NCHW to NCHW are computed on planes where :func:`.planar_knobs.prefers_planar` says so.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Schedule ``func`` for a CPU target with the default knobs."""
        kernel = packed_kernel(func, layers=2)
        if kernel is None:
            return None
        layer1, layer2 = kernel.layers
        if unsupported(layer2) is not None:
            return None
        cpu = CPUInfo.from_target(target)
        if prefers_planar(kernel, cpu):
            return planar_template(func, kernel, default_planar_knobs(kernel, cpu))
        knobs = default_fused_knobs(kernel, cpu)
        return fused_conv2d_template(func, kernel, knobs)
