# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of a packed 3x3 convolution by Winograd's algorithm."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.workload.conv2d import Conv2DKernel

from ..core.machine import CPUInfo
from ..core.rule import CPURule
from ..cost.winograd_knobs import WinogradKnobs, WinogradShape, best_plan
from .conv2d import packed_kernel
from .winograd_nest import winograd_template

__all__ = ["WinogradConv2D", "WinogradKnobs", "default_knobs", "winograd_template"]


class WinogradConv2D(CPURule):
    """Rule for functions that legalization marked as a convolution by Winograd's algorithm.

    Takes static image sizes (the batch may be symbolic); returns None for everything else. Sums are
    of transformed numbers, so that an infinity or NaN in the data makes all outputs of the tiles
    that read it NaN.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Schedule ``func`` for a CPU target with the default knobs."""
        kernel = packed_kernel(func, layers=1, winograd=True)
        if kernel is None:
            return None
        knobs = default_knobs(kernel, CPUInfo.from_target(target))
        return winograd_template(func, kernel, knobs)


def default_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> WinogradKnobs:
    """The knobs of the cheapest plan (:mod:`schedules.cpu.cost.winograd_knobs`).

    A symbolic batch counts as one.
    """
    layer = kernel.layers[0]
    out_size = layer.output_size(int(kernel.height or 1), int(kernel.width or 1))
    shape = WinogradShape.of(
        layer, kernel.batch or 1, out_size, kernel.winograd, kernel.lanes, kernel.dtype
    )
    return best_plan(shape, cpu).knobs
