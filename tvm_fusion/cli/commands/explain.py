# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion explain``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..checks import names_gpu, refuse_given
from ..options import (
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
)
from ..output import show, show_table


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
        from ...compiler.explain.explain_gpu import explain_kernels, explain_kernels_table

        refuse_given(["winograd", "records"], "it applies to CPUs only")
        names = ("shapes", "fuse", "machine", "reproducible")
        kept = {name: options[name] for name in names} | {"target": target, "precision": precision}
        report = explain_kernels(model, resources=resources, **kept)
        return report, explain_kernels_table(report, model.name)
    refuse_given(["resources"], "it is for --target cuda")
    refuse_given(["reproducible"], "it is for GPUs")
    del options["reproducible"]
    from ...compiler.explain.explain import explain, explain_table

    found = explain(model, target=target, precision=precision, **options)
    return found, explain_table(found, model.name)
