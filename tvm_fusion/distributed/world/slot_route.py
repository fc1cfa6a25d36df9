# SPDX-License-Identifier: Apache-2.0
"""Routes: exchanges all of whose messages go through slots, so that compiled code can make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedules.distribute.exchange import Exchange, Message, Region, intersection, region_size
from schedules.distribute.rows import exchange_table as table

from .parcel import ExchangeTexts
from .shared_slots import NodeSlots, Slot, SlotReceive, SlotSend


class SlotMessage(NamedTuple):
    """A message, its slot, whether this rank sends it, and its bytes."""

    message: Message
    slot: Slot
    is_sent: bool
    nbytes: int

    @property
    def peer(self) -> int:
        """The other rank."""
        return self.message.dest if self.is_sent else self.message.source


def slot_route(exchange: Exchange, rank: int, itemsize: int, slots: NodeSlots) -> SlotRoute | None:
    """How one rank takes part in an exchange; None if MPI or several pieces are in it.

    Parameters
    ----------
    exchange : Exchange
        One in turn.
    rank : int
        The rank.
    itemsize : int
        Bytes of an element.
    slots : NodeSlots
        Of its node.
    """
    found = []
    pieces = [(m, True) for m in exchange.sent_by(rank)]
    pieces += [(m, False) for m in exchange.received_by(rank)]
    for message, is_sent in pieces:
        nbytes = message.size * itemsize
        peer = message.dest if is_sent else message.source
        slot = (slots.outgoing if is_sent else slots.incoming)(exchange.slot, peer, nbytes)
        if slot is not None:
            found.append(SlotMessage(message, slot, is_sent, nbytes))
    different = {(each.peer, each.is_sent) for each in found}
    if not pieces or not len(pieces) == len(found) == len(different):
        return None
    return SlotRoute(exchange.id, found, itemsize)


class SlotRoute:
    """How one rank takes part in an exchange, for the kernel that makes it.

    Parameters
    ----------
    number : int
        Of the exchange.
    messages : Sequence[SlotMessage]
        One for each peer, those sent first.
    itemsize : int
        Bytes of an element.

    Attributes
    ----------
    texts : ExchangeTexts
        What the rank says in and after the exchange.
    """

    def __init__(self, number: int, messages: Sequence[SlotMessage], itemsize: int) -> None:
        self.texts = ExchangeTexts(number, [each.peer for each in messages])
        self._messages, self._itemsize = messages, itemsize
        self._texts = [np.frombuffer(t, np.uint8) for t in (self.texts.inside, self.texts.after)]
        self._row = np.zeros(table.HEADER, np.int64)

    def fill(self, row: np.ndarray, own: Region, held: Region, spins: int, record: int) -> None:
        """Write the row that the kernel reads, where it can make the exchange.

        Parameters
        ----------
        row : np.ndarray
            Of zeros.
        own, held : Region
            What lies in the tensors from which it sends and into which it receives; the same if
            they are one.
        spins : int
            Tests of a slot before Python waits for it.
        record : int
            Address of the text that tells what the rank does.
        """
        fields = [self._fields(each, own if each.is_sent else held) for each in self._messages]
        both, sends = intersection(own, held), sum(each.is_sent for each in self._messages)
        keeps = sends < len(fields) and own != held and region_size(both) > 0
        if keeps:
            to, by = (table.layout_in(both, window, self._itemsize) for window in (held, own))
            fields.append(table.copy_fields(both, to, by, self._itemsize))
        texts = [int(text.ctypes.data) for text in self._texts]
        counts = sends, len(self._messages) - sends, int(keeps)
        row[: table.HEADER] = [1, spins, record, *texts, *counts]
        slots = [(each.slot.address, each.nbytes) for each in self._messages]
        places = row[table.HEADER :].reshape(-1, table.FIELDS)
        for place, slot, copy in zip(places, [*slots, (0, 0)], fields, strict=False):
            if copy is None:
                row[:] = 0
                return
            place[:] = [*slot, *copy]
        self._row = row

    def awaited(self, number: int) -> list[tuple[SlotSend | SlotReceive, int]]:
        """Requests, and their peers, for which the kernel waits from a message on."""
        first, *others = self._messages[number:]
        waiting = [first] if first.is_sent else [first, *others]
        return [
            (
                SlotSend(each.slot, each.nbytes) if each.is_sent else SlotReceive(each.slot),
                each.peer,
            )
            for each in waiting
        ]

    def close(self) -> None:
        """Leave the exchange to Python, since the memory of the slots is gone."""
        self._row[table.QUICK] = 0

    def _fields(self, each: SlotMessage, window: Region) -> list[int] | None:
        """Fields of the copy into a slot, or out of it."""
        region, size = each.message.region, self._itemsize
        packed, lies = table.packed_layout(region, size), table.layout_in(region, window, size)
        target, source = (packed, lies) if each.is_sent else (lies, packed)
        return table.copy_fields(region, target, source, size)
