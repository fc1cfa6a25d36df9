# SPDX-License-Identifier: Apache-2.0
"""Stencils on a CPU and a GPU at once: a sweep of 17 splits of their rows, and the chosen ones.

    python examples/benchmarks/cooperative.py [--device cuda] [--only NAME ...] [--rounds 8]
    python examples/benchmarks/cooperative.py --device opencl --threads 1 --one-core-each
    python examples/benchmarks/cooperative.py --dry-run [--device "cuda -arch=sm_90"]

All splits take turns, each run by run with the even split: what other work leaves of a machine's
memory changes within seconds, and for both. Prints a table and writes
results/CPU/cooperative.json. Ends with 2 where the device is not there; --dry-run compiles all
splits and prints predicted times, without a device. With --one-core-each the device, an OpenCL for
CPUs, has the last processor, and the CPU has the others; then times are also predicted of those of
both sides alone, and of what a job of two ranks finds in each round that the memory gives both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from schedules.distribute.cost import sharing_seconds, work_of
from tvm_fusion import distributed
from tvm_fusion.cli.output import FILE_WIDTH
from tvm_fusion.distributed import Device
from tvm_fusion.distributed.local_program import LocalProgram
from tvm_fusion.errors import TargetError
from tvm_fusion.machine.host import host_info

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.benchmarks.distributed import run_rates  # noqa: E402
from examples.stencils import STENCILS  # noqa: E402

SIZES = {
    "blur": (8192, 8192),
    "convolution": (4096, 4096),
    "cvt_color": (4096, 4096),
    "gaussian": (4096, 4096),
    "pipeline": (4096, 4096),
    "sobel": (8192, 8192),
    "heat2d": (4096, 4096),
}
STEPS = {"heat2d": 32}
"""Stencils whose rows stay on the device for so many steps of a run; the model chooses how many of
them share an exchange."""
_RUNS = 3  # Runs of a turn.
PARTS = 16
"""Steps of the sweep, from the device alone to the CPU alone."""
CHUNKS = (1, 8)
"""Numbers of chunks: with one the device waits for its copies, with several it computes beside
them."""
EVEN = f"{PARTS // 2}/{PARTS}"
CHOSEN = ("model", "measured")
OF_SIDES = "predicted_of_sides_ms"
TYPICAL = "typical_ms"


def splits_of(rows: int) -> dict[str, list[int]]:
    """The splits of the sweep by their names."""
    cuts = [rows * part // PARTS for part in range(PARTS + 1)]
    return {f"{part}/{PARTS}": [cut, rows - cut] for part, cut in enumerate(cuts)}


class Sweep:
    """Programs of one stencil: for each split, and for the device alone with copies in chunks.

    Parameters
    ----------
    name : str
        The stencil.
    size : tuple[int, int]
        Rows and columns of its output.
    device : str or Device
        The device beside the CPU.
    threads : int
        Threads of the CPU.
    beside : callable, optional
        Where the device is there, the context in which the CPU computes beside it: then a split by
        measured times is among them.
    """

    def __init__(
        self,
        name: str,
        size: tuple[int, int],
        device: str | Device,
        threads: int,
        beside: Callable[[], AbstractContextManager[None]] | None,
    ) -> None:
        func = STENCILS[name](*size)
        options: dict[str, Any] = {"devices": [device], "threads": threads}
        self.steps = STEPS.get(name, 1)
        if self.steps > 1:
            options |= {"repeat": "A", "exchange_every": "auto"}
        splits: dict[str, Any] = {**splits_of(size[0]), "model": "model"}
        if beside is not None:
            with beside():
                splits["measured"] = distributed.measure_split(func, **options)
        self.programs = {
            title: distributed.compile(func, split=split, **options)
            for title, split in splits.items()
        }
        self._arrays: dict[str, np.ndarray] = {}
        self._even: LocalProgram | None = None
        given = Device(device) if isinstance(device, str) else device
        for chunks in CHUNKS if self.steps == 1 else ():
            options["devices"] = [replace(given, chunks=chunks)]
            title = f"device, {chunks} chunk{'s' if chunks > 1 else ''}"
            self.programs[title] = distributed.compile(func, split=[0, size[0]], **options)

    def rows(self, title: str) -> int:
        """Rows of the CPU."""
        [((begin, end), *_)] = self.programs[title].shares.cpu
        return end - begin

    def predicted(self, title: str) -> float:
        """Predicted seconds: those of the side that ends last."""
        program = self.programs[title]
        return max(program.cpu_seconds(0), *(s.seconds for s in program.shares.devices[0]), 0.0)

    def predicted_of_sides(self, title: str, device: float, cpu: float, bandwidth: float) -> float:
        """The same of measured seconds of each side alone, and of the memory that they share."""
        program = self.programs[title]
        plan, rows = program.distribution, self.rows(title)
        extent = plan.nest.extents[0]
        if rows in (0, extent):
            return cpu if rows else device
        work = work_of(plan.nest, ((0, extent),), plan.itemsizes)
        share, moved = rows / extent, 1.0
        if any(piece.steps > 1 for piece in program.pieces[0]):  # which read what they write
            moved = 2 / plan.deep
        traffic = work.bytes * (share * moved + 1 - share) / bandwidth
        return sharing_seconds(max(cpu * share, device * (1 - share)), traffic)

    def measure(self, turns: dict[str, list[Turn]]) -> None:
        """Add a turn of each split to ``turns``; all have the same result."""
        if self._even is None:
            self._even = self._ready(EVEN)
            self._expected = self._even.output.owned.copy()
        for title in self.programs:
            local = self._ready(title)
            if not turns[title]:
                result = local.output.owned
                np.testing.assert_allclose(result, self._expected, rtol=1e-4, atol=1e-5)
            both = local, self._even
            for each in both:  # the comparison had the caches, and the device slept
                each(self.steps)
            runs = [[self._seconds(each) for each in both] for _ in range(_RUNS)]
            turns[title].append(Turn(*map(statistics.median, zip(*runs, strict=True))))

    def _ready(self, title: str) -> LocalProgram:
        """A split after its first run, on the same inputs as all others."""
        local = self.programs[title].alone()
        for number, buffer in enumerate(local.plan.nest.inputs):
            held = local.input(buffer.name).owned
            if buffer.name not in self._arrays:
                drawn = np.random.default_rng(number).random(held.shape, np.float32)
                self._arrays[buffer.name] = drawn
            held[...] = self._arrays[buffer.name]
        local(self.steps)
        return local

    def _seconds(self, local: LocalProgram) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        local(self.steps)
        return (time.perf_counter() - begin) / self.steps


class Turn(NamedTuple):
    """Seconds of a split, and of the even one in turns with it."""

    split: float
    even: float


def typical(turns: Mapping[str, Sequence[Turn]]) -> dict[str, float]:
    """Seconds of each split: its median ratio to the even one, whose seconds are all in all."""
    even = statistics.median(turn.even for each in turns.values() for turn in each)
    return {
        title: even * statistics.median(turn.split / turn.even for turn in each)
        for title, each in turns.items()
    }


def table_of(name: str, splits: dict[str, dict[str, Any]]) -> Table:
    """One row a split."""
    table = Table(title=f"{name}: rows on the CPU, predicted and measured ms")
    for heading in ("split", "rows", "predicted", "of the sides", "measured"):
        table.add_column(heading, justify="right" if heading != "split" else "left")
    for title, split in splits.items():
        found = [split["predicted_ms"], split.get(OF_SIDES)]
        found.append(split.get(TYPICAL))
        cells = ["-" if ms is None else f"{ms:.2f}" for ms in found]
        table.add_row(title, str(split["cpu_rows"]), *cells)
    return table


def result_of(
    sweep: Sweep, turns: Mapping[str, Sequence[Turn]], bandwidth: float | None
) -> dict[str, dict[str, Any]]:
    """Entry of the file for a stencil; ``bandwidth`` is that of the memory that both share."""
    ways: dict[str, dict[str, Any]] = {}
    seconds = typical(turns) if turns else {}
    for title in sweep.programs:
        predicted = sweep.predicted(title) * 1e3
        ways[title] = {"cpu_rows": sweep.rows(title), "predicted_ms": predicted}
        if title in turns:
            ways[title][TYPICAL] = seconds[title] * 1e3
            ways[title]["turns_ms"] = [turn.split * 1e3 for turn in turns[title]]
            ways[title]["even_ms"] = [turn.even * 1e3 for turn in turns[title]]
        if turns and bandwidth is not None and "chunk" not in title:
            device, cpu = (seconds[f"{part}/{PARTS}"] for part in (0, PARTS))
            of_sides = sweep.predicted_of_sides(title, device, cpu, bandwidth)
            ways[title][OF_SIDES] = of_sides * 1e3
    return ways


def error_of(splits: dict[str, dict[str, Any]]) -> str:
    """Median error of the predictions of splits in which both sides have rows."""
    ends = [splits[f"{part}/{PARTS}"]["cpu_rows"] for part in (0, PARTS)]
    errors = [
        abs(split[OF_SIDES] / split[TYPICAL] - 1)
        for split in splits.values()
        if OF_SIDES in split and split["cpu_rows"] not in ends
    ]
    return f"error of predictions by sides: {100 * statistics.median(errors):.1f} % (median)"


def verdict(splits: Mapping[str, Mapping[str, Any]]) -> str:
    """The chosen splits against the best of the sweep, and the pair against either side alone."""
    found = {title: split[TYPICAL] for title, split in splits.items()}
    best = min(ms for title, ms in found.items() if "/" in title)
    alone = min(found[f"0/{PARTS}"], found[f"{PARTS}/{PARTS}"])
    chosen = ", ".join(f"{t} {found[t] / best:.2f}x" for t in CHOSEN if t in found)
    return f"to the best split: {chosen}; best split to one side alone: {alone / best:.2f}x"


def measured(
    sweep: Sweep, rounds: int, beside: Callable[[], AbstractContextManager[None]], shared: bool
) -> tuple[dict[str, list[Turn]], list[float]]:
    """Turns of each split, and where both sides share a memory its bandwidth in each round."""
    turns: dict[str, list[Turn]] = {title: [] for title in sweep.programs}
    bandwidths = []
    for _ in range(rounds):
        with beside():
            sweep.measure(turns)
        if shared:
            bandwidths.append(run_rates()["node.bandwidth"])
    return turns, bandwidths


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep the splits of all stencils."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="+", choices=list(SIZES), default=list(SIZES))
    options.add_argument("--size", type=int, nargs=2, help="rows and columns instead")
    options.add_argument("--device", help="by default cuda; of --dry-run cuda -arch=sm_90")
    options.add_argument("--threads", type=int, default=2, help="of the CPU")
    options.add_argument("--rounds", type=int, default=8, help="turns of each split")
    options.add_argument(
        "--one-core-each", action="store_true", help="the device is an OpenCL on one of the cores"
    )
    options.add_argument("--dry-run", action="store_true", help="compile and predict only")
    options.add_argument("--output", type=output_file, default=str(CPU_FOLDER / "cooperative.json"))
    chosen = options.parse_args(arguments)
    device: str | Device = chosen.device or ("cuda -arch=sm_90" if chosen.dry_run else "cuda")
    console = Console(width=FILE_WIDTH if not sys.stdout.isatty() else None)
    kept = json.loads(chosen.output.read_text()) if chosen.output.exists() else {}
    results: dict[str, Any] = kept.get("results", {})
    beside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    where = device
    if chosen.one_core_each:
        from examples.benchmarks.device_on_core import use_one_core

        beside = use_one_core(0).cpu_beside
        where = f"{chosen.device} on one core of this CPU, beside the CPU on another"
    for name in chosen.only:
        rows, cols = chosen.size or SIZES[name]
        try:
            there = None if chosen.dry_run else beside
            sweep = Sweep(name, (rows, cols), device, chosen.threads, there)
            turns: dict[str, list[Turn]] = {}
            bandwidths: list[float] = []
            if there is not None:
                turns, bandwidths = measured(sweep, chosen.rounds, there, chosen.one_core_each)
        except TargetError as error:
            print(error, file=sys.stderr)
            return 2
        bandwidth = statistics.median(bandwidths) if bandwidths else None
        splits = result_of(sweep, turns, bandwidth)
        console.print(table_of(name, splits))
        if turns:
            console.print(verdict(splits))
            if bandwidth is not None:
                console.print(error_of(splits))
            results[name] = {"size": [rows, cols], "device": where, "splits": splits}
            save(chosen.output, {"machine": host_info(), "results": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
