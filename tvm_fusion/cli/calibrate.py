# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion calibrate``."""

from __future__ import annotations

from pathlib import Path

import click

from .options import json_option, threads_option
from .output import progress_bar, show


@click.command("calibrate")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="MINUTES",
    help="Time after which no other kernel is measured; the next call goes on.",
)
@threads_option
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Default: a file in the user's cache folder, which `predict --machine native` reads.",
)
@json_option
def calibrate_command(
    budget: float, threads: int | None, output: Path | None, as_json: bool
) -> None:
    """Measure this CPU for `predict`: its limits, overheads, and kernels beside their models.

    What FILE already holds is kept and not measured again; Ctrl-C loses nothing that was written.
    """
    from ..prediction.calibrate.calibration import calibrate, missing
    from ..prediction.machines import calibration_path
    from ..runtime.thread_pool import choose_threads

    count = choose_threads(threads)
    output = output or calibration_path(count)
    with progress_bar() as progress:
        machine = calibrate(output, count, budget * 60, progress)
    left = missing(output)
    text = f"{output}: {machine.title}, {count} threads, {len(machine.figures)} figures"
    text += f"; {left} kernels are not measured yet: call it again" if left else ""
    show({"output": str(output), "missing": left, **machine.to_json()}, text, as_json)
