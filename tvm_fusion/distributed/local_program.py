# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a distributed program: its windows, and its runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tvm_ffi

from schedules.distribute.exchange import Exchange, LocalBuffer, Region
from schedules.distribute.partition import is_count
from schedules.distribute.transfer import FINISH

from ..errors import InvalidInputError, TargetError
from ..machine.numa import UNTOUCHED, bytes_on_nodes, numa_nodes, touch
from ..runtime.arguments import numpy_dtype
from ..runtime.host_arrays import ALIGNMENT, PAGE, aligned_empty
from ..runtime.thread_pool import Crew
from .world.local_world import UFUNCS

if TYPE_CHECKING:
    from schedules.distribute.distribute import Distribution
    from schedules.distribute.partial_reduction import PartialReduction

    from .world.numa_placement import Placement
    from .world.parcel import SlotRoute


def describe_memory(
    rank: int, placement: Placement | None, buffers: Mapping[str, LocalBuffer]
) -> str:
    """Return a line for the rank, and one for each of its windows."""
    nodes = len(numa_nodes())
    place = "memory not bound" if placement is None else str(placement)
    lines = [f"rank {rank}: {place}; this machine has {nodes} NUMA node{'s' * (nodes != 1)}"]
    for name, buffer in buffers.items():
        window = ", ".join(f"{begin}:{end}" for begin, end in buffer.region)
        lines.append(f"  {name}[{window}], {buffer.array.nbytes} bytes: {_places(buffer.array)}")
    return "\n".join(lines)


def _places(array: np.ndarray) -> str:
    try:
        nodes = bytes_on_nodes(array)
    except TargetError as error:
        return f"unknown, {error}"
    return ", ".join(
        f"{100 * size / array.nbytes:.1f} % "
        + ("not touched yet" if node == UNTOUCHED else f"on node {node}")
        for node, size in nodes.items()
    )


class Ranks(Protocol):
    """All ranks, seen from one: what a program needs of a communicator."""

    rank: int
    size: int
    threads: int

    @property
    def takes_device_memory(self) -> bool:
        """True if messages may lie in the memory of a GPU."""

    @property
    def placement(self) -> Placement | None:
        """Its place on the NUMA nodes of its machine, if it has one."""

    def start(self, exchange: Exchange, buffers: Mapping[str, LocalBuffer]) -> None:
        """Begin to send and receive the messages of an exchange."""

    def finish(self, exchange: Exchange) -> None:
        """Wait for them."""

    def route(
        self, exchange: Exchange, itemsize: int, row: np.ndarray, own: Region, held: Region
    ) -> SlotRoute | None:
        """Prepare an exchange for the kernel that makes it; None where Python does."""

    def wait(self, route: SlotRoute, number: int) -> None:
        """Wait for a message of a route."""

    def agree(self, text: str, of: str = "programs") -> None:
        """Compare a text on all ranks, and raise if it differs."""

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, stacked in order of the ranks."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""


class Beside(Protocol):
    """Device that computes rows of a rank beside its CPU."""

    def start(
        self,
        buffers: Mapping[str, LocalBuffer],
        first: bool = True,
        last: bool = True,
        steps: int = 1,
    ) -> None:
        """Begin to compute them, from and to these windows, in the first or last steps of a run."""

    def pass_on(self, buffers: Mapping[str, LocalBuffer], last: bool) -> None:
        """Begin to copy to these windows what several steps have computed, if not yet begun."""

    def swap(self) -> None:
        """Let outputs of a step be inputs of the next, where it has memory of its own for them."""

    def exchanged(self, buffers: Mapping[str, LocalBuffer]) -> Mapping[str, LocalBuffer]:
        """Windows in its own memory that MPI can send from and receive into."""

    def finish(self) -> None:
        """Wait until they are there."""


@dataclass(frozen=True)
class LocalArray:
    """Window of an input or of the output that a rank holds."""

    window: LocalBuffer  # Its memory, with room for what other ranks own.
    region: Region  # What it owns, in indices of the whole buffer.

    @property
    def owned(self) -> np.ndarray:
        """The elements that the rank owns, as a view."""
        return self.window.view(self.region)


@dataclass(frozen=True)
class KernelPiece:
    """Range of a rank's loops that one kernel call computes."""

    rows: Region  # The range.
    kernel: str  # Name of the kernel.
    scalars: tuple[int, ...]  # Its arguments after the windows.
    step: int  # The step since the last exchange, from 0.
    is_interior: bool = False
    """Whether it reads only what the rank owns, and runs while messages travel."""
    steps: int = 1
    """Number of steps that it computes; several are all of those between two exchanges, and the
    call takes the first of them after its scalars, since a run may end with fewer."""


_COMBINE = UFUNCS | {"and": np.logical_and, "or": np.logical_or}
"""Functions that combine parts of a reduction, by its operator."""

COMBINE = "combine"
"""Name of the kernel that combines the parts of a selection."""

