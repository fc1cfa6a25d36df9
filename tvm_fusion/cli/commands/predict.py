# SPDX-License-Identifier: Apache-2.0
"""Commands that predict without the hardware: ``predict``, ``shard`` and ``simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.table import Table

from ..options import (
    ModelFile,
    OutputFile,
    compile_options,
    exchange_option,
    existing_file,
    json_option,
    model_argument,
    model_options,
    network_option,
    records_option,
    refuse_given,
    threads_option,
)
from ..output import say, show, show_table
from ..progress import progress_bar


@click.command("predict")
@click.argument("model", type=ModelFile(), metavar="[MODEL]", required=False)
@click.option(
    "--machine",
    "machines",
    multiple=True,
    metavar="NAME|FILE",
    help="Machine to predict for: native, a known one such as v100, a file of `calibrate`, or any "
    "CPU, by the figures of the most similar one. May be repeated. Default: native.",
)
@click.option(
    "--engine",
    type=click.Choice(["tvm_fusion", "pytorch"]),
    default="tvm_fusion",
    help="Our kernels, or those of PyTorch's libraries, operator by operator.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "tf32", "fp16", "bf16"]),
    default="fp32",
    help="Type of the floats on a GPU; tf32 is of matrix products only. On a CPU bf16 is the "
    "precision of `compile`.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 4096),
    default=1,
    help="GPUs that share MODEL by tensor parallelism; engine pytorch.",
)
@click.option(
    "--cluster",
    type=existing_file,
    metavar="FILE",
    help="Nodes of the ranks, with their machine. Default: one node of --machine.",
)
@click.option(
    "--phase",
    type=click.Choice(["prefill", "decode"]),
    help="Of a decoder: a prompt of --step tokens, or the token after so many others.",
)
@click.option("--step", type=click.IntRange(min=1), help="Tokens of --phase.")
@click.option("--batch", type=click.IntRange(min=1), help="Size of the dimension `batch`.")
@click.option("--check", is_flag=True, help="Also compile and run MODEL here, and compare.")
@model_options
@records_option
@threads_option
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Kineto trace of PyTorch's profiler, or a folder with one a rank.",
)
@click.option(
    "--overheads",
    type=existing_file,
    metavar="FILE",
    help="Host overheads of --save-overheads. Default: those of the traces themselves.",
)
@click.option(
    "--save-overheads",
    type=OutputFile(),
    metavar="FILE",
    help="Write the host overheads that the traces show.",
)
@click.option(
    "--profiler-cost",
    type=float,
    nargs=2,
    default=(0.0, 0.0),
    show_default=False,
    metavar="HOST DEVICE",
    help="Microseconds that the profiler added to each event of host and device.",
)
@click.option(
    "--timeline",
    type=OutputFile(),
    metavar="FILE",
    help="Write the timeline: a Chrome trace (.json, .json.gz) or a picture (.png, .svg).",
)
@click.option(
    "--what-if",
    multiple=True,
    metavar="CHANGE",
    help="Change to predict: machine=a100-40, batch=2, graph, fuse=REGEX, remove=REGEX, "
    "resize=REGEX:0.5 or parallelize=REGEX; of MODEL engine=pytorch, precision=bf16, ranks=2, "
    "fusion=none or winograd=never; of traces link=FILE, ranks=4:FILE, bucket=25:FILE or "
    "sharding=size_greedy. Several are joined by ' and '. May be repeated.",
)
@json_option
def predict_command(
    model: Path | None, traces: Path | None, overheads: Path | None, as_json: bool, **options: Any
) -> None:
    """Predict how long MODEL, an ONNX file, or a traced run of PyTorch takes.

    MODEL is optimised, but nothing is compiled to code or run, except with --check. A row a kernel
    tells its time, the interval, what bounds it, the share of the roofline, and which model said
    so. With --traces, the timeline of a recorded run is predicted, and what holds it up.
    """
    of_traces = {name: options.pop(name) for name in _OF_TRACES}
    if (model is None) == (traces is None):
        raise click.UsageError("expected MODEL or --traces, and not both")
    if traces is not None:
        refuse_given(_OF_MODELS, "it is for MODEL")
        predict_traced(traces, as_json, overheads, what_if=options["what_if"], **of_traces)
        return
    refuse_given(_OF_TRACES, "it is for --traces")
    assert model is not None
    predict_model(model, as_json, overheads, **options)


_OF_TRACES = ("save_overheads", "profiler_cost", "timeline")
_OF_MODELS = (
    *("machines", "engine", "precision", "ranks", "phase", "step", "batch", "check"),
    *("shapes", "fuse", "winograd", "records", "threads"),
)


def predict_model(
    model: Path,
    as_json: bool,
    overheads: Path | None,
    machines: Sequence[str],
    engine: str,
    precision: str,
    ranks: int,
    cluster: Path | None,
    phase: str | None,
    step: int | None,
    batch: int | None,
    check: bool,
    shapes: dict[str, Any],
    what_if: Sequence[str],
    **options: Any,
) -> None:
    """Predict and show a model on machines."""
    from tvm_fusion.prediction.model.ask import predictions_table

    from ...prediction.cluster import load_cluster
    from ...prediction.model.ask import Question
    from ...prediction.traces.overheads import load_overheads

    if (phase is None) != (step is None):
        raise click.UsageError("expected --phase and --step together")
    if batch is not None:
        shapes = {"batch": batch, **shapes}
    if check:
        if set(machines) - {"native"}:
            raise click.UsageError("--check runs here: expected no --machine, or native")
        of_gpus = ["engine", "precision", "ranks", "cluster", "phase", "overheads", "what_if"]
        refuse_given(of_gpus, "--check is of our kernels on this CPU")
        _check(model, as_json, shapes=shapes, **options)
        return
    options |= {"overheads": load_overheads(overheads) if overheads else None}
    options |= {"precision": precision, "ranks": ranks}
    if cluster is not None:
        refuse_given(["machines"], "--cluster has its own machine")
        options["cluster"] = load_cluster(cluster)
    asked = [
        Question(model, machine, engine, shapes, options, phase or "", step or 0)
        for machine in machines or ["native"]
    ]
    imported = asked[0].imported()
    found = [one.what_if(imported, one.predict(imported), what_if) for one in asked]
    result = [prediction.to_json() for prediction in found]
    show_table(result, predictions_table(found, model.name), as_json)


def _check(model: Path, as_json: bool, **options: Any) -> None:
    from ...prediction.model.check import check_model, check_table

    with progress_bar() as progress:
        checked = check_model(model, progress=progress, **options)
    show_table(checked.to_json(), check_table(checked, model.name), as_json)


def predict_traced(
    traces: Path,
    as_json: bool,
    overheads: Path | None,
    save_overheads: Path | None,
    profiler_cost: tuple[float, float],
    timeline: Path | None,
    what_if: tuple[str, ...],
) -> None:
    """Predict and show the runs of a file or folder of traces."""
    from ...prediction.api import load_traces, predict_traces
    from ...prediction.report import answer_table, tables, write_timeline
    from ...prediction.traces.overheads import Overheads, ProfilerCost, load_overheads

    known = load_overheads(overheads) if overheads else None
    runs = load_traces(traces, ProfilerCost(*profiler_cost))
    if timeline and len(runs) > 1:
        raise click.UsageError(f"--timeline is of one run; {traces} holds {len(runs)}")
    for warning in (warning for run in runs for warning in run.warnings):
        say(f"Warning: {warning}", is_error=True)
    predictions = [predict_traces(run, known, what_if) for run in runs]
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
            "what_if": [asdict(answer) for answer in prediction.answers],
            "warnings": prediction.run.warnings,
        }
        for prediction in predictions
    ]
    shown = [tables(prediction.report) for prediction in predictions]
    shown += [
        answer_table(one.run.name, one.timeline.seconds, one.answers)
        for one in predictions
        if one.answers
    ]
    show_table(result, Group(*shown), as_json)


@click.command("shard")
@click.argument("tables", type=existing_file)
@click.option("--machine", required=True, metavar="NAME|FILE", help="Device of each rank.")
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("--batch", type=click.IntRange(min=1), help="Samples a rank. Default: of TABLES.")
@click.option(
    "--collectives",
    type=existing_file,
    metavar="FILE",
    help="Measured all-to-alls. Default: those of the machine's file, else the bandwidth of PCIe.",
)
@click.option("--seed", type=int, default=0, help="Seed of the random sharder.")
@json_option
def shard_command(
    tables: Path,
    machine: str,
    ranks: int,
    batch: int | None,
    collectives: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """Share the embedding tables of TABLES, a JSON file, out among ranks.

    Predicts the iteration of six ways and of a search: lookups, exchange of their results, and
    both backward. Ways that do not fit into memory come last.
    """
    from schedules.cost.machine import load_machine

    from ...prediction.collectives import collectives_of, load_collectives
    from ...prediction.sharding import ShardingTask, load_tables, shard

    lookups, own_batch = load_tables(tables)
    curves = load_collectives(collectives) if collectives else collectives_of(Path(machine))
    task = ShardingTask(lookups, batch or own_batch, load_machine(machine), ranks, curves)
    shardings = shard(task, seed)
    table = Table("sharder", "iteration", "balance", "largest memory", "fits")
    for one in shardings:
        memory = f"{max(one.memory) / 1e9:.2f} GB"
        time = f"{one.seconds * 1e3:.3f} ms"
        table.add_row(one.sharder, time, f"{one.balance:.2f}", memory, "yes" if one.fits else "no")
    names = [table.name for table in lookups]
    show_table({"tables": names, "shardings": [asdict(one) for one in shardings]}, table, as_json)


class Counts(click.ParamType):
    """Numbers of ranks, separated by commas; between two dots stands what doubles."""

    name = "RANKS"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        """Read the numbers."""
        if not isinstance(value, str):
            return value
        counts: list[int] = []
        for item in value.split(","):
            if item.strip() == "..." and counts:
                counts.append(0)
            elif item.strip().isdecimal() and int(item) > 0:
                counts += _between(counts, int(item))
            else:
                self.fail(f"{value!r} is not like 1,2,4 or 1,...,4096", param, ctx)
        if not counts or 0 in counts:
            self.fail(f"{value!r} is not like 1,2,4 or 1,...,4096", param, ctx)
        return counts


def _between(counts: list[int], last: int) -> list[int]:
    """``last``, after dots with all that lies between, each twice the one before."""
    if not counts or counts[-1]:
        return [last]
    counts.pop()
    numbers = []
    number = 2 * counts[-1]
    while number < last:
        numbers.append(number)
        number *= 2
    return [*numbers, last]


@click.command("simulate")
@model_argument
@click.option("--ranks", type=Counts(), default="1,...,4096", help="Numbers of ranks, ascending.")
@exchange_option
@network_option
@click.option(
    "--weak",
    is_flag=True,
    help="Weak scaling: the image is as many times higher as there are ranks.",
)
@click.option(
    "--one-rank",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MS",
    help="Measured milliseconds of one rank alone, by which predicted times of kernels are "
    "corrected.",
)
@click.option("--draw", type=OutputFile(), help="Draw the times to this file, such as scaling.svg.")
@compile_options
@threads_option
@json_option
def simulate_command(
    model: Path,
    ranks: list[int],
    exchange: str,
    network: str | None,
    weak: bool,
    one_rank: float | None,
    draw: Path | None,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict how MODEL, an ONNX file, scales over ranks; nothing is run, and no MPI is needed.

    Messages and bytes are those of a model compiled for so many ranks. Times are predicted; lines
    within the number of ranks with which the network was measured say so.
    """
    from tvm_fusion.distributed.build_network import read_network, resolve_ranks
    from tvm_fusion.distributed.simulate import simulate_network

    from ...distributed.network_figures import read_figures
    from ...distributed.program import default_processor

    target = resolve_ranks(1, options.pop("target"), threads)
    figures, measured = read_figures(network)
    stages = read_network(model, target, **options)
    scaling = simulate_network(
        stages,
        default_processor(target),
        ranks,
        network=figures,
        kind="weak" if weak else "strong",
        one_rank=None if one_rank is None else one_rank / 1e3,
        measured=measured,
        exchange=exchange,
    )
    if draw is not None:
        scaling.draw(draw)
    show({"model": str(model), **asdict(scaling)}, scaling.table(), as_json)
