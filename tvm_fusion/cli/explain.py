# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .checks import names_gpu, refuse_given
from .options import compile_options, json_option, model_argument, precision_option, records_option
from .output import show_table


@click.command("explain")
@model_argument
@click.option(
    "--resources",
    is_flag=True,
    help="Compile the CUDA kernels, and show their registers, spills and shared memory.",
)
@compile_options
@precision_option
@records_option
@json_option
def explain_command(model: Path, resources: bool, as_json: bool, **options: Any) -> None:
    """Show what MODEL is compiled to, and why; nothing is run.

    For a CPU, every pair of convolutions that could be fused: its FLOPs, the bytes moved by
    separate kernels and by a fused one, the FLOPs a byte (arithmetic intensity) of both, the
    decision, and the reason. For a GPU, every function, the rule that scheduled it, and the kernels
    that it launches. For both, the kernels that are left to a general rule or on which a rule
    failed, and why; --json names the rules of all kernels.
    """
    if names_gpu(options["target"]):
        from ..compiler.explain_gpu import explain_kernels, explain_kernels_table

        refuse_given(["winograd", "records"], "it applies to CPUs only")
        kept = {name: options[name] for name in ("target", "shapes", "fuse", "precision")}
        report = explain_kernels(model, resources=resources, **kept)
        show_table(report, explain_kernels_table(report, model.name), as_json)
        return
    refuse_given(["resources"], "it is for --target cuda")
    refuse_given(["precision"], "it is for GPUs")
    del options["precision"]
    from ..compiler.explain import explain, explain_table

    report = explain(model, **options)
    show_table(report, explain_table(report, model.name), as_json)
