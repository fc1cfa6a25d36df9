# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: results on standard output, progress on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .json_text import json_text

if TYPE_CHECKING:
    from ..runtime.compiled_model import CompiledModel

FILE_WIDTH = 200
"""Columns of a table that is not written to a terminal, so that no cell is wrapped."""


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on standard error while the block runs; yields ``report(text, done, total)``.

    It is drawn only when something is reported, since a ticking clock would disturb measurements,
    and only on a terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text, done, total: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text, done, total: bar.update(
            task, description=text, completed=done, total=total, refresh=True
        )


def compile_model(model: Path | bytes, **options: Any) -> CompiledModel:
    """Compile a model behind a progress bar; ``options`` are those of ``tvm_fusion.compile``."""
    from .. import compile as compile_

    with progress_bar() as progress:
        return compile_(model, progress=progress, **options)


def show(result: Any, text: str, as_json: bool) -> None:
    """Write ``result`` as JSON, or ``text``."""
    click.echo(json_text(_plain(result)) if as_json else text)


def show_table(result: Any, table: RenderableType, as_json: bool) -> None:
    """Write ``result`` as JSON, or ``table``."""
    if as_json:
        show(result, "", True)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(table)


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
