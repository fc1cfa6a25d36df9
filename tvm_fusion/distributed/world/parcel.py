# SPDX-License-Identifier: Apache-2.0
"""Parcels: all that one rank sends to another in an exchange, by one of the routes of packing.

Whether there is a slot both sides must choose alike: from what messages tell of both of them, and a
buffer is on devices on all ranks, or on none. Without one each chooses for itself, from what it
sees of its own regions, since the bytes on the way are the same. In the memory of a device nothing
is packed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from schedules.distribute.exchange import (
    Exchange,
    LocalBuffer,
    Message,
    Region,
    intersection,
    region_size,
)
from schedules.distribute.rows import exchange_table as table
from tvm_fusion.errors import DistributedError

from .packing import Packing, ParcelShape, Route, by_constants
from .shared_slots import NodeSlots, Slot, SlotReceive, SlotSend
from .watch import slot_text

_Copy: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Target and source."""

SlotOf: TypeAlias = Callable[[int, int], Slot | None]
"""The slot for a peer and a number of bytes."""


def _no_slot(peer: int, nbytes: int) -> None:
    """Leave it to MPI."""


class Parcel:
    """Parts of this rank's windows that go to, or come from, one other rank.

    Attributes
    ----------
    stage : np.ndarray | None
        The bytes to send or receive in one piece; None if a datatype describes the views.
    slot : Slot | None
        The slot of shared memory in which that piece lies.
    """

    def __init__(
        self,
        peer: int,  # The other rank.
        # Regions of local windows, in the order of the messages; none is empty.
        views: Sequence[np.ndarray],
        slot_of: SlotOf = _no_slot,
        # Whether any of them lies in the memory of a device, where only MPI can read it.
        on_device: bool = False,
        packing: Packing = by_constants,  # How it travels without a slot.
    ) -> None:
        self.peer = peer
        self.views = list(views)
        self.nbytes = sum(view.nbytes for view in views)
        self.slot = None if on_device else slot_of(peer, self.nbytes)
        self.stage: np.ndarray | None = None
        self._copies: list[_Copy] = []
        self._streams: list[Callable[[], None]] = []
        if self.slot is not None:
            self.stage = self.slot.data[: self.nbytes]
            self._copies = _copies(self.stage, views)
        elif len(views) == 1 and views[0].flags.c_contiguous:
            self.stage = as_bytes(views[0])
        elif not on_device and _is_packed(packing, self.nbytes, views):
            self.stage = np.empty(self.nbytes, np.uint8)
            self._copies = _copies(self.stage, views)

    def stream(self) -> None:
        """Let :meth:`pack` write the slot past the caches, where that is faster.

        For one to send: it is not unpacked. Without TVM's compiler, which is not imported for this
        alone, its slot is written as before.
        """
        if self.slot is None or "tvm" not in sys.modules:
            return
        from schedules.distribute import streamed_copy as streamed

        if streamed.LEAST_BYTES <= self.nbytes <= streamed.MOST_BYTES:
            target = int(self.slot.data.ctypes.data)
            copy, unit = streamed.streamed_copy(), streamed.UNIT
            self._copies, self._streams = _streamed(self.views, copy, target, unit)

    def pack(self) -> None:
        """Copy the regions to send into one piece, where they travel so."""
        for staged, view in self._copies:
            np.copyto(staged, view)
        for stream in self._streams:
            stream()

    def unpack(self) -> None:
        """Copy what was received in one piece to its regions, where it travelled so."""
        for staged, view in self._copies:
            np.copyto(view, staged)
        if self.slot is not None:
            self.slot.take()


def _slot_first(routes: Sequence[Route]) -> Sequence[Route]:
    return "slot", *(route for route in routes if route != "slot")


