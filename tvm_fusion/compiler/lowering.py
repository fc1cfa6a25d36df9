# SPDX-License-Identifier: Apache-2.0
"""Lowering of CPU kernels from loop nests to code: the passes that change something there.

TVM's own list is for GPUs, too, and removes dead statements one by one, which LLVM does at a
fraction of the time. Importing this module registers the list under ``NAME`` for
``tvm.tirx.build``.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import DataType, s_tir, tirx
from tvm.ir.transform import Pass, PassContext
from tvm.tirx import compilation_pipeline

NAME = "tvm_fusion_cpu"


def lowering_passes() -> list[Pass]:
    """Passes from scheduled functions to functions of packed arguments, in TVM's order."""
    nests, code = s_tir.transform, tirx.transform
    return [
        nests.CanonicalizeLoop(),
        nests.LowerInitBlock(),
        nests.PlanAndUpdateBufferAllocationLocation(),
        nests.ConvertBlocksToOpaque(),
        nests.CompactBufferAllocation(),
        nests.LowerMatchBuffer(),
        nests.StmtSimplify(),
        nests.AnnotateIrregularLoop(),
        nests.LowerOpaqueBlock(),
        code.FlattenBuffer(),
        code.BF16ComputeLegalize(),
        code.NarrowDataType(32),
        nests.LoopPartition(),
        code.VectorizeLoop(True),
        code.StorageRewrite(),
        HoistConditions(),
        code.UnrollLoop(),
        nests.RenormalizeSplitPattern(),
        code.StmtSimplify(),
        nests.RewriteUnsafeSelect(),
        code.FP8ComputeLegalize(),
        code.VerifyMemory(),
        code.AnnotateEntryFunc(),
        code.SplitHostDevice(),
        code.MakePackedAPI(),
        code.FP8StorageLegalize(),
        code.BF16StorageLegalize(),
    ]


@tvm.transform.module_pass(opt_level=0, name="HoistConditions")
class HoistConditions:
    """TVM's ``HoistIfThenElse``, for those functions with a condition that it could hoist.

    That is a loop's whole body. TVM takes a sixth of the time of all lowering to find none.
    """

    def transform_module(self, mod: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        """Return the module with conditions outside of the loops that do not change them."""
        found = {var: func for var, func in mod.functions_items() if _has_conditional_loop(func)}
        if not found:
            return mod
        hoisted = s_tir.transform.HoistIfThenElse()(tvm.IRModule(found, attrs=mod.attrs))
        functions = dict(mod.functions_items()) | dict(hoisted.functions_items())
        return tvm.IRModule(functions, attrs=mod.attrs)


@tvm.transform.module_pass(opt_level=0, name="LowerKernels")
class LowerKernels:
    """Lower kernels; those of constant shapes trust their arguments.

    The virtual machine gives a kernel tensors that it planned itself, or that the program has
    checked. TVM's checks of each argument are longer than most kernels, and slower to compile.
    Functions that assert something themselves keep all checks.
    """

    def transform_module(self, mod: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        """Return the lowered module."""
        checked = {var.name_hint for var, func in mod.functions_items() if _checks(func)}
        passes = [*lowering_passes(), AssumeElementAlignment()]
        lowered = tvm.transform.Sequential(passes)(mod)
        functions = dict(tirx.transform.SkipAssert()(lowered).functions_items())
        functions |= {var: lowered[var] for var in functions if var.name_hint in checked}
        return tvm.IRModule(functions, attrs=lowered.attrs)


@tvm.transform.module_pass(opt_level=0, name="AssumeElementAlignment")
class AssumeElementAlignment:
    """Promise LLVM no more of an argument than that its data begins where an element may.

    TVM promises 64 bytes, which arrays of numpy rarely have. With AVX and NEON, loads and stores
    of whole vectors need no alignment, and are as fast without the promise where the data is
    aligned. It runs after ``MakePackedAPI``, which writes the promise down.

    Before::

        T.attr(x, "storage_alignment", 64)

    After, for a buffer of float32::

        T.attr(x, "storage_alignment", 4)
    """

    def transform_module(self, mod: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        """Return the module with weaker promises."""
        functions = {
            var: tvm_ffi.structural_map(func, (tirx.AttrStmt, _with_element_alignment))
            for var, func in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs)


def _with_element_alignment(stmt: tirx.AttrStmt) -> tirx.Stmt:
    if stmt.attr_key != "storage_alignment":
        return stmt
    size = max(1, DataType(str(stmt.node.dtype)).bits // 8)
    return tirx.AttrStmt(stmt.node, stmt.attr_key, tirx.const(size, "int32"), stmt.body)


def _checks(func: tirx.PrimFunc) -> bool:
    """Return whether a function checks what no program checks for it."""
    extents = [extent for param in func.params for extent in getattr(param, "shape", (None,))]
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return True
    return _has(tirx.AssertStmt, func)


def _has(kind: type[tirx.Stmt], func: tirx.PrimFunc) -> bool:
    found: list[tirx.Stmt] = []
    tvm_ffi.structural_walk(func.body, (kind, found.append))
    return bool(found)


def _has_conditional_loop(func: tirx.PrimFunc) -> bool:
    """Return whether a condition is the whole body of a loop."""
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, found.append))
    return any(isinstance(loop.body, tirx.IfThenElse) for loop in found)


def _pipeline() -> tuple[Pass, object, object]:
    """Passes of a module, and those of host and device functions after that."""
    finalize = s_tir.pipeline
    return LowerKernels(), finalize.finalize_host_passes, finalize.finalize_device_passes


compilation_pipeline.PIPELINE_MAP[NAME] = _pipeline
