# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for GPUs, in the order in which they are asked."""

from __future__ import annotations

from tvm.s_tir.dlight import ScheduleRule

from .coalesced_reduce import CoalescedReduce
from .elementwise import Elementwise
from .matmul import Matmul
from .pooling import Pooling
from .transpose import Transpose

RULES: tuple[ScheduleRule, ...] = (
    CoalescedReduce(),
    Transpose(),
    Elementwise(),
    Matmul(),
    Pooling(),
)

__all__ = ["RULES", "CoalescedReduce", "Elementwise", "Matmul", "Pooling", "Transpose"]
