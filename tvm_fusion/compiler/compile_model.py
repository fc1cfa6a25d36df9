# SPDX-License-Identifier: Apache-2.0
"""Compilation of a model of ONNX or PyTorch: import, optimisation, code generation."""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import tvm

from schedules.cost.machine import load_machine
from schedules.distribute.rows.rank_plan import RankPlan

from ..codegen.device_code import compile_kernels
from ..errors import InvalidInputError, TargetError
from ..onnx.frontend import ImportedModel, import_onnx
from ..runtime.artifact import Description, current_versions
from ..runtime.compiled_model import CompiledModel
from ..runtime.thread_pool import choose_threads
from ..runtime.weights import weight_specs
from . import pipeline
from .aliasing import fresh_outputs
from .check_numbers import check_numbers
from .interrupts import interrupts_kept
from .targets.target import arch_of, device_needs, required_features, resolve
from .tuned import choose_records, used_records

if TYPE_CHECKING:
    from torch.export import ExportedProgram

REPORT = "tvm_fusion.fusion_report"
"""The module attribute with the records of the pairs, as JSON."""

Progress = Callable[[str, int, int], None]


def compile(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | ExportedProgram,
    target: str | Mapping[str, Any] | tvm.target.Target = "native",
    shapes: Mapping[str, Any] | None = None,
    *,
    fuse: str | Callable[..., Any] = "auto",
    winograd: str = "auto",
    threads: int | None = None,
    records: str | os.PathLike[str] | None = None,
    fast_math: bool = False,
    precision: str = "fp32",
    cuda_graph: bool = False,
    machine: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    ranks: int | None = None,
    check: bool = False,
) -> CompiledModel:
    """Compile an ONNX model, or an exported program of PyTorch, for a CPU or a GPU.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or torch.export.ExportedProgram
        The model; external data needs a path. A program needs the extra ``torch``; its weights are
        shared where the kernels read them as they are.
    target : str, mapping or tvm.target.Target
        The CPU: ``"native"``, ``"x86-64-v3"``, ``"cortex-a72"``, ``"llvm -mcpu=..."``; or the GPU:
        ``"cuda"`` for this machine's own, ``"cuda -arch=sm_90"``, ``"opencl"``; or a target of TVM.
        The code may be for another machine; it can be saved, and runs there. For ``cuda`` every
        kernel becomes machine code here, by NVRTC or nvcc, and no GPU is needed.
    shapes : mapping, optional
        From the name of an input to its shape, or from the name of a dimension to its size, where
        the model has symbolic ones. Those of an exported program stay symbolic by default.
    fuse : str or callable
        ``"auto"`` fuses the pairs of convolutions that gain, ``"all"`` those that can be fused,
        ``"none"`` none; a callable decides itself.
    winograd : str
        On a CPU: ``"auto"`` computes 3x3 convolutions by Winograd's algorithm where that is
        predicted faster, ``"always"`` wherever possible, ``"never"`` nowhere. It rounds
        differently, with the error of the direct kernels or twice that, and spreads an infinity or
        NaN over a tile of 4x4 pixels.
    threads : int, optional
        Threads of a call; by default one a physical core. The code is compiled for that number,
        unless the target has ``num-cores``.
    records : path, optional
        Winners of tuning jobs (:func:`tvm_fusion.tune`) for the knobs of kernels: a file, the
        folder of a job, or ``"none"``. They count for the same CPU, vectors and threads, or the
        same GPU, only, and before the records that come with the package, which ``"none"`` switches
        off, too.
    fast_math : bool
        For CUDA: whether functions of float32 may be replaced by instructions that approximate
        them, of which ``tanh`` is accurate to 2^-11 only.
    precision : str
        For GPUs: ``"fp16"`` computes products and convolutions of float32 in float16, summed in
        float32, on tensor cores where there are some; what lies between them is float16, too, but
        for norms and softmax. Inputs and outputs stay as they are. Values beyond 65504 overflow.
        ``"tf32"``, from sm_80 on, only rounds the factors of matrix products and of dense
        convolutions to 10 bits behind the point, for tensor cores; attention stays float32.
    cuda_graph : bool
        For CUDA: whether kernels are captured into CUDA graphs in the first call and replayed in
        the others, which saves the time of their launches. Those that read inputs or write outputs
        are not, nor those of unknown sizes.
    machine : str or path, optional
        A file of ``tvm-fusion calibrate``, or the name of a known machine. On a CPU it is chosen by
        its figures, instead of those of the CPU's family, which pairs are fused, which convolutions
        use Winograd's algorithm, which reductions run on threads, and the knobs of convolutions.
        For ``cuda``: how many blocks share a result of a reduction, and how they combine theirs,
        by predicted times, none of which has been measured on a GPU. ``"cuda"`` without
        an architecture is then that machine.
    progress : callable, optional
        Called before each stage with its name, the number of stages done, and the number of all of
        them; at the end with ``"done"``.
    ranks : int, optional
        Processes of MPI that compute the model together, each some rows of every image
        (:func:`tvm_fusion.distributed.compile_network` has more options); on CPUs. ``threads`` are
        those of each rank, by default its share of this machine's cores.
    check : bool
        Whether the compiled model is called once or twice on this machine, and its outputs compared
        with those of PyTorch's eager mode, or of ONNX Runtime on an ONNX model. A program is called
        on its example inputs, if it carries such of these shapes, and on random floats beside their
        integers; else floats are random, and integers 0 or 1, always the same ones. The largest
        error in parts of an output's largest magnitude may be 1e-3 in models of float32, 2e-2 with
        float16 and 5e-2 with bfloat16 or quantised values; 1% of the elements of an integer output
        may differ, as where two scores are nearly equal.

    Returns
    -------
    CompiledModel
        Or, with ``ranks``, a :class:`tvm_fusion.distributed.DistributedModel`.

    Raises
    ------
    InvalidModelError, UnsupportedOperatorError
        If the model cannot be read, or holds operators that cannot be compiled.
    CompilationError
        If TVM fails in a later stage; the message names the stage. With ``check``, if an output
        differs; the message names it, its error and the tolerance.
    EngineError
        With ``check``, if ONNX Runtime is not installed, or does not run the model.
    TargetError
        If the target is unknown, if no compiler for its kernels is installed, or if Winograd's
        algorithm is requested for a GPU, approximations of functions or graphs elsewhere than on
        CUDA, or float16 on a CPU; or if the machine is another device than the target.
    InvalidInputError
        If ``threads`` is not possible. With ``check``, if sizes of inputs are not known.
    TuningError
        If there are no such records.
    PredictionError
        If there is no such machine, its file is none, or it lacks a figure.

    Examples
    --------
    >>> compiled = tvm_fusion.compile("model.onnx")            # doctest: +SKIP
    >>> y = compiled(np.zeros((1, 3, 224, 224), "float32"))    # doctest: +SKIP
    """
    if ranks is not None:
        if check:
            raise InvalidInputError("check=True has no effect with ranks: leave it out")
        compile_network = _for_ranks(fast_math, precision, cuda_graph, machine)
        return compile_network(
            model,
            ranks,
            target,
            shapes,
            fuse=fuse,
            winograd=winograd,
            threads=threads,
            records=records,
            progress=progress,
        )
    count = choose_threads(threads)
    measured = None if machine is None else load_machine(machine)
    resolved = resolve(target, cores=threads, machine=measured)
    options = pipeline.Options(
        fuse=fuse,
        winograd=winograd,
        records=choose_records(records, resolved),
        fast_math=fast_math,
        precision=precision,
        cuda_graph=cuda_graph,
        machine=measured,
    )
    about, built = _compile(model, shapes, resolved, options, progress)
    compiled = CompiledModel(built.executable, about, count, built.weights)
    if check:
        check_numbers(model, compiled, fast_math or precision != "fp32")
    return compiled


