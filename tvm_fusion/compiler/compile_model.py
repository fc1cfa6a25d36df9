# SPDX-License-Identifier: Apache-2.0
"""Compilation of a model of ONNX or PyTorch: import, optimisation, code generation."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import tvm
from tvm import relax

from schedules import attributes
from schedules.cost.machine import load_machine
from schedules.cpu.core.machine import TILE_PRODUCTS, CPUInfo
from schedules.distribute.rows.row_plan import RankPlan

from ..codegen.library_bin import compile_kernels
from ..errors import InvalidInputError, TargetError
from ..machine.host import TILE_FEATURES
from ..onnx.frontend import ImportedModel
from ..onnx.model.loader import model_files
from ..runtime.artifact import Description, Program, current_versions
from ..runtime.compiled_model import CompiledModel
from ..runtime.weights import digest, weight_specs
from . import pipeline
from .interrupts import interrupts_kept
from .pipeline import Progress
from .record_reader import NONE, choose_records, used_records
from .registry import front_end_of
from .targets import arch_of, device_needs, host_of, is_gpu, required_features, resolve

_MAKE_NEW = ("relax.call_tir", "relax.call_tir_with_grad", "relax.call_dps_packed")


def fresh_outputs(mod: tvm.IRModule, name: str = "main") -> tuple[bool, ...]:
    """Tell of each result whether every call of the function creates it.

    Such a result can be handed out without copying it. Any other may be a constant of the model,
    which a caller must not be able to change, or a view of something; False is always safe.

    ``mod``: its kernels are calls of ``call_tir`` already.
    """
    body = mod[name].body
    values = {
        binding.var: binding.value
        for block in body.blocks
        for binding in block.bindings
        if isinstance(binding, relax.VarBinding)
    }
    result = _follow(body.body, values)
    fields = result.fields if isinstance(result, relax.Tuple) else [result]
    return tuple(_is_new(field, values) for field in fields)


def _follow(value: relax.Expr, values: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """Follow a variable through other variables to its value."""
    while isinstance(value, relax.Var) and value in values:
        value = values[value]
    return value


def _is_new(value: relax.Expr, values: dict[relax.Var, relax.Expr]) -> bool:
    value = _follow(value, values)
    if isinstance(value, relax.TupleGetItem):
        source = _follow(value.tuple_value, values)
        if isinstance(source, relax.Tuple):
            return _is_new(source.fields[value.index], values)
        return _is_new(source, values)
    is_call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
    return is_call and value.op.name in _MAKE_NEW


def compile_model(
    model: Any,
    target: Any,
    shapes: Mapping[str, Any] | None,
    threads: int | None,
    count: int,
    progress: Progress | None,
    *,
    records: str | os.PathLike[str] | None,
    machine: str | os.PathLike[str] | None,
    outputs: Sequence[str] | None,
    reproducible: bool,
    **options: Any,
) -> CompiledModel:
    """Compile for one process as :func:`tvm_fusion.compile` does, without a cache or a check.

    ``threads`` are those of the code, ``count`` those of calls on this machine.
    """
    measured = None if machine is None else load_machine(machine)
    if isinstance(target, list | tuple):
        resolved = _resolve_all(target, threads, machine)
    else:
        resolved = [resolve(target, cores=threads, machine=measured)]
    options |= {"machine": measured, "reproducible": reproducible}
    if reproducible and records is None:
        records = NONE  # Records of the package are for one device each, too.
    chosen = [
        pipeline.Options(records=choose_records(records, each), **options) for each in resolved
    ]
    targets = list(zip(resolved, chosen, strict=True))
    programs = _compile(model, shapes, outputs, targets, progress)
    if len(programs) == 1:
        return CompiledModel(programs[0].executable, programs[0].about, count, programs[0].weights)
    first, *others = (program.about for program in programs)
    about = replace(first, others=tuple(others))
    with contextlib.suppress(TargetError):  # which the first call raises
        about = about.for_this_machine()
    own = next(program for program in programs if program.about == replace(about, others=()))
    return CompiledModel(own.executable, about, count, own.weights, programs=programs)


def _resolve_all(
    targets: Sequence[Any], threads: int | None, machine: Any
) -> list[tvm.target.Target]:
    """Several CPUs, those with the widest vectors and the most features last."""
    if machine is not None:
        raise TargetError("machine= has the figures of one CPU: leave it out with several targets")
    resolved = {str(target): target for target in (resolve(one, cores=threads) for one in targets)}
    if not resolved:
        raise TargetError("the list of targets is empty; expected at least one CPU")
    for target in resolved.values():
        if len(resolved) > 1 and is_gpu(target):
            raise TargetError(
                f"several targets in one file are CPUs, and {target.kind.name!r} is a GPU: compile "
                "for it alone"
            )
    return sorted(resolved.values(), key=_rank)


def _rank(target: tvm.target.Target) -> tuple[int, int]:
    return CPUInfo.from_target(host_of(target)).vector_bits, len(required_features(target))


def external_files(model: Any) -> list[str]:
    """Names of the files of external data of a model that is a file itself."""
    if not isinstance(model, str | os.PathLike):
        return []
    path = Path(model)
    return [str(file.relative_to(path.parent)) for file in model_files(path)[1:]]


def _compile(
    model: Any,
    shapes: Mapping[str, Any] | None,
    outputs: Sequence[str] | None,
    targets: Sequence[tuple[tvm.target.Target, pipeline.Options]],
    progress: Progress | None,
) -> list[Program]:
    """Import once, then optimise and build for each target with its options."""
    stages = sum(len(pipeline.phases(*pair)) + 1 + _is_cuda(pair[0]) for pair in targets)
    tell = announcer(progress, stages + 1)
    tell("import")
    imported = import_model(model, shapes, outputs)
    known: dict[bytes, Any] = {}
    programs = []
    for target, options in targets:
        about = f"{target.attrs['mcpu']}: " if len(targets) > 1 else ""

        def told(stage: str, is_new: bool = True, about: str = about) -> None:
            tell(about + stage, is_new)

        mod = pipeline.optimize(imported.mod, target, options, lambda phase, *_: told(phase))
        built = _generate(mod, target, told, options)
        weights = built.weights
        if len(targets) > 1:
            weights = [known.setdefault(digest(weight), weight) for weight in weights]
        description = describe(imported, mod, target, built, options.fast_math)
        programs.append(Program(built.executable, description, weights))
    tell("done")
    return programs


def import_model(
    model: Any, shapes: Mapping[str, Any] | None, outputs: Sequence[str] | None = None
) -> ImportedModel:
    """Import a model with the front end of its type."""
    with interrupts_kept():
        return front_end_of(model).import_model(model, shapes, outputs)


class Teller(Protocol):
    """Function that tells a user's ``progress`` a new stage, or how far the present one is."""

    def __call__(self, stage: str, is_new: bool = True) -> None:
        """Report the stage."""


