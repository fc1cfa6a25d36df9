# SPDX-License-Identifier: Apache-2.0
"""Pipeline from an imported module to code: the phases of ``phases.py``, then lowering and code.

``relax.get_pipeline("tvm_fusion")``, which ``plugin.py`` registers, gives
a pass from an imported module to one that ``tvm.compile`` can generate code for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import tvm
from tvm import relax
from tvm.ir.transform import Pass
from tvm.relax.backend.cpu_generic import pipeline as cpu_generic
from tvm.relax.backend.gpu_generic import pipeline as gpu_generic
from tvm.target import Target

from relay_passes import (
    CaptureGraphs,
    CheckAlignment,
    LiftOutputs,
    LiftScratch,
    LiftWeights,
    ShareKernels,
    sole_kernel,
)
from schedules import attributes
from schedules.cost.decisions import deciding_for
from schedules.gpu.core.machine import reproducible_target

from .. import plugin
from ..codegen.nvrtc import tvm_compiler
from ..errors import TargetError
from ..runtime.artifact import SoleKernelCall
from ..runtime.host_arrays import ALIGNMENT
from .build_kernels import build_program
from .failures import own_errors, without_nodes
from .options import Fuse, Options, check_reproducible
from .phases import phases
from .targets import is_gpu

Progress = Callable[[str, int, int], None]
"""Told the name of a stage, its number, and the number of all of them; within the stage ``build``
again, with the number of kernels that are done."""

NAME = plugin.PIPELINE

__all__ = [
    "NAME",
    "Built",
    "Fuse",
    "Options",
    "Progress",
    "build",
    "build_apart",
    "lower_to_vm",
    "optimize",
    "phases",
    "run_phases",
    "tvm_fusion_pipeline",
]


def optimize(
    mod: tvm.IRModule,
    target: Target,
    options: Options | None = None,
    progress: Progress | None = None,
) -> tvm.IRModule:
    """Run all phases on a Relax module.

    Parameters
    ----------
    mod : tvm.IRModule
        An imported module; it is not changed.
    target : Target
        A CPU, or a GPU with a host.
    options : Options | None
        The user's choices; all defaults if None.
    progress : callable | None
        Called with a phase's name, its number and the number of phases, before each.

    Returns
    -------
    tvm.IRModule
        Scheduled functions and a ``main`` that calls them; the attribute
        ``tvm_fusion.fusion_report`` records the decision on each pair of convolutions.

    Raises
    ------
    TargetError
        If the target is of another kind, or a choice is for CPUs only and this is a GPU.
    CompilationError
        If TVM fails; the message names the phase.
    """
    options = options or Options()
    if is_gpu(target):
        _refuse_cpu_kernels(mod, target)
    if options.reproducible:
        check_reproducible(target, options)
        target = reproducible_target(target)
    with deciding_for(options.machine):
        return run_phases(mod, target, phases(target, options), options.dump, progress)


def _refuse_cpu_kernels(mod: tvm.IRModule, target: Target) -> None:
    for function in mod.functions.values():
        operator = function.attrs.get(attributes.CPU_ONLY) if function.attrs else None
        if operator is not None:
            raise TargetError(
                f"{operator} is compiled for CPUs only; the target is {target.kind.name!r}"
            )


def run_phases(
    mod: tvm.IRModule,
    target: Target,
    plan: Mapping[str, Sequence[Pass]],
    dump: Path | None = None,
    progress: Progress | None = None,
) -> tvm.IRModule:
    """Run some phases in order, with the parameters and errors of :func:`optimize`."""
    with target:
        for number, (name, passes) in enumerate(plan.items()):
            if progress is not None:
                progress(name, number, len(plan))
            for one in passes:  # a signal waits for the end of a pass
                with own_errors(name, mod):
                    mod = one(mod)
            if dump is not None:
                dump.mkdir(parents=True, exist_ok=True)
                (dump / f"{number}-{name}.py").write_text(mod.script())
    return mod


def lower_to_vm(
    target: Target, captured: Sequence[str] = (), entry: Sequence[Pass] | None = None
) -> Pass:
    """Passes from scheduled functions to the Relax virtual machine, as in TVM's own pipelines.

    Kernels of the functions ``captured`` are captured into CUDA graphs. ``entry`` are passes on the
    arguments of programs; by default their alignment is checked, on which TVM's code relies.
    """
    stock = gpu_generic if is_gpu(target) else cpu_generic
    plan_memory, *others = stock.finalize_passes(target)
    passes = [
        *([LiftScratch()] if captured else []),
        *stock.dataflow_lower_passes(target),
        *([CheckAlignment(target)] if entry is None else entry),
        plan_memory,
        *([LiftWeights(captured), CaptureGraphs(captured)] if captured else []),
        *others,
    ]
    return tvm.transform.Sequential(passes, name="lower_to_vm")


def build(mod: tvm.IRModule, target: Target) -> relax.VMExecutable:
    """Generate code for a module that :func:`optimize` returned.

    Raises
    ------
    CompilationError
        If TVM fails.
    """
    with target, own_errors("build", mod), _cuda_compiler(target):
        return tvm.compile(mod, target, relax_pipeline=lower_to_vm(target))


class Built(NamedTuple):
    """A program and its weights."""

    executable: relax.VMExecutable
    """The program; its ``main`` takes the weights after the model's inputs."""
    weights: list[tvm.runtime.Tensor]  # The weights.
    kernel: SoleKernelCall | None  # Call of the program if it is one kernel.
    lifted: tuple[bool, ...] = ()
    """Whether each result is an argument of ``main``, between the inputs and the weights. Empty if
    none is."""
    alignment: int = ALIGNMENT
    """Bytes at a multiple of which the kernels expect their arguments to begin."""


