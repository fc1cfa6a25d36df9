# SPDX-License-Identifier: Apache-2.0
"""Schedule rules for GPUs, in the order in which they are asked."""

from __future__ import annotations

from tvm.s_tir.dlight import ScheduleRule

from .coalesced_reduce import CoalescedReduce

RULES: tuple[ScheduleRule, ...] = (CoalescedReduce(),)

__all__ = ["RULES", "CoalescedReduce"]
