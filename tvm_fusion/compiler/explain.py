# SPDX-License-Identifier: Apache-2.0
"""Reports of what ``compile`` decides: pairs of convolutions, slow kernels, and kernels of GPUs."""

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
from schedules.cost.decisions import MODEL, recorded
from schedules.cost.machine import load_machine

from ..codegen.library_bin import compile_kernels
from ..errors import TargetError
from ..onnx.frontend import import_onnx
from . import pipeline
from .launches import kernel_uses
from .options import chosen_precision, faster_precision
from .phases import stock_phases
from .record_reader import choose_records
from .targets import is_gpu, resolve


def with_slow_kernels(table: Table, functions: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return ``table`` and, below it, one with a row for each function that has a ``slow``.

    ``table``: what comes first. ``functions``: with ``name``, ``rule``, ``calls`` and ``slow``, as
    :class:`tvm_fusion.compiler.launches.KernelUse` has them.
    """
    slow = [use for use in functions if use["slow"]]
    if not slow:
        return table
    below = Table(title="kernels likely to be slow")
    for heading in ("function", "rule"):
        below.add_column(heading)
    below.add_column("calls", justify="right")
    below.add_column("why")
    for use in slow:
        below.add_row(use["name"], use["rule"], str(use["calls"]), use["slow"])
    return Group(table, below)


def explain(
    model: Any,
    target: Any = "native",
    shapes: Mapping[str, Sequence[int]] | None = None,
    fuse: Any = "auto",
    winograd: str = "auto",
    records: str | os.PathLike[str] | None = None,
    machine: str | os.PathLike[str] | None = None,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Decide which pairs of ``model`` to fuse, and schedule its kernels; no code is generated.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        The model.
    target : str or tvm.target.Target
        The CPU or the GPU to decide for.
    shapes : mapping, optional
        Shapes of inputs with symbolic dimensions.
    fuse : str or callable
        ``auto``, ``all``, ``none``, or a function, as for ``compile``.
    winograd : str
        ``auto``, ``always`` or ``never``, as for ``compile``.
    records : path, optional
        Tuning records, as for ``compile``.
    machine : str or path, optional
        Machine as in ``compile``.
    precision : str
        ``fp32``, ``bf16`` or ``auto``, as for ``compile``.

    Returns
    -------
    dict
        ``target``. ``precision``: that of products, ``fp32`` or ``bf16``. ``faster``: a text on a
        faster one, or None. ``pairs``: one entry a candidate pair, in the order of the model:
        ``first`` and ``second`` (names), ``input_shape``, ``layer1`` and ``layer2`` (texts),
        ``fused``, ``reason``, ``flops``, and ``bytes_`` and ``intensity_`` (FLOPs a byte)
        ``unfused`` and ``fused``. Values that are unknown because of symbolic shapes are None.
        ``functions``: in the order of the model the ``name`` of each function, the ``rule`` that
        scheduled it (on a CPU with the nest of a reduction: rows, columns or stream), its
        ``calls``, the rules that ``failed`` on it, with the reasons, why it is likely to be
        ``slow``, empty where a rule for its kind took it, and the tuning ``record`` that chose its
        knobs, or None. ``decisions``: the times that were compared, each with ``decision``
        (``fuse``, ``winograd`` or ``split``), ``subject``, ``seconds`` by alternative, ``gain``
        over the last of them, what was ``chosen`` by them, and their ``source``: ``model``, or the
        file of the tuning record that has them; ``machine``: whose figures predicted those of the
        model.

    Raises
    ------
    InvalidModelError, UnsupportedOperatorError, CompilationError, TargetError
        As for ``compile``.
    """
    measured = None if machine is None else load_machine(machine)
    host = resolve(target, machine=measured)
    found = choose_records(records, host)
    choices = {"fuse": fuse, "winograd": winograd, "precision": precision}
    options = pipeline.Options(**choices, records=found, machine=measured)
    with recorded() as comparisons:
        mod = pipeline.optimize(import_onnx(model, shapes).mod, host, options)
    functions = [asdict(use) for use in kernel_uses(mod)]
    for use in functions:
        del use["launches"]  # told by explain_kernels, for GPUs
    return {
        "target": str(host),
        "precision": chosen_precision(precision, host),
        "faster": faster_precision(precision, host),
        "pairs": read_fusion_report(mod),
        "functions": functions,
        "decisions": [asdict(one) for one in comparisons],
        "machine": None if measured is None else measured.title,
    }


def explain_table(report: Mapping[str, Any], title: str = "") -> RenderableType:
    """Return the result of :func:`explain` as a table with one row a pair.

    Kernels that are likely to be slow follow in a table of their own.
    """
    pairs = report["pairs"]
    caption = [_totals(pairs), report.get("faster")]
    table = Table(title=title, caption=".\n".join(filter(None, caption)))
    for heading in ("first layer", "second layer", "input"):
        table.add_column(heading)
    for heading in ("MFLOP", "MB apart", "MB fused", "FLOP/B apart", "FLOP/B fused"):
        table.add_column(heading, justify="right")
    table.add_column("fused")
    table.add_column("reason")
    for pair in pairs:
        table.add_row(
            pair["layer1"],
            pair["layer2"],
            "x".join(map(str, pair["input_shape"])),
            *(_scaled(pair[key], 1e6) for key in ("flops", "bytes_unfused", "bytes_fused")),
            *(_scaled(pair[key], 1) for key in ("intensity_unfused", "intensity_fused")),
            "yes" if pair["fused"] else "no",
            pair["reason"],
        )
    shown = with_tuned_kernels(table, report["functions"])
    if not report.get("decisions"):
        return shown
    source = report["machine"] or "the CPU's family, at a nominal clock of 3 GHz"
    return Group(shown, decisions_table(report["decisions"], source))


def decisions_table(decisions: Sequence[Mapping[str, Any]], source: str) -> Table:
    """Return a table with one row a comparison of times, and the source of the model's figures."""
    table = Table(title="times that were compared", caption=f"figures of the model: {source}")
    for heading in ("decision", "of", "chosen", "us", "other", "us", "by"):
        table.add_column(heading, justify="right" if heading == "us" else "left")
    for decision in decisions:
        chosen = decision["chosen"]
        others = {name: time for name, time in decision["seconds"].items() if name != chosen}
        other = min(others, key=others.__getitem__, default="")
        first, second = (
            f"{decision['seconds'][name] * 1e6:.1f}" if name else "" for name in (chosen, other)
        )
        by = "model" if decision["source"] == MODEL else f"record, {decision['source']}"
        table.add_row(decision["decision"], decision["subject"], chosen, first, other, second, by)
    return table


def with_tuned_kernels(table: Table, functions: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return ``table``, and below it the kernels with records, and those likely to be slow."""
    shown = with_slow_kernels(table, functions)
    tuned = [use for use in functions if use["record"]]
    if not tuned:
        return shown
    below = Table(title="kernels with tuning records")
    for heading in ("function", "template", "knobs", "gain", "record"):
        below.add_column(heading)
    for use in tuned:
        record = use["record"]
        knobs = ", ".join(f"{name} {value}" for name, value in record["knobs"].items())
        gain = f"{record['gain'] - 1:+.1%}"
        source = f"{record['source']}, {record['date'][:10]}"
        below.add_row(use["name"], record["template"], knobs, gain, source)
    return Group(shown, below)


def _totals(pairs: Sequence[Mapping[str, Any]]) -> str:
    fused = [pair for pair in pairs if pair["fused"]]
    sizes = [(pair["bytes_unfused"], pair["bytes_fused"]) for pair in fused]
    saved = sum(apart - together for apart, together in sizes if apart and together)
    text = f"{len(fused)} of {len(pairs)} pairs fused"
    return f"{text}; that saves {saved / 1e6:.2f} MB of memory traffic a run" if saved else text


def _scaled(value: float | None, unit: float) -> str:
    """Return a number in ``unit``; one unknown because of symbolic shapes is a question mark."""
    return "?" if value is None else f"{value / unit:.2f}"


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
        Precision as in ``compile``.
    machine : str or path, optional
        Machine as in ``compile``.
    reproducible : bool
        Flag as in ``compile``.

    Returns
    -------
    dict
        ``target``; ``reductions``: the numbers of ``rewritten`` ones and of those fused with others
        or with producers and consumers (``fused``), and the ``groups`` of
        :func:`relay_passes.read_reduction_report`; ``pairs`` of convolutions, as
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
    table = Table(title=title, caption=_kernel_totals(report))
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


def _kernel_totals(report: Mapping[str, Any]) -> str:
    reductions = report["reductions"]
    fused = sum(bool(pair["fused"]) for pair in report["pairs"])
    return (
        f"{report['launches']} kernels a call, {report['stock_launches']} by TVM's own pipeline; "
        f"{reductions['rewritten']} reductions rewritten, {reductions['fused']} of them fused into "
        f"{len(reductions['groups'])} groups; {fused} of {len(report['pairs'])} pairs of "
        "convolutions fused"
    )
