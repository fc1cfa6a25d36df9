# SPDX-License-Identifier: Apache-2.0
"""Results of the commands on standard output."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import progress
from .progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ..runtime.compiled_model import CompiledModel


FILE_WIDTH = 200
"""Columns of a benchmark's table that is not written to a terminal, so that no cell is wrapped."""

PIPE_WIDTH = 100
"""Columns of a command's table that is not written to a terminal."""


def json_text(value: Any) -> str:
    """Indented JSON of ``value``; a float that is not finite becomes "inf", "-inf" or "nan"."""
    return json.dumps(_finite(value), indent=2, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def compile_model(model: Path, **options: Any) -> CompiledModel:
    """Compile a model behind a progress bar; ``options`` are those of ``tvm_fusion.compile``."""
    from .. import compile as compile_

    with progress_bar(clock=True) as report:
        return compile_(model, progress=report, **options)


def show(result: Any, text: str, as_json: bool) -> None:
    """Write ``result`` as JSON, or ``text``."""
    say(json_text(_plain(result)) if as_json else text)


def say(text: str, is_error: bool = False) -> None:
    """Write a line to standard output or standard error, after the progress is taken away."""
    progress.end()
    click.echo(text, err=is_error)


def show_table(result: Any, table: RenderableType, as_json: bool) -> None:
    """Write ``result`` as JSON, or ``table``."""
    if as_json:
        show(result, "", True)
        return
    from rich.console import Console

    progress.end()
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    _fit(table, console)
    console.print(table)


def _fit(table: RenderableType, console: Console) -> None:
    """Spare tables that are too wide their lines between columns, and cut no word of them off."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    for part in table.renderables if isinstance(table, Group) else ():
        _fit(part, console)
    options = console.options.update(width=sys.maxsize)
    if not isinstance(table, Table):
        return
    if table.__rich_measure__(console, options).maximum <= console.width:
        return
    table.box, table.padding = box.SIMPLE_HEAD, (0, 0)
    table.pad_edge = table.show_edge = False
    for column in table.columns:
        column.overflow = "fold"


def micros(seconds: float | None) -> str:
    """A time in microseconds; an unknown one is empty."""
    return "" if seconds is None else f"{seconds * 1e6:.1f} us"


def _plain(value: Any) -> Any:
    """Turn records in ``value`` into dictionaries."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