def _is_packed(packing: Packing, nbytes: int, views: Sequence[np.ndarray]) -> bool:
    """Return whether views are copied into one piece, where there is no slot."""
    routes = packing(ParcelShape(nbytes, min(map(segment_bytes, views)), len(views)))
    return next(route for route in routes if route != "slot") == "packed"


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous array, as a view."""
    return array.reshape(-1).view(np.uint8)


def segment_bytes(view: np.ndarray) -> int:
    """Bytes of the contiguous pieces that a view of a C-contiguous array consists of."""
    segment = view.itemsize
    for extent, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if extent > 1 and stride != segment:
            break
        segment *= extent
    return segment


def _streamed(
    views: Sequence[np.ndarray], copy: Callable[..., None], target: int, unit: int
) -> tuple[list[_Copy], list[Callable[[], None]]]:
    """Copies, and calls that then stream pieces to an address, one behind the other.

    If any are no whole units, all are copied into one piece before.
    """
    copies: list[_Copy] = []
    pieces = [_pieces(view, unit) for view in views]
    if not all(pieces):
        nbytes = sum(view.nbytes for view in views)
        stage = np.empty(-(-nbytes // unit) * unit, np.uint8)
        copies, views, pieces = _copies(stage[:nbytes], views), [stage], [(stage.nbytes, 1, 0)]
    streams: list[Callable[[], None]] = []
    for view, each in zip(views, pieces, strict=True):
        streams.append(partial(copy, target, int(view.ctypes.data), *each))
        target += view.nbytes
    return copies, streams


def _pieces(view: np.ndarray, unit: int) -> tuple[int, ...]:
    """Bytes of a view's pieces, their number and stride; empty if they are no units, or in rows."""
    pieces = _segments(view)
    apart = [axis for axis, extent in enumerate(pieces.shape) if extent > 1]
    if pieces.itemsize % unit or len(apart) > 1:
        return ()
    [stride] = [pieces.strides[axis] for axis in apart] or [0]
    return pieces.itemsize, pieces.size, stride


def _copies(stage: np.ndarray, views: Sequence[np.ndarray]) -> list[_Copy]:
    """Parts of the stage, one behind the other, each with the view that it holds."""
    pairs, begin = [], 0
    for view in map(_segments, views):
        piece = stage[begin : begin + view.nbytes]
        pairs.append((np.ndarray(view.shape, view.dtype, piece.data), view))
        begin += view.nbytes
    assert begin == math.prod(stage.shape)
    return pairs


def _segments(view: np.ndarray) -> np.ndarray:
    """A view whose elements are contiguous segments: numpy copies each as one, in half the time."""
    length, shape = segment_bytes(view), list(view.shape)
    if length == view.itemsize:
        return view
    items, merged = length // view.itemsize, 1
    while merged < items:
        merged *= shape.pop()
    return view.reshape(*shape, items).view(f"V{length}")


class ExchangeTexts:
    """Texts by which a rank describes an exchange.

    Attributes
    ----------
    name : str
        Name in messages.
    inside, after : bytes
        What the rank does in and after the exchange, for the node's record.
    """

    def __init__(
        self,
        number: int,  # Number of the exchange.
        peers: Iterable[int],  # The ranks with which it exchanges.
    ) -> None:
        several = sorted(set(peers))
        whom = f" with {name_ranks(several)}" if several else ""
        self.name = f"in exchange {number}"
        self.inside = slot_text(f"{self.name}{whom}")
        self.after = slot_text(f"after exchange {number}{whom}")


