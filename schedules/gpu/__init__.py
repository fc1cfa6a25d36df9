# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for GPUs, in the order in which they are tried.

Families, lowest first: ``core``; ``pointwise`` and ``reduce``; ``gemm``; ``attention`` and
``conv2d``.
Imports ``workload``, ``compute`` and ``tir``; the storeys above may import it.
Start with ``RULES`` below.
"""

from __future__ import annotations

from tvm.s_tir.dlight import ScheduleRule

from .attention.attention import Attention
from .conv2d.any_conv2d import AnyConv2D
from .conv2d.conv2d import Conv2D
from .conv2d.depthwise_conv2d import DepthwiseConv2D
from .conv2d.fused_conv2d import FusedConv2D
from .gemm.matmul import Matmul
from .pointwise.elementwise import Elementwise
from .pointwise.pooling import Pooling
from .pointwise.transpose import Transpose
from .reduce.coalesced_reduce import CoalescedReduce

RULES: tuple[ScheduleRule, ...] = (
    Conv2D(),
    DepthwiseConv2D(),
    FusedConv2D(),
    AnyConv2D(),
    Attention(),
    CoalescedReduce(),
    Transpose(),
    Elementwise(),
    Matmul(),
    Pooling(),
)

__all__ = [
    "RULES",
    "AnyConv2D",
    "Attention",
    "CoalescedReduce",
    "Conv2D",
    "DepthwiseConv2D",
    "Elementwise",
    "FusedConv2D",
    "Matmul",
    "Pooling",
    "Transpose",
]