def _for_ranks(
    fast_math: bool, precision: str, cuda_graph: bool, machine: str | os.PathLike[str] | None
) -> Callable[..., Any]:
    """The function that compiles for ranks; options without effect there are refused."""
    # By name: that family stands above this one.
    family = importlib.import_module("tvm_fusion.distributed.network.compile_network")
    family.refuse_gpu_options(fast_math, precision, cuda_graph)
    if machine is not None:
        raise TargetError(f"machine={machine!r} has no effect with ranks: leave it out")
    return family.compile_network


def _compile(
    model: Any,
    shapes: Mapping[str, Any] | None,
    target: tvm.target.Target,
    options: pipeline.Options,
    progress: Progress | None,
) -> tuple[Description, pipeline.Built]:
    """Import, optimise and build a model for one process."""
    tell = announcer(progress, len(pipeline.phases(target, options)) + 2 + _is_cuda(target))
    tell("import")
    imported = import_model(model, shapes)
    mod = pipeline.optimize(imported.mod, target, options, lambda phase, *_: tell(phase))
    built = _generate(mod, target, tell, options)
    tell("done")
    return describe(imported, mod, target, built, options.fast_math), built


def import_model(model: Any, shapes: Mapping[str, Any] | None) -> ImportedModel:
    """Import a model with the front end of its type."""
    with interrupts_kept():
        if type(model).__module__.startswith("torch.export"):
            # By name: that family stands above this one, and needs PyTorch.
            front_end = importlib.import_module("tvm_fusion.torch.exported_program")
            return front_end.import_exported_program(model, shapes)
        return import_onnx(model, shapes)


