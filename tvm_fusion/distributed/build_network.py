# SPDX-License-Identifier: Apache-2.0
"""Compilation of a model for several ranks, each of which computes rows of every image."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst
from tvm.ir.transform import Pass
from tvm.target import Target

from relay_passes import (
    CompileExchanges,
    DistributeRows,
    ExchangeInPlace,
    SeparatePairs,
    read_row_stages,
)
from schedules import attributes
from schedules.distribute.cost import Network, Processor
from schedules.distribute.rows.row_cost import choose_exchanges, row_cost, segments
from schedules.distribute.rows.row_plan import NetworkStage, Segment, plan_from_json
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.compile_model import Progress, announcer, describe, import_model
from tvm_fusion.compiler.record_reader import choose_records
from tvm_fusion.compiler.targets import is_gpu, resolve
from tvm_fusion.errors import InvalidInputError, TargetError
from tvm_fusion.machine.host import physical_cores

from .network_figures import check_figures
from .network_model import DistributedModel
from .program import default_processor

_LAYOUTS = "pack"  # the phase that chooses kernels and layouts of the whole model


def compile_network(
    model: Any,
    ranks: int,
    target: str | Mapping[str, Any] | Target = "native",
    shapes: Mapping[str, Any] | None = None,
    *,
    fuse: str | Callable[..., Any] = "auto",
    winograd: str = "auto",
    threads: int | None = None,
    records: str | os.PathLike[str] | None = None,
    exchange: str = "auto",
    network: Network | None = None,
    processor: Processor | None = None,
    progress: Progress | None = None,
) -> DistributedModel:
    """Compile a model for a number of ranks; ``tvm_fusion.compile(model, ranks=...)`` calls it.

    Kernels, layouts and the use of Winograd's algorithm are those of the whole model, and its tiles
    are not cut, so that the results have the bits of one rank.

    Parameters
    ----------
    model, target, shapes, fuse, winograd, records, progress
        As for :func:`tvm_fusion.compile`; a CPU, and known shapes.
    ranks : int
        Number of ranks.
    threads : int, optional
        Threads of each rank that the kernels are compiled for; by default its share of this
        machine's cores.
    exchange : str
        ``"auto"`` chooses by predicted time where ranks exchange rows, where they recompute those
        of their neighbours instead, and from where the first rank goes on alone; ``"always"``
        exchanges wherever rows of neighbours are read, ``"once"`` only at the end.
    network, processor : Network, Processor, optional
        Figures of these predictions, by default estimates; of a processor that ``tvm-fusion
        calibrate`` has measured, its own.

    Returns
    -------
    DistributedModel

    Raises
    ------
    InvalidModelError, UnsupportedOperatorError, CompilationError
        As for :func:`tvm_fusion.compile`.
    OpError
        If the model cannot be distributed; the message names the operator.
    TargetError
        If the target is unknown, or no CPU.
    InvalidInputError
        If the number of ranks or of threads is not possible, or figures are of another type.
    """
    check_figures(network, processor, 1 if threads is None else threads)
    resolved = resolve_ranks(ranks, target, threads)
    options = pipeline.Options(
        fuse=fuse, winograd=winograd, records=choose_records(records, resolved)
    )
    phases = rank_phases(resolved, options, ranks, exchange, network, processor)
    phases["lower"] = [*phases["lower"], ExchangeInPlace(), CompileExchanges(resolved)]
    tell = announcer(progress, len(phases) + 2)
    tell("import")
    imported = import_model(model, shapes)
    mod = pipeline.run_phases(imported.mod, resolved, phases, None, lambda phase, *_: tell(phase))
    plan = plan_from_json(json.loads(str(mod.attrs[attributes.RANK_PLAN])))
    plan = replace(plan, constants=_digest(mod, plan.functions))
    tell("build")
    built = pipeline.build_apart(mod, resolved, functions=plan.functions)
    tell("done")
    about = describe(imported, mod, resolved, built, ranks=plan)
    return DistributedModel(built.executable, about, built.weights)


def compile_for_ranks(
    model: Any,
    ranks: int,
    target: str | Mapping[str, Any] | Target,
    shapes: Mapping[str, Any] | None,
    *,
    machine: Any,
    fast_math: bool,
    precision: str,
    weights: str | None,
    cuda_graph: bool,
    outputs: Sequence[str] | None,
    reproducible: bool,
    **options: Any,
) -> DistributedModel:
    """Compile with the options of :func:`tvm_fusion.compile`.

    Raises ``TargetError`` if one is given that has no effect on ranks.
    """
    if fast_math or reproducible or cuda_graph:
        raise TargetError(
            "fast_math, reproducible and cuda_graph are for GPUs, and ranks compute on CPUs; leave "
            "them out"
        )
    if precision != "fp32":
        raise TargetError(f"precision={precision!r} has no effect with ranks: leave it out")
    for name, value in (("weights", weights), ("machine", machine), ("outputs", outputs)):
        if value is not None:
            raise TargetError(f"{name}={value!r} has no effect with ranks: leave it out")
    return compile_network(model, ranks, target, shapes, **options)


def _digest(mod: tvm.IRModule, functions: Sequence[str]) -> str:
    """SHA-256 of the constants in some functions."""
    digest = hashlib.sha256()

    def look(expr: relax.Expr) -> None:
        if isinstance(expr, GenericConst) and isinstance(expr.value, tvm.runtime.Tensor):
            digest.update(np.ascontiguousarray(expr.value.numpy()).reshape(-1).view(np.uint8).data)

    for name in functions:
        relax.analysis.post_order_visit(mod[name], look)
    return digest.hexdigest()


def resolve_ranks(
    ranks: int, target: str | Mapping[str, Any] | Target, threads: int | None = None
) -> Target:
    """The CPU of each rank.

    Raises ``InvalidInputError`` if the number of ranks is not possible. Raises ``TargetError`` if
    the target is unknown, or no CPU.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidInputError(f"ranks is {ranks!r}; expected a positive integer")
    resolved = resolve(target, threads or max(1, physical_cores() // ranks))
    if is_gpu(resolved):
        raise TargetError("ranks compute on CPUs in this version; name a CPU as the target")
    return resolved


def read_network(
    # ``model``, ``shapes``, ``fuse``, ``winograd``: as for :func:`tvm_fusion.compile`.
    model: Any,
    target: Target,  # A result of :func:`resolve_ranks`.
    shapes: Mapping[str, Any] | None = None,
    fuse: str | Callable[..., Any] = "auto",
    winograd: str = "auto",
    ranks: int = 2,  # One, or several, for all numbers of which the stages are the same.
) -> list[NetworkStage]:
    """Stages of a model, whose kernels are chosen and not compiled.

    Raises ``InvalidModelError, UnsupportedOperatorError, CompilationError`` as for
    :func:`tvm_fusion.compile`. Raises ``OpError`` if a size is only known at run time.
    """
    whole, _ = _phases(target, pipeline.Options(fuse=fuse, winograd=winograd), ranks)
    mod = pipeline.run_phases(import_model(model, shapes).mod, target, whole)
    return [bound.stage for bound in read_row_stages(mod["main"])]


def explain_network(
    model: Any,
    ranks: int,
    target: str | Mapping[str, Any] | Target = "native",
    shapes: Mapping[str, Any] | None = None,
    *,
    fuse: str | Callable[..., Any] = "auto",
    winograd: str = "auto",
    threads: int | None = None,
    exchange: str = "auto",
    network: Network | None = None,
    processor: Processor | None = None,
) -> tuple[Segment, ...]:
    """Rows, choices, messages and predicted times of a model over ranks; nothing is compiled.

    Parameters and errors are those of :func:`compile_network`.
    """
    resolved = resolve_ranks(ranks, target, threads)
    stages = read_network(model, resolved, shapes, fuse, winograd, ranks)
    figures = network or Network(), processor or default_processor(resolved)
    placement = choose_exchanges(stages, ranks, *figures, exchange)
    return segments(stages, placement, row_cost(stages, placement, *figures))


def rank_phases(
    target: Target,
    options: pipeline.Options,
    ranks: int,
    exchange: str = "auto",
    network: Network | None = None,
    processor: Processor | None = None,
) -> dict[str, list[Pass]]:
    """Phases from a model to the scheduled kernels of all ranks, whose results are tensors apart.

    Parameters are those of :func:`compile_network`, with a result of :func:`resolve_ranks`.
    """
    figures = network or Network(), processor or default_processor(target)
    whole, rest = _phases(target, options, ranks)
    return {**whole, "distribute": [DistributeRows(ranks, *figures, exchange)], **rest}


def _phases(
    target: Target, options: pipeline.Options, ranks: int
) -> tuple[dict[str, list[Pass]], dict[str, list[Pass]]]:
    """Phases that choose kernels and layouts of the whole model, and those after them."""
    phases = pipeline.phases(target, options)
    names = list(phases)
    split = names.index(_LAYOUTS) + 1
    if ranks > 1:
        phases[_LAYOUTS] = [*phases[_LAYOUTS], SeparatePairs()]
    return {n: phases[n] for n in names[:split]}, {n: phases[n] for n in names[split:]}
