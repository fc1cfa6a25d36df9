# SPDX-License-Identifier: Apache-2.0
"""Table of a network's exchanges, which compiled code reads: one row of int64 for each.

A row tells how one rank moves its messages through slots of shared memory, which only a session
knows. A row of zeros leaves the exchange to Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..exchange import Region

QUICK, SPINS, RECORD, INSIDE, AFTER, SENDS, RECEIVES, KEPT = range(8)
"""Fields of a row: whether compiled code may make the exchange, tests of a slot before Python waits
for it, addresses of the rank's text in its node's record and of what to write there in the exchange
and after it, messages that it sends and receives, and copies (0 or 1) of its own rows into those
that it needs. Then come the messages, those sent first, and the copy of its own rows."""
HEADER = 8

SLOT, BYTES, TARGET, SOURCE, OUTER, OUTER_TARGET, OUTER_SOURCE, INNER, INNER_TARGET = range(9)
INNER_SOURCE, LENGTH = 9, 10
"""Fields of a message: address of its slot and bytes in all. It is copied in pieces of ``LENGTH``
bytes by two loops; an offset and two steps for the target, and as many for the source."""
FIELDS = 11

SLOT_HEADER = 128  # bytes before the data
SLOT_TAKEN = 64  # bytes from a slot's count of what was sent to that of what was taken
SLOT_SIZE = 8
TEXT_BYTES = 255  # Length of the text that a rank writes into its node's record.


def table_width(ranks: int) -> int:
    """Numbers in a row."""
    return HEADER + FIELDS * (2 * (ranks - 1) + 1)


@dataclass(frozen=True)
class Layout:
    """A region in memory."""

    offset: int  # Bytes before its first element.
    steps: tuple[int, ...]  # Bytes from one index of each axis to the next.


def layout_in(region: Region, window: Region, itemsize: int) -> Layout:
    """Layout of a region within a C-contiguous window."""
    steps = _steps([end - begin for begin, end in window], itemsize)
    firsts = (begin - first for (begin, _), (first, _) in zip(region, window, strict=True))
    return Layout(sum(n * step for n, step in zip(firsts, steps, strict=True)), steps)


def packed_layout(region: Region, itemsize: int) -> Layout:
    """Layout of a region by itself, behind the header of a slot."""
    return Layout(0, _steps([end - begin for begin, end in region], itemsize))


def copy_fields(region: Region, target: Layout, source: Layout, itemsize: int) -> list[int] | None:
    """The fields of a copy from ``TARGET`` on; None if it takes more than two loops."""
    loops: list[tuple[int, int, int]] = [(itemsize, 1, 1)]  # bytes that are one piece on both sides
    axes = [(end - begin) for begin, end in region]
    for extent, to, by in reversed(list(zip(axes, target.steps, source.steps, strict=True))):
        inner, inner_to, inner_by = loops[-1]
        if extent == 1:
            continue
        if to == inner * inner_to and by == inner * inner_by:
            loops[-1] = inner * extent, inner_to, inner_by
        else:
            loops.append((extent, to, by))
    if len(loops) > 3:
        return None
    (length, *_), inner_loop, outer_loop = (*loops, (1, 0, 0), (1, 0, 0))[:3]
    return [target.offset, source.offset, *outer_loop, *inner_loop, length]


def _steps(extents: Sequence[int], itemsize: int) -> tuple[int, ...]:
    steps = [itemsize]
    for extent in reversed(extents[1:]):
        steps.append(steps[-1] * extent)
    return tuple(reversed(steps))
