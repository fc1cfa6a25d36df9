# SPDX-License-Identifier: Apache-2.0
"""Messages of an exchange: who sends which region of which buffer to whom, by arithmetic alone.

Each rank computes all messages from what every rank owns and needs, so that none has to be asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from ..errors import OpError

Region: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of each dimension, in indices of the whole buffer."""


def region_size(region: Region) -> int:
    """Number of elements of a region; 0 where an end is not above its begin."""
    return math.prod(max(0, end - begin) for begin, end in region)


def intersection(a: Region, b: Region) -> Region:
    """The region that two regions share; of size 0 if there is none."""
    return tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))


def difference(a: Region, b: Region) -> list[Region]:
    """Disjoint regions of what is in ``a`` and not in ``b``."""
    shared = intersection(a, b)
    if region_size(shared) == 0:
        return [a] if region_size(a) else []
    parts: list[Region] = []
    rest = list(a)
    for axis, ((begin, end), (low, high)) in enumerate(zip(a, shared, strict=True)):
        for part in ((begin, low), (high, end)):
            if part[0] < part[1]:
                parts.append((*rest[:axis], part, *rest[axis + 1 :]))
        rest[axis] = (low, high)
    return parts


def segment_size(region: Region, window: Region) -> int:
    """Number of elements of the contiguous pieces of a region of a C-contiguous window."""
    size = 1
    for axis, whole in zip(reversed(region), reversed(window), strict=True):
        size *= axis[1] - axis[0]
        if axis != whole:
            break
    return size


def hull(regions: Sequence[Region]) -> Region:
    """The least region that contains all of some regions, of which there is at least one."""
    return tuple(
        (min(begin for begin, _ in axis), max(end for _, end in axis))
        for axis in zip(*regions, strict=True)
    )


def union(regions: Sequence[Region]) -> list[Region]:
    """Disjoint regions of all elements of some regions, neighbours merged where that is a box."""
    merged: list[Region] = []
    for region in regions:
        _add(merged, region)
    disjoint: list[Region] = []
    for region in merged:
        rest = [region]
        for other in disjoint:
            rest = [part for piece in rest for part in difference(piece, other)]
        disjoint += rest
    return disjoint


def _add(merged: list[Region], region: Region) -> None:
    """Add a region to a list, merged with all those with which it makes a box."""
    if region_size(region) == 0:
        return
    for index, other in enumerate(merged):
        joint = _joint(other, region)
        if joint is not None:
            del merged[index]
            _add(merged, joint)
            return
    merged.append(region)


def _joint(a: Region, b: Region) -> Region | None:
    """The union of two regions if it is a region."""
    differing = [k for k, (p, q) in enumerate(zip(a, b, strict=True)) if p != q]
    both = hull([a, b])
    if both in (a, b):
        return both
    if len(differing) > 1:
        return None
    (low, high), (begin, end) = a[differing[0]], b[differing[0]]
    return both if begin <= high and low <= end else None


@dataclass(frozen=True)
class Message:
    """Region of a buffer that one rank sends to another."""

    source: int
    dest: int
    """``source`` and ``dest``: ranks."""
    buffer: str  # Name of the buffer.
    region: Region  # What is sent, in indices of the whole buffer; never empty.
    segment: int = field(default=1, compare=False)
    """Elements of the contiguous pieces of which it is known to consist on both ranks; those of the
    last axis always are."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the region."""
        return tuple(end - begin for begin, end in self.region)

    @property
    def size(self) -> int:
        """Number of elements."""
        return region_size(self.region)


@dataclass(frozen=True)
class Exchange:
    """Messages that all ranks start and finish together."""

    id: int  # Number of the exchange in its program, from 0; also the tag of its messages.
    messages: tuple[Message, ...]
    """Ordered by source, destination and buffer; the same on every rank. What one rank sends to
    another may be sent as one message, in this order."""
    synchronous: bool = False
    """Whether a send is complete only when its receive has begun (``MPI_Issend``)."""
    in_turn: bool = False
    """Whether each rank finishes an exchange of this program before it starts the next, so that
    they can share memory."""

    @property
    def slot(self) -> int:
        """Number of its slots of shared memory; two sets, below 0, serve exchanges in turn."""
        return -1 - self.id % 2 if self.in_turn else self.id

    def sent_by(self, rank: int) -> tuple[Message, ...]:
        """The messages that a rank sends."""
        return tuple(m for m in self.messages if m.source == rank)

    def received_by(self, rank: int) -> tuple[Message, ...]:
        """The messages that a rank receives."""
        return tuple(m for m in self.messages if m.dest == rank)

    def of_rank(self, rank: int) -> Exchange:
        """The same exchange with only the messages that a rank sends or receives."""
        mine = tuple(m for m in self.messages if rank in (m.source, m.dest))
        return replace(self, messages=mine)

    def bytes(self, itemsizes: Mapping[str, int]) -> int:
        """Bytes of all messages, given those of an element of each buffer."""
        return sum(m.size * itemsizes[m.buffer] for m in self.messages)


