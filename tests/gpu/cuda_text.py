# SPDX-License-Identifier: Apache-2.0
"""Compilation of TVM's CUDA text without a GPU: registers, spills and machine code.

The text is compiled as that of a model is, by ``tvm_fusion.codegen.nvrtc``.
"""

from __future__ import annotations

import functools

import tvm
from tvm import tirx

from examples.benchmarks.gpu.sass import count, loops, main_loop, opcodes, sass
from tests.targets import PLAIN
from tvm_fusion.codegen.nvrtc import Resources, compile_cuda, resources

__all__ = ["count", "cuda_source", "loops", "main_loop", "opcodes", "ptxas", "sass"]


@functools.lru_cache(maxsize=8)
def cuda_source(mod: tvm.IRModule | tirx.PrimFunc, arch: str = "sm_90") -> str:
    """Return the CUDA text that TVM's own lowering makes of GPU functions.

    Parameters
    ----------
    mod : tvm.IRModule or tirx.PrimFunc
        The functions, bound to ``blockIdx`` and ``threadIdx``.
    arch : str
        The architecture, for example ``"sm_90"``.

    Returns
    -------
    source : str
        The text of all kernels. TVM compiles it when a kernel is first run, not here.
    """
    target = tvm.target.Target({"kind": "cuda", "arch": arch}, PLAIN)  # the host's code never runs
    return tirx.build(mod, target=target).imports[0].inspect_source()


def ptxas(source: str, arch: str = "sm_90") -> dict[str, Resources]:
    """Compile CUDA text; return what each kernel uses.

    Raises
    ------
    CompilationError
        Where the text does not compile; with the compiler's log.
    """
    return resources(compile_cuda(source, arch))
