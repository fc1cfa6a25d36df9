# SPDX-License-Identifier: Apache-2.0
"""Kernels of this project, one engine for each finish."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi

from examples.benchmarks.reduction_cases import Case
from schedules.workload.reduce import FLOATS
from tvm_fusion.errors import EngineError

from ..engine import Engine, Launcher, Sets
from .relax_build import build, kernel_count, our_passes, our_reduce, relax_module


class Ours(Engine):
    """The rules of ``schedules.gpu``.

    Parameters
    ----------
    arch : str
        Such as ``sm_90``.
    finish : str
        Finish of partial results.
    """

    package = "tvm"

    def __init__(self, arch: str, finish: str = "auto") -> None:
        self.arch = arch
        self.finish = finish
        self.title = "tvm-fusion" if finish == "auto" else f"tvm-fusion {finish}"

    def check(self) -> None:
        """Look for TVM's CUDA runtime and for our rules."""
        check_tvm()
        our_passes()

    def prepare(self, case: Case, sets: Sets) -> Launcher:
        """Compile a case by our rules."""
        module = relax_module(case, our_reduce, self.finish)
        executable = build(module, our_passes(), self.arch)
        # Only the order of atomic updates is left to chance, and only floats show it.
        repeatable = self.finish != "atomic" or all(
            case.workload(reduction).dtype not in FLOATS for reduction in case.reductions
        )
        return tvm_launcher(executable, sets, repeatable)

    def stream_scope(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """Launch on this stream."""
        return tvm_ffi.use_raw_stream(tvm.cuda(0), stream)


def check_tvm() -> None:
    """Check that TVM finds a GPU.

    Raises
    ------
    EngineError
        If it does not.
    """
    if not tvm.cuda(0).exist:
        raise EngineError("TVM's CUDA runtime does not load or finds no GPU")


def tvm_launcher(executable: Any, sets: Sets, repeatable: bool) -> Launcher:
    """Bind a compiled module to input sets that it shares with PyTorch."""
    main: Callable[..., Any] = tvm.relax.VirtualMachine(executable, tvm.cuda(0))["main"]
    inputs = [[tvm.runtime.from_dlpack(tensor) for tensor in tensors] for tensors in sets]
    return Launcher(
        lambda number: tuple(main(*inputs[number])),
        repeatable=repeatable,
        details={"kernels": kernel_count(executable)},
    )
