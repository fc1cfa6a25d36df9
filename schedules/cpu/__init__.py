# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for CPUs, in the order in which they are tried; the last one takes anything.

Families, lowest first: ``core``; ``cost`` and ``nests``; ``conv2d`` and ``reduce``; ``loops``.
Imports ``workload``, ``compute`` and ``tir``; the storeys above may import it.
Start with ``RULES`` below.
"""

from __future__ import annotations

from tvm.s_tir.dlight import ScheduleRule

from schedules.tuning.records import Records

from .conv2d.channel_norm import ChannelNorm
from .conv2d.conv2d import CONV2D, Conv2D
from .conv2d.fused_conv2d import FUSED, PLANAR, FusedConv2D
from .conv2d.pack import Pack
from .conv2d.winograd_conv2d import WINOGRAD, WinogradConv2D
from .core.rule import CPUTemplate
from .loops.dense import DENSE, Dense
from .loops.elementwise import Elementwise
from .loops.fallback import Fallback
from .loops.layout_transform import LayoutTransform
from .loops.pooling import Pooling
from .loops.softmax import Softmax
from .reduce.coalesced_reduce import CoalescedReduce


def rules(records: Records | None = None) -> tuple[ScheduleRule, ...]:
    """Return all rules in order; those with knobs choose them by ``records`` where they can."""
    return (
        FusedConv2D(records),
        Conv2D(records),
        WinogradConv2D(records),
        Pack(),
        ChannelNorm(),
        LayoutTransform(),
        Elementwise(),
        Pooling(),
        Dense(records),
        CoalescedReduce(),
        Softmax(),
        Fallback(),
    )


RULES = rules()
TEMPLATES: dict[str, CPUTemplate] = {
    template.name: template for template in (FUSED, PLANAR, CONV2D, WINOGRAD, DENSE)
}
"""Templates of the rules with knobs, by name."""

__all__ = [
    "RULES",
    "TEMPLATES",
    "ChannelNorm",
    "CoalescedReduce",
    "Conv2D",
    "Dense",
    "Elementwise",
    "Fallback",
    "FusedConv2D",
    "LayoutTransform",
    "Pack",
    "Pooling",
    "Softmax",
    "WinogradConv2D",
    "rules",
]
