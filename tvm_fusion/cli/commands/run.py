# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion run``: opens a model, runs it, shows and saves its outputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...runtime.thread_pool import choose_threads
from ..checks import is_compiled, refuse_absent_gpu, refuse_given, refuse_model_file
from ..options import (
    OutputFile,
    compile_options,
    inputs_option,
    json_option,
    model_argument,
    records_option,
    threads_option,
)
from ..output import compile_model, show
from .run_model import run_model, run_text, save_outputs

if TYPE_CHECKING:
    from ...distributed.world.numa_placement import Numa


@click.command("run")
@model_argument
@inputs_option
@click.option(
    "--output",
    type=OutputFile(),
    help="Write the outputs, by name, to this .npz file.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--iterations",
    "--repeat",
    "repeat",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
)
@click.option(
    "--streams",
    type=click.IntRange(min=1),
    help="Also count the calls a second of so many copies of the model that run at the same time; "
    "each has --threads threads, by default an equal share of the physical cores.",
)
@click.option(
    "--distributed",
    is_flag=True,
    help="Be one rank of a job that runs a model compiled with --ranks; start it by "
    "`mpiexec -n RANKS tvm-fusion run MODEL --distributed`. The first rank shows the outputs.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="With --distributed: seconds for which a rank waits for another.",
)
@click.option(
    "--numa",
    type=click.Choice(["same", "other", "unbound"]),
    help="With --distributed: spread the ranks of a machine over its NUMA nodes, their memory on "
    "the same node, the next (other) one, or unbound; refused by a machine with one node.",
)
@click.option(
    "--bind/--no-bind",
    default=True,
    show_default=True,
    help="With --distributed: give each rank of a machine processors of its own, if there are "
    "enough of them.",
)
@click.option(
    "--network",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --distributed: file of `calibrate --network`, read by the first rank, whose fastest "
    "routes the exchanges take that are not kernels of the model. Default: routes by constants.",
)
@compile_options
@records_option
@threads_option
@json_option
def run_command(
    model: Path,
    inputs: dict[str, Path],
    output: Path | None,
    seed: int,
    repeat: int,
    streams: int | None,
    distributed: bool,
    timeout: float,
    numa: Numa | None,
    bind: bool,
    network: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run MODEL, a compiled model or an ONNX file, and show its outputs and its latency.

    --target, --fuse and --winograd apply to ONNX files only; --seed is that of the random inputs,
    --iterations the number of timed runs.
    """
    if distributed:
        refuse_given(
            ["target", "shapes", "fuse", "winograd", "records", "streams"],
            "--distributed runs a model that is compiled already, once at a time",
        )
        from .run_distributed import run_distributed

        threads = options["threads"]
        settings = {"timeout": timeout, "threads": threads, "numa": numa, "bind": bind}
        settings["network"] = network
        run_distributed(model, inputs, output, seed, repeat, settings, as_json)
        return
    refuse_given(["timeout", "numa", "bind", "network"], "it is for --distributed")
    from ... import load

    if streams is not None and options["threads"] is None:
        options["threads"] = max(1, choose_threads(None) // streams)
    if output is not None:
        refuse_model_file(output, model)
    if is_compiled(model):
        refuse_given(["target", "fuse", "winograd", "records"], f"{model.name} is compiled already")
        compiled = load(model, threads=options["threads"])
    else:
        refuse_absent_gpu(options["target"])
        compiled = compile_model(model, **options)
    result, outputs = run_model(compiled, inputs, options["shapes"], seed, repeat, streams)
    if output is not None:
        save_outputs(output, outputs)
    show({"model": str(model), **result}, run_text(result), as_json)
