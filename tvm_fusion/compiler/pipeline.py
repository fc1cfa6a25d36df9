# SPDX-License-Identifier: Apache-2.0
"""Pipeline: passes and their order. It only composes; every rewriting is a pass.

``relax.get_pipeline("tvm_fusion")``, which ``plugin.py`` registers, gives
a pass from an imported module to one that ``tvm.compile`` can generate code for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import tvm
from tvm import relax
from tvm.ir.transform import Pass
from tvm.relax.backend.cpu_generic import pipeline as cpu_generic
from tvm.relax.backend.gpu_generic import pipeline as gpu_generic
from tvm.target import Target

from relay_passes import (
    ApplyRules,
    AttentionInTiles,
    CaptureGraphs,
    CheckAlignment,
    ChooseWinograd,
    CoalesceReduction,
    DropPragmaScopes,
    FuseConv2D,
    FuseEpilogue,
    FusePack,
    KeepBytes,
    LegalizeCalls,
    LiftOutputs,
    LiftWeights,
    MarkConstants,
    MultiplyBfloat16,
    MultiplyBytes,
    MultiplyNarrow,
    NameSizes,
    NarrowWeights,
    PackLayout,
    PackWeights,
    PadColumns,
    ShareKernels,
    SimplifyInference,
    WidenSums,
)
from relay_passes.conv2d.fusion_decision import Decision
from relay_passes.op.legalizations import shared_legalizations
from relay_passes.program.lift_outputs import sole_kernel
from schedules import attributes, cpu
from schedules.cost.decisions import deciding_for
from schedules.cost.machine import Machine
from schedules.cpu.core.machine import CPUInfo
from schedules.gpu.core.machine import reproducible_target
from schedules.tuning.records import Records
from schedules.workload.conv2d import FusedConv2DWorkload

from .. import plugin
from ..codegen.nvrtc import tvm_compiler
from ..errors import TargetError
from ..runtime.fast_call import SoleKernelCall
from ..runtime.host_arrays import ALIGNMENT
from .build_kernels import build_program
from .failures import NoteKernels, own_errors, without_nodes
from .gpu_phases import gpu_phases
from .precision import chosen_precision
from .targets.gpu_target import check_machine
from .targets.target import is_gpu

Fuse = str | Callable[[FusedConv2DWorkload, Target], "bool | Decision"]
Progress = Callable[[str, int, int], None]

NAME = plugin.PIPELINE

WEIGHTS_BITS = {"bf16": 16, "int8": 8, "int4": 4}
"""Types to which the matrices of products can be rounded, and their bits."""


@dataclass(frozen=True)
class Options:
    """Choices of a user for the pipeline.

    Parameters
    ----------
    fuse : str or callable
        Choice of pairs of convolutions for :class:`relay_passes.FuseConv2D`.
    dump : Path | None
        A folder for the module after each phase, as ``0-simplify.py`` and so on.
    winograd : str
        Choice of 3x3 convolutions for :class:`relay_passes.ChooseWinograd`.
    records : Records
        Winners of tuning jobs, for the forms and knobs of kernels.
    fast_math : bool
        Whether functions of float32 may be approximations on CUDA.
    precision : str
        ``"fp16"``: products and convolutions of float32 are computed in float16 on a GPU;
        ``"bf16"``: what they multiply is rounded to bfloat16 on a CPU. See :mod:`.precision`.
    cuda_graph : bool
        Whether kernels are captured into CUDA graphs.
    weights : str | None
        ``"bf16"``, ``"int8"`` or ``"int4"``: type of the matrices of products on a CPU, to which
        they are rounded; with ``"int8"`` of the weights of convolutions, too.
    machine : Machine | None
        Machine by whose figures choices are made; without one, a CPU has those of its family, and a
        GPU fixed thresholds.
    reproducible : bool
        Whether kernels for a GPU do not depend on its number of multiprocessors.
    """

    fuse: Fuse = "auto"
    dump: Path | None = None
    winograd: str = "auto"
    records: Records = field(default_factory=Records)
    fast_math: bool = False
    precision: str = "fp32"
    cuda_graph: bool = False
    weights: str | None = None
    machine: Machine | None = None
    reproducible: bool = False


def phases(target: Target, options: Options) -> dict[str, list[Pass]]:
    """All phases up to scheduled functions, in order.

    Parameters
    ----------
    target : Target
        A CPU, or a GPU with a host.
    options : Options
        The user's choices.

    Returns
    -------
    dict[str, list[Pass]]
        From the name of a phase to its passes.

    Raises
    ------
    TargetError
        If the target has another kind, a choice is for CPUs only and this is a GPU, or the machine
        is another device.
    """
    _check_options(target, options)
    precision = chosen_precision(options.precision, target)
    if options.weights is not None and options.weights not in WEIGHTS_BITS:
        raise TargetError(
            f"weights is {options.weights!r}; expected {' or '.join(map(repr, WEIGHTS_BITS))}"
        )
    if is_gpu(target):
        _check_gpu(target, options)
        return gpu_phases(target, options.fuse, precision, options.records)
    if target.kind.name != "llvm":
        raise TargetError(
            f"target kind is {target.kind.name!r}; expected 'llvm', a CPU, or 'cuda' or 'opencl'"
        )
    transform = relax.transform
    winograd, has_halves = options.winograd, CPUInfo.from_target(target).halves_pay
    halves = has_halves or precision == "bf16"
    # The weights of a pair are floats.
    fuse = "none" if (options.weights, options.fuse) == ("int8", "auto") else options.fuse
    return {
        "simplify": [
            MultiplyNarrow(target),
            SimplifyInference(bounds=True),
            WidenSums(reductions=False, stored=["bfloat16"] * has_halves),
            SimplifyInference(),
            *_narrowing(target, options.weights),
        ],
        "fuse": [
            MultiplyBytes(target),
            *(_halving(target, precision == "bf16") if halves else []),
            FuseConv2D(fuse, target, winograd, options.records),
            FuseEpilogue(halves=True),
        ],
        "pack": [
            PackLayout(target=target),
            KeepBytes(target, winograd, options.weights == "int8"),
            ChooseWinograd(winograd, target, options.records),
            PadColumns(target),
            NameSizes(),
        ],
        "reduce": [CoalesceReduction(), WidenSums()],
        "lower": [
            *cpu_generic.library_dispatch_passes(target),
            LegalizeCalls(shared_legalizations()),
            DropPragmaScopes(),
            FusePack(),
            transform.AnnotateTIROpPattern(),
            NoteKernels(),
            transform.FuseOps(),
            NoteKernels(),
            transform.FuseTIR(),
            # Views, not copies; a scheduled reshape may not be recognised.
            transform.RewriteDataflowReshape(),
            transform.DeadCodeElimination(),
        ],
        "schedule": [MarkConstants(), ApplyRules(*cpu.rules(options.records)), PackWeights()],
    }


def _check_options(target: Target, options: Options) -> None:
    """Refuse choices that the target does not have."""
    if options.machine is not None:
        check_machine(target, options.machine)
    if options.cuda_graph and target.kind.name != "cuda":
        raise TargetError(
            f"cuda_graph=True is for CUDA, not for {target.kind.name!r}: leave it out, or compile "
            "for 'cuda'"
        )
    if options.fast_math and target.kind.name != "cuda":
        raise TargetError(
            f"fast_math=True has no effect on {target.kind.name!r}; it chooses the functions of "
            "CUDA kernels: leave it out, or compile for 'cuda'"
        )


def _halving(target: Target, rounds: bool) -> list[Pass]:
    """Passes of products of bfloat16, which round to it if asked to."""
    attention = [AttentionInTiles(target)] if rounds else []
    return [MultiplyBfloat16(exact=not rounds), *attention, MultiplyNarrow(target)]


def _narrowing(target: Target, weights: str | None) -> list[Pass]:
    """Passes that round the matrices of products."""
    if weights is None:
        return []
    return [NarrowWeights(WEIGHTS_BITS[weights]), MultiplyNarrow(target)]


def _check_reproducible(target: Target, options: Options) -> None:
    if not is_gpu(target):
        raise TargetError(
            f"reproducible=True has no effect on {target.kind.name!r}; it is for GPUs: leave it "
            "out, or compile for 'cuda' or 'opencl'"
        )
    if options.machine is not None or options.records:
        raise TargetError(
            "reproducible=True is for all GPUs alike, and machine= and records= have times of one: "
            "leave either out"
        )


def _check_gpu(target: Target, options: Options) -> None:
    if options.weights is not None:
        raise TargetError(
            f"weights={options.weights!r} has no effect on {target.kind.name!r}: the kernels of "
            "narrow weights are for CPUs; leave it out"
        )
    if options.winograd == "always":
        raise TargetError(
            f"winograd='always' has no effect on {target.kind.name!r}: Winograd's algorithm is for "
            "CPUs only; expected 'auto' or 'never'"
        )
    if target.host is None:
        raise TargetError(
            f"the target {target.kind.name!r} has no host; expected one, as in "
            f"Target({{'kind': {target.kind.name!r}, ...}}, host='llvm')"
        )


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
        _check_reproducible(target, options)
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
    """For each result, whether it is an argument of ``main``, between the inputs and the weights.
    Nothing if none is."""
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

    Raises
    ------
    CompilationError
        If TVM fails.
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
        As in :class:`Options`.
    winograd : str
        As in :class:`Options`.
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
