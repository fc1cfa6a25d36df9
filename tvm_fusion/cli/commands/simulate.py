# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion simulate``: predicted scaling of a model over ranks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..options import (
    OutputFile,
    compile_options,
    exchange_option,
    json_option,
    model_argument,
    network_option,
    threads_option,
)
from ..output import show


class Counts(click.ParamType):
    """Numbers of ranks, separated by commas; between two dots stands what doubles."""

    name = "RANKS"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        """Read the numbers."""
        if not isinstance(value, str):
            return value
        found: list[int] = []
        for item in value.split(","):
            if item.strip() == "..." and found:
                found.append(0)
            elif item.strip().isdecimal() and int(item) > 0:
                found += _between(found, int(item))
            else:
                self.fail(f"{value!r} is not like 1,2,4 or 1,...,4096", param, ctx)
        if not found or 0 in found:
            self.fail(f"{value!r} is not like 1,2,4 or 1,...,4096", param, ctx)
        return found


def _between(found: list[int], last: int) -> list[int]:
    """``last``, after dots with all that lies between, each twice the one before."""
    if not found or found[-1]:
        return [last]
    found.pop()
    numbers = []
    number = 2 * found[-1]
    while number < last:
        numbers.append(number)
        number *= 2
    return [*numbers, last]


@click.command("simulate")
@model_argument
@click.option(
    "--ranks",
    type=Counts(),
    default="1,...,4096",
    show_default=True,
    help="Numbers of ranks, ascending.",
)
@exchange_option
@network_option
@click.option(
    "--weak",
    is_flag=True,
    help="Weak scaling: the image is as many times higher as there are ranks.",
)
@click.option(
    "--one-rank",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MS",
    help="Measured milliseconds of one rank alone, by which predicted times of kernels are "
    "corrected.",
)
@click.option(
    "--draw",
    type=OutputFile(),
    help="Draw the times to this file, such as scaling.svg.",
)
@compile_options
@threads_option
@json_option
def simulate_command(
    model: Path,
    ranks: list[int],
    exchange: str,
    network: str | None,
    weak: bool,
    one_rank: float | None,
    draw: Path | None,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict how MODEL, an ONNX file, scales over ranks; nothing is run, and no MPI is needed.

    Messages and bytes are those of a model compiled for so many ranks. Times are predicted; lines
    within the number of ranks with which the network was measured say so.
    """
    from tvm_fusion.distributed.build_network import read_network, resolve_ranks
    from tvm_fusion.distributed.simulate import simulate_network

    from ...distributed.network_figures import read_figures
    from ...distributed.program import default_processor

    target = resolve_ranks(1, options.pop("target"), threads)
    figures, measured = read_figures(network)
    stages = read_network(model, target, **options)
    scaling = simulate_network(
        stages,
        default_processor(target),
        ranks,
        network=figures,
        kind="weak" if weak else "strong",
        one_rank=None if one_rank is None else one_rank / 1e3,
        measured=measured,
        exchange=exchange,
    )
    if draw is not None:
        scaling.draw(draw)
    show({"model": str(model), **asdict(scaling)}, scaling.table(), as_json)
