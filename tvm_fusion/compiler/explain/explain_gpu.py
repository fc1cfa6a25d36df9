# SPDX-License-Identifier: Apache-2.0
"""Report on a model on a GPU: its kernels, and its fused reductions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import tvm
from rich.console import Group, RenderableType
from rich.table import Table

from relay_passes import read_fusion_report, read_reduction_report
from schedules.cost.decisions import recorded
from schedules.cost.machine import load_machine

from ...codegen.library_bin import compile_kernels
from ...errors import TargetError
from ...onnx.frontend import import_onnx
from .. import pipeline
from ..launches import kernel_uses
from ..phases import stock_phases
from ..targets.target import is_gpu, resolve
from .explain import decisions_table, with_slow_kernels


def explain_kernels(
    model: Any,
    target: Any = "cuda",
    shapes: Mapping[str, Sequence[int]] | None = None,
    fuse: Any = "auto",
    resources: bool = False,
    precision: str = "fp32",
    machine: str | os.PathLike[str] | None = None,
    reproducible: bool = False,
) -> dict[str, Any]:
    """Count the kernels that ``model`` launches on a GPU, with our passes and without them.

    No GPU is needed.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        The model.
    target : str or tvm.target.Target
        The GPU.
    shapes : mapping, optional
        Shapes of inputs with symbolic dimensions.
    fuse : str or callable
        ``auto``, ``all``, ``none``, or a function, as for ``compile``.
    resources : bool
        Whether to compile the kernels, for ``cuda`` only, and report their resources.
    precision : str
        As for ``compile``.
    machine : str or path, optional
        As for ``compile``.
    reproducible : bool
        As for ``compile``.

    Returns
    -------
    dict
        ``target``; ``reductions``: the numbers of ``rewritten`` ones and of those fused with others
        or with producers and consumers (``fused``), and the ``groups`` of
        :func:`relay_passes.reduction.report.read_reduction_report`; ``pairs`` of convolutions, as
        :func:`tvm_fusion.explain` lists them; ``launches`` and
        ``stock_launches``: kernels a call, ours and those of TVM's default pipeline; ``functions``:
        the ``name`` of each function in the model's order, the ``rule`` that scheduled it, its
        ``calls`` and their ``launches``, the rules that ``failed`` on it, with the reasons, and
        why it is likely to be ``slow``, if it is. With ``resources`` each has ``kernels``, by name
        ``registers`` a thread, and in bytes ``stack_frame``, ``spill_stores``, ``spill_loads`` and
        ``shared``. ``decisions``: with a machine, the times that were compared, as
        :func:`tvm_fusion.explain` lists them: ``split`` (the number of blocks that share a result
        of a reduction), ``finish`` (how they combine theirs, too) and ``store`` (whether a kernel
        of few blocks stores a tensor that it has computed); reproducible ``order``: the predicted
        times of a reduction that is divided as on all GPUs, and as this one alone would have it;
        ``machine``: its full name.

    Raises
    ------
    InvalidModelError, UnsupportedOperatorError, CompilationError, TargetError
        As for ``compile``; a ``TargetError`` too if the target is a CPU.
    """
    measured = None if machine is None else load_machine(machine)
    device = resolve(target, machine=measured)
    if not is_gpu(device) or (resources and device.kind.name != "cuda"):
        what = "resources of kernels are known for 'cuda'" if is_gpu(device) else "expected a GPU"
        raise TargetError(f"{what}; got a target of kind {device.kind.name!r}")
    imported = import_onnx(model, shapes).mod
    options = pipeline.Options(
        fuse=fuse, precision=precision, machine=measured, reproducible=reproducible
    )
    with recorded() as comparisons:
        mod = pipeline.optimize(imported, device, options)
    stock = pipeline.run_phases(imported, device, stock_phases(device))
    functions: list[dict[str, Any]] = [asdict(use) for use in kernel_uses(mod)]
    if resources:
        _add_resources(functions, mod, device)
    report = read_reduction_report(mod)
    return {
        "target": str(device),
        "reductions": {"fused": sum(len(g["reductions"]) for g in report["groups"]), **report},
        "pairs": read_fusion_report(mod),
        "launches": sum(use["launches"] for use in functions),
        "stock_launches": sum(use.launches for use in kernel_uses(stock)),
        "functions": functions,
        "decisions": [asdict(one) for one in comparisons] if measured or reproducible else [],
        "machine": None if measured is None else measured.title,
    }


def explain_kernels_table(report: Mapping[str, Any], title: str = "") -> RenderableType:
    """Return the result of :func:`explain_kernels` as a table with one row a function.

    Those that are likely to be slow follow in a table of their own.
    """
    functions = report["functions"]
    table = Table(title=title, caption=_totals(report))
    for heading in ("function", "rule"):
        table.add_column(heading)
    headings = ["calls", "launches"]
    if any("kernels" in use for use in functions):
        headings += ["registers", "spilled B", "shared B"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for use in functions:
        row = [use["name"], use["rule"], str(use["calls"]), str(use["launches"])]
        kernels = use.get("kernels", {}).values()
        if kernels:
            row.append(str(max(kernel["registers"] for kernel in kernels)))
            row.append(str(sum(kernel["spill_stores"] for kernel in kernels)))
            row.append(str(max(kernel["shared"] for kernel in kernels)))
        table.add_row(*row)
    shown = with_slow_kernels(table, functions)
    if not report.get("decisions"):
        return shown
    machine = report["machine"] or "thresholds and estimates"
    source = f"{machine}; no time was measured on a GPU"
    return Group(shown, decisions_table(report["decisions"], source))


def _add_resources(
    functions: Sequence[dict[str, Any]], mod: tvm.IRModule, device: tvm.target.Target
) -> None:
    executable = pipeline.build_apart(mod, device).executable
    used = compile_kernels(executable, str(device.attrs["arch"]))
    for use in functions:
        use["kernels"] = {
            name: asdict(found) for name, found in used.items() if _is_kernel_of(use["name"], name)
        }


def _is_kernel_of(function: str, kernel: str) -> bool:
    """Match TVM's names of a function's kernels: ``NAME_kernel``, ``NAME_kernel_1`` and so on."""
    return re.fullmatch(rf"{re.escape(function)}_kernel(_\d+)?", kernel) is not None


def _totals(report: Mapping[str, Any]) -> str:
    reductions = report["reductions"]
    fused = sum(bool(pair["fused"]) for pair in report["pairs"])
    return (
        f"{report['launches']} kernels a call, {report['stock_launches']} by TVM's own pipeline; "
        f"{reductions['rewritten']} reductions rewritten, {reductions['fused']} of them fused into "
        f"{len(reductions['groups'])} groups; {fused} of {len(report['pairs'])} pairs of "
        "convolutions fused"
    )
