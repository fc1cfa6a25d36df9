# SPDX-License-Identifier: Apache-2.0
"""Runs of an operation sequence on a device, from and to a rank's windows in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from schedules.distribute.exchange import LocalBuffer, region_size

from .device_functions import KernelCall, Scratch
from .driver import Driver, Event
from .shares import DeviceShare


class DeviceRun:
    """Rows of a rank on one device.

    Parameters
    ----------
    share : DeviceShare
        The rows, their chunks and kernels.
    driver : Driver
        The device.
    buffers : Mapping[str, LocalBuffer]
        The rank's windows of all parameters, in the order of the function's parameters.
    """

    def __init__(
        self, share: DeviceShare, driver: Driver, buffers: Mapping[str, LocalBuffer]
    ) -> None:
        self._share = share
        self._sequence = share.sequence
        self._kernels = driver.load(share.code)
        for buffer in buffers.values():
            driver.pin(buffer.array)
        self._memory = {
            name: self._slots(driver, name, buffer.array.itemsize)
            for name, buffer in buffers.items()
        }
        arguments = [a for calls in share.calls for call in calls for a in call.arguments]
        sizes: dict[int, int] = {}
        for argument in arguments:
            if isinstance(argument, Scratch):
                sizes[argument.number] = max(sizes.get(argument.number, 0), argument.nbytes)
        # One for all chunks: kernels are in one queue.
        self._scratch = {number: driver.allocate(nbytes) for number, nbytes in sizes.items()}
        self._into, self._compute, self._out = (driver.queue() for _ in range(3))

    def _slots(self, driver: Driver, name: str, itemsize: int) -> list[Any]:
        """Memory of a parameter: one for all chunks if it stays, else one a slot."""
        sizes = [region_size(chunk.windows[name]) for chunk in self._sequence.chunks]
        count = 1 if name in self._sequence.resident else self._sequence.slots
        return [driver.allocate(max(sizes) * itemsize) for _ in range(count)]

    def start(self, buffers: Mapping[str, LocalBuffer]) -> None:
        """Begin to copy, compute and copy back all chunks; returns at once.

        Parameters
        ----------
        buffers : Mapping[str, LocalBuffer]
            The rank's windows; until :meth:`finish` nobody else writes what the rows read, or
            touches the rows themselves.
        """
        kernels: list[Event] = []
        ends: list[Event] = []
        names = list(buffers)
        for number in range(len(self._sequence.chunks)):
            copied = self._of_slot(kernels, number)
            for name, region in self._sequence.copied_in(number).items():
                view = buffers[name].view(region)
                copied = [self._into.copy_in(self._of(name, number), view, copied)]
            self._into.flush()
            before = [*copied, *self._of_slot(ends, number)]
            for call in self._share.calls[number]:
                event, before = self._launch(call, number, names, before), []
            kernels.append(event)
            self._compute.flush()
            after = [event]
            for name, region in self._sequence.copied_out(number).items():
                rows = buffers[name].view(region)
                after = [self._out.copy_out(rows, self._of(name, number), after)]
            ends += after
            self._out.flush()

    def finish(self) -> None:
        """Wait for the last copy.

        Raises
        ------
        DistributedError
            If the device has failed.
        """
        with ExitStack() as all_queues:  # also where one has failed
            for queue in (self._out, self._compute, self._into):
                all_queues.callback(queue.finish)

    def _launch(
        self, call: KernelCall, number: int, names: list[str], before: list[Event]
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
