# SPDX-License-Identifier: Apache-2.0
"""Base class of the CPU rules."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.error import InternalError
from tvm.s_tir import ScheduleError
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.target import Target


class CPURule(CPUScheduleRule):
    """A schedule rule for LLVM CPUs.

    ``apply`` leaves functions for other targets alone, and also those for which TVM refuses one of
    the rule's steps: the rule works on its own schedule, so that the next rule starts from scratch.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Schedule ``func``, or return None if the rule does not take it."""
        if not isinstance(func, tirx.PrimFunc) or not self.is_target_available(target):
            return None
        try:
            return self.schedule(func, target)
        except (ScheduleError, InternalError, ValueError):
            return None  # primitives also raise the latter two, half-way through their work

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Schedule the function, after the checks of :meth:`apply`."""
        raise NotImplementedError
