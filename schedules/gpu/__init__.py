# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for GPUs, in the order in which they are asked."""

from __future__ import annotations

from tvm.s_tir.dlight import ScheduleRule

from .any_conv2d import AnyConv2D
from .coalesced_reduce import CoalescedReduce
from .conv2d import Conv2D
from .depthwise_conv2d import DepthwiseConv2D
from .elementwise import Elementwise
from .fused_conv2d import FusedConv2D
from .matmul import Matmul
from .pooling import Pooling
from .transpose import Transpose

RULES: tuple[ScheduleRule, ...] = (
    Conv2D(),
    DepthwiseConv2D(),
    FusedConv2D(),
    AnyConv2D(),
    CoalescedReduce(),
    Transpose(),
    Elementwise(),
    Matmul(),
    Pooling(),
)

__all__ = [
    "RULES",
    "AnyConv2D",
    "CoalescedReduce",
    "Conv2D",
    "DepthwiseConv2D",
    "Elementwise",
    "FusedConv2D",
    "Matmul",
    "Pooling",
    "Transpose",
]
