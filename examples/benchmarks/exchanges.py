# SPDX-License-Identifier: Apache-2.0
"""Exchanges between two ranks, beside those of mpi4py alone.

    python examples/benchmarks/exchanges.py [--only NAME ...] [--rounds 5]

Bare are persistent requests of as many bytes between contiguous arrays, started and waited for by
mpi4py, without a copy, a deadline or a check. By hand are the same between the arrays that hold the
halos, with a copy to and from the contiguous ones by numpy where halos are not contiguous. Typed
are persistent requests of the halos where they lie, described by a derived datatype. Single are
persistent requests of one element each, as transfers are before they are packed, for the halo
of many elements that do not lie side by side. What is sent is written anew before each exchange, as
a kernel does: else the other core would have it in its cache. They take turns in one job of two
processes; each time is that of the slower rank, from a barrier on. Prints a table and writes
results/CPU/exchanges.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tvm  # noqa: F401 - loaded as in a rank that runs a program, whose exchanges use it
from rich.console import Console
from rich.table import Table

from schedules.distribute.exchange import (
    Exchange,
    LocalBuffer,
    Message,
    Region,
    region_size,
    segment_size,
)
from tvm_fusion import distributed
from tvm_fusion.cli.output import FILE_WIDTH
from tvm_fusion.distributed.world.packing import ROUTES, ParcelShape, always
from tvm_fusion.distributed.world.timing import renewed_seconds
from tvm_fusion.machine.host import host_info

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.benchmarks.distributed import launch  # noqa: E402


@dataclass(frozen=True)
class Case:
    """A halo at the end of an axis of float32 arrays.

    Parameters
    ----------
    shape : tuple[int, ...]
        Shape of each array, without halos.
    axis : int
        The axis that is cut between the ranks.
    halo : int
        Indices of it that each rank receives.
    arrays : int
        How many, all of which travel in one message.
    corner : int
        Indices of the last axis that travel, where not all do.
    """

    shape: tuple[int, ...]
    axis: int
    halo: int
    arrays: int = 1
    corner: int = 0

    def halo_of(self, source: int) -> Region:
        """Region of each array that one of two ranks sends; the cut is at 0."""
        region = [(0, extent) for extent in self.shape]
        if self.corner:
            region[-1] = (0, self.corner)
        region[self.axis] = (-self.halo, 0) if source == 0 else (0, self.halo)
        return tuple(region)

    def window(self, rank: int) -> Region:
        """Region of each array that one of two ranks holds."""
        window = [(0, extent) for extent in self.shape]
        extent = self.shape[self.axis]
        window[self.axis] = (-extent, self.halo) if rank == 0 else (-self.halo, extent)
        return tuple(window)

    @property
    def parcel(self) -> ParcelShape:
        """Shape of what each rank sends."""
        size = region_size(self.halo_of(0))
        return ParcelShape(4 * size * self.arrays, 4 * self.segment, self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes that each rank sends."""
        return self.parcel.nbytes

    @property
    def segment(self) -> int:
        """Elements of its contiguous pieces."""
        return min(segment_size(self.halo_of(0), self.window(rank)) for rank in (0, 1))


CASES = {
    "row of 32 KB": Case((64, 8192), 0, 1),
    "2 rows of 1 MB": Case((8, 262144), 0, 2),
    "64 pieces of 448 B": Case((64, 56, 56), 1, 2),
    "256 pieces of 224 B": Case((256, 28, 28), 1, 2),
    "16384 pieces of 4 B": Case((16384, 64), 1, 1),
    "2 rows of 16 KB": Case((64, 4096), 0, 1, arrays=2),
    "3 pieces of 100 KB": Case((3, 64, 25600), 1, 1),
}
HALOS = {
    "corner of 2 x 2": Case((512, 512), 0, 2, corner=2),
    "corner of 16 x 16": Case((512, 512), 0, 16, corner=16),
    "row of 1 KB": Case((64, 256), 0, 1),
    "row of 4 KB": Case((64, 1024), 0, 1),
    "row of 8 KB": Case((64, 2048), 0, 1),
    "row of 16 KB": Case((64, 4096), 0, 1),
    "row of 64 KB": Case((64, 16384), 0, 1),
    "row of 1 MB": Case((8, 262144), 0, 1),
    "256 pieces of 4 B": Case((256, 256), 1, 1),
    "256 pieces of 12 B": Case((256, 256), 1, 3),
    "256 pieces of 48 B": Case((256, 256), 1, 12),
    "4096 pieces of 4 B": Case((4096, 256), 1, 1),
    "4096 pieces of 12 B": Case((4096, 256), 1, 3),
    "4096 pieces of 48 B": Case((4096, 256), 1, 12),
    "16384 pieces of 12 B": Case((16384, 64), 1, 3),
    "16384 pieces of 48 B": Case((16384, 64), 1, 12),
    "plane of a cube, first axis": Case((64, 64, 64), 0, 1),
    "plane of a cube, second axis": Case((64, 64, 64), 1, 1),
    "plane of a cube, third axis": Case((64, 64, 64), 2, 1),
    "64 pieces of 2 KB": Case((8, 8, 28, 32, 16), 2, 1),
    "64 pieces of 4 KB": Case((8, 8, 56, 64, 16), 2, 1),
    "64 pieces of 16 KB": Case((8, 8, 28, 256, 16), 2, 1),
    "2 rows of 1 KB": Case((64, 256), 0, 1, arrays=2),
    "4 rows of 16 KB": Case((64, 4096), 0, 1, arrays=4),
    "2 rows of 512 KB": Case((8, 131072), 0, 1, arrays=2),
    **CASES,
}
"""Cases for the routes of ``distributed_choices.py``."""