@dataclass(frozen=True)
class LocalBuffer:
    """A rank's window of a buffer."""

    array: np.ndarray
    """The window: what the rank owns, and room for what it receives; C-contiguous."""
    first: tuple[int, ...]  # Indices in the whole buffer of the window's first element.
    on_device: bool = False
    """Whether the array stands for memory of a device, whose elements cannot be touched here."""

    @property
    def region(self) -> Region:
        """The window, in indices of the whole buffer."""
        return tuple((b, b + n) for b, n in zip(self.first, self.array.shape, strict=True))

    def view(self, region: Region) -> np.ndarray:
        """The elements of a region in the window, as a view.

        Raises ``OpError`` if the region is not inside the window.
        """
        if region_size(region) == 0:
            return np.empty([max(0, e - b) for b, e in region], self.array.dtype)
        if any(
            begin < low or end > high
            for (begin, end), (low, high) in zip(region, self.region, strict=True)
        ):
            raise OpError(f"region {region} is not inside the local window {self.region}")
        ends = zip(region, self.first, strict=True)
        return self.array[tuple(slice(b - first, e - first) for (b, e), first in ends)]


def messages_of(
    buffer: str,  # Name of the buffer.
    # Disjoint regions for each rank; several where what a loop nest reads has gaps.
    needed: Sequence[Sequence[Region]],
    # A region for each rank; they may overlap (copies), and reach beyond what is needed.
    owned: Sequence[Region],
) -> tuple[Message, ...]:
    """Messages after which every rank holds what it needs of a buffer.

    Each element that a rank needs and does not own is sent to it exactly once, by an owner with a
    rank nearest to its own.

    They are ordered by source, destination and region. Raises ``OpError`` if a rank needs elements
    that no rank owns.
    """
    bounds = np.array(owned, dtype=np.int64).reshape(len(owned), -1, 2)
    found: list[Message] = []
    for rank, regions in enumerate(needed):
        missing = [part for region in regions for part in difference(region, owned[rank])]
        if missing:
            found += _from_owners(buffer, rank, missing, owned, bounds)
    return tuple(sorted(found, key=lambda m: (m.source, m.dest, m.region)))


def _from_owners(
    buffer: str,
    rank: int,
    missing: list[Region],
    owned: Sequence[Region],
    bounds: np.ndarray,
) -> list[Message]:
    """Messages to one rank for the regions that it lacks."""
    wanted = np.array(missing, dtype=np.int64)
    low = np.maximum(bounds[..., 0], wanted[..., 0].min(axis=0))
    high = np.minimum(bounds[..., 1], wanted[..., 1].max(axis=0))
    others = np.flatnonzero((low < high).all(axis=1))
    messages: list[Message] = []
    for other in sorted((int(q) for q in others if q != rank), key=lambda q: (abs(q - rank), q)):
        shared = [intersection(region, owned[other]) for region in missing]
        messages += [
            Message(other, rank, buffer, region) for region in shared if region_size(region)
        ]
        missing = [rest for region in missing for rest in difference(region, owned[other])]
    if missing:
        raise OpError(
            f"rank {rank} reads region {missing[0]} of buffer {buffer!r}, which no rank owns; "
            "let the parts of its owners cover it"
        )
    return messages


@dataclass(frozen=True)
class Gather:
    """Parts of a result, one of each rank, that all ranks get by one collective.

    Counted is a message from each rank to each other. MPI may make fewer of them by passing on
    several parts at once; each rank sends and receives as many bytes in any case.
    """

    buffer: str  # Name of the output.
    ranks: int  # Number of parts.
    elements: int  # Elements of a part.
    itemsize: int  # Bytes of an element.

    @property
    def part_bytes(self) -> int:
        """Bytes of a part."""
        return self.elements * self.itemsize

    @property
    def bytes_each(self) -> int:
        """Bytes that each rank sends, and receives."""
        return (self.ranks - 1) * self.part_bytes

    @property
    def messages(self) -> int:
        """Messages of all ranks."""
        return self.ranks * (self.ranks - 1)

    @property
    def bytes(self) -> int:
        """Bytes of all messages."""
        return self.ranks * self.bytes_each

    @property
    def rounds(self) -> int:
        """Messages that follow each other on a rank, where parts are passed on.

        The number of recursive doubling, and of Bruck's algorithm (Thakur, Rabenseifner and Gropp,
        Optimization of collective communication operations in MPICH, 2005, section 4.1).
        """
        return (self.ranks - 1).bit_length()
