# SPDX-License-Identifier: Apache-2.0
"""Embedding tables of a traced run, shared out among its ranks in another way.

Tables that are shared out are those whose results, of the whole batch, an all-to-all passes to the
ranks of the samples; each rank has the others by itself. A launch tells the rows, width and lookups
of its tables together, so those of one launch are taken as alike. Lookups and their gradients take
longer or shorter as the models of lookups say; exchanges by the bytes of their largest message.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from schedules.cost.embedding import predict_lookups
from schedules.cost.machine import Machine

from ..errors import PredictionError
from .collectives import Collectives
from .sharding import MEMORY_SHARE, EmbeddingTable, assignments
from .timeline.edits import map_kernels
from .timeline.execution_graph import Collective, ExecutionGraph, Kernel, Op

_BYTES = 4  # Bytes of an element of a result.
_INDEX_BYTES = (4, 8)
_Key = tuple[str, int]


@dataclass(frozen=True)
class _Launch:
    """Lookups of one launch: its tables, their bags, the operator, and seconds as measured."""

    tables: tuple[EmbeddingTable, ...]
    bags: int
    op: str
    seconds: float


@dataclass(frozen=True)
class _Held:
    """Launches of each rank in a step, bags, seconds of a table, and bytes by exchange.

    ``backward`` is empty where it is not known of each table.
    """

    ranks: tuple[tuple[_Launch, ...], ...]
    bags: int
    seconds: dict[EmbeddingTable, float]
    backward: dict[EmbeddingTable, float]
    exchanges: dict[_Key, Callable[[EmbeddingTable], float]]

    @property
    def owners(self) -> list[tuple[EmbeddingTable, int]]:
        """Each table with its rank."""
        return [
            (table, rank)
            for rank, launches in enumerate(self.ranks)
            for launch in launches
            for table in launch.tables
        ]

    @property
    def together(self) -> bool:
        """Whether the tables of a rank are looked up in one launch."""
        return any(len(launch.tables) > 1 for launches in self.ranks for launch in launches)


def reshard(
    graphs: Sequence[ExecutionGraph],
    sharder: str,  # Name of one of the six, see :func:`.sharding.assignments`.
    # Device of a rank; without it each table takes along its share of the measured times.
    machine: Machine | None,
    # Measured all-to-alls; without them an exchange takes longer in proportion to its bytes, and
    # never shorter.
    curves: Collectives | None = None,
) -> tuple[tuple[ExecutionGraph, ...], tuple[str, ...]]:
    """Share the tables of a run out by another sharder.

    Returns changed graphs, and notes on what their times rest on. Raises ``PredictionError`` if
    there is no such sharder, a single rank, or no table that the ranks share out.
    """
    held = _find_tables(graphs)
    tables = [table for table, _ in held.owners]
    ways = assignments(tables, len(graphs))
    if sharder not in ways:
        raise PredictionError(f"sharding={sharder}: expected one of {', '.join(ways)}")
    now = [rank for _, rank in held.owners]
    if ways[sharder] == now:
        return tuple(graphs), ("the tables are shared out in this way",)
    factors = [_factors(held, rank, ways[sharder], machine) for rank in range(len(graphs))]
    stretch = _stretches(held, ways[sharder], len(graphs), curves)
    changed = tuple(
        map_kernels(graph, _retimed(held, held.ranks[number], factors[number], stretch))
        for number, graph in enumerate(graphs)
    )
    notes = [_origin(machine, curves)]
    if held.together:
        notes.append("tables of one launch are taken as alike")
    notes += _overfull(tables, ways[sharder], machine)
    return changed, tuple(notes)


def _find_tables(graphs: Sequence[ExecutionGraph]) -> _Held:
    """Find the lookups whose results are exchanged; a trace of several steps repeats them."""
    if len(graphs) < 2:
        raise PredictionError("sharding shares tables out among ranks; this run has one")
    lookups = [list(_launches(graph)) for graph in graphs]
    messages = _messages(graphs)
    for bags in sorted({launch.bags for launches in lookups for launch in launches}, reverse=True):
        chosen = [[one for one in launches if one.bags == bags] for launches in lookups]
        common = math.gcd(*map(len, chosen))
        for steps in (n for n in range(1, common + 1) if common % n == 0):
            ranks = tuple(tuple(each[: len(each) // steps]) for each in chosen)
            held = _Held(ranks, bags, _median_seconds(chosen), {}, {})
            exchanges = _exchanges(held, messages)
            if any(exchanged is _result for exchanged in exchanges.values()):
                _refuse_empty(graphs, held)
                backward = _backward_seconds(graphs, chosen, steps)
                return replace(held, backward=backward, exchanges=exchanges)
    raise PredictionError(
        "this run has no embedding tables that its ranks share out: no all-to-all passes on the "
        "results of embedding bags on every rank (traces need record_shapes=True)"
    )


def _median_seconds(ranks: Sequence[Sequence[_Launch]]) -> dict[EmbeddingTable, float]:
    """Median share of a table in the seconds of its launches; alike ones are one."""
    found: dict[EmbeddingTable, list[float]] = {}
    for launch in itertools.chain.from_iterable(ranks):
        for table in launch.tables:
            found.setdefault(table, []).append(launch.seconds / len(launch.tables))
    return {table: statistics.median(each) for table, each in found.items()}


def _backward_seconds(
    graphs: Sequence[ExecutionGraph], ranks: Sequence[Sequence[_Launch]], steps: int
) -> dict[EmbeddingTable, float]:
    """Median seconds of a table's gradient and update; empty where they are of several tables.

    Gradients come in the reverse order of the lookups, updates in their order.
    """
    by_table: dict[EmbeddingTable, list[float]] = {}
    for graph, launches in zip(graphs, ranks, strict=True):
        tables = [table for launch in launches for table in launch.tables]
        gradient, sizes = _gradients(launches), {float(table.bytes) for table in tables}
        ops = [op for op in graph.ops if gradient.search(op.name)]
        updates = [one for op in graph.ops for one in op.kernels if _is_update(op, one, sizes)]
        written = [one.call.written_bytes for one in updates if one.call is not None]
        if len(ops) != len(tables) or written != [float(table.bytes) for table in tables]:
            return {}
        own = len(tables) // steps
        for number, table in enumerate(tables):
            step, place = divmod(number, own)
            op = ops[(step + 1) * own - 1 - place]
            seconds = sum(kernel.seconds for kernel in op.kernels) + updates[number].seconds
            by_table.setdefault(table, []).append(seconds)
    return {table: statistics.median(each) for table, each in by_table.items()}


def _refuse_empty(graphs: Sequence[ExecutionGraph], held: _Held) -> None:
    for graph, launches in zip(graphs, held.ranks, strict=True):
        if not launches:
            raise PredictionError(
                f"sharding: rank {graph.rank} holds no tables, so that nothing tells what lookups "
                "take there"
            )


def _launches(graph: ExecutionGraph) -> Iterator[_Launch]:
    for op in graph.ops:
        for kernel in op.kernels:
            call = kernel.call
            if call is None or call.op != "embedding_bag":
                continue
            bags, count, rows, width = (call.size(name) for name in ("B", "T", "E", "D"))
            each = call.flops / (bags * count * width)  # the size L is rounded
            tables = (EmbeddingTable(f"{rows} x {width}", rows, width, each),) * count
            yield _Launch(tables, bags, call.name, kernel.seconds)


def _messages(graphs: Sequence[ExecutionGraph]) -> dict[_Key, list[float]]:
    """Bytes of each all-to-all on each rank."""
    found: dict[_Key, list[float]] = {}
    for part in (kernel.collective for graph in graphs for kernel in graph.kernels):
        if part is not None and part.kind == "all_to_all":
            found.setdefault((part.group, part.sequence), []).append(part.bytes)
    return {key: sizes for key, sizes in found.items() if len(sizes) == len(graphs)}


def _result(table: EmbeddingTable) -> float:
    return float(table.width * _BYTES)


def _exchanges(
    held: _Held, messages: dict[_Key, list[float]]
) -> dict[_Key, Callable[[EmbeddingTable], float]]:
    """Find what is exchanged: results, indices, or the lengths of bags; bytes of each bag."""
    kinds: list[Callable[[EmbeddingTable], float]] = [_result]
    for width in _INDEX_BYTES:
        kinds.append(lambda table, width=width: table.lookups * width)  # type: ignore[misc]
        kinds.append(lambda _, width=width: width)  # type: ignore[misc]
    ranks = [rank for _, rank in held.owners]
    by_key = {}
    for key, sizes in messages.items():
        for kind in kinds:
            wanted = _each_message(held, ranks, len(sizes), kind)
            if all(math.isclose(a, b, rel_tol=0.02) for a, b in zip(sizes, wanted, strict=True)):
                by_key[key] = kind
                break
    return by_key


def _each_message(
    held: _Held, ranks: Sequence[int], count: int, each: Callable[[EmbeddingTable], float]
) -> list[float]:
    """Largest bytes that each rank sends or gets: of its tables all bags, of all tables its own."""
    own = [0.0] * count
    for (table, _), rank in zip(held.owners, ranks, strict=True):
        own[rank] += held.bags * each(table)
    return [max(bytes_, sum(own) / count) for bytes_ in own]


def _stretches(
    held: _Held, ranks: Sequence[int], count: int, curves: Collectives | None
) -> dict[_Key, float]:
    """New over old time of each exchange, by its largest message."""
    before = [rank for _, rank in held.owners]
    stretches = {}
    for key, kind in held.exchanges.items():
        old, new = (max(_each_message(held, r, count, kind)) for r in (before, ranks))
        stretches[key] = max(new / old, 1.0)
        if curves is not None:
            times = [curves.predict("all_to_all", count, size).seconds for size in (old, new)]
            stretches[key] = times[1] / times[0]
    return stretches


def _factors(
    held: _Held, rank: int, ranks: Sequence[int], machine: Machine | None
) -> tuple[float, float]:
    """New over old time of a rank's lookups, and of their gradients."""
    before = [table for table, owner in held.owners if owner == rank]
    after = [table for (table, _), owner in zip(held.owners, ranks, strict=True) if owner == rank]
    if machine is None:
        forward, backward = (
            sum(each[table] for table in after) / sum(each[table] for table in before)
            for each in (held.seconds, held.backward or held.seconds)
        )
        return forward, backward
    together = held.together
    return tuple(  # type: ignore[return-value]
        _seconds(held.bags, after, together, machine, back)
        / _seconds(held.bags, before, together, machine, back)
        for back in (False, True)
    )