_SECONDS = 0.2  # Seconds of each turn.
_ROUTE_SECONDS = 0.02
_SINGLE = "16384 pieces of 4 B"  # 64 KB, also sent element by element
_KEYS = ("ours_us", "bare_us", "hand_us", "typed_us", "single_us")


class Side(NamedTuple):
    """Measured side: an exchange, and what writes before it the arrays that it sends."""

    renew: Callable[[], object]
    run: Callable[[], object]


def serve(names: Sequence[str], rounds: int) -> None:
    """Run cases on this rank; the first of two prints what was measured, as JSON."""
    with distributed.session(2, threads=1) as world:
        results = {}
        for number, name in enumerate(names):
            ours, views = _ours(world, CASES[name], number)
            bare = _bare(world, CASES[name])
            sides = {"ours_us": ours, "bare_us": bare, "hand_us": _by_hand(world, views, ours)}
            sides["typed_us"] = _typed(world, CASES[name])
            if name == _SINGLE:
                sides["single_us"] = _single(world, views, ours)
            turns: dict[str, list[float]] = {key: [] for key in sides}
            for _ in range(rounds):
                for key, side in sides.items():
                    turns[key].append(_microseconds(world, side))
            results[name] = {"bytes": CASES[name].nbytes} | turns
        if world.rank == 0:
            print(json.dumps(results))


class Views(NamedTuple):
    """Parts of this rank's arrays that are sent and received."""

    sent: list[np.ndarray]
    received: list[np.ndarray]


def _ours(world: distributed.World, case: Case, number: int) -> tuple[Side, Views]:
    """An exchange of the halos at the cut: the first rank has what lies before it."""
    buffers = {str(k): _buffer(case.window(world.rank)) for k in range(case.arrays)}
    messages = [
        Message(source, 1 - source, name, case.halo_of(source), case.segment)
        for source in (0, 1)
        for name in buffers
    ]
    exchange = Exchange(number, tuple(messages))

    sent = [buffers[m.buffer].view(m.region) for m in exchange.sent_by(world.rank)]
    received = [buffers[m.buffer].view(m.region) for m in exchange.received_by(world.rank)]

    def renew() -> None:
        for view in sent:
            np.add(view, 1, out=view)

    def run() -> None:
        world.start(exchange, buffers)
        world.finish(exchange)

    return Side(renew, run), Views(sent, received)


def route_turns(
    world: distributed.World, case: Case, rounds: int
) -> tuple[dict[str, list[float]], str]:
    """Milliseconds of the routes that a halo can take, in turns, and which one is chosen."""
    chosen: Sequence[str] = world.packing(case.parcel)
    usual = world.packing
    sides: dict[str, Side] = {}
    for number, route in enumerate(ROUTES):
        if route == "slot" and not world.has_slots(case.nbytes):
            continue
        if route == "packed" and case.segment * 4 == case.nbytes:
            continue
        world.packing = always(route)
        sides[route], _ = _ours(world, case, number)
        sides[route].run()
    world.packing = usual
    turns: dict[str, list[float]] = {route: [] for route in sides}
    for _ in range(rounds):
        for title, side in sides.items():
            turns[title].append(_microseconds(world, side, _ROUTE_SECONDS) / 1e3)
    for number in range(len(ROUTES)):
        world.forget(number)
    return turns, next(route for route in chosen if route in sides)


def _buffer(window: Region) -> LocalBuffer:
    array = np.ones([end - begin for begin, end in window], np.float32)
    return LocalBuffer(array, tuple(begin for begin, _ in window))


