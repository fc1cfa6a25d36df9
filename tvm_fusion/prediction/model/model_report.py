# SPDX-License-Identifier: Apache-2.0
"""Tables of predictions of a model."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from ..report import answer_table
from .predict_model import ModelPrediction


def predictions_table(predictions: Sequence[ModelPrediction], title: str = "") -> RenderableType:
    """One table a machine, and, where there are several, one that compares them."""
    tables: list[RenderableType] = [kernels_table(found, title) for found in predictions]
    tables += [
        answer_table(f"{found.engine} on {found.title}", found.seconds, found.answers)
        for found in predictions
        if found.answers
    ]
    return Group(*tables, *([_comparison(predictions)] if len(predictions) > 1 else []))


def kernels_table(found: ModelPrediction, title: str = "") -> Table:
    """One row a launch, in the order of the run."""
    table = Table(
        title=f"{title}, {found.engine} on {found.title}",
        caption="\n".join([_totals(found), *found.notes]),
    )
    table.add_column("call", justify="right")
    table.add_column("kernel")
    for heading in ("us", "from", "to", "% of kernels"):
        table.add_column(heading, justify="right")
    table.add_column("bound by")
    table.add_column("of roofline", justify="right")
    table.add_column("model")
    for row in found.kernels:
        table.add_row(
            str(row.position),
            f"{row.kernel}: {row.operator}" if row.kernel not in row.operator else row.operator,
            *(f"{seconds * 1e6:.1f}" for seconds in (row.seconds, row.low, row.high)),
            f"{row.seconds / found.kernel_seconds:.1%}",
            row.bound,
            f"{row.roofline_share:.0%}",
            row.model if row.in_range else " ".join((row.model, "*", ", ".join(row.extrapolated))),
        )
    return table


def _totals(found: ModelPrediction) -> str:
    outside = sum(not row.in_range for row in found.kernels)
    text = (
        f"A run takes {found.seconds * 1e3:.3f} ms ({found.low * 1e3:.3f} to "
        f"{found.high * 1e3:.3f}): kernels {found.kernel_seconds * 1e3:.3f} ms, and "
        f"{found.host_seconds * 1e3:.3f} ms of the host that they do not hide."
    )
    if found.memory_bytes is not None:
        text += f"\nPeak memory of a rank: {found.memory_bytes / 1e9:.3g} GB."
    if outside:
        text += f"\n* {outside} kernels outside of what their model was fitted to"
        text += ", in machine, type or size"
    return text


def _comparison(predictions: Sequence[ModelPrediction]) -> Table:
    table = Table(title="a run")
    table.add_column("machine")
    for heading in ("ms", "from", "to", "kernels ms", "times as fast as the first"):
        table.add_column(heading, justify="right")
    for found in predictions:
        times = (found.seconds, found.low, found.high, found.kernel_seconds)
        ratio = predictions[0].seconds / found.seconds
        table.add_row(found.title, *(f"{each * 1e3:.3f}" for each in times), f"{ratio:.2f}")
    return table
