# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of a packed 3x3 convolution by Winograd's algorithm."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.workload.conv2d import Conv2DKernel

from ...core.machine import CPUInfo
from ...cost.conv2d_knobs import multiplies_words
from ...cost.winograd_knobs import (
    WinogradKnobs,
    WinogradShape,
    best_plan,
    takes_bytes,
    winograd_cycles,
    winograd_space,
)
from ..conv2d import PackedRule, PackedTemplate, packed_kernel
from .winograd_nest import winograd_template

__all__ = ["WinogradConv2D", "WinogradKnobs", "default_knobs", "winograd_template"]


class WinogradTemplate(PackedTemplate[WinogradKnobs]):
    """The nest of :mod:`.winograd_nest`; the size of its tiles belongs to the workload."""

    name = "cpu.winograd_conv2d"
    version = 1
    knobs = WinogradKnobs

    def default(self, workload: Conv2DKernel, machine: CPUInfo) -> WinogradKnobs:
        """Return the knobs of the cheapest plan."""
        return default_knobs(workload, machine)

    def settings(self, workload: Conv2DKernel, machine: CPUInfo) -> Iterable[WinogradKnobs]:
        """Yield the plans with all register tiles."""
        return winograd_space(_shape(workload), machine)

    def write(
        self, func: tirx.PrimFunc, workload: Conv2DKernel, knobs: WinogradKnobs, target: Target
    ) -> s_tir.Schedule:
        """Write the nest."""
        dots = multiplies_words(workload, CPUInfo.from_target(target))
        return winograd_template(func, workload, knobs, dots)

    def cycles(self, workload: Conv2DKernel, knobs: WinogradKnobs, machine: CPUInfo) -> float:
        """Return the cycles of a plan."""
        return winograd_cycles(_shape(workload), knobs, machine)


WINOGRAD = WinogradTemplate()


class WinogradConv2D(PackedRule):
    """Rule for functions that legalization marked as a convolution by Winograd's algorithm.

    Takes static image sizes (the batch may be symbolic); returns None for everything else. Sums are
    of transformed numbers, so that an infinity or NaN in the data makes all outputs of the tiles
    that read it NaN.
    """

    template = WINOGRAD

    def workload(self, func: tirx.PrimFunc, target: Target) -> Conv2DKernel | None:
        """Return the convolution; None for one of bytes in other words than the CPU has."""
        kernel, cpu = packed_kernel(func, layers=1, winograd=True), CPUInfo.from_target(target)
        return None if kernel is not None and not takes_bytes(kernel, cpu) else kernel


def default_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> WinogradKnobs:
    """The knobs of the cheapest plan (:mod:`schedules.cpu.cost.winograd_knobs`)."""
    return best_plan(_shape(kernel), cpu).knobs


def _shape(kernel: Conv2DKernel) -> WinogradShape:
    """Extents of a kernel; a symbolic batch counts as one, and a word of bytes as an element."""
    kernel = kernel.in_words() if kernel.is_quantized else kernel
    layer = kernel.layers[0]
    out_size = layer.output_size(int(kernel.height or 1), int(kernel.width or 1))
    return WinogradShape.of(
        layer, kernel.batch or 1, out_size, kernel.winograd, kernel.lanes, kernel.dtype
    )