def _bare(world: distributed.World, case: Case) -> Side:
    """The same bytes each way, by persistent requests of mpi4py."""
    from mpi4py import MPI

    sent, received = (np.ones(case.nbytes // 4, np.float32) for _ in range(2))
    comm, peer = MPI.COMM_WORLD, 1 - world.rank
    requests = [comm.Recv_init(received, peer, 7), comm.Send_init(sent, peer, 7)]

    def run() -> None:
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)

    return Side(lambda: np.add(sent, 1, out=sent), run)


def _by_hand(world: distributed.World, views: Views, ours: Side) -> Side:
    """The same halos by mpi4py and numpy, as a user would write it."""
    from mpi4py import MPI

    comm, peer = MPI.COMM_WORLD, 1 - world.rank
    out: list[tuple[np.ndarray, np.ndarray]] = []
    back: list[tuple[np.ndarray, np.ndarray]] = []
    if len(views.sent) == 1 and views.sent[0].flags.c_contiguous:
        (sent,), (received,) = views
    else:
        sent, received = (np.empty(sum(v.size for v in way), np.float32) for way in views)
        out, back = _pieces(sent, views.sent), _pieces(received, views.received)
    requests = [comm.Recv_init(received, peer, 8), comm.Send_init(sent, peer, 8)]

    def run() -> None:
        for part, view in out:
            np.copyto(part, view)
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        for part, view in back:
            np.copyto(view, part)

    return Side(ours.renew, run)


def _typed(world: distributed.World, case: Case) -> Side:
    """The same halos by mpi4py from where they lie: a message an array."""
    from mpi4py import MPI

    comm, rank, peer = MPI.COMM_WORLD, world.rank, 1 - world.rank
    window = case.window(rank)
    extents = [end - begin for begin, end in window]
    buffers = [_buffer(window) for _ in range(case.arrays)]

    def datatype(region: Region) -> MPI.Datatype:
        starts = [begin - first for (begin, _), (first, _) in zip(region, window, strict=True)]
        sizes = [end - begin for begin, end in region]
        return MPI.FLOAT.Create_subarray(extents, sizes, starts).Commit()

    sent, received = datatype(case.halo_of(rank)), datatype(case.halo_of(peer))
    requests = [comm.Recv_init([each.array, 1, received], peer, 6) for each in buffers]
    requests += [comm.Send_init([each.array, 1, sent], peer, 6) for each in buffers]
    views = [each.view(case.halo_of(rank)) for each in buffers]

    def renew() -> None:
        for view in views:
            np.add(view, 1, out=view)

    def run() -> None:
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)

    return Side(renew, run)


def _single(world: distributed.World, views: Views, ours: Side) -> Side:
    """A message an element, from and to where it lies."""
    from mpi4py import MPI

    comm, peer = MPI.COMM_WORLD, 1 - world.rank
    (sent,), (received,) = ([view.reshape(-1, 1) for view in way] for way in views)
    requests = [comm.Recv_init(one, peer, 9) for one in received]
    requests += [comm.Send_init(one, peer, 9) for one in sent]

    def run() -> None:
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)

    return Side(ours.renew, run)


def _pieces(array: np.ndarray, views: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Parts of an array, one behind the other, each with its view."""
    parts = np.split(array, np.cumsum([view.size for view in views])[:-1])
    return [(part.reshape(view.shape), view) for part, view in zip(parts, views, strict=True)]


def _microseconds(world: distributed.World, side: Side, seconds: float = _SECONDS) -> float:
    """Median over exchanges of the slower rank's time."""
    from mpi4py import MPI

    meet = MPI.COMM_WORLD.Barrier
    return 1e6 * renewed_seconds(world, meet, side.renew, side.run, seconds)


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    """One row a case."""
    table = Table(title="Exchanges between two ranks, medians in us")
    times = ("ours", "bare", "by hand", "typed", "single")
    ratios = ("ours to bare", "ours to by hand", "ours to typed", "single to ours")
    for number, heading in enumerate(("halo", "bytes", *times, *ratios)):
        table.add_column(heading, justify="right" if number else "left")
    for name, result in results.items():
        ours, *others, single = (statistics.median(result.get(key, [0.0])) for key in _KEYS)
        cells = [f"{time:.1f}" if time else "" for time in (ours, *others, single)]
        cells += [f"{ours / other:.2f}" for other in others]
        cells.append(f"{single / ours:.0f}" if single else "")
        table.add_row(name, str(result["bytes"]), *cells)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, or be a rank of the job."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--rounds", type=int, default=5, help="turns of each side")
    options.add_argument("--output", type=output_file, default=str(CPU_FOLDER / "exchanges.json"))
    options.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args(arguments)
    if chosen.job:
        serve(chosen.only, chosen.rounds)
        return 0
    job = ["--job", "--rounds", str(chosen.rounds), "--only", *chosen.only]
    results = json.loads(launch(2, [__file__, *job], "the job of exchanges").splitlines()[-1])
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    save(chosen.output, {"machine": host_info(), "date": date, "results": results})
    console = Console(width=FILE_WIDTH if not sys.stdout.isatty() else None)
    console.print(table_of(results))
    for key, what in (("bare_us", "bare"), ("hand_us", "by hand")):
        ratios = [
            statistics.median(one["ours_us"]) / statistics.median(one[key])
            for one in results.values()
        ]
        console.print(f"ours to {what}: {statistics.geometric_mean(ratios):.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
