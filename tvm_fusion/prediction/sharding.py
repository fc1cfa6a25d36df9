# SPDX-License-Identifier: Apache-2.0
"""Embedding tables shared out among ranks, and the predicted time of an iteration of each way.

The six sharders of Table 5.3 of the dissertation, and a local search that starts from the best of
them. An iteration is the lookups of each rank, the all-to-all of their results, and both backward;
dense layers, which every rank has, are left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from schedules.cost.embedding import TableLookups, predict_lookups
from schedules.cost.machine import Machine, read_json
from schedules.cost.trees import read_arrays

from ..errors import PredictionError
from .collectives import Collectives, all_to_all_bytes, bus_factor
from .timeline.execution_graph import Collective, ExecutionGraph, Kernel, Launch, Op
from .timeline.timelines import simulate

MEMORY_SHARE = 0.8
"""Share of a device's memory that tables may take."""

_BYTES = 4
_MAX_FILE_BYTES = 64 << 20
_MAX_STEPS = 200


@dataclass(frozen=True)
class EmbeddingTable:
    """Embedding table."""

    name: str
    rows: int
    width: int
    """``rows`` and ``width``: rows E and their width D, of float32."""
    lookups: float  # Mean number L of rows that a sample looks up.
    data: TableLookups | None = None
    """Lookups of a batch of all ranks; without them all rows are equally likely."""

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return self.rows * self.width * _BYTES

    def batch_of(self, bags: int) -> TableLookups:
        """Lookups of so many samples: those of its data, else of rows that are equally likely.

        Raises ``PredictionError`` if its data are of another number of samples.
        """
        if self.data is None:
            return TableLookups(bags, self.rows, self.width, max(round(self.lookups * bags), 1))
        if self.data.bags != bags:
            raise PredictionError(
                f"table {self.name!r}: its data are of {self.data.bags} samples; expected those of "
                f"all ranks together, {bags}"
            )
        return self.data


@dataclass(frozen=True)
class Sharding:
    """Prediction of one way to share tables out."""

    sharder: str  # Name.
    ranks: tuple[int, ...]  # Rank of each table.
    seconds: float  # Predicted iteration.
    balance: float  # Lookup time of the mean rank over that of the slowest; 1 is best.
    memory: tuple[int, ...]  # Bytes of each rank.
    fits: bool  # Whether no rank has more than ``MEMORY_SHARE`` of its memory.


@dataclass(frozen=True)
class ShardingTask:
    """Tables, and what they are to be shared out on.

    Ranks of CPUs share one, with its caches and its memory; GPUs have their own.
    """

    tables: tuple[EmbeddingTable, ...]
    batch: int  # Samples of each rank.
    machine: Machine  # Device of each rank.
    ranks: int  # Number of ranks.
    collectives: Collectives | None = None
    """Measured all-to-alls; without them the bandwidth of PCIe says how long one takes."""
    _known: dict[tuple, float] = field(default_factory=dict, repr=False, compare=False)

    def sharding(self, name: str, ranks: Sequence[int]) -> Sharding:
        """Predict the iteration of a table's rank each."""
        parts = self._parts(ranks)
        lookups = [[self._lookup(part, back) for part in parts] for back in (False, True)]
        joins = [self._join(part) for part in parts]
        exchange = self._exchange(parts)
        graphs = [
            _iteration(rank, forward + join, backward, exchange)
            for rank, (forward, backward, join) in enumerate(zip(*lookups, joins, strict=True))
        ]
        totals = [sum(times) for times in zip(*lookups, strict=True)]
        memory = tuple(sum(table.bytes for table in part) for part in parts)
        return Sharding(
            name,
            tuple(ranks),
            simulate(graphs, _NoCosts()).seconds,
            sum(totals) / len(totals) / max(totals) if max(totals) else 1.0,
            memory,
            max(memory) <= self.capacity,
        )

    @property
    def capacity(self) -> float:
        """Bytes of tables that a rank may hold; any number on a CPU whose file does not say."""
        if self.machine.kind == "cpu":
            return MEMORY_SHARE * self.machine.get("capacity.memory", math.inf)
        return MEMORY_SHARE * self.machine["capacity.memory"]

    def _parts(self, ranks: Sequence[int]) -> list[list[EmbeddingTable]]:
        parts: list[list[EmbeddingTable]] = [[] for _ in range(self.ranks)]
        for table, rank in zip(self.tables, ranks, strict=True):
            parts[rank].append(table)
        return parts

    def _lookup(self, tables: Sequence[EmbeddingTable], is_backward: bool) -> float:
        """Seconds of the lookups of a rank: one launch for all of its tables, on a CPU one each."""
        if self.machine.kind == "cpu":
            return sum(self._launch((table,), is_backward) for table in tables)
        return self._launch(tuple(tables), is_backward) if tables else 0.0

    def _launch(self, tables: tuple[EmbeddingTable, ...], is_backward: bool) -> float:
        """Seconds of one launch, beside those of all others."""
        key = tables, is_backward
        if key not in self._known:
            others = list(self.tables)
            for table in tables:
                others.remove(table)
            bags = self.batch * self.ranks
            lookups, beside = ([one.batch_of(bags) for one in part] for part in (tables, others))
            found = predict_lookups(lookups, self.machine, is_backward, beside)
            self._known[key] = found.seconds
        return self._known[key]

    def _join(self, tables: Sequence[EmbeddingTable]) -> float:
        """Seconds in which a CPU joins the results of a rank's tables for the all-to-all.

        Pieces of short rows are copied at no more than the bandwidth of the memory (measured: 15 to
        20 GB/s where the memory has 22, and L3 74). One launch for all tables, as on GPUs, writes
        them side by side.
        """
        if self.machine.kind != "cpu" or self.ranks == 1:
            return 0.0
        width = sum(table.width for table in tables)
        moved = 2.0 * self.batch * self.ranks * width * _BYTES
        return moved / self.machine["bandwidth.memory"]

    def _exchange(self, parts: Sequence[Sequence[EmbeddingTable]]) -> float:
        """Seconds of the all-to-all of all results; a rank keeps those of its own samples."""
        if self.ranks == 1:
            return 0.0
        widths = [sum(table.width for table in part) for part in parts]
        sent = [[self.batch * width * _BYTES] * self.ranks for width in widths]
        message = all_to_all_bytes(sent)
        if self.machine.kind == "cpu":  # one memory passes the bytes of all
            message = sum(map(sum, sent)) / self.ranks
        if self.collectives is not None:
            return self.collectives.predict("all_to_all", self.ranks, message).seconds
        return message * bus_factor("all_to_all", self.ranks) / self.machine["bandwidth.pcie"]


