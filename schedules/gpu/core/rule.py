# SPDX-License-Identifier: Apache-2.0
"""Base class of the GPU rules."""

from __future__ import annotations

from schedules.schedule_rule import Rule

from .machine import KINDS


class GPURule(Rule):
    """A schedule rule for CUDA and OpenCL; functions for other targets are left alone."""

    kinds = KINDS
