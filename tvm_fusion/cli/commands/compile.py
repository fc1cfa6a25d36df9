# SPDX-License-Identifier: Apache-2.0
"""Commands that compile, and tell what came of it: ``compile``, ``inspect`` and ``explain``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from ...runtime.artifact import Description, describe_artifact
from ...runtime.host_arrays import TensorSpec
from ...runtime.weights import stored_bytes
from ..options import (
    Names,
    OutputFile,
    exchange_option,
    json_option,
    machine_option,
    model_argument,
    model_options,
    names_gpu,
    network_option,
    precision_option,
    records_option,
    refuse_absent_folder,
    refuse_given,
    refuse_model_file,
    reproducible_option,
    targets_option,
    threads_option,
    weights_option,
)
from ..output import compile_model, show, show_table
from ..progress import progress_bar

if TYPE_CHECKING:
    from tvm_fusion.distributed.network_model import DistributedModel

    from ...runtime.compiled_model import CompiledModel


@click.command("compile")
@model_argument
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    help="Default: MODEL.so, or model.so for a model from standard input.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Processes of MPI that run the model together, by `mpiexec -n RANKS tvm-fusion run FILE "
    "--distributed`; no MPI is needed here.",
)
@exchange_option
@network_option
@targets_option
@model_options
@click.option(
    "--outputs",
    type=Names(),
    help="Results of nodes to return, instead of the model's own outputs.",
)
@records_option
@machine_option
@click.option(
    "--fast-math",
    is_flag=True,
    help="Let CUDA kernels approximate functions of float32: tanh to 2^-11, and others.",
)
@click.option(
    "--cuda-graph",
    is_flag=True,
    help="Capture CUDA kernels into graphs, which are replayed in all calls but the first.",
)
@reproducible_option
@precision_option
@weights_option
@threads_option
@json_option
def compile_command(
    model: Path,
    output: Path | None,
    ranks: int | None,
    exchange: str,
    network: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile MODEL, an ONNX file, into a shared library that `run` and tvm_fusion.load take."""
    if output is None:
        output = Path(model.with_suffix(".so").name)
        refuse_absent_folder(output)
    refuse_model_file(output, model)
    begin = time.perf_counter()
    compiled = _compiled(model, ranks, exchange, network, options)
    compiled.save(output)
    seconds = time.perf_counter() - begin
    fused = sum(bool(pair["fused"]) for pair in compiled.fused)
    size = output.stat().st_size
    result = {
        "output": str(output),
        "bytes": size,
        "seconds": seconds,
        "target": str(compiled.target),
        "targets": compiled.targets,
        "pairs": len(compiled.fused),
        "fused": fused,
        "inputs": compiled.inputs,
        "outputs": compiled.outputs,
        "records": compiled.records,
        "faster": None if ranks else _faster(options, compiled),
    }
    device = "" if compiled.needs is None else f" for {compiled.needs}"
    if ranks is not None:
        result["ranks"], device = ranks, f" for {ranks} ranks"
    if len(compiled.targets) > 1:
        device = f" for {'; '.join(compiled.targets)}"
    tuned = f"{len(compiled.records)} tuned kernels, " if compiled.records else ""
    text = (
        f"{output}: {size / 1e6:.1f} MB{device}, {fused} of {len(compiled.fused)} pairs fused, "
        f"{tuned}compiled in {seconds:.1f} s"
    )
    text += f"\n{result['faster']}" if result["faster"] else ""
    show(result, text, as_json)


def _faster(options: Mapping[str, Any], compiled: Any) -> str | None:
    """A line on a faster precision of each target that has it; None without any."""
    from ...compiler.options import faster_precision
    from ...compiler.targets import resolve

    named = options["target"]
    targets = list(map(resolve, named)) if isinstance(named, list) else [compiled.target]
    lines = (faster_precision(options["precision"], target) for target in targets)
    return "\n".join(filter(None, lines)) or None


def _compiled(
    model: Path, ranks: int | None, exchange: str, network: str | None, options: dict[str, Any]
) -> CompiledModel | DistributedModel:
    """The model for one process, or for some ranks."""
    if ranks is None:
        refuse_given(["exchange", "network"], "it is for --ranks")
        return compile_model(model, **options)
    for_gpus = ("fast_math", "cuda_graph", "reproducible")
    refuse_given(for_gpus, "it is for GPUs, and ranks compute on CPUs")
    for_one = ("machine", "weights", "outputs", "precision")
    refuse_given(for_one, "it is for one process")
    from tvm_fusion.distributed.build_network import compile_network

    from ...distributed.network_figures import read_figures

    for name in (*for_gpus, *for_one):
        del options[name]
    figures, _ = read_figures(network)
    with progress_bar(clock=True) as progress:
        return compile_network(
            model, ranks, exchange=exchange, network=figures, progress=progress, **options
        )


