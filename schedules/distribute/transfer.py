# SPDX-License-Identifier: Apache-2.0
"""Explicit transfers: what a user sends besides, or instead of, what is inferred."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from schedules.errors import OpError

from .exchange import Exchange, Message, Region, difference, intersection, region_size

FINISH = "tvm_fusion.exchange_finish"
"""Packed function that waits for the exchange whose number it is given."""


@dataclass(frozen=True)
class Mode:
    """Manner of a transfer."""

    synchronous: bool = False
    """Whether a send is complete only when its receive has begun (MPI's Ssend), else when the data
    may be overwritten (Send)."""
    blocking: bool = True
    """Whether both sides wait for it before they go on, else before the first block that reads it.
    """


@dataclass(frozen=True)
class Transfer:
    """Rows of an input or an output that one rank sends to another."""

    buffer: str  # Its name.
    rows: Region
    """Begin and end of its leading dimensions, in indices of the whole buffer; the others are sent
    whole."""
    source: int
    dest: int
    """``source`` and ``dest``: ranks."""
    mode: Mode = Mode()  # How.
    before: str | None = None  # Block before which both sides wait, if the transfer does not block.
    id: int = 0  # Number of its exchange, its place among all transfers.

    @property
    def exchange(self) -> Exchange:
        """The transfer as an exchange of one message."""
        message = Message(self.source, self.dest, self.buffer, self.rows)
        return Exchange(self.id, (message,), self.mode.synchronous)


def send_recv(
    buffer: str,
    rows: tuple[int, int] | Region,
    source: int,
    dest: int,
    mode: Mode = Mode(),  # noqa: B008
    before: str | None = None,
) -> Transfer:
    """Describe a transfer from one rank to another, for :func:`distribute`.

    Parameters
    ----------
    buffer : str
        Name of an input, which is sent before a run, or of an output, sent at its end.
    rows : tuple[int, int] or Region
        Begin and end of its first dimension, or of several leading ones.
    source, dest : int
        Ranks; the source must own the rows, or have received them by an earlier transfer. What
        the destination receives of an output lies in its window.
    mode : Mode
        Synchronous or not, blocking or not.
    before : str, optional
        Block of the function before whose loops source and destination wait for the transfer, of an
        input, if it does not block; by default they wait before the first block. No earlier block
        may read the input.

    Raises
    ------
    OpError
        If the rows are no ranges, or the mode is no :class:`Mode`.
    """
    if not isinstance(mode, Mode):
        raise OpError(f"mode of a transfer of {buffer!r} is {mode!r}; expected a Mode")
    try:
        leading: Any = rows if isinstance(rows[0], Iterable) else (rows,)
        region = tuple((operator.index(begin), operator.index(end)) for begin, end in leading)
    except (IndexError, TypeError, ValueError):
        raise OpError(
            f"rows of a transfer of {buffer!r} are {rows!r}; expected (begin, end), or one such "
            "pair for each of several leading dimensions"
        ) from None
    return Transfer(buffer, region, source, dest, mode, before)


@dataclass(frozen=True)
class Delivery:
    """Transfers with their numbers, their regions complete."""

    transfers: tuple[Transfer, ...]  # Transfers in order.

    def received(self, rank: int, buffer: str) -> list[Region]:
        """Regions of a buffer that a rank receives."""
        return [t.rows for t in self.transfers if (t.dest, t.buffer) == (rank, buffer)]


def check_transfers(transfers: Any) -> None:
    """Refuse what is no list of transfers.

    Raises ``OpError`` if it is none.
    """
    listed = isinstance(transfers, Iterable) and not isinstance(transfers, str)
    if not listed or not all(isinstance(each, Transfer) for each in transfers):
        raise OpError(f"transfers are {transfers!r:.80}; expected a list of what send_recv returns")


def deliver(
    transfers: Sequence[Transfer],  # Transfers in the order in which they happen.
    shapes: Mapping[str, tuple[int, ...]],  # Shapes of inputs and outputs.
    owned: Sequence[Mapping[str, Region]],  # What each rank owns of each.
) -> Delivery:
    """Check transfers and number them.

    Raises ``OpError`` if a rank, a buffer or a region does not exist, or if the source does not
    hold the region.
    """
    check_transfers(transfers)
    done = Delivery(())
    for number, transfer in enumerate(transfers):
        whole = _complete(transfer, shapes, len(owned))
        # What has not been waited for may not have come.
        here = Delivery(tuple(one for one in done.transfers if one.mode.blocking))
        held = [owned[whole.source][whole.buffer], *here.received(whole.source, whole.buffer)]
        rest = [whole.rows]
        for region in held:
            rest = [part for piece in rest for part in difference(piece, region)]
        if rest:
            raise OpError(
                f"{_name(whole)}: rank {whole.source} does not hold region {rest[0]}; send it from "
                "the rank that owns it, or to this rank first, by a blocking transfer"
            )
        done = Delivery((*done.transfers, replace(whole, id=number)))
    return done


def check_waits(
    delivery: Delivery,
    # What the blocks of each rank read of each input.
    read: Sequence[Mapping[str, Sequence[Region]]],
    # The blocks in order, each with the inputs that it reads.
    blocks: Sequence[tuple[str, Collection[str]]],
) -> None:
    """Refuse transfers that neither side waits for, or too late.

    Raises ``OpError`` if one does not block, and no block of the receiver, before which it could
    wait, reads it, or if the function has no block of the name before which it is to wait, or that
    block comes after one that reads it.
    """
    for transfer in delivery.transfers:
        if transfer.before is not None:
            _check_wait(transfer, blocks)
            continue
        wanted = read[transfer.dest].get(transfer.buffer, ())
        if not transfer.mode.blocking and not any(
            region_size(intersection(region, transfer.rows)) for region in wanted
        ):
            raise OpError(
                f"{_name(transfer)}: no block of rank {transfer.dest} reads it, so that none waits "
                "for it; make it blocking"
            )


def _check_wait(transfer: Transfer, blocks: Sequence[tuple[str, Collection[str]]]) -> None:
    """Refuse a block before which a transfer cannot be waited for."""
    names = [name for name, _ in blocks]
    what = f"{_name(transfer)} is to be waited for before block {transfer.before!r}"
    if transfer.mode.blocking:
        raise OpError(f"{what}, and blocks; make it Mode(blocking=False), or leave out before=")
    if transfer.before not in names:
        raise OpError(f"{what}, and there is none; the blocks are {', '.join(names)}")
    inputs = {buffer for _, read in blocks for buffer in read}
    if transfer.buffer not in inputs:
        raise OpError(f"{what}; outputs are sent at the end of a run: leave out before=")
    for name, read in blocks[: names.index(transfer.before)]:
        if transfer.buffer in read:
            raise OpError(f"{what}, which comes after block {name!r}, which reads it; name that")


def _complete(transfer: Transfer, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> Transfer:
    """Check a transfer's ends, and add the dimensions that are sent whole."""
    if transfer.buffer not in shapes:
        raise OpError(f"{_name(transfer)}: no such input or output; there are {', '.join(shapes)}")
    for rank in (transfer.source, transfer.dest):
        if not 0 <= rank < ranks:
            raise OpError(f"{_name(transfer)}: rank {rank} is not between 0 and {ranks - 1}")
    if transfer.source == transfer.dest:
        raise OpError(f"{_name(transfer)}: a rank needs no transfer to itself")
    shape = shapes[transfer.buffer]
    rows = (*transfer.rows, *((0, extent) for extent in shape[len(transfer.rows) :]))
    whole = tuple((0, extent) for extent in shape)
    if len(rows) != len(shape) or intersection(rows, whole) != rows or not region_size(rows):
        raise OpError(f"{_name(transfer)}: it has no such rows; its shape is {shape}")
    return replace(transfer, rows=rows)


def _name(transfer: Transfer) -> str:
    ends = ", ".join(f"{begin}:{end}" for begin, end in transfer.rows)
    return f"transfer of {transfer.buffer!r}[{ends}] from rank {transfer.source} to {transfer.dest}"
