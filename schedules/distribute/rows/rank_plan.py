# SPDX-License-Identifier: Apache-2.0
"""Plan of a network over ranks, as a saved model holds it: functions, rows, exchanges, predictions.

Read from JSON it is checked: every number is one, and every rank has its entry. Files of format 7
know rows only, programs up to format 8 no exchange in place, and those up to 9 no kernels for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from ..exchange import Region
from .row_plan import transfers

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
    """For each input of the model the rows that the function takes; None where it takes none."""
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
        """What a rank has computed."""
        return self._region(1 if self.by_channels else 2, self.own[rank])

    def held_region(self, rank: int) -> Region:
        """What a rank needs."""
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
    exchanges: tuple[RowExchange, ...]  # In the order in which all ranks make them.
    segments: tuple[Segment, ...]  # For reports.
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

    Raises
    ------
    ValueError, TypeError, KeyError
        If something is missing, of another type, or does not fit the rest.
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
