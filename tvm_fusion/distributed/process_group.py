# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job that PyTorch connects by gloo or NCCL, and its collectives, to be measured."""

from __future__ import annotations

import datetime
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DistributedError

if TYPE_CHECKING:
    import torch

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Call = Callable[[], object]


class ProcessGroup:
    """A rank among those that ``torchrun`` has started.

    Parameters
    ----------
    backend : str
        ``gloo`` or ``nccl``, with which each rank of a machine has a GPU.
    """

    def __init__(self, backend: str) -> None:
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
        """From each even rank to the next."""
        peer, data = self.rank ^ 1, self.zeros(message)
        if peer >= self.size:
            return lambda: None
        function = self._dist.recv if self.rank % 2 else self._dist.send
        return self.calling(function, data, peer)


KINDS: dict[str, Callable[[ProcessGroup, int], Call]] = {
    "all_reduce": ProcessGroup.all_reduce,
    "all_to_all": ProcessGroup.all_to_all,
    "all_gather": ProcessGroup.all_gather_message,
    "broadcast": ProcessGroup.broadcast,
    "send_recv": ProcessGroup.send_recv,
}
"""Collectives as those of :mod:`.collective_curves`, of float32."""


@contextmanager
def process_group(backend: str, timeout: float) -> Iterator[ProcessGroup]:
    """Connect the ranks of a job.

    Parameters
    ----------
    backend : str
        ``gloo`` or ``nccl``.
    timeout : float
        Seconds for which a rank waits for another.

    Raises
    ------
    DistributedError
        If PyTorch is not installed, the job was not started by ``torchrun``, or a rank does not
        answer.
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
    except (RuntimeError, ValueError) as error:  # of PyTorch: ours are neither
        first = str(error).strip().splitlines()[0]
        rank = os.environ["RANK"]
        raise DistributedError(f"rank {rank}: PyTorch with {backend} failed: {first}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
