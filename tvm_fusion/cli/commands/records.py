# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion records`` and its own commands."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ..options import ModelFile, OutputFile, json_option, model_options, threads_option
from ..output import micros, say, show, show_table

existing = click.Path(exists=True, path_type=Path)
path_argument = click.argument("path", type=existing, metavar="PATH")


@click.group("records")
def records_command() -> None:
    """Show, check and pass on tuning records: files of JSON lines, or folders of them."""


@records_command.command("list")
@path_argument
@json_option
def list_command(path: Path, as_json: bool) -> None:
    """List the records in PATH."""
    from ...tuning.record_files import all_records

    records = all_records(path)
    table = Table(caption=f"{len(records)} records")
    for heading in ("template", "workload", "CPU", "default", "best", "gain", "date"):
        table.add_column(heading)
    for record in records:
        table.add_row(
            f"{record.template} {record.version}",
            _workload_text(record),
            f"{record.cpu}, {record.vector_bits} bits, {record.threads} threads",
            *(micros(value) for value in (record.default_seconds, record.best_seconds)),
            f"{record.gain - 1:+.1%}",
            record.date[:10],
        )
    show_table([asdict(record) for record in records], table, as_json)


def _workload_text(record: Any) -> str:
    """A workload in a few words; that of an unknown template as it is."""
    from ...compiler.record_reader import SPACES
    from ...errors import OpError

    template = SPACES.get(record.template)
    text = record.key.workload
    try:
        return text[:60] if template is None else template.describe(template.read_workload(text))
    except (OpError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError):
        return text[:60]


@records_command.command("verify")
@path_argument
@json_option
def verify_command(path: Path, as_json: bool) -> int:
    """Check every line in PATH; exit with 1 if one is no usable record."""
    from ...tuning.record_files import verify

    good, bad = verify(path)
    lines = [f"{found.file}, line {found.line}: {found.reason}" for found in bad]
    text = "\n".join([*lines, f"{good} good, {len(bad)} bad"])
    show({"good": good, "bad": [asdict(found) for found in bad]}, text, as_json)
    return 1 if bad else 0


@records_command.command("merge")
@click.argument("output", type=OutputFile())
@click.argument("inputs", type=existing, nargs=-1, required=True)
def merge_command(output: Path, inputs: tuple[Path, ...]) -> None:
    """Write the records of INPUTS to the file OUTPUT; of equal workloads the last one stays."""
    from ...tuning.record_files import merge

    say(f"{output}: {merge(inputs, output)} records")


@records_command.command("prune")
@path_argument
def prune_command(path: Path) -> None:
    """Remove lines from PATH that are no usable records, or that later ones replace."""
    from ...tuning.record_files import prune

    kept, gone = prune(path)
    say(f"{path}: {kept} records kept, {gone} lines removed")


JSONL, META_SCHEDULE = "jsonl", "meta-schedule"
format_option = click.option(
    "--format",
    "form",
    type=click.Choice([JSONL, META_SCHEDULE]),
    default=JSONL,
    help="Our lines of JSON, or a folder with the JSON database of TVM's MetaSchedule.",
)


@records_command.command("export")
@click.argument("database", type=existing)
@click.argument("output", type=OutputFile(dir_okay=True))
@format_option
@click.option("--cpu", "family", metavar="NAME", help="Only records of this CPU, as LLVM names it.")
@click.option(
    "--model",
    type=ModelFile(),
    help="For meta-schedule: the model whose kernels are exported; a record alone has no function. "
    "The options below are those of tune.",
)
@model_options
@threads_option
def export_command(
    database: Path,
    output: Path,
    form: str,
    family: str | None,
    model: Path | None,
    threads: int | None,
    shapes: dict[str, Any],
    **options: Any,
) -> None:
    """Write the usable records of DATABASE to OUTPUT, a file or, for meta-schedule, a folder."""
    if (form == META_SCHEDULE) != (model is not None):
        raise click.UsageError("--format meta-schedule and --model need each other")
    if model is None:
        if output.is_dir():
            raise click.UsageError(f"{output} is a folder; expected a file")
        from ...tuning.record_files import export

        say(f"{output}: {export(database, output, family)} records")
        return
    from ...compiler.pipeline import Options
    from ...compiler.targets import resolve
    from ...runtime.thread_pool import choose_threads
    from ...tuning.meta_schedule_records import export_records
    from ...tuning.tasks import extract_tasks

    target = resolve(family or "native", cores=choose_threads(threads))
    tasks = extract_tasks(model, target, shapes, Options(**options))
    count = export_records(database, output, tasks, target)
    say(f"{output}: {count} records of {len(tasks)} tasks")


@records_command.command("import")
@click.argument("database", type=click.Path(file_okay=False, path_type=Path))
@click.argument("inputs", type=existing, nargs=-1, required=True)
@format_option
def import_command(database: Path, inputs: tuple[Path, ...], form: str) -> None:
    """Append the usable records of INPUTS to DATABASE."""
    if form == JSONL:
        from ...tuning.record_files import import_records
    else:
        from ...tuning.meta_schedule_records import import_records

    taken, refused = import_records(database, inputs)
    say(f"{database}: {taken} records taken, {refused} refused")
