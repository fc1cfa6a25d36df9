# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for GPUs, in the order in which they are asked."""

from __future__ import annotations

from tvm.s_tir.dlight import ScheduleRule

from .coalesced_reduce import CoalescedReduce
from .elementwise import Elementwise

RULES: tuple[ScheduleRule, ...] = (CoalescedReduce(), Elementwise())

__all__ = ["RULES", "CoalescedReduce", "Elementwise"]
