# SPDX-License-Identifier: Apache-2.0
"""Rows of a network's activations over ranks, and the plan of them that a saved model holds.

A network is a list of stages, each of which makes rows of one tensor from rows of others. The first
rank returns the results. From there each stage is asked for the rows that its readers need; where
a stage is exchanged, each rank computes an equal share of its rows instead, and what it needs and
has not computed arrives by messages. So everything between two exchanges recomputes the rows that
it needs beyond its share, and an exchange before stages that only the first rank runs is a gather.

Of a convolution ranks can compute channels instead of rows: all rows of them, with their share of
the weights. It reads all rows of its image, and its result is exchanged.

A plan that is read from JSON is checked: every number is one, and every rank has its entry. Files
of format 7 know rows only, programs up to format 8 no exchange in place, and those up to 9 no
kernels for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from schedules.errors import OpError

from ..exchange import Region

Rows: TypeAlias = np.ndarray
"""Begin and end of a range of rows on each rank: int64 [ranks, 2]; (0, 0) where there is none."""

ROOT = 0
"""The rank that returns the results."""


class RowMap(Protocol):
    """Rows of an operand that rows of a result need; monotonous in both arguments."""

    def read(self, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and past the last row read for result rows from ``begin`` to ``end``."""


@dataclass(frozen=True)
class RowWindow:
    """Rows that a convolution or a pooling reads."""

    extent: int  # Rows of the operand, without padding.
    stride: int  # Rows between two windows.
    reach: int  # Rows of a window, ``(kernel - 1) * dilation + 1``.
    top: int  # Rows of padding before the first row; fewer than ``reach``.

    def read(self, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows that lie in the operand."""
        low, high = self.padded(begin, end)
        return np.maximum(low, 0), np.minimum(high, self.extent)

    def padded(self, begin: Any, end: Any) -> tuple[Any, Any]:
        """The rows with those of the padding; of arrays or numbers."""
        return begin * self.stride - self.top, (end - 1) * self.stride - self.top + self.reach


@dataclass(frozen=True)
class Enlargement:
    """Rows that an enlargement by a whole factor reads."""

    extent: int  # Rows of the operand.
    factor: int  # Result rows of each of them.
    halo: int  # Rows read before and after.

    def read(self, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows that lie in the operand."""
        low, high = begin // self.factor - self.halo, -(-end // self.factor) + self.halo
        return np.maximum(low, 0), np.minimum(high, self.extent)


@dataclass(frozen=True)
class StageOperand:
    """A stage that another one reads."""

    stage: int  # Its place in the list.
    maps: tuple[RowMap, ...] | None
    """Maps from the reader's rows to the stage's, applied one after the other. Empty where it reads
    the rows that it makes, None where it reads all rows."""


@dataclass(frozen=True)
class NetworkStage:
    """One operation of a network, or one of its inputs."""

    name: str  # Name of its result.
    op: str  # What it computes; ``input`` if nothing.
    rows: int  # Rows of the result; 1 where it has none.
    row_bytes: int  # Bytes of a row.
    operands: tuple[StageOperand, ...] = ()  # Earlier stages.
    flops: float = 0.0  # Operations for a row.
    fixed_bytes: int = 0  # Bytes read whatever the rows, such as weights.
    grain: int = 1
    """Rows come in multiples of so many, but for the last ones, since they are rounded together:
    those of a tile of Winograd's algorithm, or all rows of an operation that cannot be split."""
    blocks: int = 1  # Equal blocks of channels that can be computed apart; 1 where they cannot.

    @property
    def is_input(self) -> bool:
        """True if nothing computes it."""
        return self.op == "input"

    @property
    def is_split(self) -> bool:
        """True if some of its rows can be computed without the others."""
        return self.grain < self.rows


@dataclass(frozen=True)
class RowPlacement:
    """Rows of every stage on every rank."""

    exchanged: tuple[int, ...]  # The stages that are exchanged, ascending.
    computed: tuple[Rows, ...]
    """Rows of each stage that the ranks compute; of inputs, those that they read; of stages in
    ``by_channels``, blocks of channels of all rows."""
    held: tuple[Rows, ...]
    """The rows that they need, which arrive by messages where they are not computed."""
    by_channels: frozenset[int] = frozenset()
    """Stages of which ranks compute channels. One that reads another element by element has the
    same channels there."""

    def transfers(self, stage: int) -> np.ndarray:
        """Messages after an exchanged stage, as :func:`transfers` gives them."""
        return transfers(self.computed[stage], self.held[stage], stage in self.by_channels)

    def sent_bytes(self, stages: Sequence[NetworkStage], stage: int) -> np.ndarray:
        """Bytes of those messages."""
        source, _, begin, end = self.transfers(stage).T
        size = (end - begin) * stages[stage].row_bytes
        return size * self.blocks(stages, stage)[source] // stages[stage].blocks

    def blocks(self, stages: Sequence[NetworkStage], stage: int) -> np.ndarray:
        """Blocks of channels that each rank computes of the rows of a stage."""
        begin, end = self.computed[stage].T
        whole = np.full(len(begin), stages[stage].blocks)
        return end - begin if stage in self.by_channels else whole


def place(
    # Stages in an order in which they can be computed; the last is the result.
    stages: Sequence[NetworkStage],
    ranks: int,  # Number of ranks.
    exchanged: Iterable[int],  # Stages, split ones, of which each rank computes an equal share.
    # Numbers of rows; shares of stages of so many rows have the greatest grain of those.
    aligned: Collection[int] = (),
    # Stages of which each rank computes an equal share of channels.
    by_channels: Collection[int] = (),
    # What stages need, of other placements of the same network; it is added to.
    known: Needs | None = None,
) -> RowPlacement:
    """Give every rank its rows of every stage."""
    known = {} if known is None else known
    shared = frozenset(exchanged)
    grains = {
        rows: max(stage.grain for stage in stages if stage.rows == rows and stage.is_split)
        for rows in aligned
    }
    held = [np.zeros((ranks, 2), np.int64) for _ in stages]
    computed: list[Rows] = [rows for rows in held]
    held[-1][ROOT] = 0, stages[-1].rows
    for index in reversed(range(len(stages))):
        stage = stages[index]
        if index in by_channels:
            rows = _shares(stage.blocks, 1, ranks)
        elif index in shared:
            rows = _shares(stage.rows, grains.get(stage.rows, stage.grain), ranks)
        else:
            rows = _whole_grains(stage, held[index])
        computed[index] = rows
        key = index, index in by_channels, key_of(rows)
        if key not in known:
            known[key] = [_needed(stages, operand, rows, key[1]) for operand in stage.operands]
        for operand, needed in zip(stage.operands, known[key], strict=True):
            if key[1] and operand.maps == () and operand.stage in by_channels:
                continue
            before = held[operand.stage]
            held[operand.stage] = _hulls(before, needed) if before.any() else needed
    exchanged = tuple(sorted(shared.union(by_channels)))
    return RowPlacement(exchanged, tuple(computed), tuple(held), frozenset(by_channels))


Needs: TypeAlias = dict[tuple[int, bool, bytes], list[Rows]]
"""Rows of the operands that stages need, for rows, or all rows of channels, that ranks compute."""

_LONG = 1024  # bytes


def key_of(*rows: Rows) -> bytes:
    """Key for some rows, of which there may be many."""
    text = b"".join(each.tobytes() for each in rows)
    return text if len(text) < _LONG else hashlib.sha256(text).digest()


def _needed(
    stages: Sequence[NetworkStage], operand: StageOperand, rows: Rows, by_channels: bool
) -> Rows:
    read = StageOperand(operand.stage, None) if by_channels else operand
    return rows_needed(stages[operand.stage], read, rows)


def rows_needed(source: NetworkStage, operand: StageOperand, rows: Rows) -> Rows:
    """Rows of an operand that the ranks need for rows of its reader."""
    begin, end = rows[:, 0], rows[:, 1]
    busy = begin < end
    if operand.maps is None:
        begin, end = np.zeros_like(begin), np.full_like(end, source.rows)
    else:
        for one in operand.maps:
            begin, end = one.read(begin, end)
    return np.where(busy[:, None], np.stack([begin, end], axis=1), 0)


def transfers(
    own: Rows,  # Rows that the ranks have: together all of them, ascending and disjoint.
    held: Rows,  # Rows that they need.
    by_channels: bool = False,  # ``own`` are channels, of all rows.
) -> np.ndarray:
    """Messages after which every rank holds its rows.

    Returns source, destination, first and past the last row of each message: int64 [messages, 4].
    """
    if by_channels:
        has, needs = (np.flatnonzero(rows[:, 0] < rows[:, 1]) for rows in (own, held))
        source, dest = np.tile(has, len(needs)), np.repeat(needs, len(has))
        return np.column_stack([source, dest, held[dest]])[source != dest]
    owners = np.flatnonzero(own[:, 0] < own[:, 1])
    first = np.searchsorted(own[owners, 1], held[:, 0], side="right")
    last = np.searchsorted(own[owners, 0], held[:, 1], side="left")
    counts = np.where(held[:, 0] < held[:, 1], last - first, 0)
    dest = np.repeat(np.arange(len(held)), counts)
    place_in_row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    source = owners[np.repeat(first, counts) + place_in_row]
    begin = np.maximum(own[source, 0], held[dest, 0])
    end = np.minimum(own[source, 1], held[dest, 1])
    return np.stack([source, dest, begin, end], axis=1)[source != dest]


def _shares(extent: int, grain: int, ranks: int) -> Rows:
    """Equal shares of rows, in whole grains."""
    bounds = np.arange(ranks + 1) * -(-extent // grain) // ranks * grain
    rows = np.minimum(np.stack([bounds[:-1], bounds[1:]], axis=1), extent)
    return np.where((rows[:, 0] < rows[:, 1])[:, None], rows, 0)


def _whole_grains(stage: NetworkStage, rows: Rows) -> Rows:
    begin, end = rows[:, 0], rows[:, 1]
    low = begin // stage.grain * stage.grain
    high = np.minimum(-(-end // stage.grain) * stage.grain, stage.rows)
    return np.where((begin < end)[:, None], np.stack([low, high], axis=1), 0)


def _hulls(a: Rows, b: Rows) -> Rows:
    """The least ranges that hold both, rank by rank."""
    both = np.stack([np.minimum(a[:, 0], b[:, 0]), np.maximum(a[:, 1], b[:, 1])], axis=1)
    is_a, is_b = (a[:, 0] < a[:, 1])[:, None], (b[:, 0] < b[:, 1])[:, None]
    return np.where(is_a & is_b, both, np.where(is_a, a, b))


_ANY_HEIGHT = ("mean", "sum", "max", "min", "nn.adaptive_avg_pool2d", "result", "Tuple", "Var")


def heighten(
    stages: Sequence[NetworkStage],
    factor: int,  # Factor, at least 1.
) -> list[NetworkStage]:
    """The network for images of ``factor`` times the height.

    Raises ``OpError`` if an operation takes images of one height only, such as a fully connected
    layer.
    """
    heightened: list[NetworkStage] = []
    for stage in stages:
        if stage.is_input:
            heightened.append(replace(stage, rows=stage.rows * factor if stage.rows > 1 else 1))
            continue
        rows, read = stage.rows, []
        is_whole = all(operand.maps is None for operand in stage.operands)
        for operand in stage.operands:
            before, source = stages[operand.stage], heightened[operand.stage]
            if operand.maps is None:
                _check(stage, before, source)
                read.append(operand)
                if is_whole and stage.rows == before.rows > 1:
                    rows = source.rows  # a result that is all of another stage
            else:
                maps, rows = _heighten(operand.maps, before.rows, source.rows, stage.rows)
                read.append(StageOperand(operand.stage, maps))
        grain = rows if is_whole else stage.grain
        heightened.append(replace(stage, rows=rows, operands=tuple(read), grain=grain))
    return heightened


def _check(stage: NetworkStage, before: NetworkStage, after: NetworkStage) -> None:
    if before.rows != after.rows and stage.op not in _ANY_HEIGHT:
        raise OpError(
            f"weak scaling needs a network for images of any height: {stage.name!r} ({stage.op}) "
            f"reads {before.rows} rows and no more"
        )


def _heighten(
    maps: Sequence[RowMap], before: int, after: int, result: int
) -> tuple[tuple[RowMap, ...], int]:
    """Maps for an operand of ``after`` instead of ``before`` rows, and the rows of the result."""
    heightened: list[RowMap] = []
    for index in reversed(range(len(maps))):
        window = maps[index]
        made = result if index == 0 else maps[index - 1].extent  # type: ignore[attr-defined]
        if isinstance(window, RowWindow):
            bottom = (made - 1) * window.stride + window.reach - window.top - before
            heightened.append(replace(window, extent=after))
            before, after = made, (after + window.top + bottom - window.reach) // window.stride + 1
        else:
            assert isinstance(window, Enlargement)
            heightened.append(replace(window, extent=after))
            before, after = made, after * window.factor
    return tuple(reversed(heightened)), after


EXCHANGE = "tvm_fusion.exchange_rows"
"""The packed function of an exchange: its number, the rank's own rows if it has some, the result of
the exchange before it, and as its result the rows that it needs, or a byte: if it needs none, or if
its own rows lie in a tensor of all that it needs, which then receives the others. What
kernels leave to Python, they call with the number and the addresses of own and of needed rows."""

EXCHANGE_WAIT = "tvm_fusion.exchange_wait"
"""The packed function that waits for a slot: number of the exchange, and place of a message among
those that the rank sends, then those that it receives."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Segment:
    """Stages between two exchanges, and the exchange after them."""

    first: str
    last: str
    """``first`` and ``last``: names of the first and last stage."""
    stages: int  # Their number.
    rows: tuple[tuple[int, int], ...]
    """Rows of the last stage that each rank computes, or blocks of its channels; (0, 0) where it
    computes none."""
    recomputed: float
    """Operations that more than one rank does, as a share of those of one rank alone."""
    end: str  # ``exchange`` of rows with neighbours, ``gather`` on the first rank, or ``result``.
    halo: int  # Most rows that a rank receives.
    messages: int
    bytes: int
    """``messages`` and ``bytes``: what all ranks send in the exchange."""
    compute: float
    exchange: float
    """``compute`` and ``exchange``: predicted seconds, of the slowest rank."""
    split: str = "rows"  # ``rows`` or ``channels``: what ranks share of the last stage.


@dataclass(frozen=True)
class RankPart:
    """Program of one rank."""

    function: str  # Its function; empty if it has nothing to do.
    inputs: tuple[Range | None, ...]
    """Rows of each input of the model that the function takes; None where it takes none."""
    in_place: tuple[int, ...] = ()
    """Numbers of the exchanges for which its own rows lie in a tensor of all that it needs, where
    it exchanges by kernels."""


@dataclass(frozen=True)
class RowExchange:
    """Exchange of rows of one tensor."""

    name: str  # Name of the tensor.
    shape: tuple[int, ...]  # All of it; rows are axis 2, and a tensor without that axis has one.
    dtype: str  # Type of its elements.
    own: tuple[Range, ...]
    held: tuple[Range, ...]
    """``own`` and ``held``: rows that each rank has computed, and those that it needs; (0, 0) for
    none."""
    by_channels: bool = False  # ``own`` are indices of axis 1, with all rows.

    def transfers(self) -> np.ndarray:
        """Messages: source, destination, first and past the last row."""
        own, held = np.array(self.own, np.int64), np.array(self.held, np.int64)
        return transfers(own, held, self.by_channels)

    def own_region(self, rank: int) -> Region:
        """Region that a rank has computed."""
        return self._region(1 if self.by_channels else 2, self.own[rank])

    def held_region(self, rank: int) -> Region:
        """Region that a rank needs."""
        return self._region(2, self.held[rank])

    def _region(self, axis: int, indices: Range) -> Region:
        region = [(0, extent) for extent in self.shape]
        if axis < len(region):
            region[axis] = indices
        elif indices[0] == indices[1]:
            region[0] = indices
        return tuple(region)


@dataclass(frozen=True)
class RankPlan:
    """A network over ranks."""

    parts: tuple[RankPart, ...]  # One for each rank.
    exchanges: tuple[RowExchange, ...]  # Exchanges in the order in which all ranks make them.
    segments: tuple[Segment, ...]  # Segments for reports.
    constants: str = ""
    """Digest of the constants in the functions, so that ranks can compare their models."""
    takes_table: bool = False
    """Whether the functions exchange rows by kernels, whose table is the parameter after inputs."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.parts)

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions, each once."""
        return tuple(dict.fromkeys(part.function for part in self.parts if part.function))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def plan_from_json(data: Any) -> RankPlan:
    """Read what :meth:`RankPlan.to_json` wrote.

    Raises ``ValueError, TypeError, KeyError`` if something is missing, of another type, or does not
    fit the rest.
    """
    parts = tuple(
        RankPart(
            _typed(part["function"], str),
            tuple(None if rows is None else _range(rows) for rows in _typed(part["inputs"], list)),
            tuple(_typed(number, int) for number in _typed(part.get("in_place", []), list)),
        )
        for part in _typed(data["parts"], list)
    )
    exchanges = tuple(_exchange(one, len(parts)) for one in _typed(data["exchanges"], list))
    segments = tuple(_segment(one) for one in _typed(data["segments"], list))
    if not parts:
        raise ValueError("the plan has no ranks")
    takes_table = _typed(data.get("takes_table", False), bool)
    return RankPlan(parts, exchanges, segments, _typed(data["constants"], str), takes_table)


def _exchange(data: Any, ranks: int) -> RowExchange:
    own, held = (tuple(map(_range, _typed(data[name], list))) for name in ("own", "held"))
    shape = tuple(_typed(extent, int) for extent in _typed(data["shape"], list))
    if len(own) != ranks or len(held) != ranks or len(shape) < 2:
        raise ValueError("an exchange does not fit the ranks")
    by_channels = _typed(data.get("by_channels", False), bool)
    rows = shape[2] if len(shape) > 2 else 1
    shared = shape[1] if by_channels else rows
    if any(end > shared for _, end in own) or any(end > rows for _, end in held):
        raise ValueError("an exchange has rows or channels beyond those of its tensor")
    name, dtype = (_typed(data[key], str) for key in ("name", "dtype"))
    return RowExchange(name, shape, dtype, own, held, by_channels)


def _segment(data: Mapping[str, Any]) -> Segment:
    given = {"split": "rows", **data}
    values = {field.name: given[field.name] for field in fields(Segment)}
    kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int)}
    for field in fields(Segment):
        if str(field.type) in kinds:
            _typed(values[field.name], *kinds[str(field.type)])
    values["rows"] = tuple(map(_range, _typed(values["rows"], list)))
    return Segment(**values)


def _range(data: Any) -> Range:
    begin, end = (_typed(value, int) for value in _typed(data, list))
    if not 0 <= begin <= end:
        raise ValueError(f"{begin} to {end} is not a range of rows")
    return begin, end


def _typed(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise TypeError(f"{value!r:.50} is no {' or '.join(kind.__name__ for kind in types)}")
    return value
