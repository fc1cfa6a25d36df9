# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for CPUs, in the order in which they are asked; the last one takes anything."""

from __future__ import annotations

from tvm.s_tir.dlight import ScheduleRule

from .conv2d import Conv2D
from .elementwise import Elementwise
from .fused_conv2d import FusedConv2D
from .layout_transform import LayoutTransform
from .pooling import Pooling
from .reduction import Reduction
from .softmax import Softmax

RULES: tuple[ScheduleRule, ...] = (
    FusedConv2D(),
    Conv2D(),
    LayoutTransform(),
    Softmax(),
    Pooling(),
    Reduction(),
    Elementwise(),
)

__all__ = [
    "RULES",
    "Conv2D",
    "Elementwise",
    "FusedConv2D",
    "LayoutTransform",
    "Pooling",
    "Reduction",
    "Softmax",
]
