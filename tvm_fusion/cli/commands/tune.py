# SPDX-License-Identifier: Apache-2.0
"""Commands ``tune``, and ``serve``, which measures for it on another machine."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from .. import progress
from ..options import ModelFile, compile_options, existing_file, json_option, threads_option
from ..output import micros, say, show, show_table

if TYPE_CHECKING:
    from ...tuning.job import TuneResult


@click.command("tune")
@click.argument("model", type=ModelFile(), metavar="MODEL", required=False)
@click.option(
    "--database",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the records, for --records of the other commands; made if absent.",
)
@click.option(
    "--export",
    "exported",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Measure nothing: compile the candidates of a GPU into FOLDER, for python -m "
    "tvm_fusion.tuning.candidates FOLDER FILE on its machine.",
)
@click.option(
    "--import",
    "imported",
    type=existing_file,
    metavar="FILE",
    help="Take the records and trials of such a FILE into the database; no MODEL is needed.",
)
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    default=64,
    help="Settings to try for each kernel, those of earlier jobs included.",
)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Time limit.")
@click.option(
    "--runner",
    default="local",
    metavar="local|rpc://HOST:PORT/KEY",
    help="Where settings race: here, or on the machines of tvm-fusion serve that an RPC tracker "
    "knows under a key.",
)
@click.option(
    "--space",
    type=click.Choice(["default", "wide"]),
    default="default",
    help="Settings of fused pairs: those that the cost model compares, or all.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0)
@click.option(
    "--forms/--no-forms",
    default=True,
    help="Race fused kernels, separate ones and Winograd's algorithm, with all their kernels.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Tune the kernels of so many ranks that compute the model together; --threads of each.",
)
@compile_options
@threads_option
@json_option
def tune_command(
    model: Path | None,
    database: Path | None,
    exported: Path | None,
    imported: Path | None,
    minutes: float | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Search faster settings for the kernels of MODEL on a CPU or a GPU, and record the winners.

    Each kernel's settings race its default; a winner is recorded if it gains 1 % in a second race.
    Then the forms of convolutions and pairs race: fused, separate, by Winograd's algorithm.
    Ctrl-C keeps all trials; the same command then goes on, and repeats none.
    """
    if imported is not None:
        if model is not None or exported is not None or database is None:
            raise click.UsageError("--import needs --database, and neither MODEL nor --export")
        return _import(database, imported)
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    if exported is not None:
        if database is not None:
            raise click.UsageError("--export measures nothing: --database is for --import")
        return _export(model, exported, as_json, **options)
    if database is None:
        raise click.UsageError("Missing option '--database'.")
    from ... import tune

    with live_table() as report:
        result = tune(model, database=database, minutes=minutes, progress=report, **options)
    show_table(result.to_json(), tune_table(result), as_json)
    if result.interrupted and minutes is None:
        say("Interrupted.", is_error=True)
        return 130
    return 0


def _export(model: Path, folder: Path, as_json: bool, **options: Any) -> int:
    """Compile the candidates of the kernels of a model."""
    from ...tuning.export import export_candidates

    names = ("target", "shapes", "trials", "seed", "fuse")
    found = export_candidates(model, folder, **{name: options[name] for name in names})
    lines = [f"{about}: {count} candidates" for about, count in found]
    show(
        [{"kernel": about, "candidates": count} for about, count in found],
        "\n".join(lines),
        as_json,
    )
    return 0


def _import(database: Path, file: Path) -> int:
    """Take in what was measured; 1 if a line was refused."""
    from ...tuning.record_files import import_measured

    records, trials, refused = import_measured(database, file)
    say(f"{database}: {records} records and {trials} trials taken, {refused} lines refused")
    return 1 if refused else 0


@contextlib.contextmanager
def live_table() -> Iterator[Callable[[TuneResult], None]]:
    """Show the job's table on standard error while it runs, if that is a terminal.

    It is drawn when something changes only: a ticking clock would disturb the measurements.
    """
    progress.end()
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
            *(micros(value) for value in (task.default_seconds, task.best_seconds)),
            f"{task.gain - 1:+.1%}" if task.best_seconds else "",
            str(task.trials or ""),
            str(task.settings or ""),
            str(len(task.failures) or ""),
            task.status,
        )
    return table


def seconds_left(result: TuneResult) -> float | None:
    """Return the rest of a job's time: of its limit, or at the pace of its tasks so far."""
    if result.minutes is not None:
        return max(0.0, 60 * result.minutes - result.seconds)
    states = Counter(task.status for task in result.tasks)
    done = states["tuned"] + states["default stays"]
    left = states["waiting"] + states["searching"] + states["confirming"]
    return result.seconds / done * left if done and left else None


def _caption(result: TuneResult) -> str:
    text = f"{result.seconds:.0f} s"
    left = seconds_left(result)
    if left is not None:
        text += f", {'' if result.minutes else 'about '}{left:.0f} s left"
    failures = [(task, failure) for task in result.tasks for failure in task.failures]
    for task, failure in failures[-3:]:
        knobs = ", ".join(f"{name} {value}" for name, value in failure["knobs"].items())
        text += f"\n{task.name}: {failure['failure']} ({failure['reason']}) with {knobs}"
    return "\n".join([text, *result.notes, f"records: {result.database}"])


@click.command("serve")
@click.option("--tracker", "address", metavar="HOST:PORT", required=True, help="TVM's RPC tracker.")
@click.option("--key", required=True, help="Name under which jobs find this machine.")
@click.option(
    "--host",
    default="127.0.0.1",
    help="Address on which jobs are taken: this machine's own alone, or 0.0.0.0 for all networks. "
    "RPC has no authentication: whoever reaches the port can run any code here.",
)
@click.option("--port", type=click.IntRange(1, 65535), help="Default: a free one from 9090 on.")
@threads_option
def serve_command(address: str, key: str, host: str, port: int | None, threads: int | None) -> None:
    """Measure on this machine for tuning jobs on others, until Ctrl-C.

    Start a tracker first (python -m tvm.exec.rpc_tracker); jobs are then run by
    tvm-fusion tune --runner rpc://HOST:PORT/KEY.
    """
    from ...tuning.remote import Tracker
    from ...tuning.server import serve

    def ready(about: dict[str, Any]) -> None:
        cpu = about["cpu"]
        say(
            f"serving {about['processor']} ({cpu['family']}, {cpu['vector_bits']} bits, "
            f"{cpu['num_cores']} threads) as {about['name']} under the key {key}; Ctrl-C ends it"
        )

    serve(Tracker.read(address, key), host, port, threads, ready)
