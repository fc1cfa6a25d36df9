# SPDX-License-Identifier: Apache-2.0
"""torch.compile: Inductor's Triton kernels, with producers fused."""

from __future__ import annotations

from typing import Any

from examples.benchmarks.reduction_cases import Case

from .array_steps import planned, reduce_torch, run_planned
from .engine import Engine, Launcher, Sets, check_torch, module


class TorchCompile(Engine):
    """Inductor with fixed shapes; its own CUDA graphs are off, since we capture our own.

    Parameters
    ----------
    cooperative : bool
        Whether several blocks may share an output within one kernel.
    """

    package = "torch"

    def __init__(self, cooperative: bool = False) -> None:
        self.cooperative = cooperative
        self.title = "torch.compile cooperative" if cooperative else "torch.compile"

    def check(self) -> None:
        """Look for PyTorch and Triton."""
        check_torch(compiled=True)

    def prepare(self, case: Case, sets: Sets) -> Launcher:
        """Compile a case, all of it as one graph."""
        torch = module("torch")
        work = planned(case)  # the compiler need not trace the description of a case

        def graph(*inputs: Any) -> tuple[Any, ...]:
            return run_planned(work, inputs, torch, reduce_torch)

        options = {"triton.cooperative_reductions": self.cooperative}
        compiled = torch.compile(graph, dynamic=False, fullgraph=True, options=options)
        compiled(*sets[0])
        return Launcher(lambda number: compiled(*sets[number]), repeatable=True)

    def release(self) -> None:
        """Forget compiled cases: PyTorch keeps only a few of one function."""
        module("torch").compiler.reset()