_running = threading.local()
"""The program whose kernel runs in this thread, for its calls of :func:`_finish_exchange`."""


@tvm_ffi.register_global_func(FINISH, override=True)
def _finish_exchange(number: int) -> None:
    """Wait for a transfer from within a kernel."""
    _running.program.finish_transfer(number)


class LocalProgram:
    """One rank's share of a program; :meth:`.Program.on` makes it.

    Attributes
    ----------
    buffers : dict[str, LocalBuffer]
        The windows of all parameters, by name.
    devices : Sequence[Beside]
        What devices compute of this rank's rows.
    gpu_aware : bool
        Whether MPI sends from the memory of the device, and receives there, between steps.
    """

    devices: Sequence[Beside] = ()
    gpu_aware: bool = False

    def __init__(
        self,
        plan: Distribution,  # Parts and messages of all ranks.
        world: Ranks,
        pieces: Sequence[KernelPiece],  # This rank's kernel calls.
        # Their kernels, and the one that combines the parts of a selection.
        kernels: Mapping[str, Callable[..., Any]],
        library: tvm_ffi.Module | None,  # The kernels' library, if there are any.
    ) -> None:
        self.plan = plan
        self.world = world
        self._calls: dict[tuple[int, bool], list[tuple[Callable[..., Any], tuple[int, ...]]]] = {}
        self._all_steps: tuple[Callable[..., Any], tuple[int, ...]] | None = None
        for piece in pieces:
            call = kernels[piece.kernel], piece.scalars
            if piece.steps > 1:
                self._all_steps = call
            else:
                self._calls.setdefault((piece.step, piece.is_interior), []).append(call)
        self._combine: Any = kernels.get(COMBINE)
        self._crew = Crew(world.threads, library)
        self._pending: dict[int, Exchange] = {}
        self._part = plan.parts[world.rank]
        self.buffers = {
            buffer.name: self._allocate(buffer.name, str(buffer.dtype), place)
            for place, buffer in enumerate(plan.nest.func.params)
        }
        self._tensors = {
            name: tvm_ffi.from_dlpack(buffer.array) for name, buffer in self.buffers.items()
        }

    def _allocate(self, name: str, dtype: str, place: int) -> LocalBuffer:
        """Window of a buffer, each at another place in a page.

        A load waits for an earlier store at the same place in another page (4 KiB aliasing).
        """
        window = self._part.windows[name]
        apart = PAGE // len(self.plan.nest.func.params) // ALIGNMENT * ALIGNMENT
        shape = [end - begin for begin, end in window]
        array = aligned_empty(shape, numpy_dtype(dtype), place * apart % PAGE)
        if self.world.placement is not None:
            touch(array)
        return LocalBuffer(array, tuple(begin for begin, _ in window))

    def input(self, name: str) -> LocalArray:
        """Window of an input that this rank holds.

        Raises ``InvalidInputError`` if there is no input of that name.
        """
        names = [buffer.name for buffer in self.plan.nest.inputs]
        if name not in names:
            raise InvalidInputError(f"no input is called {name!r}; the inputs are {names}")
        return LocalArray(self.buffers[name], self._part.owned[name])

    @property
    def output(self) -> LocalArray:
        """Window of the output, or of the first one, that this rank holds."""
        return next(iter(self.outputs.values()))

    @property
    def outputs(self) -> dict[str, LocalArray]:
        """Windows of the outputs that this rank holds, by name."""
        names = (buffer.name for buffer in self.plan.nest.outputs)
        return {name: LocalArray(self.buffers[name], self._part.owned[name]) for name in names}

    def explain(self) -> str:
        """Return a line for each window: its bytes, and the NUMA nodes on which its pages lie."""
        return describe_memory(self.world.rank, self.world.placement, self.buffers)

    def __call__(
        self,
        # How many times; the output of a step is the input ``repeat`` of the next, so that several
        # steps overwrite it: get the input and write it before the next call.
        steps: int = 1,
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """Run the program; called by all ranks together.

        Returns this rank's part of the output, of several a tuple in their order; valid until the
        next call. If the distributed loop is a reduction, the whole result, on all ranks, of which
        the parts are combined in their order. Raises ``InvalidInputError`` if there are several
        steps and no input takes the output.
        """
        if not is_count(steps) or (steps > 1 and not self.plan.repeat):
            raise InvalidInputError(
                f"steps is {steps!r:.60}; expected 1, or more for a program compiled with repeat=; "
                "inputs are written to input(NAME).owned"
            )
        deep, done = self.plan.deep, 0
        while done < steps:
            first = max(0, deep - (steps - done))  # the last round may have fewer steps
            if done:
                self._swap()
            self._exchange(first, begins=not done)
            begins, done = not done, done + deep - first
            self._run(first, begins, ends=done == steps)
            for number in list(self._pending):  # A rank that computes nothing has some.
                self.finish_transfer(number)
        for transfer in self.plan.after:
            self.world.start(transfer.exchange, self.buffers)
            self.world.finish(transfer.exchange)
        results = tuple(output.owned for output in self.outputs.values())
        if self.plan.reduction is not None:
            results = self._combined(self.plan.reduction, results)
        return results if len(results) > 1 else results[0]

    def _combined(
        self, reduction: PartialReduction, owned: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, ...]:
        """Results of a reduction, from the parts of all ranks."""
        parts = [self.world.all_gather(field)[:, 0] for field in owned]
        if reduction.combine is None:
            [values] = parts
            combine = _COMBINE[reduction.operator]
            with np.errstate(all="ignore"):  # The kernels of the parts do not warn either.
                return (np.asarray(combine.reduce(values, axis=0, dtype=values.dtype)),)
        stacked = [aligned_empty(each.shape, each.dtype) for each in parts]
        results = [aligned_empty(each.shape[1:], each.dtype) for each in parts]
        for field, part in zip(stacked, parts, strict=True):
            field[...] = part
        self._crew.run(self._combine, *map(tvm_ffi.from_dlpack, (*stacked, *results)))
        return tuple(results[: reduction.results])

    def _exchange(self, step: int, begins: bool) -> None:
        """Send and receive halos, and compute the interior of a step meanwhile."""
        buffers = self.buffers
        if self.gpu_aware and not begins:
            for device in self.devices:
                buffers = {**buffers, **device.exchanged(buffers)}
        for transfer in self.plan.before:
            self.world.start(transfer.exchange, buffers)
            if transfer.mode.blocking:
                self.world.finish(transfer.exchange)
        self.world.start(self.plan.exchange, buffers)
        self.run_pieces(step, interior=True)
        for transfer in self.plan.before:
            if transfer.before is not None:
                self._pending[transfer.id] = transfer.exchange
            elif not transfer.mode.blocking:
                self.world.finish(transfer.exchange)
        self.world.finish(self.plan.exchange)

    def _run(self, first: int, begins: bool, ends: bool) -> None:
        """Compute the steps between two exchanges, from one of them on."""
        with ExitStack() as started:  # all of them end, also where one fails
            for device in self.devices:
                started.callback(device.finish)
                device.start(self.buffers, begins, ends, self.plan.deep - first)
            self.run_steps(first)
            for device in self.devices:
                device.pass_on(self.buffers, ends)

    def run_steps(self, first: int = 0) -> None:
        """Compute the steps between two exchanges on the CPU alone, from one of them on."""
        left = self.plan.deep - first
        if self._all_steps is None:
            for step in range(first, self.plan.deep):
                if step > first:
                    self._swap_windows()
                self.run_pieces(step, interior=False)
            return
        kernel, scalars = self._all_steps
        if first % 2:  # odd steps read what is an output of the even ones
            self._swap_windows()
        self._crew.run(kernel, *self._tensors.values(), *scalars, first)
        for _ in range(first % 2 + left - 1):
            self._swap_windows()

    @property
    def has_pieces(self) -> bool:
        """True if the CPU computes any rows."""
        return bool(self._calls or self._all_steps)

    def run_pieces(self, step: int = 0, interior: bool = False) -> None:
        """Compute what the CPU computes of a step, without exchange or devices."""
        for kernel, scalars in self._calls.get((step, interior), ()):
            if self._pending:
                self._crew.run(self._run_with_waits, kernel, scalars)
            else:
                self._crew.run(kernel, *self._tensors.values(), *scalars)

    def finish_transfer(self, number: int) -> None:
        """Wait for a transfer that is to be waited for before a block, once."""
        if (exchange := self._pending.pop(number, None)) is not None:
            self.world.finish(exchange)

    def _run_with_waits(self, kernel: Callable[..., Any], scalars: tuple[int, ...]) -> None:
        _running.program = self
        try:
            kernel(*self._tensors.values(), *scalars)
        finally:
            del _running.program

    def _swap(self) -> None:
        """Let outputs of a step be inputs of the next, here and on the devices."""
        self._swap_windows()
        for device in self.devices:
            device.swap()

    def _swap_windows(self) -> None:
        buffers, tensors = self.buffers, self._tensors
        for name, output in self.plan.repeat.items():
            buffers[output], buffers[name] = buffers[name], buffers[output]
            tensors[output], tensors[name] = tensors[name], tensors[output]


def check_ranks(world: Ranks, ranks: int, what: str) -> None:
    """Refuse a world of another size than a model or program was compiled for.

    Raises ``InvalidInputError`` if the sizes differ, or it is no world.
    """
    if not hasattr(world, "agree"):
        raise InvalidInputError(
            f"the ranks are {world!r:.60}; expected what distributed.session() yields"
        )
    if world.size != ranks:
        raise InvalidInputError(
            f"the {what} is compiled for {ranks} ranks and there are {world.size}; "
            f"start it by mpiexec -n {ranks}, or compile it for {world.size}"
        )
