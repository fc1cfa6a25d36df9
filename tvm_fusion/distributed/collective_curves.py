# SPDX-License-Identifier: Apache-2.0
"""Measurement of collectives on ranks that MPI or PyTorch connects: time by a message's bytes."""

from __future__ import annotations

import datetime
import importlib.util
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from typing import Any

import numpy as np
import torch

from schedules.distribute.exchange import Exchange, LocalBuffer, Message
from tvm_fusion.errors import DistributedError, InvalidInputError
from tvm_fusion.machine.host import cpu_name
from tvm_fusion.prediction.collectives import Collectives, Curve

from .world.communicator import World
from .world.timing import MeasuredRanks, slowest, timed

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Call = Callable[[], object]


class ProcessGroup:
    """A rank among those that ``torchrun`` has started."""

    def __init__(
        self,
        backend: str,  # ``gloo`` or ``nccl``, with which each rank of a machine has a GPU.
    ) -> None:
        import torch.distributed

        self._torch, self._dist = torch, torch.distributed
        self.rank, self.size = self._dist.get_rank(), self._dist.get_world_size()
        self._device = torch.device("cpu")
        if backend == "nccl":
            self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(self._device)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._dist.barrier()
        self.wait_for_device()

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, of one shape and type, stacked in order of the ranks."""
        mine = self._torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
        gathered = [self._torch.empty_like(mine) for _ in range(self.size)]
        self._dist.all_gather(gathered, mine)
        return np.stack([each.cpu().numpy() for each in gathered])

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Make a message of some bytes, whole float32 elements."""
        return self._torch.zeros(nbytes // 4, device=self._device)

    def wait_for_device(self) -> None:
        """Wait for the GPU of this rank, if it has one."""
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)

    def calling(self, function: Callable[..., Any], *arguments: Any) -> Call:
        """Return a call of a function that ends when its result is there."""

        def call() -> None:
            function(*arguments)
            self.wait_for_device()

        return call

    def all_reduce(self, message: int) -> Call:
        """Sums of all ranks, to all of them."""
        return self.calling(self._dist.all_reduce, self.zeros(message))

    def all_to_all(self, message: int) -> Call:
        """A slice of each rank's message to each rank."""
        function = self._dist.all_to_all_single
        return self.calling(function, self.zeros(message), self.zeros(message))

    def all_gather_message(self, message: int) -> Call:
        """A part of the message by each rank, all of it to all."""
        parts = self.zeros(message), self.zeros(message // self.size)
        older = self._dist.all_gather_into_tensor
        return self.calling(getattr(self._dist, "all_gather_single", older), *parts)

    def broadcast(self, message: int) -> Call:
        """The message of the first rank, to all."""
        return self.calling(self._dist.broadcast, self.zeros(message), 0)

    def send_recv(self, message: int) -> Call:
        """Send from each even rank to the next."""
        peer, data = self.rank ^ 1, self.zeros(message)
        if peer >= self.size:
            return lambda: None
        function = self._dist.recv if self.rank % 2 else self._dist.send
        return self.calling(function, data, peer)


GROUP_KINDS: dict[str, Callable[[ProcessGroup, int], Call]] = {
    "all_reduce": ProcessGroup.all_reduce,
    "all_to_all": ProcessGroup.all_to_all,
    "all_gather": ProcessGroup.all_gather_message,
    "broadcast": ProcessGroup.broadcast,
    "send_recv": ProcessGroup.send_recv,
}
"""Collectives as those of :mod:`.collective_curves`, of float32."""


@contextmanager
def process_group(
    backend: str,  # ``gloo`` or ``nccl``.
    timeout: float,  # Seconds for which a rank waits for another.
) -> Iterator[ProcessGroup]:
    """Connect the ranks of a job.

    Raises ``DistributedError`` if PyTorch is not installed, the job was not started by
    ``torchrun``, or a rank does not answer.
    """
    if importlib.util.find_spec("torch") is None:
        raise DistributedError("PyTorch is not installed; install it by: pip install torch")
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise DistributedError(
            f"the environment has no {', '.join(missing)}; start the ranks by torchrun "
            f"--nproc-per-node 2 -m tvm_fusion.cli calibrate --collectives --backend {backend}"
        )
    import torch.distributed as dist

    try:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
        yield ProcessGroup(backend)
    except (RuntimeError, ValueError) as error:  # PyTorch raises these; ours are neither.
        first = str(error).strip().splitlines()[0]
        rank = os.environ["RANK"]
        raise DistributedError(f"rank {rank}: PyTorch with {backend} failed: {first}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


MESSAGES = tuple(4 << k for k in range(23))
"""Bytes: 4 bytes to 16 MB, doubled, as section 5.4.3.2 of the dissertation fits them."""

ROUNDS = 3
_SECONDS = 0.02  # Seconds of one message in a round, about.


def _all_reduce(world: World, message: int) -> Call:
    data = np.zeros(message // 4, np.uint32)
    return lambda: world.all_reduce(data, "sum")


def _all_to_all(world: World, message: int) -> Call:
    data = np.zeros((world.size, message // world.size), np.uint8)
    return lambda: world.all_to_all(data)


def _all_gather(world: World, message: int) -> Call:
    data = np.zeros(message // world.size, np.uint8)
    return lambda: world.all_gather(data)


def _broadcast(world: World, message: int) -> Call:
    data = np.zeros(message, np.uint8)
    return lambda: world.broadcast(data)


def _send_recv(world: World, message: int) -> Call:
    """Send from each even rank to the next."""
    pairs = [
        Message(rank, rank + 1, "A", ((0, message),), True) for rank in range(0, world.size - 1, 2)
    ]
    exchange = Exchange(100 + message.bit_length(), tuple(pairs))
    buffers = {"A": LocalBuffer(np.zeros(message, np.uint8), (0,))}

    def call() -> None:
        world.start(exchange, buffers)
        world.finish(exchange)

    return call


KINDS: dict[str, Callable[[World, int], Call]] = {
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}
"""Collectives that are measured, by the kinds of :mod:`tvm_fusion.prediction.collectives`."""


def measure_collectives(
    ranks: MeasuredRanks,  # Two ranks or more: a :class:`.World`, or a :class:`.ProcessGroup`.
    # Bytes, rounded up to what divides among the ranks; the larger of what a rank puts in and gets
    # out.
    messages: tuple[int, ...] = MESSAGES,
    rounds: int = ROUNDS,  # Number of rounds.
    # How these ranks start a collective of so many bytes.
    kinds: Mapping[str, Callable[[Any, int], Call]] = KINDS,
    transport: str = "MPI",  # What connects them, for the origin.
) -> Collectives:
    """Measure a curve of each kind; called by all ranks together.

    Messages take turns in several rounds, whose median counts; the origin of a curve tells by how
    much its rounds differ.

    The result is the same on all ranks. Raises ``InvalidInputError`` if there is one rank only.
    """
    if ranks.size < 2:
        raise InvalidInputError(
            "one rank has no collectives; start at least 2 by mpiexec -n 2, or by torchrun "
            "--nproc-per-node 2"
        )
    unit = 4 * ranks.size
    sizes = sorted({-(-message // unit) * unit for message in messages})
    curves = {}
    for kind, start in kinds.items():
        seconds, differ = _curve(ranks, start, sizes, rounds)
        origin = (
            f"measured by calibrate with {ranks.size} ranks on {cpu_name()}, {transport}, "
            f"{date.today().isoformat()}; rounds differ by {differ:.0%}"
        )
        points = tuple(map(float, sizes))
        curves[kind, ranks.size] = Curve(kind, ranks.size, points, tuple(seconds), origin)
    return Collectives(curves)


def _curve(
    ranks: MeasuredRanks, start: Callable[[Any, int], Call], sizes: list[int], rounds: int
) -> tuple[list[float], float]:
    """Median seconds of each size, and by how much its rounds differ in the median."""
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(rounds):
        for index, size in enumerate(sizes):
            times[index].append(slowest(ranks, timed(ranks, start(ranks, size), _SECONDS)))
    differ = statistics.median(max(each) / min(each) - 1 for each in times)
    return [statistics.median(each) for each in times], differ
