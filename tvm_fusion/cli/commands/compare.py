# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion compare``: what less precision costs a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..checks import refuse_absent_gpu
from ..options import (
    compile_options,
    inputs_option,
    json_option,
    model_argument,
    precision_option,
    threads_option,
    weights_option,
)
from ..output import show_table
from ..progress import progress_bar


@click.command("compare")
@model_argument
@inputs_option
@click.option(
    "--layers", is_flag=True, help="Compare the results of each convolution and product, too."
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
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

    A table shows the errors of each output, and how often its largest number is in the same place.
    """
    if weights is None and precision == "fp32":
        raise click.UsageError("give --weights or --precision, whose errors are to be shown")
    refuse_absent_gpu(options["target"])
    from ...bench.comparison import compare, comparison_table
    from .run_model import load_array

    given = {name: load_array(path) for name, path in inputs.items()}
    with progress_bar() as progress:
        found = compare(
            model,
            weights=weights,
            precision=precision,
            inputs=[given] if given else None,
            runs=runs,
            layers=layers,
            progress=progress,
            **options,
        )
    show_table(found.to_json(), comparison_table(found, model.name), as_json)
