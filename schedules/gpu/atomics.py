# SPDX-License-Identifier: Apache-2.0
"""Atomic updates of an output by a partial result, as expressions of one target's language."""

from __future__ import annotations

from ..reduce_workload import FLOATS, ReduceWorkload


def is_exact(workload: ReduceWorkload) -> bool:
    """Whether the order of atomic updates cannot be seen in the result."""
    return workload.dtype not in FLOATS and not workload.is_arg


def atomic_update(gpu, workload, output, m, state):
    raise NotImplementedError
