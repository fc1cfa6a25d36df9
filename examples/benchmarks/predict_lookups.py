# SPDX-License-Identifier: Apache-2.0
"""Predicted and measured times of PyTorch's lookups of embedding bags on this CPU.

    python examples/benchmarks/predict_lookups.py --seconds 120   # measures; again for more
    python examples/benchmarks/predict_lookups.py --seconds 0 --train

A launch is one to eight tables of random sizes, with rows that are equally likely or follow a Zipf
law, and batches that differ. Backward is the gradient of the rows and their update by plain SGD.
The process keeps the memory that it frees: otherwise what was freed before decides whether glibc
gives large gradients back to the system, and they take page faults anew, up to 20 times the time.
What a core writes and another reads at once takes times that differ up to 15-fold with the place
of a virtual machine's cores, which may change every few seconds; it is measured beside each launch.
Measured times are kept in ``--launches``. ``--train`` writes the kernel models from four fifths of
the launches (needs xgboost), ``--check`` takes those that are there, of other days. Both write
results/CPU/predict_lookups.json: errors on the last fifth by the data of each batch; without the
data, but with the exchange and the sizes of the caches; by B, E, L and D alone; all beside the
difference of two measurements of the same batch, and for launches of the dissertation's sizes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.benchmarks.campaign import CPU_FOLDER, output_file, save  # noqa: E402
from examples.benchmarks.prediction.data import errors  # noqa: E402
from schedules.cost.embedding import (  # noqa: E402
    RANGES,
    TableLookups,
    base_seconds,
    features,
    size_features,
    sizes_of,
)
from schedules.cost.learned import find_model  # noqa: E402
from schedules.cost.machine import Figure, Machine, load_machine  # noqa: E402
from tvm_fusion.bench.machine_limits import exchange_seconds
from tvm_fusion.machine.host import (
    host_cpu,  # noqa: E402
    host_info,
)
from tvm_fusion.paths import written_aside

THREADS = 2
# Batches of a launch, one after the other, so that none finds its own rows in the cache.
BATCHES = 3
ROUNDS = 8
ARENA = 1 << 30  # bytes in which all tables lie
MOST = 48 << 20  # bytes of rows that a launch reads
WIDTHS = (16, 32, 64, 128, 256)
SEEDS = (0, 1, 2)
STEADY = 1.5  # times by which the exchange before and after a launch may differ
KEEP_MEMORY = {-1: 2**31 - 1, -4: 0}
"""Options of glibc's mallopt: M_TRIM_THRESHOLD as large as can be, and M_MMAP_MAX none."""
KERNELS = {"forward": "lookup", "backward": "lookup_backward"}
DIRECTIONS = tuple(KERNELS)
PARAMETERS = {"max_depth": 6, "eta": 0.06, "subsample": 0.8, "colsample_bynode": 0.5}
TREES = 300
SOURCE_SIZES = {"bags": 128, "lookups": 8}
"""Least sizes of the dissertation's sweep, whose launches read much enough for reuse to matter."""

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Launch:
    """Tables and batches of one launch.

    Parameters
    ----------
    rows, widths : list of int
        Rows and widths of each table.
    batches : list of list of tuple
        Indices and offsets of each table, for each batch.
    """

    rows: list[int]
    widths: list[int]
    batches: list[list[Batch]]

    @property
    def lookups(self) -> list[list[TableLookups]]:
        """Lookups of each batch, as the model is told of them."""
        return [
            [
                TableLookups.of(indices.numpy(), offsets.numpy(), rows, width)
                for (indices, offsets), rows, width in zip(
                    batch, self.rows, self.widths, strict=True
                )
            ]
            for batch in self.batches
        ]


def draw(seed: int) -> Launch:
    """Draw a launch; the same for the same seed."""
    random = np.random.default_rng(seed)
    while True:
        count = 1 if random.random() < 0.6 else int(random.integers(2, 9))
        bags = int(2 ** random.uniform(4, 12))
        rows = [int(10 ** random.uniform(3, 6.6)) for _ in range(count)]
        widths = [int(random.choice(WIDTHS)) for _ in range(count)]
        lookups = [2 ** random.uniform(0, 6.6) for _ in range(count)]
        held = sum(4 * e * d for e, d in zip(rows, widths, strict=True))
        read = sum(4 * bags * n * d for n, d in zip(lookups, widths, strict=True))
        if held <= ARENA and read <= MOST:
            break
    return Launch(rows, widths, draw_batches(random, bags, rows, lookups))


