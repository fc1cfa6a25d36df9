# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion calibrate``: what connects the ranks of a job."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from .options import json_option
from .output import show_table


@click.command("calibrate")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("network.json"),
    show_default=True,
    help="Write the figures, each with its origin, to this file.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds for which a rank waits for another.",
)
@json_option
def calibrate_command(output: Path, timeout: float, as_json: bool) -> None:
    """Measure latency and bandwidth between ranks, and what of it passes while they compute.

    Start it by `mpiexec -n 2 tvm-fusion calibrate`; pairs of ranks measure at the same time.
    """
    from ..distributed import session
    from ..distributed.calibrate import calibrate, write_machine

    with session(timeout=timeout) as world:
        machine = calibrate(world)
        if world.rank > 0:
            return
        write_machine(machine, output)
        table = Table("figure", "value", title=f"{machine.title}: {output}")
        for name, figure in machine.figures.items():
            table.add_row(name, f"{figure.value:.4g}")
        show_table(machine.to_json(), table, as_json)
