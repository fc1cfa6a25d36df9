# SPDX-License-Identifier: Apache-2.0
"""Predicted times of a network over ranks, and the choice of the stages that are exchanged.

A stage takes the longer of its arithmetic and the traffic of its images on the slowest rank
(roofline), and the time to read its weights, which splitting its rows does not shorten; an exchange
``messages * latency + bytes / bandwidth`` (postal model), the copy of what the rank has itself and
no convolution wrote, and a constant. Fewer exchanges recompute more rows; after the last one the
first rank is alone. A rank that computes channels reads their weights only, and all rows of the
image.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...errors import OpError
from ..cost import CALL_SECONDS, Network, Processor
from .row_plan import (
    ROOT,
    Needs,
    NetworkStage,
    RowPlacement,
    Rows,
    Segment,
    key_of,
    place,
    rows_needed,
)

CHOICES = ("auto", "always", "once")
KERNEL_SECONDS, PYTHON_SECONDS = 1e-5, 3e-5
"""Time of an exchange on a rank beside its messages and copies, made by a kernel or by Python;
measured on Zen 4."""

_ROUNDS = 3
_MOST_KEPT = 16  # placements, which are large where there are many ranks


@dataclass(frozen=True)
class RowCost:
    """Predicted times, in seconds for each rank: float64 [stages, ranks]."""

    compute: np.ndarray  # Seconds of each stage.
    exchange: np.ndarray  # Seconds of the exchange after it; 0 where there is none.

    @property
    def seconds(self) -> float:
        """Seconds of a run: ranks wait for the slowest one at every stage."""
        return float(self.compute.max(axis=1).sum() + self.exchange.max(axis=1).sum())


def row_cost(
    # ``stages``, ``placement``: a network, and its rows on every rank.
    stages: Sequence[NetworkStage],
    placement: RowPlacement,
    # ``network``, ``processor``: what connects the ranks, and what each of them computes with.
    network: Network,
    processor: Processor,
) -> RowCost:
    """Predict the times of a placement."""
    ranks = len(placement.computed[0])
    compute, exchange = np.zeros((2, len(stages), ranks))
    for index in range(len(stages)):
        compute[index] = _compute_seconds(stages, index, placement, processor)
    for index in placement.exchanged:
        exchange[index] = _exchange_seconds(stages, index, placement, network, processor)
    return RowCost(compute, exchange)


def choose_exchanges(
    stages: Sequence[NetworkStage],
    ranks: int,  # Number of ranks.
    # ``network``, ``processor``: figures of the predictions.
    network: Network,
    processor: Processor,
    # ``auto`` searches for the least predicted time: all exchanges up to some stage, then each of
    # them by itself, for each number of rows whether shares are cut between tiles of Winograd's
    # algorithm, and which stages are split by channels. ``always`` exchanges whatever is read with
    # a halo, ``once`` only the last such stage, both without splitting channels.
    choice: str = "auto",
) -> RowPlacement:
    """Choose the stages that are exchanged.

    Raises ``OpError`` if the choice is another one, there is no rank, or no stage can be split.
    """
    if choice not in CHOICES:
        raise OpError(f"exchange is {choice!r}; expected {', '.join(map(repr, CHOICES))}")
    if ranks < 1:
        raise OpError(f"a model is distributed over {ranks} ranks; expected at least 1")
    candidates = _candidates(stages)
    if not candidates:
        raise OpError(_nothing_to_split(stages))
    if choice == "always":
        return _without_silent(stages, ranks, candidates)
    if choice == "once":
        return _without_silent(stages, ranks, candidates[-1:])

    search = _Search(stages, ranks, network, processor)
    seconds = search.seconds
    nothing: frozenset[int] = frozenset()
    prefixes = [frozenset(candidates[:count]) for count in range(len(candidates) + 1)]
    lasts = [frozenset([candidate]) for candidate in candidates]
    best = min([(exchanged, nothing, nothing) for exchanged in (*prefixes, *lasts)], key=seconds)
    levels = {stage.rows for stage in stages if stage.is_split and stage.grain > 1}
    for _ in range(_ROUNDS):
        before = best
        for rows in sorted(levels):
            best = min(best, (best[0], best[1] ^ {rows}, best[2]), key=seconds)
        for candidate in reversed(candidates):
            best = min(best, (best[0] ^ {candidate}, *best[1:]), key=seconds)
        for index in reversed(range(len(stages))):
            if index in best[2] or search.gains_by_channels(index, best):
                best = min(best, _toggle_channels(stages, index, best, candidates), key=seconds)
        if best == before:
            break
    return _without_silent(stages, ranks, *best)


_Choice = tuple[frozenset[int], frozenset[int], frozenset[int]]
"""Stages that are exchanged, numbers of rows whose shares are aligned, and stages of which channels
are computed."""


class _Search:
    """Predicted times of choices, most of whose stages are placed as in others before."""

    def __init__(
        self,
        stages: Sequence[NetworkStage],
        ranks: int,
        network: Network,
        processor: Processor,
    ) -> None:
        self._stages, self._ranks = stages, ranks
        self._network, self._processor = network, processor
        self._needs: Needs = {}
        self._placements: dict[_Choice, RowPlacement] = {}
        self._seconds: dict[_Choice, float] = {}
        self._parts: dict[tuple[int, bool, bool, bytes], float] = {}

    def seconds(self, choice: _Choice) -> float:
        """Predicted time of a run."""
        if choice not in self._seconds:
            placement = self._place(choice)
            stages = range(len(self._stages))
            found = sum(self._part(placement, stage, False) for stage in stages)
            found += sum(self._part(placement, stage, True) for stage in placement.exchanged)
            self._seconds[choice] = found
        return self._seconds[choice]

    def gains_by_channels(self, index: int, choice: _Choice) -> bool:
        """True if a stage by itself takes less time split by channels than as it is placed."""
        if self._stages[index].blocks < 2:
            return False
        exchanged, aligned, by_channels = choice
        channels = self._place((exchanged, aligned, by_channels | {index}))
        return self._part(channels, index, False) < self._part(self._place(choice), index, False)

    def _place(self, choice: _Choice) -> RowPlacement:
        if choice not in self._placements:
            if len(self._placements) >= _MOST_KEPT:
                self._placements.clear()
            placement = place(self._stages, self._ranks, *choice, known=self._needs)
            self._placements[choice] = placement
        return self._placements[choice]

    def _part(self, placement: RowPlacement, index: int, is_exchange: bool) -> float:
        """Time of a stage, or of the exchange after it, on the slowest rank."""
        rows = [placement.computed[index], *([placement.held[index]] if is_exchange else [])]
        key = index, index in placement.by_channels, is_exchange, key_of(*rows)
        if key not in self._parts:
            every = self._stages, index, placement
            if is_exchange:
                seconds = _exchange_seconds(*every, self._network, self._processor)
            else:
                seconds = _compute_seconds(*every, self._processor)
            self._parts[key] = float(seconds.max())
        return self._parts[key]


def _toggle_channels(
    stages: Sequence[NetworkStage], index: int, choice: _Choice, candidates: Sequence[int]
) -> _Choice:
    """Split a stage by channels or no longer; by channels, what it reads is exchanged."""
    exchanged, aligned, by_channels = choice
    if index not in by_channels:
        read = {operand.stage for operand in stages[index].operands if operand.maps != ()}
        exchanged |= read.intersection(candidates)
    return exchanged, aligned, by_channels ^ {index}


def _without_silent(
    stages: Sequence[NetworkStage],
    ranks: int,
    exchanged: Iterable[int],
    aligned: frozenset[int] = frozenset(),
    by_channels: frozenset[int] = frozenset(),
) -> RowPlacement:
    """A placement without those exchanges in which no rank needs anything of another."""
    exchanged = frozenset(exchanged) - by_channels
    while True:
        placement = place(stages, ranks, exchanged, aligned, by_channels)
        heard = [index for index in placement.exchanged if len(placement.transfers(index))]
        if exchanged <= set(heard):
            return replace(placement, exchanged=tuple(heard))
        exchanged &= set(heard)


def _candidates(stages: Sequence[NetworkStage]) -> list[int]:
    """Stages split since the inputs that are read with a halo, a stride, or as a whole.

    Those made in tiles, too: where an exchange cuts between tiles, no tile is computed twice.
    """
    split: set[int] = set()
    for index, stage in enumerate(stages):
        mapped = [operand for operand in stage.operands if operand.maps is not None]
        followed = [operand.stage in split for operand in mapped]
        if (stage.is_input and stage.rows > 1) or (stage.is_split and followed and all(followed)):
            split.add(index)
    read = {
        operand.stage for stage in stages for operand in stage.operands if operand.maps != ()
    } | {len(stages) - 1}
    read |= {index for index, stage in enumerate(stages) if stage.grain > 1}
    return sorted(index for index in split & read if not stages[index].is_input)


def _nothing_to_split(stages: Sequence[NetworkStage]) -> str:
    """Reason why no stage can be distributed: the first that needs all rows."""
    first = next(stage for stage in stages if not stage.is_input)
    return (
        f"the model cannot be distributed: {first.name!r} ({first.op}) needs all rows of its "
        "operands; expected images [N, C, H, W] that convolutions, pooling or element-wise "
        "operators read first"
    )


def _compute_seconds(
    stages: Sequence[NetworkStage], index: int, placement: RowPlacement, processor: Processor
) -> np.ndarray:
    if index in placement.by_channels:
        return _channel_seconds(stages, index, placement, processor)
    rows = placement.computed[index]
    if stages[index].is_input:
        return np.zeros(len(rows))
    return _stage_seconds(stages, stages[index], rows, processor)


def _stage_seconds(
    stages: Sequence[NetworkStage], stage: NetworkStage, rows: Rows, processor: Processor
) -> np.ndarray:
    count = rows[:, 1] - rows[:, 0]
    size = count * float(stage.row_bytes)
    for operand in stage.operands:
        source = stages[operand.stage]
        needed = rows_needed(source, operand, rows)
        size += (needed[:, 1] - needed[:, 0]) * float(source.row_bytes)
    in_tiles = np.minimum(-(-count // stage.grain) * stage.grain, stage.rows)
    seconds = np.maximum(in_tiles * stage.flops / processor.rate, size / processor.bandwidth)
    fixed = stage.fixed_bytes / processor.read_bandwidth
    return np.where(count > 0, seconds + fixed + CALL_SECONDS, 0.0)


def _channel_seconds(
    stages: Sequence[NetworkStage], index: int, placement: RowPlacement, processor: Processor
) -> np.ndarray:
    stage, count = stages[index], placement.blocks(stages, index)
    share = count / stage.blocks
    size = share * (stage.rows * float(stage.row_bytes))
    for operand in stage.operands:
        source = stages[operand.stage]
        size += (share if operand.maps == () else 1.0) * (source.rows * float(source.row_bytes))
    operations = share * (stage.rows * stage.flops)
    seconds = np.maximum(operations / processor.rate, size / processor.bandwidth)
    fixed = share * stage.fixed_bytes / processor.read_bandwidth
    return np.where(count > 0, seconds + fixed + CALL_SECONDS, 0.0)


def _exchange_seconds(
    stages: Sequence[NetworkStage],
    index: int,
    placement: RowPlacement,
    network: Network,
    processor: Processor,
) -> np.ndarray:
    stage, held, computed = stages[index], placement.held[index], placement.computed[index]
    ranks = len(held)
    source, dest, _, _ = placement.transfers(index).T
    sizes = placement.sent_bytes(stages, index).astype(float)
    messages, size = (
        np.maximum(np.bincount(source, weights, ranks), np.bincount(dest, weights, ranks))
        for weights in (np.ones(len(sizes)), sizes)
    )
    if index in placement.by_channels:
        kept = (held[:, 1] - held[:, 0]) * (placement.blocks(stages, index) / stage.blocks)
    else:
        kept = np.minimum(held[:, 1], computed[:, 1]) - np.maximum(held[:, 0], computed[:, 0])
    is_copied = (size > 0) & (stage.flops == 0)  # convolutions write where the rest arrives
    copied = np.where(is_copied, 2.0 * stage.row_bytes * np.maximum(kept, 0), 0.0)
    calls = np.where(messages > 0, KERNEL_SECONDS if network.is_shared else PYTHON_SECONDS, 0.0)
    sent = messages * network.latency + size / network.bandwidth
    return calls + sent + copied / processor.bandwidth


def segments(
    # ``stages``, ``placement``, ``cost``: a network, its rows on every rank, and predicted times.
    stages: Sequence[NetworkStage],
    placement: RowPlacement,
    cost: RowCost,
) -> tuple[Segment, ...]:
    """Describe a placement."""
    begin = next(index for index, stage in enumerate(stages) if not stage.is_input)
    found = []
    for end in (*placement.exchanged, len(stages) - 1):
        if begin <= end:
            found.append(_segment(stages, placement, cost, begin, end))
        begin = end + 1
    return tuple(found)


def _segment(
    stages: Sequence[NetworkStage], placement: RowPlacement, cost: RowCost, begin: int, end: int
) -> Segment:
    computed, held = placement.computed[end], placement.held[end]
    is_exchanged = end in placement.exchanged
    sent = placement.transfers(end) if is_exchanged else np.zeros((0, 4), np.int64)
    by_channels = end in placement.by_channels
    rows = sent[:, 3] - sent[:, 2]
    received = rows if by_channels else np.bincount(sent[:, 1], rows, len(computed))
    inside = slice(begin, end + 1)
    return Segment(
        first=stages[begin].name,
        last=stages[end].name,
        stages=end + 1 - begin,
        rows=tuple((int(low), int(high)) for low, high in computed),
        recomputed=_recomputed(stages, placement, range(begin, end + 1)),
        end=_kind(held) if is_exchanged else "result",
        halo=int(received.max(initial=0)),
        messages=len(sent),
        bytes=int(placement.sent_bytes(stages, end).sum()) if is_exchanged else 0,
        compute=float(cost.compute[inside].max(axis=1).sum()),
        exchange=float(cost.exchange[end].max()),
        split="channels" if by_channels else "rows",
    )


def _kind(held: Rows) -> str:
    needs = held[:, 0] < held[:, 1]
    needs[ROOT] = False
    return "exchange" if needs.any() else "gather"


def _recomputed(
    stages: Sequence[NetworkStage], placement: RowPlacement, indices: Iterable[int]
) -> float:
    """Share of operations beyond those for each row once."""
    done = once = 0.0
    for index in indices:
        stage, rows = stages[index], placement.computed[index]
        counts = rows[:, 1] - rows[:, 0]
        if index in placement.by_channels:
            done += stage.rows * stage.flops
            once += stage.rows * stage.flops
        elif counts.any():
            done += float(counts.sum()) * stage.flops
            busy = rows[counts > 0]
            once += float(_covered(busy)) * stage.flops
    return done / once - 1 if once else 0.0


def _covered(rows: Rows) -> int:
    """Rows in the union of ranges that ascend."""
    reached = np.maximum.accumulate(rows[:, 1])
    begin = np.maximum(rows[1:, 0], reached[:-1])
    return int(rows[0, 1] - rows[0, 0] + np.maximum(rows[1:, 1] - begin, 0).sum())
