# SPDX-License-Identifier: Apache-2.0
"""Pass ``AllowTF32``: lets GPU kernels round the factors of float32 products to TF32."""

from __future__ import annotations

import tvm
from tvm import IRModule, tirx

from schedules.gpu.gemm.matmul.tensor_core_tile import TF32


@tvm.transform.module_pass(opt_level=0, name="AllowTF32")
class AllowTF32:
    """Mark every function, before it is scheduled, so that products and convolutions may use TF32.

    Factors then keep 10 of the 23 bits behind the point; sums and all else stay float32. Has no
    effect before sm_80.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Mark the functions."""
        changed = mod.clone()
        for var, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc):
                changed.update_func(var, func.with_attr(TF32, True))
        return changed
