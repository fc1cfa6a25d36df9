# SPDX-License-Identifier: Apache-2.0
"""Runs of an operation sequence on a device, from and to a rank's windows in the host's memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from schedules.distribute.exchange import LocalBuffer, Region, region_size

from .driver import DeviceCall, Driver, Event, Place, Scratch
from .shares import DeviceShare


class DeviceRun:
    """Rows of a rank on one device."""

    def __init__(
        self,
        share: DeviceShare,  # The rows, their chunks and kernels.
        driver: Driver,
        # The rank's windows of all parameters, in the order of the function's parameters.
        buffers: Mapping[str, LocalBuffer],
    ) -> None:
        self._share = share
        self._sequence = share.sequence
        self._driver = driver
        self._kernels = driver.load(share.code)
        self._shared: dict[int, Any] = {}  # Shared arrays by address.
        self._memory: dict[str, list[Any]] = {}
        for name, buffer in buffers.items():
            if self._sequence.in_place:
                self._shared[buffer.array.ctypes.data] = driver.share(buffer.array)
            else:
                driver.pin(buffer.array)
                self._memory[name] = self._slots(driver, name, buffer.array.itemsize)
        arguments = [a for calls in share.calls for call in calls for a in call.arguments]
        sizes: dict[int, int] = {}
        for argument in arguments:
            if isinstance(argument, Scratch):
                sizes[argument.number] = max(sizes.get(argument.number, 0), argument.nbytes)
        # One for all chunks: kernels are in one queue.
        self._scratch = {number: driver.allocate(nbytes) for number, nbytes in sizes.items()}
        self._into, self._compute, self._out = (driver.queue() for _ in range(3))
        self._exchanged: dict[str, LocalBuffer] = {}
        self._last: Event = None  # Event of the steps whose results are still to be passed on.

    def _slots(self, driver: Driver, name: str, itemsize: int) -> list[Any]:
        """Memory of a parameter: one for all chunks if it stays, else one a slot."""
        sizes = [region_size(chunk.windows[name]) for chunk in self._sequence.chunks]
        count = 1 if name in self._sequence.resident else self._sequence.slots
        return [driver.allocate(max(sizes) * itemsize) for _ in range(count)]

    def start(
        self,
        # The rank's windows; until :meth:`finish` nobody else writes what the rows read, or touches
        # the rows themselves.
        buffers: Mapping[str, LocalBuffer],
        # ``first``, ``last``: whether it is the first and the last step of a run. Between them,
        # rows that stay on the device are copied only where others compute or read them.
        first: bool = True,
        last: bool = True,
        steps: int = 1,  # Steps to compute.
    ) -> None:
        """Begin to copy, compute and copy back all chunks.

        Returns at once, but where several steps have no copy between them: when all is copied in,
        since others then write what is copied. Then :meth:`pass_on` copies back.
        """
        kernels: list[Event] = []
        ends: list[Event] = []
        names = list(buffers)
        if self._sequence.in_place:
            of = {name: self._shared[buffer.array.ctypes.data] for name, buffer in buffers.items()}
            self._memory = {name: [shared] for name, shared in of.items()}
        for number in range(len(self._sequence.chunks)):
            copied = self._of_slot(kernels, number)
            for name, region in self._copies_in(number, first):
                memory, place = self._of(name, number), self._place(buffers, name, region, number)
                view = buffers[name].view(region)
                copied = [self._into.copy_in(memory, place, view, copied)]
            if self._is_deep:
                self._into.finish()
            else:
                self._into.flush()
            before = [*copied, *self._of_slot(ends, number)]
            for step in range(steps):
                if step:
                    self.swap()
                for call in self._share.calls[number]:
                    event, before = self._launch(call, number, names, before), []
            kernels.append(event)
            self._compute.flush()
            if self._is_deep:
                self._last = event
            else:
                ends += self._copy_out(buffers, number, last, event)

    @property
    def _is_deep(self) -> bool:
        """True if several steps follow each other without a copy."""
        return self._sequence.kept is not None and self._sequence.kept.steps > 1

    def pass_on(
        self,
        buffers: Mapping[str, LocalBuffer],  # The rank's windows after these steps.
        last: bool,  # Whether they are the last of a run.
    ) -> None:
        """Begin to copy back what several steps have computed, when others have, too."""
        if self._is_deep:
            self._copy_out(buffers, 0, last, self._last)

    def _copy_out(
        self, buffers: Mapping[str, LocalBuffer], number: int, last: bool, event: Event
    ) -> list[Event]:
        after = [event]
        for name, region in self._copies_out(number, last):
            memory, place = self._of(name, number), self._place(buffers, name, region, number)
            rows = buffers[name].view(region)
            after = [self._out.copy_out(rows, memory, place, after)]
        self._out.flush()
        return after

    def swap(self) -> None:
        """Let outputs of a step be inputs of the next, if they stay on the device."""
        if self._sequence.kept is None:
            return
        memory, windows = self._memory, self._exchanged
        for name, output in self._sequence.kept.repeat.items():
            memory[name], memory[output] = memory[output], memory[name]
            if windows:
                windows[name], windows[output] = windows[output], windows[name]

    def exchanged(self, buffers: Mapping[str, LocalBuffer]) -> dict[str, LocalBuffer]:
        """Windows on the device of what outputs and inputs pass on, for MPI.

        Raises ``TargetError`` if the device's memory has no address.
        """
        if not self._exchanged and self._sequence.kept is not None:
            [chunk] = self._sequence.chunks
            for name in itertools.chain.from_iterable(self._sequence.kept.repeat.items()):
                window, dtype = chunk.windows[name], buffers[name].array.dtype
                shape = [end - begin for begin, end in window]
                array = self._driver.array(self._of(name, 0), shape, dtype)
                first = tuple(begin for begin, _ in window)
                self._exchanged[name] = LocalBuffer(array, first, on_device=True)
        return self._exchanged

    def finish(self) -> None:
        """Wait for the last copy.

        Raises ``DistributedError`` if the device has failed.
        """
        with ExitStack() as all_queues:  # also where one has failed
            for queue in (self._out, self._compute, self._into):
                all_queues.callback(queue.finish)

    def _copies_in(self, number: int, first: bool) -> Iterable[tuple[str, Region]]:
        kept = self._sequence.kept
        if kept is None or first:
            return self._sequence.copied_in(number).items()
        return () if self._exchanged else kept.into

    def _copies_out(self, number: int, last: bool) -> Iterable[tuple[str, Region]]:
        kept = self._sequence.kept
        if kept is None or last:
            return self._sequence.copied_out(number).items()
        return () if self._exchanged else kept.out

    def _place(
        self, buffers: Mapping[str, LocalBuffer], name: str, region: Region, number: int
    ) -> Place:
        window = self._sequence.chunks[number].windows[name]
        return Place.of(region, window, buffers[name].array.itemsize)

    def _launch(
        self, call: DeviceCall, number: int, names: list[str], before: list[Event]
    ) -> Event:
        arguments = [
            self._scratch[argument.number]
            if isinstance(argument, Scratch)
            else self._of(names[argument], number)
            if isinstance(argument, int)
            else argument
            for argument in call.arguments
        ]
        return self._compute.launch(
            self._kernels[call.launch.kernel], call.launch, arguments, before
        )

    def _of_slot(self, events: list[Event], number: int) -> list[Event]:
        """The event of the chunk that had a chunk's slot before, if there was one."""
        before = number - self._sequence.slots
        return [events[before]] if before >= 0 else []

    def _of(self, name: str, number: int) -> Any:
        slots = self._memory[name]
        return slots[number % len(slots)]
