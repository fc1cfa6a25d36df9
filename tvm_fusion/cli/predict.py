# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion predict``: how long a run takes, and what holds it up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Group

from .options import json_option
from .output import show_table


@click.command("predict")
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Kineto trace of PyTorch's profiler, or a folder with one a rank.",
)
@click.option(
    "--overheads",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Host overheads of --save-overheads. Default: those of the traces themselves.",
)
@click.option(
    "--save-overheads",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the host overheads that the traces show.",
)
@click.option(
    "--profiler-cost",
    type=float,
    nargs=2,
    default=(0.0, 0.0),
    metavar="HOST DEVICE",
    help="Microseconds that the profiler added to each event of host and device.",
)
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the timeline: a Chrome trace (.json, .json.gz) or a picture (.png, .svg).",
)
@json_option
def predict_command(traces: Path | None, as_json: bool, **options: Any) -> None:
    """Predict how long a traced run takes, and name what holds it up."""
    if traces is None:
        raise click.UsageError("nothing to predict; give --traces")
    predict_traced(traces, as_json, **options)


def predict_traced(
    traces: Path,
    as_json: bool,
    overheads: Path | None,
    save_overheads: Path | None,
    profiler_cost: tuple[float, float],
    timeline: Path | None,
) -> None:
    """Predict and show the runs of a file or folder of traces."""
    from ..prediction.api import load_traces, predict_traces
    from ..prediction.overheads import Overheads, ProfilerCost, load_overheads
    from ..prediction.report import tables, write_timeline

    known = load_overheads(overheads) if overheads else None
    runs = load_traces(traces, ProfilerCost(*profiler_cost))
    if timeline and len(runs) > 1:
        raise click.UsageError(f"--timeline is of one run; {traces} holds {len(runs)}")
    for warning in (warning for run in runs for warning in run.warnings):
        click.echo(f"Warning: {warning}", err=True)
    predictions = [predict_traces(run, known) for run in runs]
    if save_overheads:
        Overheads().merge(run.overheads for run in runs).save(save_overheads)
    if timeline:
        write_timeline(predictions[0].timeline, timeline)
    result = [
        {
            **asdict(prediction.report),
            "device": prediction.run.device,
            "overheads": str(overheads) if overheads else "of the traces",
            "unknown_ops": prediction.unknown,
            "warnings": prediction.run.warnings,
        }
        for prediction in predictions
    ]
    shown = Group(*(tables(prediction.report) for prediction in predictions))
    show_table(result, shown, as_json)
