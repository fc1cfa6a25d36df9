# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion calibrate``: this CPU, or what connects the ranks of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from ...plugin import allow_torch
from ..options import OutputFile, json_option, refuse_given, threads_option
from ..output import show, show_table
from ..progress import progress_bar

if TYPE_CHECKING:
    from ...prediction.collectives import Collectives

NETWORK_FILE = Path("network.json")
COLLECTIVES_FILE = Path("collectives.json")


@click.command("calibrate")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    metavar="MINUTES",
    help="Time after which no other kernel is measured; the next call goes on.",
)
@threads_option
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    metavar="FILE",
    help="Default: a file in the user's cache folder, which `predict --machine native` reads; "
    f"{NETWORK_FILE} with --network, {COLLECTIVES_FILE} with --collectives, which may also be the "
    "file of a machine, and is added to it.",
)
@click.option(
    "--network",
    is_flag=True,
    help="Measure instead latency and bandwidth between ranks, and what of it passes while they "
    "compute; start it by `mpiexec -n 2 tvm-fusion calibrate --network`.",
)
@click.option(
    "--collectives",
    is_flag=True,
    help="Measure instead all-reduce, all-to-all, all-gather, broadcast and send/recv of 4 bytes "
    "to 16 MB, for `shard` and `predict --what-if link=FILE`; start it by `mpiexec -n 2 tvm-fusion "
    "calibrate --collectives`.",
)
@click.option(
    "--backend",
    type=click.Choice(["mpi", "gloo", "nccl"]),
    default="mpi",
    help="With --collectives: what connects the ranks; PyTorch's are started by `torchrun "
    "--nproc-per-node 2 -m tvm_fusion.cli calibrate --collectives --backend gloo`.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    help="With --network or --collectives: seconds for which a rank waits for another.",
)
@json_option
def calibrate_command(
    budget: float,
    threads: int | None,
    output: Path | None,
    network: bool,
    collectives: bool,
    backend: str,
    timeout: float,
    as_json: bool,
) -> None:
    """Measure this CPU for `predict`: its limits, overheads, and kernels beside their models.

    What FILE already holds is kept and not measured again; Ctrl-C loses nothing that was written.
    """
    if network and collectives:
        raise click.UsageError("expected --network or --collectives, and not both")
    if not collectives:
        refuse_given(["backend"], "it is for --collectives")
    if network:
        refuse_given(["budget", "threads"], "it is for kernels, and --network measures ranks")
        _calibrate_network(output or NETWORK_FILE, timeout, as_json)
        return
    if collectives:
        refuse_given(["budget", "threads"], "it is for kernels, and --collectives measures ranks")
        _calibrate_collectives(output or COLLECTIVES_FILE, backend, timeout, as_json)
        return
    refuse_given(["timeout"], "it is for --network and --collectives")
    allow_torch()
    from ...prediction.calibrate.calibration import calibrate, missing
    from ...prediction.machines import calibration_path
    from ...runtime.thread_pool import choose_threads

    count = choose_threads(threads)
    output = output or calibration_path(count)
    with progress_bar() as progress:
        machine = calibrate(output, count, budget * 60, progress)
    left = missing(output)
    text = f"{output}: {machine.title}, {count} threads, {len(machine.figures)} figures"
    text += f"; {left} kernels are not measured yet: call it again" if left else ""
    show({"output": str(output), "missing": left, **machine.to_json()}, text, as_json)


def _calibrate_network(output: Path, timeout: float, as_json: bool) -> None:
    """Measure pairs of ranks at the same time; rank 0 writes the file."""
    from ...distributed import session
    from ...distributed.calibrate import calibrate, write_machine
    from ...distributed.world.packing import is_figure

    with session(timeout=timeout) as world:
        machine = calibrate(world)
        if world.rank > 0:
            return
        write_machine(machine, output)
        table = Table("figure", "value", title=f"{machine.title}: {output}")
        for name, figure in machine.figures.items():
            if not is_figure(name):
                table.add_row(name, f"{figure.value:.4g}")
        parcels = sum(map(is_figure, machine.figures))
        table.add_row("routes of parcels", f"{parcels} times")
        if "network.progress" not in machine.figures:  # a file has no figures of 0
            table.add_row("network.progress", "0")
        show_table(machine.to_json(), table, as_json)


def _calibrate_collectives(output: Path, backend: str, timeout: float, as_json: bool) -> None:
    """Measure all ranks together; rank 0 writes the file."""
    from ...distributed.collective_curves import measure_collectives

    if backend == "mpi":
        from ...distributed import session

        with session(timeout=timeout) as world:
            collectives = measure_collectives(world)
            if world.rank == 0:
                _write_collectives(collectives, output, as_json)
        return
    allow_torch()
    from tvm_fusion.distributed.collective_curves import GROUP_KINDS, process_group

    with process_group(backend, timeout) as group:
        collectives = measure_collectives(group, kinds=GROUP_KINDS, transport=backend)
        if group.rank == 0:
            _write_collectives(collectives, output, as_json)


def _write_collectives(collectives: Collectives, output: Path, as_json: bool) -> None:
    """Write the curves, and show their ends."""
    from ...prediction.collectives import bus_bandwidth

    collectives.save(output)
    table = Table("collective", "ranks", "shortest us", "bus GB/s, most", "origin")
    result = []
    for curve in collectives.curves.values():
        points = list(zip(curve.bytes, curve.seconds, strict=True))
        bandwidth = max(bus_bandwidth(curve.kind, curve.ranks, *point) for point in points)
        figures = (f"{min(curve.seconds) * 1e6:.2f}", f"{bandwidth / 1e9:.2f}")
        table.add_row(curve.kind, str(curve.ranks), *figures, curve.origin)
        result.append({"kind": curve.kind, "ranks": curve.ranks, "points": points})
    show_table({"output": str(output), "curves": result}, table, as_json)
