# SPDX-License-Identifier: Apache-2.0
"""Commands that measure a model: ``bench`` and ``compare``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..options import (
    EngineList,
    ModelFile,
    compile_options,
    inputs_option,
    json_option,
    model_argument,
    names_gpu,
    precision_option,
    records_option,
    refuse_absent_gpu,
    refuse_given,
    threads_option,
    weights_option,
)
from ..output import show_table
from ..progress import progress_bar


@click.command("bench")
@model_argument
@click.option(
    "--against",
    type=EngineList(),
    help="Peers, separated by commas: onnxruntime, openvino, tvm. Default: those installed.",
)
@click.option(
    "--compiled",
    type=ModelFile(),
    help="Race this compiled model instead of compiling MODEL again.",
)
@click.option(
    "--profile",
    "as_profile",
    is_flag=True,
    help="Do not race; show the time of each kernel beside the machine's limit.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=20)
@click.option("--runs", type=click.IntRange(min=1), default=10)
@compile_options
@precision_option
@records_option
@threads_option
@json_option
def bench_command(
    model: Path,
    against: list[str] | None,
    compiled: Path | None,
    as_profile: bool,
    rounds: int,
    runs: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Race tvm-fusion against other engines on MODEL, an ONNX file.

    Each engine runs in its own process; in each of --rounds rounds they take turns of --runs timed
    runs, on the same random inputs. With --profile, tvm-fusion runs alone, --runs times, and a
    table shows its kernels, sorted by the time lost against the machine's limit. OpenVINO takes
    part twice: in float32, and with what it chooses itself.
    """
    is_gpu = names_gpu(options["target"])
    if as_profile:
        refuse_given(["against", "compiled", "rounds"], "--profile does not race")
        if is_gpu:
            raise click.UsageError("--profile is for CPUs; use explain --resources for GPU kernels")
        _show_profile(model, runs, as_json, **options)
        return
    refuse_absent_gpu(options["target"])
    from ...bench.race import EngineSpec, Plan, cpu_peers, gpu_peers, race, race_table
    from ...runtime.artifact import read_artifact

    shapes, threads = options.pop("shapes"), options.pop("threads")
    target = options["target"]
    if options["records"] is None:
        del options["records"]
    if compiled is not None:
        given = ["target", "fuse", "winograd", "records", "precision"]
        refuse_given(given, f"{compiled.name} is compiled already")
        options = {"artifact": str(compiled.resolve())}
        about = read_artifact(compiled)
        target, is_gpu = about.target, about.device is not None
    engines = [EngineSpec("tvm-fusion", options=options)]
    if is_gpu:
        engines += gpu_peers(against or [], target)
    else:
        engines += cpu_peers(against or [])
    with progress_bar() as progress:
        result = race(
            model,
            engines,
            threads=threads,
            shapes=shapes,
            plan=Plan(rounds=rounds, runs=runs),
            progress=progress,
        )
    table = race_table(result)
    table.caption = " ".join(filter(None, [str(table.caption), _hint(options)]))
    show_table(result.to_json() | {"faster": _hint(options)}, table, as_json)


def _hint(options: Mapping[str, Any]) -> str | None:
    """One line on a faster precision; None for a model that is compiled already."""
    if "artifact" in options:
        return None
    from ...compiler.options import faster_precision
    from ...compiler.targets import resolve

    return faster_precision(options["precision"], resolve(options["target"]))


def _show_profile(model: Path, runs: int, as_json: bool, **options: Any) -> None:
    from ...bench.profiler import profile, profile_table

    with progress_bar() as progress:
        result = profile(model, runs=runs, progress=progress, **options)
    show_table(result.to_json(), profile_table(result, model.name), as_json)


@click.command("compare")
@model_argument
@inputs_option
@click.option(
    "--layers/--no-layers",
    default=True,
    help="Compare the results of each convolution and product, too.",
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=8,
    help="Number of random inputs; with --input there is one run.",
)
@compile_options
@weights_option
@precision_option
@threads_option
@json_option
def compare_command(
    model: Path,
    inputs: dict[str, Path],
    layers: bool,
    runs: int,
    weights: str | None,
    precision: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare MODEL, an ONNX file, compiled with --weights or --precision, with itself in fp32.

    A table shows the errors of each output and each layer, and how often the largest number of a
    line is in the same place.
    """
    if weights is None and precision == "fp32":
        raise click.UsageError("give --weights or --precision, whose errors are to be shown")
    refuse_absent_gpu(options["target"])
    from ...bench.comparison import compare, comparison_table
    from .run import load_array

    feed = {name: load_array(path) for name, path in inputs.items()}
    with progress_bar() as progress:
        comparison = compare(
            model,
            weights=weights,
            precision=precision,
            inputs=[feed] if feed else None,
            runs=runs,
            layers=layers,
            progress=progress,
            **options,
        )
    show_table(comparison.to_json(), comparison_table(comparison, model.name), as_json)