def draw_batches(
    random: np.random.Generator, bags: int, rows: Sequence[int], lookups: Sequence[float]
) -> list[list[Batch]]:
    """Batches of some bags for tables of some rows, with a mean number of lookups a bag of each."""
    skews = [0.0 if random.random() < 0.25 else random.uniform(0, 1.5) for _ in rows]
    return [
        [
            (torch.from_numpy(zipf(random, int(sizes.sum()), e, skew)), _offsets(sizes))
            for e, mean, skew in zip(rows, lookups, skews, strict=True)
            for sizes in [_bag_sizes(random, bags, mean)]
        ]
        for _ in range(BATCHES)
    ]


def _bag_sizes(random: np.random.Generator, bags: int, mean: float) -> np.ndarray:
    if bags % 2:
        return np.full(bags, max(1, round(mean)))
    return np.maximum(random.poisson(mean, bags), 1)


def _offsets(sizes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.cumsum(sizes) - sizes)


def zipf(random: np.random.Generator, count: int, rows: int, skew: float) -> np.ndarray:
    """Rows whose probability falls with the power ``skew`` of their rank; ranks lie anywhere."""
    share = random.random(count)
    if skew == 0:
        return (share * rows).astype(np.int64)
    if abs(skew - 1) < 1e-3:
        rank = np.exp(share * np.log(rows + 1))
    else:
        rank = (share * ((rows + 1) ** (1 - skew) - 1) + 1) ** (1 / (1 - skew))
    rank = np.minimum(rank.astype(np.int64) - 1, rows - 1)
    return (rank * 2654435761) % rows if rows % 2654435761 else rank


def tables_in(arena: torch.Tensor, launch: Launch) -> list[torch.Tensor]:
    """Tables of a launch, one after the other in one piece of memory."""
    found, at = [], 0
    for rows, width in zip(launch.rows, launch.widths, strict=True):
        found.append(arena[at : at + rows * width].view(rows, width))
        at += rows * width
    return found


Run = Callable[[], Any]


def forward(tables: list[torch.Tensor], batch: list[Batch]) -> list[Run]:
    """Lookups of one batch in each table."""
    lookup = torch.ops.aten._embedding_bag_forward_only.default
    return [
        partial(lookup, table, indices, offsets, False, 0, True, None, False, -1)
        for table, (indices, offsets) in zip(tables, batch, strict=True)
    ]


def backward(tables: list[torch.Tensor], batch: list[Batch]) -> list[Run]:
    """Sparse gradients of one batch, and the update of the rows by them, of each table."""
    return [_update(table, *given) for table, given in zip(tables, batch, strict=True)]