def build_apart(
    mod: tvm.IRModule,
    target: Target,
    fast_math: bool = False,
    functions: Sequence[str] = ("main",),
    cuda_graph: bool = False,
    built: Callable[[int, int], None] | None = None,
) -> Built:
    """Generate code as :func:`build` does, with separate weights.

    So code and weights can be saved and loaded separately. On a CPU ``main`` also takes tensors
    that it writes its results to, between the inputs and the weights. ``fast_math`` and
    ``cuda_graph`` are those of the options; ``functions`` are the programs of the module, each of
    which takes all weights. ``built`` is told how many kernels have code, of all.

    Raises CompilationError if TVM fails.
    """
    is_main, on_cpu = tuple(functions) == ("main",), not is_gpu(target)
    entry, alignment = None, ALIGNMENT
    if on_cpu and not _has_external(mod):  # our own lowering, which relies on no alignment
        entry, alignment = [LiftOutputs()] if is_main else [], 1
    noted, mod = mod, without_nodes(mod)
    with target, own_errors("build", noted):
        lower = lower_to_vm(target, functions if cuda_graph else (), entry)
        shared = [ShareKernels()] if on_cpu else []
        mod = tvm.transform.Sequential([lower, LiftWeights(functions), *shared])(mod)
    with target, own_errors("build", noted), _cuda_compiler(target, fast_math):
        weights = (
            list(mod.attrs[attributes.WEIGHTS])
            if mod.attrs and attributes.WEIGHTS in mod.attrs
            else []
        )
        executable = _generate(mod.without_attr(attributes.WEIGHTS), target, built)
        if not is_main:
            return Built(executable, weights, None, alignment=alignment)
        main = mod["main"]
        lifted = (
            map(bool, main.attrs[attributes.LIFTED_OUTPUTS])
            if attributes.LIFTED_OUTPUTS in (main.attrs or {})
            else ()
        )
        return Built(executable, weights, _kernel_call(main), tuple(lifted), alignment)


_EXTERNAL = ("external_mods", "const_name_to_constant")
"""Attributes of a module, parts of which are compiled already."""


def _has_external(mod: tvm.IRModule) -> bool:
    return bool(mod.attrs) and any(name in mod.attrs for name in _EXTERNAL)


def _generate(
    mod: tvm.IRModule, target: Target, built: Callable[[int, int], None] | None
) -> relax.VMExecutable:
    """Code of a lowered module."""
    if _has_external(mod):
        return tvm.compile(mod, target, relax_pipeline=tvm.transform.Sequential([]))
    return build_program(mod, target, built)


def _kernel_call(main: relax.Function) -> SoleKernelCall | None:
    """Call of the kernel of a program that is one kernel."""
    call = sole_kernel(main)
    if call is None:
        return None
    params = [param for param in main.params if not param.same_as(call.args[-1])]
    if any(argument not in params for argument in call.args[:-1]):
        return None
    arguments = tuple(params.index(argument) for argument in call.args[:-1])
    is_once = sorted(arguments) == list(range(len(params)))
    return SoleKernelCall(call.op.name_hint, arguments) if is_once else None


def _cuda_compiler(target: Target, fast_math: bool = False) -> AbstractContextManager[None]:
    """Compiler context: where TVM's CUDA runtime is loaded, TVM compiles CUDA text at once."""
    if target.kind.name != "cuda":
        return nullcontext()
    return tvm_compiler(str(target.attrs["arch"]), fast_math)


def tvm_fusion_pipeline(
    target: Target | None = None, fuse: Fuse = "auto", winograd: str = "auto"
) -> Pass:
    """The whole pipeline as one pass, for ``tvm.compile(..., relax_pipeline=...)``.

    Where there is a GPU, TVM compiles CUDA text by the package ``cuda-bindings``; within ``with
    tvm_fusion.codegen.nvrtc.tvm_compiler("sm_90"):`` by any installed NVRTC or nvcc.

    Parameters
    ----------
    target : Target | None
        A CPU, or a GPU with a host; the current target of the pass run if None.
    fuse : str or callable
        Choice as in :class:`Options`.
    winograd : str
        Choice as in :class:`Options`.
    """

    @tvm.transform.module_pass(opt_level=0, name=NAME)
    def run(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        chosen = target or Target.current(allow_none=True)
        if chosen is None:
            raise TargetError(
                f"no target for the pipeline {NAME!r}; expected the option target=..., or a call "
                "within 'with target:'"
            )
        return lower_to_vm(chosen)(optimize(mod, chosen, Options(fuse=fuse, winograd=winograd)))

    return run


plugin.register()
