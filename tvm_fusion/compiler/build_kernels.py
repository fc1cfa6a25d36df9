# SPDX-License-Identifier: Apache-2.0
"""Code generation of kernels: some groups of them at once, each on a thread of its own.

Lowering and LLVM work without Python's lock, and most of the time of a compilation goes there.

Importing this module registers the lowering of GPU kernels as ``GPU_LOWERING`` for ``tvm.compile``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir.transform import Pass, PassContext
from tvm.target import Target
from tvm.tirx import compilation_pipeline

from schedules.errors import reason

from ..errors import CompilationError
from ..machine.host import physical_cores
from .interrupts import interrupts_at_once
from .lowering import NAME as LOWERING
from .lowering import ExactFloats
from .targets import is_gpu

GROUP = 8
"""Least number of kernels of a group; smaller ones cost more modules than they balance threads."""


GPU_LOWERING = "tvm_fusion_gpu"
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


compilation_pipeline.PIPELINE_MAP[GPU_LOWERING] = _pipeline


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
    lowering = GPU_LOWERING if is_gpu(target) else LOWERING
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
