# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion shard``: which rank holds which embedding table."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from ..options import json_option
from ..output import show_table


@click.command("shard")
@click.argument("tables", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--machine", required=True, metavar="NAME|FILE", help="Device of each rank.")
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("--batch", type=click.IntRange(min=1), help="Samples a rank. Default: of TABLES.")
@click.option(
    "--collectives",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measured all-to-alls. Default: those of the machine's file, else the bandwidth of PCIe.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random sharder.")
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

    found, own_batch = load_tables(tables)
    curves = load_collectives(collectives) if collectives else collectives_of(Path(machine))
    task = ShardingTask(found, batch or own_batch, load_machine(machine), ranks, curves)
    shardings = shard(task, seed)
    table = Table("sharder", "iteration", "balance", "largest memory", "fits")
    for one in shardings:
        memory = f"{max(one.memory) / 1e9:.2f} GB"
        time = f"{one.seconds * 1e3:.3f} ms"
        table.add_row(one.sharder, time, f"{one.balance:.2f}", memory, "yes" if one.fits else "no")
    names = [table.name for table in found]
    show_table({"tables": names, "shardings": [asdict(one) for one in shardings]}, table, as_json)