class PreparedExchange:
    """Parcels of an exchange, and MPI's persistent requests that move them again and again.

    Attributes
    ----------
    incoming : list[tuple[Prequest | SlotReceive, Parcel, Status | SlotReceive]]
        What is received, one a peer.
    outgoing : list[tuple[Prequest | SlotSend, Parcel]]
        What is sent, one a peer.
    name : str
        Name in messages.
    inside, after : bytes
        Texts as in :class:`ExchangeTexts`.
    """

    def __init__(
        self,
        mpi: Any,  # ``mpi4py.MPI``.
        comm: Any,
        exchange: Exchange,  # The messages of all ranks.
        buffers: Mapping[str, LocalBuffer],  # This rank's windows of the buffers that they name.
        slots: NodeSlots | None = None,  # The slots of this rank's node.
        packing: Packing = by_constants,  # How parcels travel.
    ) -> None:
        self.exchange = exchange
        sent, received = exchange.sent_by(comm.rank), exchange.received_by(comm.rank)
        windows = {m.buffer: _buffer(exchange, buffers, m) for m in (*sent, *received)}
        self._windows = list(windows.items())
        if exchange.synchronous:  # ends when its receives have begun, which a slot does not tell
            slots = None
        # The kernel of the other rank takes the slot, if there is one.
        chosen = (lambda shape: _slot_first(packing(shape))) if exchange.in_turn else packing
        send_slot = partial(slots.outgoing, exchange.slot) if slots else _no_slot
        receive_slot = partial(slots.incoming, exchange.slot) if slots else _no_slot
        outgoing = _parcels(sent, [m.dest for m in sent], buffers, send_slot, chosen)
        incoming = _parcels(received, [m.source for m in received], buffers, receive_slot, chosen)
        texts = ExchangeTexts(exchange.id, (parcel.peer for parcel in (*incoming, *outgoing)))
        self.name, self.inside, self.after = texts.name, texts.inside, texts.after
        self._types: list[Any] = []
        self._mpi, self._comm = mpi, comm
        self.incoming = [self._receive(parcel) for parcel in incoming]
        self.outgoing = [(self._send(parcel), parcel) for parcel in outgoing]

    @property
    def requests(self) -> list[tuple[Any, int]]:
        """All requests, each with its peer."""
        return [(request, parcel.peer) for request, parcel, *_ in (*self.incoming, *self.outgoing)]

    @property
    def awaited(self) -> list[tuple[Any, int]]:
        """The requests that the end of the exchange waits for, each with its peer."""
        sends = [(request, parcel.peer) for request, parcel in self.outgoing if self.awaits(parcel)]
        return [*((request, parcel.peer) for request, parcel, _ in self.incoming), *sends]

    def awaits(self, parcel: Parcel) -> bool:
        """Return whether the end of the exchange waits until a parcel has been sent.

        Its views may be written as soon as it lies in a slot.
        """
        return parcel.slot is None

    def fits(self, exchange: Exchange, buffers: Mapping[str, LocalBuffer]) -> bool:
        """Return whether these are the parcels of an exchange between given buffers."""
        if exchange is not self.exchange and exchange != self.exchange:
            return False
        for name, window in self._windows:
            given = buffers.get(name)
            if given is not window and not _same(given, window):
                return False
        return True

    def free(self) -> None:
        """Release what MPI holds; no message is on its way."""
        for held in (*(request for request, _ in self.requests), *self._types):
            held.Free()

    def _receive(self, parcel: Parcel) -> tuple[Any, Parcel, Any]:
        """Request, parcel and status of what is received."""
        if parcel.slot is not None:
            through = SlotReceive(parcel.slot)
            return through, parcel, through
        request = self._comm.Recv_init(self._message(parcel), parcel.peer, self.exchange.id)
        return request, parcel, self._mpi.Status()

    def _send(self, parcel: Parcel) -> Any:
        """Request of what is sent."""
        if parcel.slot is not None:
            parcel.stream()
            return SlotSend(parcel.slot, parcel.nbytes)
        send = self._comm.Ssend_init if self.exchange.synchronous else self._comm.Send_init
        return send(self._message(parcel), parcel.peer, self.exchange.id)

    def _message(self, parcel: Parcel) -> Any:
        """Argument of MPI's calls: bytes in one piece, or a datatype of a region."""
        if parcel.stage is not None:
            return [parcel.stage, self._mpi.BYTE]
        origin = parcel.views[0].ctypes.data
        datatypes = [_strided(self._mpi, view) for view in parcel.views]
        datatype = datatypes[0]
        if len(datatypes) > 1:
            offsets = [view.ctypes.data - origin for view in parcel.views]
            datatype = self._mpi.Datatype.Create_struct([1] * len(offsets), offsets, datatypes)
            for each in datatypes:
                each.Free()
        self._types.append(datatype.Commit())
        return [self._mpi.buffer.fromaddress(origin, 0), 1, datatype]


def _same(given: LocalBuffer | None, window: LocalBuffer) -> bool:
    return given is not None and given.array is window.array and given.first == window.first


def _buffer(
    exchange: Exchange, buffers: Mapping[str, LocalBuffer], message: Message
) -> LocalBuffer:
    if message.buffer not in buffers:
        raise DistributedError(
            f"exchange {exchange.id} moves buffer {message.buffer!r} between ranks "
            f"{message.source} and {message.dest}; expected it among {sorted(buffers)}"
        )
    return buffers[message.buffer]


