# SPDX-License-Identifier: Apache-2.0
"""torch.compile: Inductor's Triton kernels, with producers fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from examples.benchmarks.reduction_cases import Case

from .array_steps import reduce_torch, run_case
from .engine import Engine, Launcher, Sets, module


class TorchCompile(Engine):
    """Inductor with fixed shapes; its own CUDA graphs are off, since ours time it.

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
        module("torch")
        module("triton")

    def prepare(self, case: Case, sets: Sets) -> Launcher:
        """Compile a case, all of it as one graph."""
        torch = module("torch")
        torch.compiler.reset()

        def graph(*inputs: Any) -> tuple[Any, ...]:
            return run_case(case, inputs, torch, reduce_torch)

        options = {"triton.cooperative_reductions": self.cooperative}
        compiled = torch.compile(graph, dynamic=False, fullgraph=True, options=options)
        compiled(*sets[0])
        return Launcher(lambda number: compiled(*sets[number]), repeatable=True)


def kernel_count(launcher: Launcher) -> int:
    """GPU kernels of one launch, counted by PyTorch's profiler; other engines' too."""
    torch = module("torch")
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        launcher.launch(0)
        torch.cuda.synchronize()
    return len(_kernels(profile.events()))


def _kernels(events: Sequence[Any]) -> list[Any]:
    return [event for event in events if "CUDA" in str(event.device_type)]
