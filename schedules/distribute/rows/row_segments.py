# SPDX-License-Identifier: Apache-2.0
"""Segments of a network over ranks, from one exchange to the next, with rows, bytes and times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .rank_plan import Segment
from .row_cost import RowCost
from .row_plan import ROOT, NetworkStage, RowPlacement, Rows


def segments(
    stages: Sequence[NetworkStage], placement: RowPlacement, cost: RowCost
) -> tuple[Segment, ...]:
    """Describe a placement.

    Parameters
    ----------
    stages, placement, cost
        A network, its rows on every rank, and predicted times.
    """
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
    own, held = placement.computed[end], placement.held[end]
    is_exchanged = end in placement.exchanged
    sent = placement.transfers(end) if is_exchanged else np.zeros((0, 4), np.int64)
    by_channels = end in placement.by_channels
    rows = sent[:, 3] - sent[:, 2]
    received = rows if by_channels else np.bincount(sent[:, 1], rows, len(own))
    inside = slice(begin, end + 1)
    return Segment(
        first=stages[begin].name,
        last=stages[end].name,
        stages=end + 1 - begin,
        rows=tuple((int(low), int(high)) for low, high in own),
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
