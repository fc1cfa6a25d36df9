# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job: exchanges, collectives, and the session in which they happen, through MPI.

This is the only module that imports mpi4py, and it does so when a session begins. Every wait polls,
with a deadline: a rank that does not answer ends the job instead of hanging it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from schedules.distribute.exchange import Exchange, LocalBuffer, Region

from ...errors import DistributedError
from . import failure
from .numa_placement import Placement
from .packing import Packing, by_constants
from .parcel import PreparedExchange, SlotRoute, as_bytes, name_ranks, slot_route
from .shared_slots import NodeSlots
from .watch import NodeRecord, slot_text

_INSTALL = "{}; install both by: pip install 'tvm-fusion[mpi]', or mpi4py for the cluster's own MPI"
_KEPT = 16
"""Prepared forms of an exchange that are kept: TVM gives tensors up to seven places, in turns."""

_SPINS = 1000  # tests before the clock is read
_KERNEL_SPINS = 20_000  # tests by compiled code, in about a millisecond
_CROWDED_SPINS = 200  # where another rank may need the processor
_YIELD_SECONDS = 1e-3  # then a rank sleeps between tests: others may need its core
_SLEEP_SECONDS = 5e-5


class World:
    """The ranks of a job, seen from one of them.

    Collectives and exchanges are called by all ranks, in the same order.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : mpi4py.MPI.Intracomm
        Its ranks; used by this object alone.
    record : NodeRecord
        Record of this node.
    neighbours : Mapping[int, int]
        Ranks of this node, and their places in the record.
    timeout : float
        Seconds for which a rank waits for another.
    slots : NodeSlots, optional
        Memory that this node's ranks share.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    threads : int
        Threads for each kernel of this rank.
    placement : Placement | None
        Its place on the NUMA nodes of its machine, if the session gave it one.
    is_crowded : bool
        Whether other ranks of the node may need the processor of this one while it waits.
    packing : Packing
        How the parcels of exchanges that are prepared from now on travel; the same on all ranks.
    """

    placement: Placement | None = None
    is_crowded = True

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        record: NodeRecord,
        neighbours: Mapping[int, int],
        timeout: float,
        slots: NodeSlots | None = None,
    ) -> None:
        self.rank, self.size = int(comm.rank), int(comm.size)
        self.timeout, self.threads = timeout, 1
        self._mpi, self._comm = mpi, comm
        self._record, self._neighbours, self._slots = record, neighbours, slots
        self._byte = mpi.BYTE
        self._prepared: dict[int, list[PreparedExchange]] = {}
        self._running: dict[int, PreparedExchange] = {}
        self._routes: list[SlotRoute] = []
        self.packing: Packing = by_constants
        self.doing = "before its first exchange"

    @property
    def node_size(self) -> int:
        """Ranks of this node."""
        return len(self._neighbours)

    def start(self, exchange: Exchange, buffers: Mapping[str, LocalBuffer]) -> None:
        """Start to send and receive the messages of an exchange, without waiting for them.

        What is sent must not be written, and what is received not be read, before :meth:`finish`.
        A rank of this node may have to take a short message of the last exchange with this number
        first.

        Parameters
        ----------
        exchange : Exchange
            The same on all ranks.
        buffers : Mapping[str, LocalBuffer]
            This rank's windows of the buffers that the messages name.

        Raises
        ------
        DistributedError
            If the exchange has been started and not finished, a buffer is missing, a rank does not
            answer in time, or MPI fails.
        """
        if exchange.id in self._running:
            raise DistributedError(
                f"exchange {exchange.id} is started twice; call finish in between"
            )
        prepared = self._prepare(exchange, buffers)
        self._running[exchange.id] = prepared
        self._say(prepared.inside)
        try:
            for request, _, _ in prepared.incoming:
                request.Start()
            for request, parcel in prepared.outgoing:
                if parcel.slot is not None and not request.Test():
                    whom = [(request, parcel.peer)]
                    self._wait_for(request, None, whom, prepared.name, time.monotonic())
                parcel.pack()
                request.Start()
        except self._mpi.Exception as error:
            raise self._failed(prepared, error) from error

    def finish(self, exchange: Exchange) -> None:
        """Wait until all messages of an exchange have arrived, and been sent.

        Raises
        ------
        DistributedError
            If it was not started, a rank does not answer in time, or a message has another size
            than here.
        """
        prepared = self._running.pop(exchange.id, None)
        if prepared is None:
            raise DistributedError(f"exchange {exchange.id} is finished without a start")
        begin, byte = time.monotonic(), self._byte
        try:
            for done, (request, parcel, status) in enumerate(prepared.incoming):
                if not request.Test(status):
                    awaited = prepared.awaited[done:]
                    self._wait_for(request, status, awaited, prepared.name, begin)
                received = status.Get_count(byte)
                if received != parcel.nbytes:
                    raise DistributedError(
                        f"rank {parcel.peer} sent {received} bytes in exchange {exchange.id}, and "
                        f"rank {self.rank} expected {parcel.nbytes}"
                    )
                parcel.unpack()
            for request, parcel in prepared.outgoing:
                if prepared.awaits(parcel) and not request.Test():
                    rest = prepared.awaited[len(prepared.incoming) :]
                    self._wait_for(request, None, rest, prepared.name, begin)
        except self._mpi.Exception as error:
            raise self._failed(prepared, error) from error
        self._say(prepared.after)

    def forget(self, number: int) -> None:
        """Release what is kept of the exchanges of a number, all of which are finished."""
        for prepared in self._prepared.pop(number, ()):
            prepared.free()

    def route(
        self, exchange: Exchange, itemsize: int, row: np.ndarray, own: Region, held: Region
    ) -> SlotRoute | None:
        """Prepare an exchange of one array for the kernel that makes it, if all is on this node.

        Parameters
        ----------
        exchange : Exchange
            One in turn, the same on all ranks.
        itemsize : int
            Bytes of an element.
        row : np.ndarray
            Zeros, to be filled for the kernel until the end of the session.
        own, held : Region
            What lies in the tensors from which it sends and into which it receives.
        """
        if self._slots is None:
            return None
        route = slot_route(exchange, self.rank, itemsize, self._slots)
        if route is None:
            return None
        record = ctypes.addressof(ctypes.c_char.from_buffer(self._record.text))
        spins = _CROWDED_SPINS if self.is_crowded else _KERNEL_SPINS
        route.fill(row, own, held, spins, record)
        self._routes.append(route)
        return route

    def wait(self, route: SlotRoute, number: int) -> None:
        """Wait for the slot of a message of a route, for which its kernel has waited long.

        Raises
        ------
        DistributedError
            If the rank does not answer in time.
        """
        awaited = route.awaited(number)
        self._wait_for(awaited[0][0], None, awaited, route.texts.name, time.monotonic())

    def has_slots(self, nbytes: int) -> bool:
        """Return whether all ranks share memory for parcels of so many bytes."""
        if self._slots is None or len(self._neighbours) < self.size:
            return False
        return nbytes <= self._slots.most

    @property
    def takes_device_memory(self) -> bool:
        """True if messages may lie in the memory of a GPU, as MPICH and Open MPI tell; else True.

        Others are not asked: there is no call for it in MPI.
        """
        query = getattr(ctypes.CDLL(self._mpi.__file__), "MPIX_Query_cuda_support", None)
        return query is None or bool(query())

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._collective("in a barrier", self._comm.Ibarrier())

    def agree(self, text: str, of: str = "programs") -> None:
        """Compare a text, by its hash, on all ranks.

        Parameters
        ----------
        text : str
            What has to be the same everywhere.
        of : str
            What it describes, for the message.

        Raises
        ------
        DistributedError
            On all ranks, if any of them has another text.
        """
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
        digests = self.all_gather(digest)
        others = np.flatnonzero((digests != digests[0]).any(axis=1))
        if others.size:
            raise failure.DisagreementError(
                f"{name_ranks(others.tolist())} and rank 0 have different {of}: start the same "
                "program, of the same versions and with the same arguments, on all ranks; rank 0 "
                f"has {text[:200]!r}"
            )

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, of one shape and type, stacked in order of the ranks."""
        array = np.ascontiguousarray(array)
        gathered = np.empty((self.size, *array.shape), array.dtype)
        if array.nbytes:
            request = self._comm.Iallgather(as_bytes(array), as_bytes(gathered))
            self._collective("in a gather", request)
        return gathered

    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        """Slice ``rank`` of the arrays of all ranks, in their order; one slice is for each rank."""
        array = np.ascontiguousarray(array)
        received = np.empty_like(array)
        if array.nbytes:
            request = self._comm.Ialltoall(as_bytes(array), as_bytes(received))
            self._collective("in an exchange of slices", request)
        return received

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """The array of one rank; those of the others have the same shape and type."""
        array = np.array(array, order="C")
        if array.nbytes:
            self._collective("in a broadcast", self._comm.Ibcast(as_bytes(array), root))
        return array

    def all_reduce(self, array: np.ndarray, operator: str) -> np.ndarray:
        """Combine the elements of integer arrays of all ranks, wrapping around as numpy does.

        Parameters
        ----------
        array : np.ndarray
            Integers; of the same shape and type on all ranks.
        operator : str
            ``sum``, ``prod``, ``min``, ``max``, ``and`` or ``or``, the last two by bits.
        """
        array = np.ascontiguousarray(array)
        combine = {"and": "BAND", "or": "BOR"}.get(operator, operator.upper())
        if operator in ("sum", "prod"):  # Sums and products of signed integers must not overflow.
            array = array.view(f"u{array.dtype.itemsize}")
        result = np.empty_like(array)
        request = self._comm.Iallreduce(array, result, getattr(self._mpi, combine))
        self._collective("in a reduction", request)
        return result

    def wait_for_all(self) -> None:
        """Wait at the end of the session until all ranks are there; end the job if one is not."""
        try:
            self._collective("at the end of the session", self._comm.Ibarrier())
        except DistributedError as error:
            self.abort(error)

    def free(self) -> None:
        """Release what MPI holds for this object, which is of no use any more."""
        for route in self._routes:
            route.close()
        for prepared in itertools.chain.from_iterable(self._prepared.values()):
            prepared.free()
        self._prepared.clear()
        self._comm.Free()

    def abort(self, error: BaseException, code: int = 1) -> None:
        """Tell why, once a node, and end the job on all ranks; does not return."""
        failure.tell(self._record, self.rank, self.size, self.doing, error)
        self._comm.Abort(code or 1)
        os.kill(os.getpid(), 9)

    def _prepare(self, exchange: Exchange, buffers: Mapping[str, LocalBuffer]) -> PreparedExchange:
        """Parcels of an exchange; some are kept, since steps may swap arrays."""
        kept = self._prepared.setdefault(exchange.id, [])
        for number, prepared in enumerate(kept):
            if prepared.fits(exchange, buffers):
                kept.append(kept.pop(number))  # The next one is now the first.
                return prepared
        mine = self._mpi, self._comm, exchange, buffers, self._slots, self.packing
        kept.append(PreparedExchange(*mine))
        if len(kept) > _KEPT:
            kept.pop(0).free()
        return kept[-1]

    def _failed(self, prepared: PreparedExchange, error: Exception) -> DistributedError:
        """The error of an exchange in which MPI failed."""
        who = name_ranks(sorted({peer for _, peer in prepared.requests}))
        return DistributedError(f"MPI failed {prepared.name} with {who}: {error}")

    def _collective(self, name: str, request: Any) -> None:
        before = self.doing
        self._say(slot_text(f"{name}, {before}"))
        try:
            if not self._completes(request, None, time.monotonic()):
                raise DistributedError(self._late(self._absent(name), name))
        except self._mpi.Exception as error:
            raise DistributedError(f"MPI failed {name}: {error}") from error
        self._say(slot_text(before))

    def _wait_for(
        self,
        request: Any,
        status: Any,
        awaited: Sequence[tuple[Any, int]],
        name: str,
        begin: float,
    ) -> None:
        """Wait for a message of an exchange, or raise at the deadline and name whom it awaits."""
        if not self._completes(request, status, begin):
            late = sorted({peer for other, peer in awaited if not other.Test()})
            raise DistributedError(self._late(late, name))

    def _completes(self, request: Any, status: Any, begin: float) -> bool:
        """Test a request until it is complete; False at the deadline."""
        for _ in range(_SPINS):
            if request.Test(status):
                return True
        while not request.Test(status):
            self._comm.Iprobe()  # messages of MPI go on, also while a slot is awaited
            waited = time.monotonic() - begin
            if waited > self.timeout:
                return False
            if waited < _YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_SECONDS)
        return True

    def _absent(self, name: str) -> list[int]:
        """Ranks of this node that are not in a collective."""
        slots = {rank: slot for rank, slot in self._neighbours.items() if rank != self.rank}
        return [
            rank for rank, slot in slots.items() if not self._record.said(slot).startswith(name)
        ]

    def _late(self, late: Sequence[int], name: str) -> str:
        """Explain a deadline that is over: which ranks do not answer, and what they do."""
        slots = {rank: slot for rank, slot in self._neighbours.items() if rank != self.rank}
        told = [f"rank {r} is {self._record.said(slots[r])}" for r in late if r in slots]
        whom = name_ranks(late) if late else "ranks of other nodes"
        return (
            f"waited {self.timeout:g} s for {whom} {name}"
            + "".join(f"; {text}" for text in told[:3])
            + "; a longer timeout=... helps if they are only slow"
        )

    def _say(self, text: bytes) -> None:
        self._record.say(text)

    @property
    def doing(self) -> str:
        """The exchange in which, or after which, this rank is."""
        return bytes(self._record.text).rstrip(b"\0").decode(errors="replace")

    @doing.setter
    def doing(self, text: str) -> None:
        self._say(slot_text(text))


def require_mpi() -> None:
    """Refuse to go on without mpi4py, before anything is started."""
    if importlib.util.find_spec("mpi4py") is None:
        raise DistributedError(_INSTALL.format("mpi4py is not installed"))


def load_mpi() -> Any:
    """The module ``mpi4py.MPI``, with MPI initialised."""
    import mpi4py

    mpi4py.rc.thread_level = "serialized"  # This spares the locks of several threads.
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DistributedError(_INSTALL.format(f"mpi4py finds no MPI ({error})")) from error
    return MPI
