# SPDX-License-Identifier: Apache-2.0
"""Stencils on a CPU and a GPU at once: a sweep of 17 splits of their rows, and the chosen ones.

    python examples/benchmarks/cooperative.py [--device cuda] [--only NAME ...] [--rounds 8]
    python examples/benchmarks/cooperative.py --device opencl --threads 1 --one-core-each
    python examples/benchmarks/cooperative.py --dry-run [--device "cuda -arch=sm_90"]

All splits take turns, of which the lower quartile counts: other work on a machine only adds to
them. Prints a table and writes results/CPU/cooperative.json. Ends with 2 where the
device is not there; --dry-run compiles all splits and prints predicted times, without a device.
With --one-core-each the device, an OpenCL for CPUs, has the last processor, and the CPU has the
others; then times are also predicted of those of both sides alone, and of what a job of two ranks
finds that the memory gives one core and both.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from schedules.distribute.cost import sharing_seconds, work_of
from tvm_fusion import distributed
from tvm_fusion.cli.json_text import json_text
from tvm_fusion.cli.output import FILE_WIDTH
from tvm_fusion.distributed import Device
from tvm_fusion.errors import TargetError
from tvm_fusion.machine.host_info import host_info
from tvm_fusion.written_aside import written_aside

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import CPU_FOLDER  # noqa: E402
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
STEPS = {"heat2d": 10}
"""Stencils whose rows stay on the device for so many steps of a run."""
_RUNS = 3  # of a turn
PARTS = 16
"""Steps of the sweep, from the device alone to the CPU alone."""
CHUNKS = (1, 8)
"""In one the device waits for its copies, in several it computes beside them."""
CHOSEN = ("model", "measured")
OF_SIDES = "predicted_of_sides_ms"


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
        Of the CPU.
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
            options["repeat"] = "A"
        splits: dict[str, Any] = {**splits_of(size[0]), "model": "model"}
        if beside is not None:
            with beside():
                splits["measured"] = distributed.measure_split(func, **options)
        self.programs = {
            title: distributed.compile(func, split=split, **options)
            for title, split in splits.items()
        }
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
        plan = self.programs[title].distribution
        rows, extent = self.rows(title), plan.nest.extents[0]
        if rows in (0, extent):
            return cpu if rows else device
        work = work_of(plan.nest, ((0, extent),), plan.itemsizes)
        share = rows / extent
        return sharing_seconds(max(cpu * share, device * (1 - share)), work.bytes / bandwidth)

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of a step of each split in each round; all have the same result."""
        found: dict[str, list[float]] = {title: [] for title in self.programs}
        arrays: dict[str, np.ndarray] = {}
        expected: np.ndarray | None = None
        for number in range(rounds):
            for title, program in self.programs.items():
                local = program.alone()
                for buffer in program.distribution.nest.inputs:
                    held = local.input(buffer.name).owned
                    if buffer.name not in arrays:
                        seed = len(arrays)
                        drawn = np.random.default_rng(seed).random(held.shape, np.float32)
                        arrays[buffer.name] = drawn
                    held[...] = arrays[buffer.name]
                local(self.steps)  # the first call prepares
                if number == 0:
                    result = local.output.owned
                    expected = result.copy() if expected is None else expected
                    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
                local(self.steps)  # the comparison had the caches, and the device slept
                runs = [_seconds(functools.partial(local, self.steps)) for _ in range(_RUNS)]
                found[title].append(statistics.median(runs) / self.steps)
        return found


def typical(turns: Sequence[float]) -> float:
    """The lower quartile."""
    return float(np.quantile(turns, 0.25))


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def table_of(name: str, splits: dict[str, dict[str, Any]]) -> Table:
    """One row a split."""
    table = Table(title=f"{name}: rows on the CPU, predicted and measured ms")
    for heading in ("split", "rows", "predicted", "of the sides", "measured"):
        table.add_column(heading, justify="right" if heading != "split" else "left")
    for title, split in splits.items():
        found = [split["predicted_ms"], split.get(OF_SIDES)]
        found.append(typical(split["turns_ms"]) if "turns_ms" in split else None)
        cells = ["-" if ms is None else f"{ms:.2f}" for ms in found]
        table.add_row(title, str(split["cpu_rows"]), *cells)
    return table