def announcer(progress: Progress | None, stages: int) -> Teller:
    """Function that reports each stage's name, its number and the number of stages.

    Raises InvalidInputError if ``progress`` is no function.
    """
    if progress is not None and not callable(progress):
        raise InvalidInputError(f"progress is {progress!r:.60}; expected a function or None")
    number = -1

    def tell(stage: str, is_new: bool = True) -> None:
        nonlocal number
        number += is_new
        if progress is not None:
            progress(stage, number, stages)

    return tell


def _generate(
    mod: tvm.IRModule, target: tvm.target.Target, tell: Teller, options: pipeline.Options
) -> pipeline.Built:
    """The code of an optimised module, CUDA kernels as machine code, and its weights."""
    tell("build")
    built = pipeline.build_apart(
        mod,
        target,
        options.fast_math,
        cuda_graph=options.cuda_graph,
        built=lambda done, total: tell(f"build, {done} of {total} kernels", is_new=False),
    )
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
        features=_features(mod, target),
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


def _features(mod: tvm.IRModule, target: tvm.target.Target) -> tuple[str, ...]:
    """CPU features that a scheduled module needs: tile registers only where kernels use them."""
    functions = mod.functions.values()
    products = {
        str(func.attrs[attributes.TILES])
        for func in functions
        if attributes.TILES in (func.attrs or {})
    }
    used = {"amx-tile", *(TILE_PRODUCTS[dtype] for dtype in products)} if products else set()
    return tuple(
        name for name in required_features(target) if name not in TILE_FEATURES or name in used
    )


def _records(mod: tvm.IRModule) -> Sequence[dict[str, Any]]:
    """The records of the pairs; none if nothing looked for pairs."""
    report = mod.attrs.get(attributes.FUSION_REPORT) if mod.attrs else None
    return [] if report is None else json.loads(str(report))
