# SPDX-License-Identifier: Apache-2.0
"""Lowering of kernels from loop nests to code, and code generation of several groups at once.

On CPUs only those passes run that change something there: TVM's own list is for GPUs, too, and
removes dead statements one by one, which LLVM does at a fraction of the time. Importing this module
registers both lists, ``CPU_LOWERING`` and ``GPU_LOWERING``, for ``tvm.tirx.build`` and
``tvm.compile``.

Lowering and LLVM work without Python's lock, and most of the time of a compilation goes there, so
that each group of kernels is built on a thread of its own.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import DataType, ir, relax, s_tir, tirx
from tvm.ir.transform import Pass, PassContext
from tvm.target import Target
from tvm.tirx import compilation_pipeline

from schedules.errors import reason
from schedules.tir.expression_walk import op_name, variables

from ..errors import CompilationError
from ..machine.host import physical_cores
from .interrupts import interrupts_at_once
from .targets import is_gpu

CPU_LOWERING = "tvm_fusion_cpu"
GPU_LOWERING = "tvm_fusion_gpu"
COMPACTION = "s_tir.CompactBufferAllocation"

GROUP = 8
"""Least number of kernels of a group; smaller ones cost more modules than they balance threads."""


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


_QUOTIENT, _FMA = "__fdiv_rn", {"cuda": "__fmaf_rn", "opencl": "fma"}
_TO_WHOLE = ("tirx.round", "tirx.nearbyint")


@tvm.transform.module_pass(opt_level=0, name="RoundAlike")
class RoundAlike:
    """Let GPUs round numbers to whole ones as CPUs do.

    ::

        round(a / b)                round(__fdiv_rn(a, b))       CUDA; other quotients err by 2 ulp
        float32(integer) * a + b    fma(float32(integer), a, b)

    ONNX defines the first. LLVM makes the second, where the CPU can; a compiler of GPUs may or may
    not, and what is near a half becomes another whole number. It runs before loops are vectors.
    """

    def transform_module(self, mod: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        """Return the module with calls of the devices' functions."""
        functions = {var: _rounded_alike(func) for var, func in mod.functions_items()}
        return tvm.IRModule(functions, attrs=mod.attrs)


def _rounded_alike(func: tirx.PrimFunc) -> tirx.PrimFunc:
    kind = _kind(func)
    if kind not in _FMA:
        return func
    func = tvm_ffi.structural_map(func, (tirx.Add, lambda total: _as_fma(total, _FMA[kind])))
    rounded: list[ir.Call] = []
    tvm_ffi.structural_walk(
        func.body, (ir.Call, lambda call: rounded.append(call) if _to_whole(call) else None)
    )
    if kind != "cuda" or not rounded:
        return func
    bound = set().union(*map(variables, rounded))
    rules = [
        (ir.Call, lambda call: _with_exact_quotients(call) if _to_whole(call) else call),
        (tirx.Bind, lambda bind: _with_exact_quotients(bind) if bind.var in bound else bind),
    ]
    return tvm_ffi.structural_map(func, rules)


def _kind(func: tirx.PrimFunc) -> str:
    target = func.attrs.get("target") if func.attrs else None
    return "" if target is None else str(target.kind.name)


def _as_fma(total: tirx.Add, name: str) -> tirx.Expr:
    if str(total.ty.dtype) != "float32":
        return total
    products = [each for each in (total.a, total.b) if isinstance(each, tirx.Mul)]
    if not any(map(_scales_integer, products)):
        return total
    product, other = products[0], total.b if products[0].same_as(total.a) else total.a
    return tirx.call_pure_extern("float32", name, product.a, product.b, other)


def _scales_integer(product: tirx.Mul) -> bool:
    factors = [each for each in (product.a, product.b) if isinstance(each, tirx.Cast)]
    return any("int" in str(factor.value.ty.dtype) for factor in factors)


def _to_whole(call: ir.Call) -> bool:
    return op_name(call) in _TO_WHOLE and str(call.ty.dtype) == "float32"


def _with_exact_quotients(tree: ir.Call | tirx.Bind) -> Any:
    return tvm_ffi.structural_map(tree, (tirx.Div, _exact_quotient))


def _exact_quotient(quotient: tirx.Div) -> tirx.Expr:
    if str(quotient.ty.dtype) != "float32":
        return quotient
    return tirx.call_pure_extern("float32", _QUOTIENT, quotient.a, quotient.b)