def announcer(progress: Progress | None, stages: int) -> Callable[[str], None]:
    """Function that reports each stage's name, its number and the number of stages.

    Raises
    ------
    InvalidInputError
        If ``progress`` is no function.
    """
    if progress is not None and not callable(progress):
        raise InvalidInputError(f"progress is {progress!r:.60}; expected a function or None")
    numbers = itertools.count()

    def tell(stage: str) -> None:
        if progress is not None:
            progress(stage, next(numbers), stages)

    return tell


def _generate(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    tell: Callable[[str], None],
    options: pipeline.Options,
) -> pipeline.Built:
    """The code of an optimised module, CUDA kernels as machine code, and its weights."""
    tell("build")
    built = pipeline.build_apart(mod, target, options.fast_math, cuda_graph=options.cuda_graph)
    if _is_cuda(target):
        tell("machine code")
        with interrupts_kept():
            compile_kernels(built.executable, str(target.attrs["arch"]), options.fast_math)
    return built


def _is_cuda(target: tvm.target.Target) -> bool:
    return target.kind.name == "cuda"


def describe(
    imported: ImportedModel,
    mod: tvm.IRModule,
    target: tvm.target.Target,
    built: pipeline.Built,
    fast_math: bool = False,
    ranks: RankPlan | None = None,
) -> Description:
    """Description of a compiled model; ``mod`` is the optimised module."""
    outputs = tuple(imported.outputs)
    return Description(
        target=str(target),
        arch=arch_of(target),
        features=required_features(target),
        inputs=tuple(imported.inputs),
        outputs=outputs,
        fresh=fresh_outputs(mod) if ranks is None else (False,) * len(outputs),
        fused=tuple(_records(mod)),
        versions=current_versions(),
        weights=weight_specs(built.weights),
        device=device_needs(target),
        kernel=built.kernel,
        records=tuple(used_records(mod)),
        fast_math=fast_math,
        ranks=ranks,
        lifted=built.lifted,
        alignment=built.alignment,
    )


def _records(mod: tvm.IRModule) -> Sequence[dict[str, Any]]:
    """The records of the pairs; none if nothing looked for pairs."""
    report = mod.attrs.get(REPORT) if mod.attrs else None
    return [] if report is None else json.loads(str(report))