def _seconds(
    bags: int,
    owned: Sequence[EmbeddingTable],
    together: bool,
    machine: Machine,
    is_backward: bool,
) -> float:
    """Predicted lookups of some tables, in one launch or in one each."""
    tables = [table.batch_of(bags) for table in owned]
    launches = [tables] if together and tables else [[table] for table in tables]
    return sum(predict_lookups(one, machine, is_backward).seconds for one in launches)


def _retimed(
    held: _Held,
    launches: Sequence[_Launch],
    factors: tuple[float, float],
    stretch: dict[_Key, float],
) -> Callable[[Kernel, Op], Kernel]:
    """Change of a rank's kernels: lookups, gradients, updates of the tables, and exchanges."""
    gradient = _gradients(launches)
    sizes = {float(table.bytes) for launch in launches for table in launch.tables}

    def change(kernel: Kernel, op: Op) -> Kernel:
        part, call = kernel.collective, kernel.call
        if part is not None:
            return _stretched(kernel, part, stretch)
        if call is not None and call.op == "embedding_bag" and call.size("B") == held.bags:
            return replace(kernel, seconds=kernel.seconds * factors[0])
        if _is_update(op, kernel, sizes) or gradient.search(op.name):
            return replace(kernel, seconds=kernel.seconds * factors[1])
        return kernel

    return change