class _NoCosts:
    """Host that is never late: what remains is the devices' time."""

    def t1(self, previous: str, op: Op) -> float:
        return 0.0

    def t2(self, op: Op) -> float:
        return 0.0

    t3 = whole = t2

    def t4(self, call: str) -> float:
        return 0.0

    delay = t4

    def t5(self, op: Op, step: int) -> float:
        return 0.0


def _iteration(rank: int, forward: float, backward: float, exchange: float) -> ExecutionGraph:
    """Lookups, all-to-all forward and backward, and the backward lookups of one rank."""

    def part(number: int) -> Collective:
        return Collective("all_to_all", "tables", number)

    kernels = (
        Kernel(0, "lookup", forward),
        Kernel(1, "all-to-all", exchange, 1, (0,), part(0)),
        Kernel(2, "all-to-all backward", exchange, 1, (), part(1)),
        Kernel(3, "lookup backward", backward, 0, (2,)),
    )
    return ExecutionGraph(tuple(Op(one.name, (Launch(one),)) for one in kernels), rank)


Cost = Callable[[EmbeddingTable], float]

COSTS: dict[str, Cost] = {
    "size_greedy": lambda table: table.rows,
    "lookup_greedy": lambda table: table.lookups * table.width,
    "norm_lookup_greedy": lambda table: table.lookups / table.rows,
    "size_lookup_greedy": lambda table: (
        table.lookups * table.width * math.log10(max(table.rows, 2))
    ),
}
"""Cost of a table by the greedy sharder that adds it up (Table 5.3)."""


def greedy(tables: Sequence[EmbeddingTable], ranks: int, cost: Cost) -> list[int]:
    """Put the dearest tables first, each on the rank that costs least so far."""
    loads = [0.0] * ranks
    found = [0] * len(tables)
    for index in sorted(range(len(tables)), key=lambda index: -cost(tables[index])):
        rank = min(range(ranks), key=lambda one: loads[one])
        found[index] = rank
        loads[rank] += cost(tables[index])
    return found


def assignments(
    tables: Sequence[EmbeddingTable], ranks: int, seed: int = 0
) -> dict[str, list[int]]:
    """Rank of each table by each of the six sharders of Table 5.3."""
    random_ = random.Random(seed)
    return {
        "naive": [index % ranks for index in range(len(tables))],
        "random": [random_.randrange(ranks) for _ in tables],
        **{name: greedy(tables, ranks, cost) for name, cost in COSTS.items()},
    }


