# SPDX-License-Identifier: Apache-2.0
"""GPU rule for windows that slide over one tensor, weighted or not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx

from schedules.schedule_rule import KernelFacts
from schedules.tir.block_expressions import Stage, stages_of
from schedules.tir.expression_walk import loads, uses
from schedules.tir.extents import constant

from ..core.machine import GPUInfo
from ..core.rule import GPURule
from .axis_order import spaces_of
from .elementwise import write_spaces

_LARGEST_WINDOW = 72  # 8 x 8, or 3 x 3 of eight channels


class Pooling(GPURule):
    """Maxima, averages and weighted sums of windows up to 8 x 8, with padding and strides.

    A thread computes neighbouring elements of the output, with the window unrolled: in NCHW4c four
    channels of a pixel, by 16-byte loads under the padding's condition. Element-wise producers and
    consumers are part of the kernel. Weighted sums are the depthwise convolutions, and those of a
    few channels a group, that no other rule takes: those of float16.

    Left alone: larger windows and whole rows, which are reductions; sums over all channels.
    """

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        return write_windows(facts.func, facts.read(stages_of), gpu)


def write_windows(
    func: tirx.PrimFunc, stages: Sequence[Stage] | None, gpu: GPUInfo
) -> tirx.PrimFunc | None:
    """The kernel of a function with these stages; None if they are not :class:`Pooling`'s."""
    if stages is None or not any(stage.reduced for stage in stages):
        return None
    if not all(_is_window(stage) for stage in stages if stage.reduced):
        return None
    return write_spaces(func, spaces_of(func, stages), gpu)


def _is_window(stage: Stage) -> bool:
    """Return whether a reduction is small and slides over one tensor, with weights or without."""
    extents = [constant(axis.dom.extent) for axis in stage.reduced]
    known = [extent for extent in extents if extent is not None]
    return (
        len(known) == len(extents)
        and math.prod(known) <= _LARGEST_WINDOW
        and slid_tensor(stage) is not None
    )


def slid_tensor(stage: Stage) -> tirx.Buffer | None:
    """Return the one tensor over which a reduction slides; None if there is none.

    It may have weights, but then sums over all channels are products of matrices.
    """
    read = [load for load in loads(stage.value) if not load.source.same_as(stage.output)]
    sliding = [
        (load.source, index) for load in read for index in load.indices if _slides(index, stage)
    ]
    if len({source for source, _ in sliding}) != 1:
        return None
    [source, _], *_ = sliding
    has_weights = any(not load.source.same_as(source) for load in read)
    is_slid = (
        constant(axis.dom.extent) == 1 or any(uses(index, axis.var) for _, index in sliding)
        for axis in stage.reduced
    )
    return source if not has_weights or all(is_slid) else None


def _slides(index: tirx.Expr, stage: Stage) -> bool:
    return _has(index, stage.axes) and _has(index, stage.reduced)


def _has(index: tirx.Expr, axes: Sequence[tirx.IterVar]) -> bool:
    return uses(index, *(axis.var for axis in axes))
