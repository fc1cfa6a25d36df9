# SPDX-License-Identifier: Apache-2.0
"""Lowering of CPU kernels from loop nests to code: the passes that change something there.

TVM's own list is for GPUs, too, and removes dead statements one by one, which LLVM does at a
fraction of the time. Importing this module registers the list under ``NAME`` for
``tvm.tirx.build``.
"""

from __future__ import annotations

from collections.abc import Callable

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
        ExactFloats(),
        nests.CanonicalizeLoop(),
        nests.LowerInitBlock(),
        PlaceBuffers(),
        nests.LowerMatchBuffer(),
        nests.StmtSimplify(),
        nests.AnnotateIrregularLoop(),
        nests.LowerOpaqueBlock(),
        code.FlattenBuffer(),
        code.BF16ComputeLegalize(),
        code.NarrowDataType(32),
        nests.LoopPartition(),
        code.VectorizeLoop(True),
        BroadcastBits(),
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


@tvm.transform.module_pass(opt_level=0, name="ExactFloats")
class ExactFloats:
    """Write operations on floats so that TVM's simplifier and code generator keep their numbers.

    ::

        a - b                 a + b * -1           x + y - x is not y where x is large or infinite
        a == a                a <= a               false where a is NaN
        a != b                (a == b) ^ True      true where one is NaN; in LLVM's code it is not
        not (a < b)           (a < b) ^ True       not b <= a where one is NaN
        bool(a)               (a == 0) ^ True      true where a is NaN

    LLVM and the compilers of GPUs make the shorter instruction of each again.
    """

    def transform_module(self, mod: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        """Return the module with other operations, and the same numbers."""
        rules: list[tuple[type, Callable[..., tirx.Expr]]] = [
            (tirx.Sub, _as_sum),
            (tirx.EQ, _as_order),
            (tirx.NE, _as_inverse),
            (tirx.Not, _as_bits),
            (tirx.Cast, _as_comparison),
        ]
        functions = {
            var: tvm_ffi.structural_map(func, rules) for var, func in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs)


_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ)


def _const(number: float, like: tirx.Expr) -> tirx.Expr:
    dtype = DataType(str(like.ty.dtype))
    one = tirx.const(number, str(dtype).partition("x")[0])
    return tirx.Broadcast(one, dtype.lanes) if dtype.lanes > 1 else one


def _is_float(value: tirx.Expr) -> bool:
    return "float" in str(value.ty.dtype)


def _inverse(condition: tirx.Expr) -> tirx.Expr:
    return tirx.bitwise_xor(condition, _const(True, condition))


def _as_sum(difference: tirx.Sub) -> tirx.Expr:
    a, b = difference.a, difference.b
    return a + b * _const(-1, b) if _is_float(a) else difference


def _as_order(equality: tirx.EQ) -> tirx.Expr:
    a, b = equality.a, equality.b
    return tirx.LE(a, b) if _is_float(a) and tvm_ffi.structural_equal(a, b) else equality


def _as_inverse(inequality: tirx.NE) -> tirx.Expr:
    a, b = inequality.a, inequality.b
    return _inverse(_as_order(tirx.EQ(a, b))) if _is_float(a) else inequality


def _as_bits(inverse: tirx.Not) -> tirx.Expr:
    condition = inverse.a
    return _inverse(condition) if _compares_floats(condition) else inverse


def _compares_floats(condition: tirx.Expr) -> bool:
    return isinstance(condition, _COMPARISONS) and _is_float(condition.a)


def _as_comparison(cast: tirx.Cast) -> tirx.Expr:
    value = cast.value
    if not _is_float(value) or not str(cast.ty.dtype).startswith("bool"):
        return cast
    return _inverse(tirx.EQ(value, _const(0, value)))


@tvm.transform.module_pass(opt_level=0, name="BroadcastBits")
class BroadcastBits:
    """Repeat a bfloat16 in the lanes of a vector as the bits that it is stored as.

    ``BF16StorageLegalize`` does not replace the type of such a vector, and fails where it is
    stored.
    """

    def transform_module(self, mod: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        """Return the module without vectors of one bfloat16."""
        functions = {
            var: tvm_ffi.structural_map(func, (tirx.Broadcast, _broadcast_bits))
            for var, func in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs)


def _broadcast_bits(vector: tirx.Broadcast) -> tirx.Expr:
    if str(vector.value.ty.dtype) != "bfloat16":
        return vector
    bits = tirx.Broadcast(tirx.reinterpret("uint16", vector.value), vector.lanes)
    return tirx.reinterpret(str(vector.ty.dtype), bits)


@tvm.transform.module_pass(opt_level=0, name="PlaceBuffers")
class PlaceBuffers:
    """Allocate buffers where they are used, those of schedules as large as the part that is used.

    Schedules leave whole buffers in the outermost block. Those of inner blocks were written with
    their sizes, and a look at every access to them takes a third of the time of all lowering.
    """

    def transform_module(self, mod: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        """Return the module with buffers in opaque blocks."""
        nests = s_tir.transform
        scheduled = {var for var, func in mod.functions_items() if _allocates_outside(func)}
        place = [nests.PlanAndUpdateBufferAllocationLocation(), nests.ConvertBlocksToOpaque()]
        functions = dict(tvm.transform.Sequential(place)(mod).functions_items())
        wide = {var: func for var, func in functions.items() if var in scheduled}
        if wide:
            compact = tvm.transform.Sequential([nests.CompactBufferAllocation()])
            functions |= compact(tvm.IRModule(wide, attrs=mod.attrs)).functions_items()
        return tvm.IRModule(functions, attrs=mod.attrs)


def _allocates_outside(func: tirx.PrimFunc) -> bool:
    """Return whether a function has buffers in the block around its body."""
    return isinstance(func.body, s_tir.SBlockRealize) and len(func.body.block.alloc_buffers) > 0


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
