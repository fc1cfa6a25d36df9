# SPDX-License-Identifier: Apache-2.0
"""TVM's own GPU rules (dlight), as its default CUDA pipeline has them."""

from __future__ import annotations

import contextlib

import tvm
import tvm_ffi

from examples.benchmarks.reduction_cases import Case

from ..engine import Engine, Launcher, Sets
from .ours import check_tvm, tvm_launcher
from .relax_build import build, relax_module, stock_passes, stock_reduce


class TVMDefault(Engine):
    """Stock TVM.

    Parameters
    ----------
    arch : str
        Such as ``sm_90``.
    """

    title = "TVM dlight"
    package = "tvm"

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def check(self) -> None:
        """Look for TVM's CUDA runtime."""
        check_tvm()

    def prepare(self, case: Case, sets: Sets) -> Launcher:
        """Compile a case by TVM's rules."""
        executable = build(relax_module(case, stock_reduce), stock_passes(), self.arch)
        return tvm_launcher(executable, sets, repeatable=True)

    def stream_scope(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """Launch on this stream."""
        return tvm_ffi.use_raw_stream(tvm.cuda(0), stream)