@tvm.transform.module_pass(opt_level=0, name="ExactLiterals")
class ExactLiterals:
    """Write constants of GPU kernels as their bits where TVM's text would round them.

    TVM writes floats with seven digits for OpenCL, and float64 with fifteen behind the point for
    CUDA: 3.2300844 as 3.230084, and 1e-20 as 0. It is the last pass of device functions.

    ::

        a * 3.2300844    a * as_float(1078898100)                         OpenCL
        a * 1e-20        a * __longlong_as_double(4307583784117748259)    CUDA
    """

    def transform_module(self, mod: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        """Return the module with calls in place of such constants."""
        functions = {var: _with_exact_literals(func) for var, func in mod.functions_items()}
        return tvm.IRModule(functions, attrs=mod.attrs)


def _with_exact_literals(func: tirx.PrimFunc) -> tirx.PrimFunc:
    kind = _kind(func)

    def in_bits(number: tirx.FloatImm) -> tirx.Expr:
        dtype = str(number.ty.dtype)
        name = _FROM_BITS.get((kind, dtype))
        if name is None or not math.isfinite(number.value):
            return number
        text = f"{number.value:.6e}" if kind == "opencl" else f"{number.value:.15f}"
        value, written = np.array([number.value, float(text)]).astype(dtype)
        if value == written:
            return number
        bits = f"int{8 * value.itemsize}"
        return tirx.call_pure_extern(dtype, name, tirx.const(int(value.view(bits)), bits))

    return tvm_ffi.structural_map(func, (tirx.FloatImm, in_bits))


_FROM_BITS = {
    ("opencl", "float32"): "as_float",
    ("opencl", "float64"): "as_double",
    ("cuda", "float64"): "__longlong_as_double",
}


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
        mod = tvm.transform.Sequential([ExactFloats(), RoundAlike()])(mod)
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


def _finalized(lower: Callable[[], Pass]) -> Callable[[], tuple[Pass, object, object]]:
    """Passes of a module, and those of host and device functions after that."""
    host = s_tir.pipeline.finalize_host_passes
    return lambda: (lower(), host, _finalize_device_passes)


def _finalize_device_passes() -> Pass:
    return tvm.transform.Sequential([s_tir.pipeline.finalize_device_passes(), ExactLiterals()])


compilation_pipeline.PIPELINE_MAP[CPU_LOWERING] = _finalized(LowerKernels)
compilation_pipeline.PIPELINE_MAP[GPU_LOWERING] = _finalized(LowerGPUKernels)


def build_program(
    mod: tvm.IRModule, target: Target, built: Callable[[int, int], None] | None = None
) -> relax.VMExecutable:
    """Generate code of a module that is lowered to the virtual machine.

    The groups depend on the names of the kernels only, so that the code does not depend on the
    number of processors. Where the current pass context has instruments, which need not be safe to
    call from several threads, the calling thread generates everything.

    ``mod``: Relax functions in the form of the virtual machine, and scheduled kernels. ``target``:
    the CPU, or the GPU with its host. ``built``: called on this thread with the number of kernels
    that have code, and that of all. Raises CompilationError if TVM fails on a kernel; the message
    names it.
    """
    builder = relax.ExecBuilder()
    left = tvm.get_global_func("relax.VMCodeGen")(builder, mod)
    kernels = {v: func for v, func in left.functions_items() if isinstance(func, tirx.PrimFunc)}
    groups = [kernels] if _has_calls(kernels) else _groups(kernels)
    libraries: list[tvm.runtime.Module] = []
    done = 0
    with contextlib.closing(_on_threads(groups if kernels else [], target)) as found:
        for group, library in zip(groups, found, strict=False):
            libraries.append(library)
            done += len(group)
            if built is not None:
                built(done, len(kernels))
    for library in libraries[1:]:
        libraries[0].import_module(library)
    library = libraries[0] if libraries else None
    return relax.VMExecutable(tvm.get_global_func("relax.VMLink")(builder, target, library, [], {}))


_Group = dict[tvm.ir.GlobalVar, tirx.PrimFunc]


def _groups(kernels: _Group) -> list[_Group]:
    """Kernels in groups of about ``GROUP``; neighbours in name, often equally slow, are apart."""
    ordered = sorted(kernels, key=lambda var: var.name_hint)
    count = max(1, len(kernels) // GROUP)
    return [{var: kernels[var] for var in ordered[start::count]} for start in range(count)]


def _has_calls(kernels: _Group) -> bool:
    """Return whether a kernel calls another one: those must be in one module."""
    found: list[tvm.ir.GlobalVar] = []
    for func in kernels.values():
        tvm_ffi.structural_walk(func.body, (tvm.ir.GlobalVar, found.append))
    return bool(found)


def _on_threads(
    groups: Sequence[_Group], target: Target
) -> Generator[tvm.runtime.Module, None, None]:
    """Build groups on as many threads as this process has cores; their order is kept."""
    context = PassContext.current()
    workers = min(len(groups), physical_cores())
    if workers < 2 or context.instruments:
        yield from (_build(group, target) for group in groups)
        return
    stopped = threading.Event()

    def build(group: _Group) -> tvm.runtime.Module | None:
        if stopped.is_set():
            return None
        with context, target:
            return _build(group, target)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="tvm_fusion.build")
    try:
        with interrupts_at_once():
            yield from pool.map(build, groups)
    finally:
        # After an error or Ctrl-C, groups that have not begun are left out.
        stopped.set()
        pool.shutdown(cancel_futures=True)


def _build(group: _Group, target: Target) -> tvm.runtime.Module:
    try:
        return _compiled(group, target)
    except Exception as error:  # TVM raises anything
        raise CompilationError(_failure_text(group, target, error)) from error


def _compiled(group: _Group, target: Target) -> tvm.runtime.Module:
    lowering = GPU_LOWERING if is_gpu(target) else CPU_LOWERING
    return tvm.tirx.build(tvm.IRModule(group), target=target, pipeline=lowering)


def _failure_text(group: _Group, target: Target, error: Exception) -> str:
    """Name the kernel of a group on which TVM fails, and tell why."""
    for var, func in group.items():
        try:
            _compiled({var: func}, target)
        except Exception as alone:
            return f"the stage 'build' failed on the kernel {var.name_hint!r}: {reason(alone)}"
    names = ", ".join(var.name_hint for var in group)
    return f"the stage 'build' failed on the kernels {names}: {reason(error)}"