def _update(table: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> Run:
    gradient = torch.ops.aten._embedding_bag_backward.default
    out, *states = torch.ops.aten._embedding_bag.default(
        table, indices, offsets, False, 0, True, None, False, -1
    )
    ones = torch.full_like(out, 1e-3)

    def run() -> None:
        sparse = gradient(ones, indices, offsets, *states, table.shape[0], False, 0, True, None, -1)
        table.add_(sparse, alpha=-1e-6)

    return run


def measure(arena: torch.Tensor, seed: int) -> dict[str, Any]:
    """Microseconds of each batch and table, by direction: medians of even and of odd rounds."""
    launch = draw(seed)
    tables = tables_in(arena, launch)
    result: dict[str, Any] = {"seed": seed, "exchange": [torch_exchange()]}
    for name, prepare in zip(DIRECTIONS, (forward, backward), strict=True):
        batches = [prepare(tables, batch) for batch in launch.batches]
        times = [[[_timed(run) for run in batch] for batch in batches] for _ in range(ROUNDS + 1)]
        halves = [np.median(times[1 + half :: 2], axis=0) for half in (0, 1)]
        result[name] = (1e6 * np.array(halves)).round(2).tolist()
    result["exchange"].append(torch_exchange())
    return result


def is_steady(entry: dict[str, Any]) -> bool:
    """Whether the cores exchanged data after a launch as they did before it."""
    return max(entry["exchange"]) <= STEADY * min(entry["exchange"])


def machine_beside(entry: dict[str, Any], machine: Machine) -> Machine:
    """The machine as it was during a launch."""
    seconds = float(np.mean(entry["exchange"]))
    exchange = Figure(1 / seconds, "measured beside the launch")
    return replace(machine, figures={**machine.figures, "bandwidth.exchange": exchange})


def _timed(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def torch_exchange() -> float:
    """Seconds of a byte from another core, by PyTorch's threads; TVM's would share its cores."""
    rows, width = 512 * THREADS, 256
    source, copy, same = torch.zeros(rows, width), torch.zeros(rows, width), torch.arange(rows)
    copies = [
        partial(torch.index_select, source, 0, order, out=copy) for order in (same, same.flip(0))
    ]
    return exchange_seconds(partial(source.fill_, 1.0), copies, 4 * rows * width)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory; other C libraries have no such choice."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for option, value in KEEP_MEMORY.items():
        if mallopt is not None:
            mallopt(option, value)


def measure_more(launches: list[dict[str, Any]], seconds: float) -> None:
    """Measure launches for so many seconds, and add them."""
    torch.set_num_threads(THREADS)
    keep_freed_memory()
    arena = torch.full((ARENA // 4,), 1e-3)
    end = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < end:
            found = measure(arena, launches[-1]["seed"] + 1 if launches else 0)
            if is_steady(found):
                launches.append(found)


@dataclass
class Rows:
    """Tables of batches as rows of a training.

    Parameters
    ----------
    by_data, by_sizes, usual : np.ndarray
        (rows, features); ``usual`` as ``by_data``, of the machine of the file.
    base, usual_base, measured : dict of str to np.ndarray
        (rows,) least and measured seconds by direction.
    halves : dict of str to np.ndarray
        (rows, 2) seconds of even and of odd rounds.
    launch : np.ndarray
        (rows,) number of the batch of a launch that a row belongs to.
    held : np.ndarray
        (rows,) whether it is held out.
    sizes : np.ndarray
        (rows, ranges).
    """

    by_data: np.ndarray
    by_sizes: np.ndarray
    usual: np.ndarray
    base: dict[str, np.ndarray]
    usual_base: dict[str, np.ndarray]
    measured: dict[str, np.ndarray]
    halves: dict[str, np.ndarray]
    launch: np.ndarray
    held: np.ndarray
    sizes: np.ndarray

    def sums(self, each: np.ndarray) -> np.ndarray:
        """(launches, ...) sums over the tables of each held-out launch."""
        _, number = np.unique(self.launch[self.held], return_inverse=True)
        total = np.zeros((number.max() + 1, *each.shape[1:]))
        np.add.at(total, number, each[self.held])
        return total


def rows_of(launches: list[dict[str, Any]], machine: Machine) -> Rows:
    """Draw the launches again, and describe each table of their batches."""
    columns: dict[str, list[Any]] = defaultdict(list)
    base: dict[str, list[list[float]]] = {name: [] for name in DIRECTIONS}
    times: dict[str, list[Any]] = {name: [] for name in DIRECTIONS}
    for entry in launches:
        beside = machine_beside(entry, machine)
        for batch, tables in enumerate(draw(entry["seed"]).lookups):
            equal = [TableLookups(t.bags, t.rows, t.width, t.count) for t in tables]
            for number, table in enumerate(tables):
                columns["data"].append(features(table, tables, beside))
                columns["usual"].append(features(table, tables, machine))
                sizes = size_features(table, tables, beside)
                traffic = np.log2(base_seconds(equal[number], beside, False))
                columns["sizes"].append(np.append(sizes, traffic))
                columns["ranges"].append(sizes_of(table))
                columns["launch"].append(BATCHES * entry["seed"] + batch)
                columns["held"].append(entry["seed"] % 5 == 0)
                for name in DIRECTIONS:
                    is_backward = name == "backward"
                    base[name].append(
                        [base_seconds(table, each, is_backward) for each in (beside, machine)]
                    )
                    times[name].append([half[batch][number] * 1e-6 for half in entry[name]])
    halves = {name: np.array(times[name]) for name in DIRECTIONS}
    return Rows(
        np.array(columns["data"]),
        np.array(columns["sizes"]),
        np.array(columns["usual"]),
        {name: np.array(base[name])[:, 0] for name in DIRECTIONS},
        {name: np.array(base[name])[:, 1] for name in DIRECTIONS},
        {name: halves[name].mean(axis=1) for name in DIRECTIONS},
        halves,
        np.array(columns["launch"]),
        np.array(columns["held"]),
        np.array(columns["ranges"]),
    )


def fit(rows: np.ndarray, target: np.ndarray, held: np.ndarray, seed: int) -> tuple[Any, Any]:
    """Trees trained on what is not held out, as arrays, and what they predict of all rows."""
    import xgboost

    from examples.benchmarks.prediction.train import arrays_of
    from schedules.cost.trees import trees_from_arrays

    parameters = {**PARAMETERS, "tree_method": "hist", "nthread": THREADS, "seed": seed}
    parameters |= {"min_child_weight": 3, "base_score": float(target[~held].mean())}
    matrix = xgboost.DMatrix(rows[~held].astype(np.float32), target[~held])
    arrays = arrays_of(xgboost.train(parameters, matrix, TREES))
    return arrays, trees_from_arrays(arrays)(rows)


def train(rows: Rows, direction: str) -> dict[str, Any]:
    """Train one direction three times, keep the median model, and tell the errors of launches."""
    from examples.benchmarks.prediction.train import intervals
    from schedules.cost.trees import trees_from_arrays

    held, measured, base = rows.held, rows.measured[direction], rows.base[direction]
    total = rows.sums(measured)
    trained = []
    for seed in SEEDS:
        arrays, factors = fit(rows.by_data, np.log(measured / base), held, seed)
        predicted = base * np.exp(factors)
        trained.append((errors(total, rows.sums(predicted))["gmae"], arrays, predicted))
    trained.sort(key=lambda run: run[0])
    _, arrays, predicted = trained[len(trained) // 2]
    ends = intervals(measured[held], predicted[held], base[held])
    low, high = rows.sizes.min(axis=0), rows.sizes.max(axis=0)
    zero = np.zeros(1)
    arrays |= {"harness": zero, "latency": zero, "low": low, "high": high, **ends}
    usual = rows.usual_base[direction] * np.exp(trees_from_arrays(arrays)(rows.usual))
    report = compared(rows, direction, predicted, usual)
    return {
        "arrays": arrays,
        "errors": {**report, "three_trainings_gmae": [run[0] for run in trained]},
    }


def check(rows: Rows, direction: str, machine: Machine) -> dict[str, Any]:
    """Errors of the models that are there, whatever they were trained on, on held-out seeds."""
    found = find_model(KERNELS[direction], "float32", machine.name)
    if found is None:
        raise SystemExit(f"no model of lookups on {machine.name}: --train writes one")
    model, _ = found
    predicted = rows.base[direction] * np.exp(model.trees(rows.by_data))
    usual = rows.usual_base[direction] * np.exp(model.trees(rows.usual))
    at = np.searchsorted(model.edges, rows.base[direction])
    ratio = (rows.measured[direction] / predicted)[rows.held]
    inside = (model.below[at][rows.held] <= ratio) & (ratio <= model.above[at][rows.held])
    errors_ = compared(rows, direction, predicted, usual)
    return {"errors": {**errors_, "inside_percent": round(100 * float(inside.mean()), 1)}}


def compared(
    rows: Rows, direction: str, predicted: np.ndarray, usual: np.ndarray
) -> dict[str, dict[str, float]]:
    """Errors of held-out launches by the data, and by models that lack some of it."""
    measured, base, held = rows.measured[direction], rows.base[direction], rows.held
    total = rows.sums(measured)
    even, odd = rows.sums(rows.halves[direction]).T
    alone = {"without_the_data": rows.by_sizes, "by_sizes_alone": np.log2(rows.sizes)}
    totals = {
        "by_the_data": rows.sums(predicted),
        "by_the_data_with_the_exchange_of_the_file": rows.sums(usual),
        **{name: rows.sums(_median(columns, measured, held)) for name, columns in alone.items()},
        "by_traffic": rows.sums(base),
    }
    report = {name: errors(total, times) for name, times in totals.items()}
    report["repeat"] = errors(odd, even)
    smaller = [rows.sizes[:, RANGES.index(name)] < least for name, least in SOURCE_SIZES.items()]
    large = rows.sums(np.any(smaller, axis=0).astype(float)) == 0
    for name in ("by_the_data", *alone):
        report[f"{name}_of_the_sources_sizes"] = errors(total[large], totals[name][large])
    return report


def _median(columns: np.ndarray, measured: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Median over three trainings of the seconds by some features."""
    times = [fit(columns, np.log(measured), held, seed)[1] for seed in SEEDS]
    return np.exp(np.median(times, axis=0))


def write_model(direction: str, model: dict[str, Any], rows: Rows, machine: Machine) -> None:
    """Write a model and its report beside the others."""
    import xgboost

    from schedules.cost.learned import FOLDER

    kernel = KERNELS[direction]
    path = FOLDER / f"{kernel}-float32-{machine.name}.npz"
    with written_aside(path) as aside, aside.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **model["arrays"])
    ends = (rows.sizes.min(axis=0), rows.sizes.max(axis=0))
    ranges = zip(RANGES, *(end.tolist() for end in ends), strict=True)
    report = {
        "kernel": kernel,
        "dtype": "float32",
        "machines": [machine.name],
        "data": "measured: examples/benchmarks/predict_lookups.py",
        "rows": len(rows.held),
        "ranges": {name: [low, high] for name, low, high in ranges},
        "command": "python examples/benchmarks/predict_lookups.py --seconds 0 --train",
        "xgboost": xgboost.__version__,
        "split": "a fifth of the launches is held out",
        "held_out": model["errors"]["by_the_data"],
        **model["errors"],
    }
    with written_aside(path.with_suffix(".json")) as aside:
        aside.write_text(json.dumps(report, indent=2) + "\n")


def table_of(results: dict[str, Any]) -> Table:
    """GMAE and MAPE of each direction and model."""
    table = Table("lookups", "by", "GMAE %", "MAPE %")
    for direction, found in results.items():
        for by, entry in found.items():
            if isinstance(entry, dict):
                table.add_row(direction, by, f"{entry['gmae']:.2f}", f"{entry['mape']:.2f}")
    return table


def main() -> int:
    """Measure, and train if asked to."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=120, help="of measuring (default: 120)")
    options.add_argument("--train", action="store_true", help="write the models")
    options.add_argument("--check", action="store_true", help="take the models that are there")
    options.add_argument("--launches", type=Path, default=Path("build/lookups.json"))
    options.add_argument(
        "--output", type=output_file, default=str(CPU_FOLDER / "predict_lookups.json")
    )
    chosen = options.parse_args()
    file = chosen.launches
    launches: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    is_known = chosen.train or chosen.check
    machine = load_machine(host_cpu()) if is_known else None  # an error before minutes are spent
    if chosen.seconds:
        measure_more(launches, chosen.seconds)
        save(file, json.dumps(launches))
    print(f"{len(launches)} launches of {BATCHES} batches in {file}")
    if machine is not None:
        rows, results = rows_of(launches, machine), {}
        for direction in DIRECTIONS:
            if chosen.train:
                found = train(rows, direction)
                write_model(direction, found, rows, machine)
            else:
                found = check(rows, direction, machine)
            results[direction] = found["errors"]
        settings = {"machine": host_info(), "torch": torch.__version__, "threads": THREADS}
        settings |= {"launches": len(launches), "batches": BATCHES}
        save(chosen.output, {"settings": settings, "results": results})
        Console(width=100).print(table_of(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
