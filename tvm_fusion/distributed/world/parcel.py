# SPDX-License-Identifier: Apache-2.0
"""Parcels: all that one rank sends to another in an exchange, and how it travels.

One contiguous region travels from where it lies. One of long segments, too: a derived datatype of
MPI describes it. Short segments, and several regions, are copied into one piece (packed); in the
memory of a device a datatype describes all of them. Both sides choose for themselves, since the
bytes on the way are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from schedules.distribute.exchange import Exchange, LocalBuffer, Message

from ...errors import DistributedError
from .watch import slot_text

SHORT_SEGMENT = 4 * 1024
"""Bytes; a copy of shorter segments is faster than MPI's own walk over them.

Measured between two ranks of one node (MPICH 5.0), packed and as datatype: 64 segments of 2 KB in
40 and 43 us, of 4 KB 59 and 51, of 16 KB 146 and 104; several regions, 2 of 512 KB in 137 and 221.
"""


class Parcel:
    """Parts of this rank's windows that go to, or come from, one other rank.

    Parameters
    ----------
    peer : int
        The other rank.
    views : Sequence[np.ndarray]
        Regions of local windows, in the order of the messages; none is empty.
    on_device : bool
        Whether any of them lies in the memory of a device.

    Attributes
    ----------
    stage : np.ndarray | None
        The bytes to send or receive in one piece; None if a datatype describes the views.
    """

    def __init__(self, peer: int, views: Sequence[np.ndarray], on_device: bool = False) -> None:
        self.peer = peer
        self.views = list(views)
        self.nbytes = sum(view.nbytes for view in views)
        self.stage: np.ndarray | None = None
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        if len(views) == 1 and views[0].flags.c_contiguous:
            self.stage = as_bytes(views[0])
        elif not on_device and (len(views) > 1 or segment_bytes(views[0]) < SHORT_SEGMENT):
            self.stage = np.empty(self.nbytes, np.uint8)
            self._copies = list(zip(_pieces(self.stage, views), views, strict=True))

    def pack(self) -> None:
        """Copy the regions to send into one piece, where they travel so."""
        for staged, view in self._copies:
            np.copyto(staged, view)

    def unpack(self) -> None:
        """Copy what was received in one piece to its regions, where it travelled so."""
        for staged, view in self._copies:
            np.copyto(view, staged)


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


def _pieces(stage: np.ndarray, views: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Parts of the stage with the shapes and types of the views, one behind the other."""
    pieces, begin = [], 0
    for view in views:
        piece = stage[begin : begin + view.nbytes]
        pieces.append(np.ndarray(view.shape, view.dtype, piece.data))
        begin += view.nbytes
    assert begin == math.prod(stage.shape)
    return pieces


class PreparedExchange:
    """Parcels of an exchange, and MPI's persistent requests that move them again and again.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : mpi4py.MPI.Intracomm
        The ranks.
    exchange : Exchange
        The messages of all ranks.
    buffers : Mapping[str, LocalBuffer]
        This rank's windows of the buffers that they name.

    Attributes
    ----------
    incoming : list[tuple[Prequest, Parcel, Status]]
        What is received, one a peer.
    outgoing : list[tuple[Prequest, Parcel]]
        What is sent, one a peer.
    name : str
        For messages.
    inside, after : bytes
        What this rank does in and after the exchange, for the node's record.
    """

    def __init__(
        self, mpi: Any, comm: Any, exchange: Exchange, buffers: Mapping[str, LocalBuffer]
    ) -> None:
        self.exchange = exchange
        sent, received = exchange.sent_by(comm.rank), exchange.received_by(comm.rank)
        windows = {m.buffer: _buffer(exchange, buffers, m) for m in (*sent, *received)}
        self._windows = list(windows.items())
        outgoing = _parcels(sent, [m.dest for m in sent], buffers)
        incoming = _parcels(received, [m.source for m in received], buffers)
        self.name = f"in exchange {exchange.id}"
        peers = sorted({parcel.peer for parcel in (*incoming, *outgoing)})
        whom = f" with {name_ranks(peers)}" if peers else ""
        self.inside = slot_text(f"{self.name}{whom}")
        self.after = slot_text(f"after exchange {exchange.id}{whom}")
        self._types: list[Any] = []
        send, tag = comm.Ssend_init if exchange.synchronous else comm.Send_init, exchange.id
        self.incoming = [
            (comm.Recv_init(self._message(mpi, p), p.peer, tag), p, mpi.Status()) for p in incoming
        ]
        self.outgoing = [(send(self._message(mpi, p), p.peer, tag), p) for p in outgoing]

    @property
    def requests(self) -> list[tuple[Any, int]]:
        """All requests, each with its peer."""
        return [(request, parcel.peer) for request, parcel, *_ in (*self.incoming, *self.outgoing)]

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

    def _message(self, mpi: Any, parcel: Parcel) -> Any:
        """Argument of MPI's calls: bytes in one piece, or a datatype of a region."""
        if parcel.stage is not None:
            return [parcel.stage, mpi.BYTE]
        origin = parcel.views[0].ctypes.data
        datatypes = [_strided(mpi, view) for view in parcel.views]
        datatype = datatypes[0]
        if len(datatypes) > 1:
            offsets = [view.ctypes.data - origin for view in parcel.views]
            datatype = mpi.Datatype.Create_struct([1] * len(offsets), offsets, datatypes)
            for each in datatypes:
                each.Free()
        self._types.append(datatype.Commit())
        return [mpi.buffer.fromaddress(origin, 0), 1, datatype]


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
    messages: Sequence[Message], peers: Sequence[int], buffers: Mapping[str, LocalBuffer]
) -> list[Parcel]:
    """One parcel for each peer, of its messages in their order."""
    views: dict[int, list[np.ndarray]] = {}
    for message, peer in zip(messages, peers, strict=True):
        views.setdefault(peer, []).append(buffers[message.buffer].view(message.region))
    on_device = any(buffers[message.buffer].on_device for message in messages)
    return [Parcel(peer, found, on_device) for peer, found in views.items()]


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
