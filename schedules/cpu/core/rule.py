# SPDX-License-Identifier: Apache-2.0
"""Base class of the CPU rules."""

from __future__ import annotations

from schedules.schedule_rule import Rule


class CPURule(Rule):
    """A schedule rule for LLVM CPUs; functions for other targets are left alone."""

    kinds = ("llvm",)
