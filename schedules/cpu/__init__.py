# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for CPUs, in the order in which they are asked; the last one takes anything."""

from __future__ import annotations

from tvm.s_tir.dlight import ScheduleRule

from .channel_norm import ChannelNorm
from .coalesced_reduce import CoalescedReduce
from .conv2d import Conv2D
from .dense import Dense
from .elementwise import Elementwise
from .fallback import Fallback
from .fused_conv2d import FusedConv2D
from .layout_transform import LayoutTransform
from .pack import Pack
from .pooling import Pooling
from .reduction import Reduction
from .softmax import Softmax
from .winograd_conv2d import WinogradConv2D

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
    Softmax(),
    CoalescedReduce(),
    Reduction(),
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
    "Reduction",
    "Softmax",
    "WinogradConv2D",
]
