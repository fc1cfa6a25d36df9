# SPDX-License-Identifier: Apache-2.0
"""Drivers of devices: code, memory, in-order queues, and events that tie them.

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
from tvm import tirx

from schedules.distribute.exchange import Region

from ...codegen.host_code import Allocation, HostCode, Launch, opencl_texts
from ...errors import TargetError
from ...runtime.arguments import numpy_dtype

Event: TypeAlias = Any
Memory: TypeAlias = Any
Kernel: TypeAlias = Any


@dataclass(frozen=True)
class Scratch:
    """Memory that a function needs for an intermediate result."""

    number: int  # Which of the function's.
    nbytes: int  # Its size.


Argument: TypeAlias = "int | Scratch | np.generic"
"""An argument of a kernel: a window by its place among the parameters, scratch, or a number."""


@dataclass(frozen=True)
class DeviceCall:
    """One launch."""

    launch: Launch  # Kernel, grid and block.
    arguments: tuple[Argument, ...]  # Arguments in the order of the kernel's parameters.


@dataclass(frozen=True)
class DeviceCode:
    """Compiled functions of a device."""

    kind: str  # ``cuda`` or ``opencl``.
    text: str  # All kernels as text.
    cubin: bytes  # Their machine code for CUDA, else empty.
    before: str  # OpenCL that stands before each kernel: functions that they call.
    hosts: Mapping[str, tirx.PrimFunc]
    kernels: Mapping[str, tirx.PrimFunc]
    """``hosts`` and ``kernels``: host functions and kernels."""

    @property
    def programs(self) -> dict[str, str]:
        """OpenCL text of each kernel."""
        return {name: self.before + text for name, text in opencl_texts(self.text).items()}

    def calls(
        self,
        function: str,
        scalars: Sequence[int],  # Its arguments after the windows.
    ) -> tuple[DeviceCall, ...]:
        """The launches of a call of a function."""
        host = self.hosts[function]
        windows = host.params[: len(host.params) - len(scalars)]
        # Shapes are constant: the arrays stand for them, and their memory is never touched.
        arrays = [
            np.empty([int(n) for n in window.ty.shape], numpy_dtype(str(window.ty.dtype)))
            for window in windows
        ]
        buffers: dict[tirx.Var, int | Scratch] = {w: place for place, w in enumerate(windows)}
        launched = []
        for step in HostCode(host, self.kernels, [*arrays, *scalars]).steps():
            if isinstance(step, Allocation):
                number = sum(isinstance(buffer, Scratch) for buffer in buffers.values())
                buffers[step.buffer] = Scratch(number, step.nbytes)
                continue
            arguments = tuple(
                buffers[value] if dtype is None else dtype.type(value)
                for value, dtype in step.arguments
            )
            launched.append(DeviceCall(step.launch, arguments))
        return tuple(launched)


class Queue(Protocol):
    """Operations that run in their order, beside those of other queues."""

    def copy_in(
        self, dest: Memory, place: Place, view: np.ndarray, after: Sequence[Event]
    ) -> Event:
        """Copy an array to a place of a device's memory; returns at once."""

    def copy_out(
        self, view: np.ndarray, source: Memory, place: Place, after: Sequence[Event]
    ) -> Event:
        """Copy back to an array what lies at a place of a device's memory."""

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

    def share(self, array: np.ndarray) -> Memory:
        """An array of the host as memory of the device.

        Raises ``TargetError`` if the device does not share the host's memory.
        """

    def pin(self, array: np.ndarray) -> None:
        """Keep an array where it lies, where that makes its copies faster."""

    def array(self, memory: Memory, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """An array at the address of memory of the device, which only MPI may touch.

        Raises ``TargetError`` if this memory has no address.
        """

    def queue(self) -> Queue:
        """Make a queue."""


@dataclass(frozen=True)
class Place:
    """Place of a region in the memory of a device."""

    offset: int  # Byte of its first element.
    strides: tuple[int, ...]  # Bytes from an element to the next along each dimension.

    @classmethod
    def of(cls, region: Region, window: Region, itemsize: int) -> Place:
        """The place of a region in memory that holds a window densely."""
        strides: list[int] = []
        step = itemsize
        for begin, end in reversed(window):
            strides.insert(0, step)
            step *= end - begin
        starts = (begin - first for (begin, _), (first, _) in zip(region, window, strict=True))
        offset = sum(n * stride for n, stride in zip(starts, strides, strict=True))
        return cls(offset, tuple(strides))


@dataclass(frozen=True)
class Plane:
    """Rows of bytes in the host's memory, and where they lie in a device's."""

    address: int  # Address of the first row.
    rows: int
    length: int
    pitch: int
    """``rows``, ``length`` and ``pitch``: number of rows, bytes of each, and bytes from one to the
    next."""
    offset: int
    offset_pitch: int
    """``offset`` and ``offset_pitch``: byte of the first row in the device's memory, and bytes from
    one to the next there."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.length


def planes(view: np.ndarray, place: Place) -> Iterator[Plane]:
    """The bytes of a view of a C-contiguous array; one plane where that is possible."""
    if view.size == 0:
        return
    strides = zip(view.shape, view.strides, place.strides, strict=True)
    axes = [each for each in strides if each[0] > 1]
    length = view.itemsize
    while axes and axes[-1][1] == axes[-1][2] == length:
        length *= axes.pop()[0]
    rows, pitch, offset_pitch = axes.pop() if axes else (1, length, length)
    for index in np.ndindex(*(n for n, *_ in axes)):
        host = sum(i * stride for i, (_, stride, _) in zip(index, axes, strict=True))
        there = sum(i * stride for i, (_, _, stride) in zip(index, axes, strict=True))
        address, offset = view.ctypes.data + host, place.offset + there
        yield Plane(address, rows, length, pitch, offset, offset_pitch)


def check_index(kind: str, index: int, names: Sequence[str]) -> None:
    """Refuse a device that is not there.

    Raises ``TargetError`` if there are fewer.
    """
    if index >= len(names):
        there = ", ".join(f"{kind}:{n} ({name})" for n, name in enumerate(names)) or "none"
        raise TargetError(f"this machine has no device {kind}:{index}; it has {there}")
