# SPDX-License-Identifier: Apache-2.0
"""PyTorch, one kernel or more for each operator."""

from __future__ import annotations

from examples.benchmarks.reduction_cases import Case

from .array_steps import reduce_torch, run_case
from .engine import Engine, Launcher, Sets, module


class TorchEager(Engine):
    """PyTorch without a compiler."""

    title = "PyTorch"
    package = "torch"

    def prepare(self, case: Case, sets: Sets) -> Launcher:
        """Bind a case."""
        torch = module("torch")
        return Launcher(
            lambda number: run_case(case, sets[number], torch, reduce_torch), repeatable=True
        )
