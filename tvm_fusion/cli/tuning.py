# SPDX-License-Identifier: Apache-2.0
"""Commands ``tvm-fusion tune`` and ``tvm-fusion records``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from .options import (
    COMPILE_OPTIONS,
    as_mapping,
    json_option,
    many_options,
    model_argument,
    threads_option,
)
from .output import show, show_table

if TYPE_CHECKING:
    from ..tuning.job import TuneResult

INTERRUPTED = 130


@click.command("tune")
@model_argument
@click.option(
    "--database",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder of the records, for --records of the other commands; made if absent.",
)
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Settings to try for each kernel, those of earlier jobs included.",
)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Time limit.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@many_options(COMPILE_OPTIONS)
@threads_option
@json_option
def tune_command(
    model: Path,
    database: Path,
    trials: int,
    minutes: float | None,
    seed: int,
    target: str,
    shape: tuple,
    fuse: str,
    winograd: str,
    threads: int | None,
    as_json: bool,
) -> int:
    """Search faster settings for the kernels of MODEL on this CPU, and record the winners.

    Each kernel's settings race its default; a winner is recorded if it gains 1 % in a second race.
    Ctrl-C keeps all trials; the same command then goes on, and repeats none.
    """
    from .. import tune

    with live_table() as progress:
        result = tune(
            model,
            target,
            as_mapping(shape, "--shape"),
            database=database,
            trials=trials,
            minutes=minutes,
            threads=threads,
            seed=seed,
            fuse=fuse,
            winograd=winograd,
            progress=progress,
        )
    show_table(result.to_json(), tune_table(result), as_json)
    stopped = result.interrupted and minutes is None
    return INTERRUPTED if stopped else 0


@contextlib.contextmanager
def live_table() -> Iterator[Callable[[TuneResult], None]]:
    """Show the job's table on standard error while it runs, if that is a terminal.

    It is drawn when something changes only: a ticking clock would disturb the measurements.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda result: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda result: live.update(tune_table(result), refresh=True)


def tune_table(result: TuneResult) -> Table:
    """Return the state of a job, one row a task."""
    table = Table(title="tuning", caption=_caption(result))
    table.add_column("kernel")
    for heading in ("share", "default", "best", "gain", "trials", "settings", "failures"):
        table.add_column(heading, justify="right")
    table.add_column("state")
    for task in result.tasks:
        table.add_row(
            task.about if task.calls == 1 else f"{task.about}, {task.calls} times",
            f"{task.share:.1%}",
            *(_micros(value) for value in (task.default_seconds, task.best_seconds)),
            f"{task.gain - 1:+.1%}" if task.best_seconds else "",
            str(task.trials or ""),
            str(task.settings or ""),
            str(len(task.failures) or ""),
            task.status,
        )
    return table


def _caption(result: TuneResult) -> str:
    text = f"{result.seconds:.0f} s"
    if result.minutes is not None:
        text += f", {max(0.0, 60 * result.minutes - result.seconds):.0f} s left"
    failures = [(task, failure) for task in result.tasks for failure in task.failures]
    for task, failure in failures[-3:]:
        knobs = ", ".join(f"{name} {value}" for name, value in failure["knobs"].items())
        text += f"\n{task.name}: {failure['failure']} ({failure['reason']}) with {knobs}"
    return f"{text}\nrecords: {result.database}"


def _micros(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f} us"


existing = click.Path(exists=True, path_type=Path)
path_argument = click.argument("path", type=existing, metavar="PATH")


@click.group("records")
def records_group() -> None:
    """Show, check and pass on tuning records: files of JSON lines, or folders of them."""


@records_group.command("list")
@path_argument
@json_option
def list_command(path: Path, as_json: bool) -> None:
    """List the records in PATH."""
    from ..tuning.record_files import all_records

    found = all_records(path)
    table = Table(caption=f"{len(found)} records")
    for heading in ("template", "workload", "CPU", "default", "best", "gain", "date"):
        table.add_column(heading)
    for record in found:
        table.add_row(
            f"{record.template} {record.version}",
            _workload_text(record),
            f"{record.cpu}, {record.vector_bits} bits, {record.threads} threads",
            *(_micros(value) for value in (record.default_seconds, record.best_seconds)),
            f"{record.gain - 1:+.1%}",
            record.date[:10],
        )
    show_table([asdict(record) for record in found], table, as_json)


def _workload_text(record: Any) -> str:
    """A workload in a few words; that of an unknown template as it is."""
    from schedules import cpu

    from ..errors import OpError

    template = cpu.TEMPLATES.get(record.template)
    text = record.key.workload
    try:
        return text[:60] if template is None else template.describe(template.read_workload(text))
    except (OpError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError):
        return text[:60]


@records_group.command("verify")
@path_argument
@json_option
def verify_command(path: Path, as_json: bool) -> int:
    """Check every line in PATH; exit with 1 if one is no usable record."""
    from ..tuning.record_files import verify

    good, bad = verify(path)
    lines = [f"{found.file}, line {found.line}: {found.reason}" for found in bad]
    text = "\n".join([*lines, f"{good} good, {len(bad)} bad"])
    show({"good": good, "bad": [asdict(found) for found in bad]}, text, as_json)
    return 1 if bad else 0


@records_group.command("merge")
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("inputs", type=existing, nargs=-1, required=True)
def merge_command(output: Path, inputs: tuple[Path, ...]) -> None:
    """Write the records of INPUTS to the file OUTPUT; of equal workloads the last one stays."""
    from ..tuning.record_files import merge

    click.echo(f"{output}: {merge(inputs, output)} records")


@records_group.command("prune")
@path_argument
def prune_command(path: Path) -> None:
    """Remove lines from PATH that are no usable records, or that later ones replace."""
    from ..tuning.record_files import prune

    kept, gone = prune(path)
    click.echo(f"{path}: {kept} records kept, {gone} lines removed")


@records_group.command("export")
@click.argument("database", type=existing)
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--cpu", "family", metavar="NAME", help="Only records of this CPU, as LLVM names it.")
def export_command(database: Path, output: Path, family: str | None) -> None:
    """Write the usable records of DATABASE to the file OUTPUT."""
    from ..tuning.record_files import export

    click.echo(f"{output}: {export(database, output, family)} records")


@records_group.command("import")
@click.argument("database", type=click.Path(file_okay=False, path_type=Path))
@click.argument("inputs", type=existing, nargs=-1, required=True)
def import_command(database: Path, inputs: tuple[Path, ...]) -> None:
    """Append the usable records of INPUTS to DATABASE."""
    from ..tuning.record_files import import_records

    taken, refused = import_records(database, inputs)
    click.echo(f"{database}: {taken} records taken, {refused} refused")
