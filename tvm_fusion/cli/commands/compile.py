# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion compile``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checks import refuse_absent_folder, refuse_given, refuse_model_file
from ..options import (
    Names,
    OutputFile,
    exchange_option,
    json_option,
    machine_option,
    model_argument,
    model_options,
    network_option,
    precision_option,
    records_option,
    reproducible_option,
    targets_option,
    threads_option,
    weights_option,
)
from ..output import compile_model, show
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
        "faster": None if ranks else _faster(options["precision"], compiled),
    }
    device = "" if compiled.needs is None else f" for {compiled.needs}"
    if ranks is not None:
        result["ranks"], device = ranks, f" for {ranks} ranks"
    if len(compiled.targets) > 1:
        device = f" for {', '.join(compiled.targets)}"
    tuned = f"{len(compiled.records)} tuned kernels, " if compiled.records else ""
    text = (
        f"{output}: {size / 1e6:.1f} MB{device}, {fused} of {len(compiled.fused)} pairs fused, "
        f"{tuned}compiled in {seconds:.1f} s"
    )
    text += f"\n{result['faster']}" if result["faster"] else ""
    show(result, text, as_json)


def _faster(precision: str, compiled: Any) -> str | None:
    from ...compiler.options import faster_precision

    return faster_precision(precision, compiled.target)


def _compiled(
    model: Path,
    ranks: int | None,
    exchange: str,
    network: str | None,
    options: dict[str, Any],
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
