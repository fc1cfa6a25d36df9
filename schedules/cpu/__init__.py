# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for CPUs, in the order in which they are tried; the last one takes anything.

Families, lowest first: ``core``; ``cost`` and ``nests``; ``conv2d`` and ``reduce``; ``loops``.
Imports ``workload``, ``compute`` and ``tir``; the storeys above may import it.
Start with ``RULES`` below.
"""

from __future__ import annotations

from tvm.s_tir.dlight import ScheduleRule

from .conv2d.channel_norm import ChannelNorm
from .conv2d.conv2d import Conv2D
from .conv2d.fused_conv2d import FusedConv2D
from .conv2d.pack import Pack
from .conv2d.winograd_conv2d import WinogradConv2D
from .loops.dense import Dense
from .loops.elementwise import Elementwise
from .loops.fallback import Fallback
from .loops.layout_transform import LayoutTransform
from .loops.pooling import Pooling
from .loops.softmax import Softmax
from .reduce.coalesced_reduce import CoalescedReduce

RULES: tuple[ScheduleRule, ...] = (
    FusedConv2D(),
    Conv2D(),
    WinogradConv2D(),
    Pack(),
    ChannelNorm(),
    LayoutTransform(),
    Elementwise(),
    Pooling(),
    Dense(),
    CoalescedReduce(),
    Softmax(),
    Fallback(),
)

__all__ = [
    "RULES",
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
]
