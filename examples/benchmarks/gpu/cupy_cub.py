# SPDX-License-Identifier: Apache-2.0
"""CuPy with its CUB accelerator; forms that CUB lacks run CuPy's own kernels."""

from __future__ import annotations

import contextlib

from examples.benchmarks.reduction_cases import Case, step_dtypes
from tvm_fusion.errors import EngineError

from .array_steps import reduce_numpy, run_case
from .engine import Engine, Launcher, Sets, module


class CupyCub(Engine):
    """CuPy, one kernel or more for each operator."""

    title = "CuPy CUB"
    package = "cupy"

    def prepare(self, case: Case, sets: Sets) -> Launcher:
        """Bind a case to arrays that it shares with PyTorch.

        Raises
        ------
        EngineError
            If a type is bfloat16, which CuPy has no reductions of.
        """
        cupy = module("cupy")
        dtypes = {dtype for item in case.reductions for dtype in step_dtypes(item, case.dtype)}
        if "bfloat16" in dtypes:
            raise EngineError("CuPy has no bfloat16")
        accelerators = module("cupy._core")
        accelerators.set_reduction_accelerators(["cub"])
        accelerators.set_routine_accelerators(["cub"])
        arrays = [[cupy.from_dlpack(tensor) for tensor in tensors] for tensors in sets]
        return Launcher(lambda number: run_case(case, arrays[number], cupy, reduce_numpy))

    def release(self) -> None:
        """Free the memory pool, which other engines cannot use."""
        module("cupy").get_default_memory_pool().free_all_blocks()

    def stream_scope(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """Launch on this stream."""
        return module("cupy").cuda.ExternalStream(stream)