def _parcels(
    messages: Sequence[Message],
    peers: Sequence[int],
    buffers: Mapping[str, LocalBuffer],
    slot_of: SlotOf,
    packing: Packing,
) -> list[Parcel]:
    """One parcel for each peer, of its messages in their order."""
    by_peer: dict[int, list[Message]] = {}
    for message, peer in zip(messages, peers, strict=True):
        by_peer.setdefault(peer, []).append(message)
    parcels = []
    for peer, mine in by_peer.items():
        views = [buffers[message.buffer].view(message.region) for message in mine]
        on_device = any(buffers[message.buffer].on_device for message in mine)
        wanted = slot_of if packing(_shape_on_both(mine, views))[0] == "slot" else _no_slot
        parcels.append(Parcel(peer, views, wanted, on_device, packing))
    return parcels


def _shape_on_both(messages: Sequence[Message], views: Sequence[np.ndarray]) -> ParcelShape:
    """Shape of a parcel as both of its ranks know it."""
    segments = [
        max(message.segment, *message.shape[-1:]) * view.itemsize
        for message, view in zip(messages, views, strict=True)
    ]
    return ParcelShape(sum(view.nbytes for view in views), min(segments), len(views))


def _strided(mpi: Any, view: np.ndarray) -> Any:
    """The datatype of a view's bytes, from its address; of whole segments, MPI's fast path."""
    length = segment_bytes(view)
    axes = list(zip(view.shape, view.strides, strict=True))
    while axes and axes[-1][1] < length:
        axes.pop()
    blocks, stride = axes.pop() if axes else (1, length)
    datatype = mpi.BYTE.Create_hvector(blocks, length, stride)
    for extent, stride in reversed(axes):
        wider = datatype.Create_hvector(extent, 1, stride)
        datatype.Free()
        datatype = wider
    return datatype


def name_ranks(ranks: Sequence[int]) -> str:
    """The ranks in words, of many the first."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


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


def slot_route(
    exchange: Exchange,  # One in turn.
    rank: int,
    itemsize: int,  # Bytes of an element.
    slots: NodeSlots,
) -> SlotRoute | None:
    """Part of one rank in an exchange; None if MPI or several pieces are in it."""
    messages = []
    pieces = [(m, True) for m in exchange.sent_by(rank)]
    pieces += [(m, False) for m in exchange.received_by(rank)]
    for message, is_sent in pieces:
        nbytes = message.size * itemsize
        peer = message.dest if is_sent else message.source
        slot = (slots.outgoing if is_sent else slots.incoming)(exchange.slot, peer, nbytes)
        if slot is not None:
            messages.append(SlotMessage(message, slot, is_sent, nbytes))
    different = {(each.peer, each.is_sent) for each in messages}
    if not pieces or not len(pieces) == len(messages) == len(different):
        return None
    return SlotRoute(exchange.id, messages, itemsize)


class SlotRoute:
    """Part of one rank in an exchange, for the kernel that makes it.

    Attributes
    ----------
    texts : ExchangeTexts
        Texts of the exchange.
    """

    def __init__(
        self,
        number: int,  # Number of the exchange.
        messages: Sequence[SlotMessage],  # One for each peer, those sent first.
        itemsize: int,  # Bytes of an element.
    ) -> None:
        self.texts = ExchangeTexts(number, [each.peer for each in messages])
        self._messages, self._itemsize = messages, itemsize
        self._texts = [np.frombuffer(t, np.uint8) for t in (self.texts.inside, self.texts.after)]
        self._row = np.zeros(table.HEADER, np.int64)

    def fill(
        self,
        row: np.ndarray,  # All zeros.
        # ``own``, ``held``: what lies in the tensors from which it sends and into which it
        # receives; the same if they are one.
        own: Region,
        held: Region,
        spins: int,  # Tests of a slot before Python waits for it.
        record: int,  # Address of the text that tells what the rank does.
    ) -> None:
        """Write the row that the kernel reads, where it can make the exchange."""
        fields = [
            self._fields(message, own if message.is_sent else held) for message in self._messages
        ]
        both, sends = intersection(own, held), sum(message.is_sent for message in self._messages)
        keeps = sends < len(fields) and own != held and region_size(both) > 0
        if keeps:
            to, by = (table.layout_in(both, window, self._itemsize) for window in (held, own))
            fields.append(table.copy_fields(both, to, by, self._itemsize))
        texts = [int(text.ctypes.data) for text in self._texts]
        counts = sends, len(self._messages) - sends, int(keeps)
        row[: table.HEADER] = [1, spins, record, *texts, *counts]
        slots = [(message.slot.address, message.nbytes) for message in self._messages]
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
