# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for CPUs, in the order in which they are tried; the last one takes anything.

Families, lowest first: ``core``; ``cost`` and ``nests``; ``conv2d`` and ``reduce``; ``loops``.
Imports ``workload``, ``compute`` and ``tir``; the storeys above may import it.
Start with ``RULES`` below.
"""

from __future__ import annotations

from tvm.s_tir.dlight import ScheduleRule

from schedules.cpu.loops.fallback import Elementwise
from schedules.cpu.loops.pooling import POOLING, Pooling
from schedules.cpu.loops.softmax import ROW_CHAIN, Softmax
from schedules.cpu.reduce.coalesced_reduce import REDUCTIONS
from schedules.tuning.records import AnySpace, Records

from .conv2d.channel_norm import CHANNEL_NORM, ChannelNorm
from .conv2d.conv2d import CONV2D, Conv2D
from .conv2d.forms import FORMS
from .conv2d.fused_conv2d import FUSED, PLANAR, FusedConv2D
from .conv2d.pack import Pack
from .conv2d.tile_conv2d import TILE_CONV2D, TileConv2D
from .conv2d.tile_pair import TILE_PAIR, TilePair
from .conv2d.winograd.winograd_conv2d import WINOGRAD, WinogradConv2D
from .core.rule import CPUTemplate
from .loops.fallback import Fallback
from .loops.layout_transform import LayoutTransform
from .loops.matmul.dense import DENSE, Dense
from .reduce.coalesced_reduce import CoalescedReduce


def rules(records: Records | None = None) -> tuple[ScheduleRule, ...]:
    """Return all rules in order; those with knobs choose them by ``records`` where they can."""
    return (
        FusedConv2D(records),
        TilePair(records),
        TileConv2D(records),
        Conv2D(records),
        WinogradConv2D(records),
        Pack(),
        ChannelNorm(records),
        LayoutTransform(),
        Elementwise(),
        Pooling(records),
        Dense(records),
        CoalescedReduce(records),
        Softmax(records),
        Fallback(),
    )


RULES = rules()
_ALL: tuple[CPUTemplate, ...] = (
    FUSED,
    PLANAR,
    TILE_CONV2D,
    TILE_PAIR,
    CONV2D,
    WINOGRAD,
    DENSE,
    *REDUCTIONS,
    ROW_CHAIN,
    POOLING,
    CHANNEL_NORM,
)
TEMPLATES: dict[str, CPUTemplate] = {template.name: template for template in _ALL}
"""Templates of the rules with knobs, by name."""
SPACES: dict[str, AnySpace] = {**TEMPLATES, FORMS.name: FORMS}
"""All that a record can choose from, by name."""

__all__ = [
    "RULES",
    "SPACES",
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
    "TileConv2D",
    "TilePair",
    "WinogradConv2D",
    "rules",
]