def result_of(
    sweep: Sweep, times: dict[str, list[float]], bandwidth: float | None
) -> dict[str, dict[str, Any]]:
    """Entry of the file for a stencil; ``bandwidth`` is that of the memory that both share."""
    found: dict[str, dict[str, Any]] = {}
    for title in sweep.programs:
        predicted = sweep.predicted(title) * 1e3
        found[title] = {"cpu_rows": sweep.rows(title), "predicted_ms": predicted}
        if times:
            found[title]["turns_ms"] = [seconds * 1e3 for seconds in times[title]]
        if times and bandwidth is not None and "chunk" not in title:
            device, cpu = (typical(times[f"{part}/{PARTS}"]) for part in (0, PARTS))
            seconds = sweep.predicted_of_sides(title, device, cpu, bandwidth)
            found[title][OF_SIDES] = seconds * 1e3
    return found


def error_of(splits: dict[str, dict[str, Any]]) -> str:
    """Median error of the predictions of splits in which both sides have rows."""
    ends = [splits[f"{part}/{PARTS}"]["cpu_rows"] for part in (0, PARTS)]
    errors = [
        abs(split[OF_SIDES] / typical(split["turns_ms"]) - 1)
        for split in splits.values()
        if OF_SIDES in split and split["cpu_rows"] not in ends
    ]
    return f"error of predictions by sides: {100 * statistics.median(errors):.1f} % (median)"


def verdict(times: dict[str, list[float]]) -> str:
    """The chosen splits against the best of the sweep, and the pair against either side alone."""
    found = {title: typical(turns) for title, turns in times.items()}
    best = min(seconds for title, seconds in found.items() if "/" in title)
    alone = min(found[f"0/{PARTS}"], found[f"{PARTS}/{PARTS}"])
    chosen = ", ".join(f"{t} {found[t] / best:.2f}x" for t in CHOSEN if t in found)
    return f"to the best split: {chosen}; best split to one side alone: {alone / best:.2f}x"


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
    options.add_argument("--output", type=Path, default=CPU_FOLDER / "cooperative.json")
    given = options.parse_args(arguments)
    device: str | Device = given.device or ("cuda -arch=sm_90" if given.dry_run else "cuda")
    console = Console(width=FILE_WIDTH if not sys.stdout.isatty() else None)
    kept = json.loads(given.output.read_text()) if given.output.exists() else {}
    results: dict[str, Any] = kept.get("results", {})
    beside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    where = device
    if given.one_core_each:
        from examples.benchmarks.device_on_core import use_one_core

        beside = use_one_core(0).cpu_beside
        where = f"{given.device} on one core of this CPU, beside the CPU on another"
    for name in given.only:
        rows, cols = given.size or SIZES[name]
        try:
            there = None if given.dry_run else beside
            shared = there is not None and given.one_core_each
            bandwidth = run_rates()["node.bandwidth"] if shared else None
            sweep = Sweep(name, (rows, cols), device, given.threads, there)
            with beside():
                times = {} if given.dry_run else sweep.measure(given.rounds)
        except TargetError as error:
            print(error, file=sys.stderr)
            return 2
        splits = result_of(sweep, times, bandwidth)
        console.print(table_of(name, splits))
        if times:
            console.print(verdict(times))
            if bandwidth is not None:
                console.print(error_of(splits))
            results[name] = {"size": [rows, cols], "device": where, "splits": splits}
            given.output.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(given.output) as aside:
                aside.write_text(json_text({"machine": host_info(), "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
