# SPDX-License-Identifier: Apache-2.0
"""OpenCL devices, through ``pyopencl``: any GPU or accelerator with a driver, or a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...codegen.host_code import Launch
from ...errors import DistributedError, OpError, TargetError
from ...runtime.host_arrays import PAGE, aligned_empty
from .driver import DeviceCode, Place, Plane, check_index, planes

# pyopencl keeps binaries by the device's name, which virtual machines on other CPUs share.
os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
try:
    cl: Any = importlib.import_module("pyopencl")
except ImportError as error:
    raise TargetError(
        f"OpenCL devices need pyopencl ({error}); install it by: pip install 'tvm-fusion[opencl]'"
    ) from error

_PLACES = 4  # Places in a page at which memory begins.


def opencl_devices() -> list[Any]:
    """The OpenCL devices of all platforms of this machine, those that are no CPU first."""
    try:
        platforms = cl.get_platforms()
    except cl.Error:  # so the loader says that there is none
        return []
    found = [device for platform in platforms for device in platform.get_devices()]
    return sorted(found, key=lambda device: bool(device.type & cl.device_type.CPU))


def cpu_units(index: int) -> int:
    """Compute units of a device that is a CPU; 0 of another one, and where there is none."""
    devices = opencl_devices()[index : index + 1]
    return sum(each.max_compute_units for each in devices if each.type & cl.device_type.CPU)


def shares_memory(index: int) -> bool:
    """Whether a device's kernels work in the memory of the host; False where there is none."""
    return any(map(_shares_memory, opencl_devices()[index : index + 1]))


def _shares_memory(device: Any) -> bool:
    any_address = device.svm_capabilities & cl.device_svm_capabilities.FINE_GRAIN_SYSTEM
    return bool(any_address and device.host_unified_memory)  # others move pages over a link


class OpenCLDriver:
    """One OpenCL device.

    Raises
    ------
    TargetError
        If there is none of that number.
    """

    _places = itertools.count()

    def __init__(
        self,
        index: int,  # Its number in :func:`opencl_devices`.
    ) -> None:
        devices = opencl_devices()
        check_index("opencl", index, [device.name.strip() for device in devices])
        self.name = f"opencl:{index}"
        self._context = cl.Context([devices[index]])

    def load(self, code: DeviceCode) -> Mapping[str, Any]:
        """The kernels of some code, by their names."""
        if code.kind != "opencl":
            raise OpError(f"code for {code.kind} does not run on {self.name}")
        with _driver_errors(f"{self.name} refuses a kernel"), warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)  # Intel's always says what it did
            return {
                name: cl.Kernel(cl.Program(self._context, text).build("-w"), name)
                for name, text in code.programs.items()
            }

    def allocate(self, nbytes: int) -> Any:
        """Memory of the device; of the host, where it shares that.

        Then each begins at another place in a page: a load waits for an earlier store at the same
        place in another page (4 KiB aliasing).
        """
        flags, size = cl.mem_flags.READ_WRITE, max(1, nbytes)
        with _driver_errors(
            f"{self.name} has no {nbytes} bytes of memory; cut its rows into more chunks"
        ):
            if not all(map(_shares_memory, self._context.devices)):
                return cl.Buffer(self._context, flags, size)
            place = next(self._places) * PAGE // _PLACES % PAGE
            host = aligned_empty((size,), np.uint8, place)
            return cl.Buffer(self._context, flags | cl.mem_flags.USE_HOST_PTR, hostbuf=host)

    def share(self, array: np.ndarray) -> Any:
        """The host's memory, if the device shares it."""
        if not all(map(_shares_memory, self._context.devices)):
            raise TargetError(
                f"{self.name} does not share the host's memory; compile for it with in_place=False"
            )
        return cl.SVM(array) if array.size else self.allocate(1)

    def pin(self, array: np.ndarray) -> None:
        """Leave the array as it is: OpenCL pins what it copies."""

    def array(self, memory: Any, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """Refuse: a buffer of OpenCL has no address."""
        raise TargetError(
            f"MPI takes no memory of {self.name}, which has no address; leave gpu_aware out"
        )

    def queue(self) -> OpenCLQueue:
        """Make a queue."""
        return OpenCLQueue(self.name, cl.CommandQueue(self._context))


class OpenCLQueue:
    """An in-order queue."""

    def __init__(
        self,
        name: str,  # The device, for errors.
        queue: Any,
    ) -> None:
        self._name = name
        self._queue = queue
        # That of a copy waits, when it is deleted, for the copy: kept until all is finished.
        self._events: list[Any] = []

    def copy_in(self, dest: Any, place: Place, view: np.ndarray, after: Sequence[Any]) -> Any:
        """Copy an array to the device; returns at once."""
        with _driver_errors(f"{self._name} cannot copy {view.nbytes} bytes"):
            for plane in planes(view, place):
                self._events.append(self._copy(dest, plane, after, into=True))
        return self._events[-1]

    def copy_out(self, view: np.ndarray, source: Any, place: Place, after: Sequence[Any]) -> Any:
        """Copy from the device to an array; returns at once."""
        with _driver_errors(f"{self._name} cannot copy {view.nbytes} bytes"):
            for plane in planes(view, place):
                self._events.append(self._copy(source, plane, after, into=False))
        return self._events[-1]

    def launch(
        self, kernel: Any, launch: Launch, arguments: Sequence[Any], after: Sequence[Any]
    ) -> Any:
        """Launch a kernel; returns at once."""
        threads = tuple(g * b for g, b in zip(launch.grid, launch.block, strict=True))
        with _driver_errors(f"{self._name} cannot launch {launch.kernel!r}"):
            kernel.set_args(*arguments)
            return cl.enqueue_nd_range_kernel(
                self._queue, kernel, threads, launch.block, wait_for=list(after)
            )

    def flush(self) -> None:
        """Let the device begin."""
        with _driver_errors(f"{self._name} failed"):
            self._queue.flush()

    def finish(self) -> None:
        """Wait for all operations."""
        with _driver_errors(f"{self._name} failed"):
            self._queue.finish()
        self._events.clear()

    def _copy(self, memory: Any, plane: Plane, after: Sequence[Any], into: bool) -> Any:
        """Enqueue one copy."""
        span = (plane.rows - 1) * plane.pitch + plane.length
        host = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(plane.address))
        ends = (memory, host) if into else (host, memory)
        waits: dict[str, Any] = {"is_blocking": False, "wait_for": list(after)}
        if plane.rows == 1:
            offset = {"dst_offset" if into else "src_offset": plane.offset}
            return cl.enqueue_copy(self._queue, *ends, **offset, **waits)
        there = plane.offset_pitch
        return cl.enqueue_copy(
            self._queue,
            *ends,
            buffer_origin=(plane.offset % there, plane.offset // there, 0),
            host_origin=(0, 0, 0),
            region=(plane.length, plane.rows, 1),
            buffer_pitches=(there, there * plane.rows),
            host_pitches=(plane.pitch, plane.pitch * plane.rows),
            **waits,
        )


@contextlib.contextmanager
def _driver_errors(what: str) -> Iterator[None]:
    """Raise errors of OpenCL, and of memory, as ours."""
    try:
        yield
    except MemoryError as error:
        raise DistributedError(f"{what} ({error})") from error
    except cl.Error as error:
        reason = cl.status_code.to_string(error.code) if error.code else str(error)
        raise DistributedError(f"{what} ({error.routine}: {reason})") from error
