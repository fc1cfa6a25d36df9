# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for GPUs, in the order in which they are tried.

Families, lowest first: ``core``; ``pointwise`` and ``reduce``; ``gemm``; ``attention`` and
``conv2d``.
Imports ``workload``, ``compute`` and ``tir``; the storeys above may import it.
Start with ``RULES`` below.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir.dlight import ScheduleRule

from schedules.gpu.pointwise.elementwise import Pooling
from schedules.gpu.reduce.coalesced_reduce import CHAIN, SISTERS
from schedules.tuning.records import Records

from .attention.attention import Attention
from .conv2d.any_conv2d import WARPGROUPS as WARPGROUP_CONV2D
from .conv2d.any_conv2d import AnyConv2D
from .conv2d.conv2d import CONV2D, Conv2D
from .conv2d.depthwise_conv2d import DEPTHWISE, DepthwiseConv2D
from .conv2d.fused_conv2d import FUSED, FusedConv2D
from .conv2d.grouped_conv2d import GroupedConv2D
from .core.machine import reproducible_target
from .core.rule import GPUTemplate
from .gemm.matmul.matmul import Matmul
from .gemm.matmul.templates import ROWS, TILES, WARPGROUPS
from .pointwise.elementwise import Elementwise
from .pointwise.transpose import Transpose
from .reduce.coalesced_reduce import CoalescedReduce


def rules(records: Records | None = None) -> tuple[ScheduleRule, ...]:
    """Return all rules in order; those with knobs choose them by ``records`` where they can."""
    return (
        Conv2D(records),
        DepthwiseConv2D(records),
        FusedConv2D(records),
        AnyConv2D(records),
        Attention(),
        CoalescedReduce(records),
        Transpose(),
        Elementwise(),
        Matmul(records),
        Pooling(),
        GroupedConv2D(),
    )


RULES = rules()
TEMPLATES: dict[str, GPUTemplate[Any, Any]] = {
    template.name: template
    for template in (
        *(CONV2D, DEPTHWISE, FUSED, WARPGROUP_CONV2D),
        *(TILES, ROWS, WARPGROUPS, SISTERS, CHAIN),
    )
}
"""Templates of the rules with knobs, by name."""

__all__ = [
    "RULES",
    "TEMPLATES",
    "AnyConv2D",
    "Attention",
    "CoalescedReduce",
    "Conv2D",
    "DepthwiseConv2D",
    "Elementwise",
    "FusedConv2D",
    "GroupedConv2D",
    "Matmul",
    "Pooling",
    "Transpose",
    "reproducible_target",
    "rules",
]