@click.command("inspect")
@model_argument
@json_option
def inspect_command(model: Path, as_json: bool) -> None:
    """Show what MODEL, a compiled model, takes, returns and needs; nothing of it is run.

    It need not be for this machine.
    """
    about = describe_artifact(model)
    stored: dict[int, TensorSpec] = {}
    for one in about.all:
        stored.update(zip(one.places, one.weights, strict=True))
    size, weights = model.stat().st_size, stored_bytes(list(stored.values()))
    result = {"model": str(model), "bytes": size, "weight_bytes": weights, **asdict(about)}
    show_table(result, _table(model, about, size, weights), as_json)


def _table(model: Path, about: Description, size: int, weights: int) -> Table:
    fused = sum(bool(pair["fused"]) for pair in about.fused)
    rows: dict[str, Any] = {
        "inputs": "\n".join(map(str, about.inputs)),
        "outputs": "\n".join(map(str, about.outputs)),
        "CPU": "\n".join(f"{one.title}, {one.triple}" for one in about.all),
        "CPU features": "\n".join(_features(one, len(about.all) > 1) for one in about.all),
        "GPU": about.device or "none",
        "size": f"{size / 1e6:.1f} MB, {weights / 1e6:.1f} MB of it weights",
        "fused": f"{fused} of {len(about.fused)} pairs of convolutions",
        "ranks": "1" if about.ranks is None else about.ranks.ranks,
        "tuned": f"{len(about.records)} kernels",
        "fast math": "yes" if about.fast_math else "no",
        "compiled by": ", ".join(f"{name} {number}" for name, number in about.versions.items()),
    }
    table = Table(title=model.name, show_header=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _features(about: Description, is_named: bool) -> str:
    return (f"{about.title}: " if is_named else "") + (
        ", ".join(about.features) or "none beyond the architecture's"
    )


@click.command("explain")
@model_argument
@click.option(
    "--resources",
    is_flag=True,
    help="Compile the CUDA kernels, and show their registers, spills and shared memory.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Show instead how the rows of a model are distributed over so many ranks: what they "
    "exchange, recompute or gather between which stages, with bytes and predicted times.",
)
@exchange_option
@network_option
@targets_option
@model_options
@precision_option
@reproducible_option
@records_option
@machine_option
@json_option
def explain_command(
    model: Path,
    resources: bool,
    ranks: int | None,
    exchange: str,
    network: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what MODEL is compiled to, and why; nothing is run.

    For a CPU, every pair of convolutions that could be fused: its FLOPs, the bytes moved by
    separate kernels and by a fused one, the FLOPs a byte (arithmetic intensity) of both, the
    decision, and the reason. For a GPU, every function, the rule that scheduled it, and the kernels
    that it launches. For both, the kernels that are left to a general rule or on which a rule
    failed, and why; --json names the rules of all kernels. Several targets are told one by one.
    """
    if ranks is not None:
        refuse_given(["resources"], "it is for GPUs")
        unused = ["records", "machine", "precision", "reproducible"]
        refuse_given(unused, "it does not change how rows are distributed")
        from tvm_fusion.distributed.build_network import explain_network
        from tvm_fusion.distributed.network_model import segments_table

        from ...distributed.network_figures import read_figures

        kept = {name: options[name] for name in ("target", "shapes", "fuse", "winograd")}
        figures, _ = read_figures(network)
        segments = explain_network(model, ranks, **kept, exchange=exchange, network=figures)
        shown = [asdict(segment) for segment in segments]
        show({"ranks": ranks, "segments": shown}, segments_table(segments), as_json)
        return
    refuse_given(["exchange", "network"], "it is for --ranks")
    targets = options.pop("target")
    several = targets if isinstance(targets, list) else [targets]
    reports, tables = zip(
        *(_explained(model, resources, target=target, **options) for target in several), strict=True
    )
    if len(several) == 1:
        show_table(reports[0], tables[0], as_json)
        return
    from rich.console import Group

    headed = [part for pair in zip(several, tables, strict=True) for part in pair]
    show_table(reports, Group(*headed), as_json)


def _explained(
    model: Path, resources: bool, target: str, precision: str, **options: Any
) -> tuple[Any, Any]:
    """The report of one target, and its table."""
    if names_gpu(target):
        from ...compiler.explain import explain_kernels, explain_kernels_table

        refuse_given(["winograd", "records"], "it applies to CPUs only")
        names = ("shapes", "fuse", "machine", "reproducible")
        kept = {name: options[name] for name in names} | {"target": target, "precision": precision}
        report = explain_kernels(model, resources=resources, **kept)
        return report, explain_kernels_table(report, model.name)
    refuse_given(["resources"], "it is for --target cuda")
    refuse_given(["reproducible"], "it is for GPUs")
    del options["reproducible"]
    from ...compiler.explain import explain, explain_table

    found = explain(model, target=target, precision=precision, **options)
    return found, explain_table(found, model.name)
