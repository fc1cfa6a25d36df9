# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process, with the interface of :class:`.communicator.World`.

For tests, and for looking at programs of many ranks without MPI: threads take turns at the
interpreter, so nothing here is fast.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from schedules.distribute.exchange import Exchange, LocalBuffer, Message, Region
from schedules.distribute.partition import is_count

from ...errors import DistributedError, InvalidInputError

Result = TypeVar("Result")


UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
"""Functions that combine parts of all ranks, by their operator."""

_Address = tuple[int, int, int, Region]
"""Exchange, source, destination and region of a message, whatever the ranks call its buffer."""


@dataclass
class _Shared:
    """State that the ranks of a process share."""

    size: int
    timeout: float
    arrived: threading.Condition = field(default_factory=threading.Condition)
    mail: dict[_Address, deque[np.ndarray]] = field(default_factory=dict)
    gathered: dict[int, dict[int, Any]] = field(default_factory=dict)
    failed: BaseException | None = None


class LocalWorld:
    """One rank among the threads of a process; :func:`run_ranks` makes them.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    threads : int
        Threads of each kernel of this rank: 1.
    placement : None
        Threads of a process have no place of their own.
    takes_device_memory : bool
        False: messages are copied here.
    sent : list[tuple[Message, int]]
        Every message that this rank has sent, and its bytes.
    """

    threads = 1
    placement = None
    takes_device_memory = False

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.size = rank, shared.size
        self.sent: list[tuple[Message, int]] = []
        self._shared = shared
        self._running: dict[int, Mapping[str, LocalBuffer]] = {}
        self._collectives = 0

    def start(self, exchange: Exchange, buffers: Mapping[str, LocalBuffer]) -> None:
        """Send this rank's messages of an exchange.

        Raises ``DistributedError`` if the exchange has been started and not finished.
        """
        if exchange.id in self._running:
            raise DistributedError(f"exchange {exchange.id} is started twice; finish it in between")
        self._running[exchange.id] = buffers
        with self._shared.arrived:
            for message in exchange.sent_by(self.rank):
                data = buffers[message.buffer].view(message.region).copy()
                self._shared.mail.setdefault(_address(exchange, message), deque()).append(data)
                self.sent.append((message, data.nbytes))
            self._shared.arrived.notify_all()

    def finish(self, exchange: Exchange) -> None:
        """Wait for the messages that this rank receives in an exchange.

        Raises ``DistributedError`` if it was not started, or a message does not arrive in time.
        """
        if exchange.id not in self._running:
            raise DistributedError(f"exchange {exchange.id} is finished without a start")
        buffers = self._running.pop(exchange.id)
        for message in exchange.received_by(self.rank):
            key = _address(exchange, message)
            self._wait(
                functools.partial(self._shared.mail.get, key),
                f"exchange {exchange.id}: rank {self.rank} waits for rank {message.source}",
            )
            data = self._shared.mail[key].popleft()
            buffers[message.buffer].view(message.region)[...] = data

    def route(
        self, exchange: Exchange, itemsize: int, row: np.ndarray, own: Region, held: Region
    ) -> None:
        """None: threads take turns, so that none may wait in compiled code."""

    def wait(self, route: Any, number: int) -> None:
        """Nothing: there is no route."""

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, of one shape and type, stacked in order of the ranks."""
        return np.stack(self._gather(np.array(array), "a gather"))

    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        """Slice ``rank`` of the arrays of all ranks, in their order; one slice is for each rank."""
        gathered = self._gather(np.array(array), "an exchange of slices")
        return np.stack([each[self.rank] for each in gathered])

    def all_reduce(self, array: np.ndarray, operator: str) -> np.ndarray:
        """Combine the elements of integer arrays of all ranks: see :class:`.communicator.World`."""
        combine = UFUNCS[operator]
        return combine.reduce(self.all_gather(array), axis=0, dtype=array.dtype)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._gather(None, "a barrier")

    def agree(self, text: str, of: str = "programs") -> None:
        """Compare a text on all ranks.

        Raises ``DistributedError`` on all ranks, if any of them has another text.
        """
        texts = self._gather(text, "a comparison")
        others = [rank for rank, other in enumerate(texts) if other != texts[0]]
        if others:
            raise DistributedError(f"ranks {others} and rank 0 have different {of}")

    def _gather(self, value: Any, what: str) -> list[Any]:
        number, self._collectives = self._collectives, self._collectives + 1
        with self._shared.arrived:
            values = self._shared.gathered.setdefault(number, {})
            values[self.rank] = value
            self._shared.arrived.notify_all()
        self._wait(lambda: len(values) == self.size, f"{what}: rank {self.rank} waits for others")
        return [values[rank] for rank in range(self.size)]

    def _wait(self, ready: Callable[[], object], doing: str) -> None:
        shared = self._shared
        with shared.arrived:
            ended = shared.arrived.wait_for(
                lambda: ready() or shared.failed is not None, shared.timeout
            )
            if not ended:
                raise DistributedError(f"{doing} for more than {shared.timeout:g} s")
            if not ready():
                raise DistributedError(f"{doing}, and another rank failed") from shared.failed


def _address(exchange: Exchange, message: Message) -> _Address:
    return exchange.id, message.source, message.dest, message.region


def run_ranks(
    size: int, function: Callable[[LocalWorld], Result], timeout: float = 60.0
) -> list[Result]:
    """Run a function on every rank, each in a thread, and return their results in order.

    Parameters
    ----------
    size : int
        Number of ranks.
    function : Callable[[LocalWorld], Result]
        What each rank does.
    timeout : float
        Seconds for which a rank waits for another.

    Raises
    ------
    InvalidInputError
        If the number is none.
    Exception
        What the first rank that failed has raised; the others end at their next wait.
    """
    if not is_count(size):
        raise InvalidInputError(f"the number of ranks is {size!r}; expected a positive integer")
    shared = _Shared(size, timeout)
    results: dict[int, Result] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = function(LocalWorld(rank, shared))
        except BaseException as error:
            with shared.arrived:
                shared.failed = shared.failed or error
                shared.arrived.notify_all()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if shared.failed is not None:
        raise shared.failed
    return [results[rank] for rank in range(size)]
