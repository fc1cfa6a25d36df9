# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion inspect``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ...runtime.artifact import Description, describe_artifact
from ...runtime.tensor_spec import TensorSpec
from ...runtime.weights import stored_bytes
from ..options import json_option, model_argument
from ..output import show_table


@click.command("inspect")
@model_argument
@json_option
def inspect_command(model: Path, as_json: bool) -> None:
    """Show what MODEL, a compiled model, takes, returns and needs; nothing of it is run.

    It need not be for this machine.
    """
    about = describe_artifact(model)
    stored: dict[int, TensorSpec] = {}
    for one in about.all:
        stored.update(zip(one.places, one.weights, strict=True))
    size, weights = model.stat().st_size, stored_bytes(list(stored.values()))
    result = {"model": str(model), "bytes": size, "weight_bytes": weights, **asdict(about)}
    show_table(result, _table(model, about, size, weights), as_json)


def _table(model: Path, about: Description, size: int, weights: int) -> Table:
    fused = sum(bool(pair["fused"]) for pair in about.fused)
    rows: dict[str, Any] = {
        "inputs": "\n".join(map(str, about.inputs)),
        "outputs": "\n".join(map(str, about.outputs)),
        "CPU": "\n".join(f"{one.cpu}, {one.triple}" for one in about.all),
        "CPU features": "\n".join(_features(one, len(about.all) > 1) for one in about.all),
        "GPU": about.device or "none",
        "size": f"{size / 1e6:.1f} MB, {weights / 1e6:.1f} MB of it weights",
        "fused": f"{fused} of {len(about.fused)} pairs of convolutions",
        "ranks": "1" if about.ranks is None else about.ranks.ranks,
        "tuned": f"{len(about.records)} kernels",
        "fast math": "yes" if about.fast_math else "no",
        "compiled by": ", ".join(f"{name} {number}" for name, number in about.versions.items()),
    }
    table = Table(title=model.name, show_header=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _features(about: Description, is_named: bool) -> str:
    return (f"{about.cpu}: " if is_named else "") + (
        ", ".join(about.features) or "none beyond the architecture's"
    )
