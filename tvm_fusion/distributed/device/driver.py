# SPDX-License-Identifier: Apache-2.0
"""Drivers of devices: memory, in-order queues, and events that tie them.

TVM 0.27 can make streams of CUDA and let its kernels run in one of them
(``Device.create_raw_stream``, ``tvm_ffi.use_raw_stream``), but its copies from Python go to the
default stream, it has no events, and its wheel has no OpenCL at all. So kernels that TVM has
generated are launched here through the driver itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from ...codegen.host_code import Launch
from ...errors import TargetError
from ..world.parcel import segment_bytes
from .device_functions import DeviceCode

Event: TypeAlias = Any
Memory: TypeAlias = Any
Kernel: TypeAlias = Any


class Queue(Protocol):
    """Operations that run in their order, beside those of other queues."""

    def copy_in(self, dest: Memory, view: np.ndarray, after: Sequence[Event]) -> Event:
        """Copy an array to the begin of a device's memory, densely; returns at once."""

    def copy_out(self, view: np.ndarray, source: Memory, after: Sequence[Event]) -> Event:
        """Copy back to an array what lies densely at the begin of a device's memory."""

    def launch(
        self, kernel: Kernel, launch: Launch, arguments: Sequence[Any], after: Sequence[Event]
    ) -> Event:
        """Launch a kernel; arguments are memory and numbers."""

    def flush(self) -> None:
        """Let the device begin."""

    def finish(self) -> None:
        """Wait for all operations."""


class Driver(Protocol):
    """A device of this machine."""

    name: str

    def load(self, code: DeviceCode) -> Mapping[str, Kernel]:
        """The kernels of some code, by their names."""

    def allocate(self, nbytes: int) -> Memory:
        """Memory of the device, freed with the driver."""

    def pin(self, array: np.ndarray) -> None:
        """Keep an array where it lies, where that makes its copies faster."""

    def queue(self) -> Queue:
        """Make a queue."""


@dataclass(frozen=True)
class Plane:
    """Rows of bytes in the host's memory, and where they lie densely.

    Parameters
    ----------
    address : int
        Of the first row.
    rows, length, pitch : int
        Number of rows, bytes of each, and bytes from one to the next.
    dense : int
        Offset of the first row where all rows lie one behind the other.
    """

    address: int
    rows: int
    length: int
    pitch: int
    dense: int

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.length


def planes(view: np.ndarray) -> Iterator[Plane]:
    """The bytes of a view of a C-contiguous array; one plane where that is possible."""
    if view.size == 0:
        return
    length = segment_bytes(view)
    axes = [(n, s) for n, s in zip(view.shape, view.strides, strict=True) if n > 1]
    while axes and axes[-1][1] < length:
        axes.pop()
    rows, pitch = axes.pop() if axes else (1, length)
    for number, index in enumerate(np.ndindex(*(n for n, _ in axes))):
        offset = sum(i * s for i, (_, s) in zip(index, axes, strict=True))
        yield Plane(view.ctypes.data + offset, rows, length, pitch, number * rows * length)


def open_driver(kind: str, index: int) -> Driver:
    """Open a device of this machine.

    Parameters
    ----------
    kind : str
        ``cuda`` or ``opencl``.
    index : int
        Its number among those of its kind.

    Raises
    ------
    TargetError
        If there is none, or its driver or package is not installed.
    """
    if kind == "opencl":
        from .opencl_driver import OpenCLDriver

        return OpenCLDriver(index)
    from .cuda_driver import CUDADriver

    return CUDADriver(index)


def check_index(kind: str, index: int, names: Sequence[str]) -> None:
    """Refuse a device that is not there.

    Raises
    ------
    TargetError
        If there are fewer.
    """
    if index >= len(names):
        there = ", ".join(f"{kind}:{n} ({name})" for n, name in enumerate(names)) or "none"
        raise TargetError(f"this machine has no device {kind}:{index}; it has {there}")
