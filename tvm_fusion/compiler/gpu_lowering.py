# SPDX-License-Identifier: Apache-2.0
"""Lowering of GPU kernels from loop nests to code: TVM's passes, but for one that finds nothing.

Importing this module registers them under ``NAME`` for ``tvm.compile``.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import s_tir
from tvm.ir.transform import Pass, PassContext
from tvm.tirx import compilation_pipeline

from .lowering import ExactFloats

NAME = "tvm_fusion_gpu"
COMPACTION = "s_tir.CompactBufferAllocation"


@tvm.transform.module_pass(opt_level=0, name="LowerGPUKernels")
class LowerGPUKernels:
    """TVM's lowering of GPU kernels; without compaction of buffers where a kernel was written.

    Schedules leave buffers larger than the part that is used, in blocks around their loops. A
    function without such blocks has the buffers that its author wrote, and a look at every access
    to them takes three quarters of the time of all lowering.

    Where the current pass context has instruments, they see TVM's passes on the whole module.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: PassContext) -> tvm.IRModule:
        """Return the lowered module."""
        mod = tvm.transform.Sequential([ExactFloats()])(mod)
        lower, *_ = s_tir.pipeline.default_s_tir_pipeline()
        written = {var: func for var, func in mod.functions_items() if _is_written(func)}
        if ctx.instruments or not written:
            return lower(mod)
        others = {var: func for var, func in mod.functions_items() if var not in written}
        lowered = dict(lower(tvm.IRModule(others, attrs=mod.attrs)).functions_items())
        disabled = [*ctx.disabled_pass, COMPACTION]
        with PassContext(ctx.opt_level, ctx.required_pass, disabled, config=ctx.config):
            lowered |= lower(tvm.IRModule(written, attrs=mod.attrs)).functions_items()
        return tvm.IRModule(lowered, attrs=mod.attrs)


def _is_written(func: tvm.ir.BaseFunc) -> bool:
    """Return whether a function has no block but the one around its body."""
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, found.append))
    return len(found) <= 1


def _pipeline() -> tuple[Pass, object, object]:
    """Passes of a module, and those of host and device functions after that."""
    finalize = s_tir.pipeline
    return LowerGPUKernels(), finalize.finalize_host_passes, finalize.finalize_device_passes


compilation_pipeline.PIPELINE_MAP[NAME] = _pipeline