def shard(task: ShardingTask, seed: int = 0) -> tuple[Sharding, ...]:
    """Predict the six sharders and the search, the fastest that fits first.

    Raises ``PredictionError`` if the tables fit into the memory of the ranks in none of these ways.
    """
    tables, ranks = task.tables, task.ranks
    ways = assignments(tables, ranks, seed)
    shardings = [task.sharding(name, way) for name, way in ways.items()]
    by_memory = task.sharding("memory", greedy(tables, ranks, lambda table: table.bytes))
    fitting = [sharding for sharding in (*shardings, by_memory) if sharding.fits]
    if not fitting:
        needed, largest = sum(table.bytes for table in tables), max(tables, key=lambda t: t.bytes)
        raise PredictionError(
            f"{needed} bytes of tables do not fit on {ranks} ranks of {task.machine.name}, which "
            f"hold {task.capacity:.0f} each; the largest, {largest.name!r}, has {largest.bytes}"
        )
    shardings.append(_search(task, min(fitting, key=lambda sharding: sharding.seconds)))
    return tuple(sorted(shardings, key=lambda sharding: (not sharding.fits, sharding.seconds)))


def _search(task: ShardingTask, best: Sharding) -> Sharding:
    """Move tables, the best move first, as long as the iteration gets shorter."""
    best = task.sharding("search", best.ranks)
    for _ in range(_MAX_STEPS):
        tried = (task.sharding("search", ranks) for ranks in _neighbours(task, best))
        better = min((one for one in tried if one.fits), key=lambda one: one.seconds, default=best)
        if better.seconds >= best.seconds * (1 - 1e-9):
            break
        best = better
    return best


def _neighbours(task: ShardingTask, now: Sharding) -> list[tuple[int, ...]]:
    """Ways in which one table changes its rank; tables that are alike count once."""
    neighbours: dict[tuple, tuple[int, ...]] = {}
    for index, table in enumerate(task.tables):
        own = now.ranks[index]
        for rank in range(task.ranks):
            if rank != own:
                kind = replace(table, name=""), own, rank
                neighbours[kind] = (*now.ranks[:index], rank, *now.ranks[index + 1 :])
    return list(neighbours.values())


def load_tables(path: Path) -> tuple[tuple[EmbeddingTable, ...], int]:
    """Read tables and the batch of a rank.

    The file is ``{"batch": 4096, "tables": [{"name": "t", "rows": 1000000, "width": 64,
    "lookups": 20}, ...]}``. In place of ``lookups`` a table may have ``data``, an ``.npz`` file
    beside it with ``indices`` and ``offsets`` of a batch of all ranks.

    Raises ``PredictionError`` if it cannot be read, or a number is not positive and finite: the
    message names the table.
    """
    data = read_json(path, _MAX_FILE_BYTES, "file of tables")
    entries = data.get("tables") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise PredictionError(f"{path}: expected a list of 'tables'")
    batch = _positive(path, "the file", "batch", data.get("batch"), whole=True)
    return tuple(_table(path, index, entry) for index, entry in enumerate(entries)), int(batch)


def _table(path: Path, index: int, entry: Any) -> EmbeddingTable:
    entry = entry if isinstance(entry, dict) else {}
    name = str(entry.get("name", index))
    where = f"table {name!r}"
    rows, width = (
        int(_positive(path, where, part, entry.get(part), whole=True)) for part in ("rows", "width")
    )
    if "data" not in entry:
        lookups = _positive(path, where, "lookups", entry.get("lookups"), whole=False)
        return EmbeddingTable(name, rows, width, lookups)
    file = entry["data"]
    if not isinstance(file, str) or Path(file).name != file:
        raise PredictionError(
            f"{path}: {where}: data is {file!r}; expected the name of a file in the same folder"
        )
    try:
        arrays = read_arrays(path.parent / file)
        indices, offsets = (_array(arrays, part) for part in ("indices", "offsets"))
        data = TableLookups.of(indices, offsets, rows, width)
    except PredictionError as error:
        raise PredictionError(f"{path}: {where}: {error}") from None
    return EmbeddingTable(name, rows, width, data.count / data.bags, data)


def _array(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise PredictionError(f"its data have no array {name!r}")
    return arrays[name]


def _positive(path: Path, where: str, part: str, value: Any, whole: bool) -> float:
    allowed = (int,) if whole else (int, float)
    if type(value) not in allowed or not 0 < value < 1 << 53:
        kind = "integer" if whole else "number"
        raise PredictionError(f"{path}: {where}: {part} is {value!r}; expected a positive {kind}")
    return value