def _stretched(kernel: Kernel, part: Collective, stretch: dict[_Key, float]) -> Kernel:
    factor = stretch.get((part.group, part.sequence), 1.0)
    longer = replace(part, bytes=part.bytes * factor)
    return replace(kernel, seconds=kernel.seconds * factor, collective=longer)


def _is_update(op: Op, kernel: Kernel, sizes: Collection[float]) -> bool:
    """Whether a kernel updates a table of one of some sizes."""
    call = kernel.call
    return op.name == "aten::add_" and call is not None and call.written_bytes in sizes


def _gradients(launches: Sequence[_Launch]) -> re.Pattern[str]:
    """Regular expression of the operators that compute the gradients of some lookups."""
    return re.compile("|".join(sorted({_gradient(launch.op) for launch in launches})))


def _gradient(op: str) -> str:
    """Regular expression of the operator that computes the gradient of a lookup."""
    found = re.search(r"(\w+?)_embedding(?:_\w+?)?_lookup(?:_(\w+?))?_function", op)
    if found is None:
        return "EmbeddingBagBackward"
    optimizer = found[2] or found[1].capitalize()
    return f"SplitLookupFunction_{optimizer}_Op"


def _origin(machine: Machine | None, curves: Collectives | None) -> str:
    lookups = f"lookups by their model on {machine.name}" if machine else "lookups as measured"
    return f"{lookups}, exchanges {'as measured' if curves else 'in proportion to their bytes'}"


def _overfull(
    tables: Sequence[EmbeddingTable], ranks: Sequence[int], machine: Machine | None
) -> Iterator[str]:
    """Say which ranks cannot hold their tables."""
    capacity = machine.get("capacity.memory", math.inf) if machine else math.inf
    pairs = sorted(zip(ranks, (table.bytes for table in tables), strict=True))
    for rank, group in itertools.groupby(pairs, lambda pair: pair[0]):
        size = sum(bytes_ for _, bytes_ in group)
        if size > MEMORY_SHARE * capacity:
            yield f"{size / 1e9:.1f} GB of tables do not fit on rank {rank}"
