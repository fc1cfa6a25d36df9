# SPDX-License-Identifier: Apache-2.0
"""Schedule rule of two fused packed convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.workload.conv2d import Conv2DKernel

from ..core.machine import CPUInfo
from ..core.rule import CPUTemplate
from ..cost.cost_model import default_fused_knobs, estimate
from ..cost.fused_conv2d_knobs import (
    LOOPS,
    FusedConv2DKnobs,
    fused_conv2d_space,
    in_wide_fused_conv2d_space,
    whole_rows,
    wide_fused_conv2d_space,
)
from ..cost.fused_conv2d_limits import takes_plain, unsupported
from .conv2d import PackedRule, PackedTemplate, packed_kernel
from .forms import layer_workload, recorded_form
from .fused_nest import fused_conv2d_template
from .planar.planar_knobs import can_be_planar, default_planar_knobs, planar_space, prefers_planar
from .planar.planar_nest import PlanarKnobs, planar_template

__all__ = [
    "LOOPS",
    "FusedConv2D",
    "FusedConv2DKnobs",
    "fused_conv2d_template",
    "takes_plain",
    "unsupported",
]


class FusedTemplate(PackedTemplate[FusedConv2DKnobs]):
    """The nest of :mod:`.fused_nest`."""

    name = "cpu.fused_conv2d"
    version = 1
    knobs = FusedConv2DKnobs

    def default(self, workload: Conv2DKernel, machine: CPUInfo) -> FusedConv2DKnobs:
        """Return the cheapest setting of the cost model."""
        return default_fused_knobs(workload, machine)

    def settings(self, workload: Conv2DKernel, machine: CPUInfo) -> Iterable[FusedConv2DKnobs]:
        """Yield the settings that the cost model compares."""
        return fused_conv2d_space(workload, machine)

    def wide_settings(self, workload: Conv2DKernel, machine: CPUInfo) -> Iterable[FusedConv2DKnobs]:
        """Yield them with all pieces, orders and places of layer one, and what else there is."""
        return wide_fused_conv2d_space(workload, machine)

    def contains(self, workload: Conv2DKernel, knobs: FusedConv2DKnobs, machine: CPUInfo) -> bool:
        """Return whether a setting is one of the wide space."""
        return in_wide_fused_conv2d_space(workload, knobs, machine)

    def write(
        self, func: tirx.PrimFunc, workload: Conv2DKernel, knobs: FusedConv2DKnobs, target: Target
    ) -> s_tir.Schedule:
        """Write the nest."""
        return fused_conv2d_template(func, workload, knobs)

    def cycles(self, workload: Conv2DKernel, knobs: FusedConv2DKnobs, machine: CPUInfo) -> float:
        """Return the cost model's cycles; it knows whole rows only."""
        return estimate(workload, whole_rows(workload, knobs), machine).cycles

    def features(
        self, workload: Conv2DKernel, knobs: FusedConv2DKnobs, machine: CPUInfo
    ) -> dict[str, float]:
        """Return the knobs, the terms of the cost model, and products of knobs."""
        terms = estimate(workload, whole_rows(workload, knobs), machine).terms()
        terms |= {f"level_{name}": float(level) for level, name in enumerate(knobs.order)}
        terms["accumulators1"] = knobs.pixels1 * knobs.blocks1
        terms["accumulators2"] = knobs.pixels2 * knobs.blocks2
        terms["pieces"] = knobs.h_t * knobs.w_t * knobs.oc_t
        return super().features(workload, knobs, machine) | terms


class PlanarTemplate(PackedTemplate[PlanarKnobs]):
    """The nest of :mod:`.planar_nest`."""

    name = "cpu.planar_conv2d"
    version = 2
    knobs = PlanarKnobs

    def default(self, workload: Conv2DKernel, machine: CPUInfo) -> PlanarKnobs:
        """Return the setting of the measured rules."""
        return default_planar_knobs(workload, machine)

    def settings(self, workload: Conv2DKernel, machine: CPUInfo) -> Iterable[PlanarKnobs]:
        """Yield other steps, register tiles and prefetches."""
        return planar_space(workload, machine)

    def write(
        self, func: tirx.PrimFunc, workload: Conv2DKernel, knobs: PlanarKnobs, target: Target
    ) -> s_tir.Schedule:
        """Write the nest."""
        return planar_template(func, workload, knobs)

    def cycles(self, workload: Conv2DKernel, knobs: PlanarKnobs, machine: CPUInfo) -> float:
        """Return the cycles of the packed nest's default: this one has no model of its own."""
        return estimate(workload, default_fused_knobs(workload, machine), machine).cycles


FUSED, PLANAR = FusedTemplate(), PlanarTemplate()


class FusedConv2D(PackedRule):
    """Rule for functions that legalization marked as a fused pair of packed convolutions.

    Takes what :func:`unsupported` does not refuse; returns None for everything else. Pairs from
    NCHW to NCHW are computed on planes where a record or :func:`.planar_knobs.prefers_planar` says
    so.
    """

    def workload(self, func: tirx.PrimFunc, target: Target) -> Conv2DKernel | None:
        """Return the pair."""
        kernel = packed_kernel(func, layers=2)
        if kernel is None or kernel.mid_layout is not None:
            return None
        return None if unsupported(kernel.layers[1]) is not None else kernel

    def templates(self, workload: Conv2DKernel, cpu: CPUInfo) -> Sequence[CPUTemplate]:
        """Return the packed nest, and the one on planes if it can compute the pair."""
        if not can_be_planar(workload, cpu):
            return (FUSED,)
        return (PLANAR, FUSED) if prefers_planar(workload, cpu) else (FUSED, PLANAR)

    def preferred(self, workload: Conv2DKernel, cpu: CPUInfo) -> Sequence[CPUTemplate]:
        """Return the template of a recorded form, else all."""
        templates = self.templates(workload, cpu)
        found = recorded_form(self.records, layer_workload(workload), cpu)
        if found is None or not found.form.fused or len(templates) == 1:
            return templates
        return (PLANAR,) if found.form.planes else (FUSED,)
