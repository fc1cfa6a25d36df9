# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's GPUs, through the functions of their driver (``libcuda.so.1``), without a toolkit."""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...codegen.host_code import Launch
from ...errors import DistributedError, OpError, TargetError
from .driver import DeviceCode, Place, Plane, check_index, planes

_LIBRARY = "libcuda.so.1"
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_PINNED_BYTES = 1 << 16  # smaller arrays share pages with others

_Pointer = ctypes.c_uint64


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_uint),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", _Pointer),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_uint),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", _Pointer),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


def load_library() -> Any:
    """NVIDIA's driver.

    Raises ``TargetError`` if it is not installed.
    """
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise TargetError(f"this machine has no NVIDIA driver ({_LIBRARY})") from error


class CUDADriver:
    """One GPU of NVIDIA.

    Raises
    ------
    TargetError
        If there is no driver, or no GPU of that number.
    """

    def __init__(
        self,
        index: int,  # Its number in the driver.
    ) -> None:
        self._library = load_library()
        self.name = f"cuda:{index}"
        status = self._library.cuInit(ctypes.c_uint(0))
        count = ctypes.c_int(0)
        if status == 0:
            self.call("cuDeviceGetCount", ctypes.byref(count))
        check_index("cuda", index, [self._device_name(n) for n in range(count.value)])
        self._device = self._device_of(index)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._kept: list[tuple[str, Any]] = [("cuDevicePrimaryCtxRelease_v2", self._device)]
        self._arrays: dict[int, np.ndarray] = {}
        weakref.finalize(self, _free, self._library, self._context, self._kept, self._arrays)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises ``DistributedError`` if it fails.
        """
        status = getattr(self._library, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise DistributedError(f"{self.name} failed in {function}: {reason} ({status})")

    def use(self) -> None:
        """Let the calls of this thread mean this device."""
        self.call("cuCtxSetCurrent", self._context)

    def load(self, code: DeviceCode) -> Mapping[str, Any]:
        """The kernels of some code, by their names."""
        if code.kind != "cuda":
            raise OpError(f"code for {code.kind} does not run on {self.name}")
        self.use()
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code.cubin))
        self._kept.append(("cuModuleUnload", module))
        found = {}
        for name in code.kernels:
            found[name] = ctypes.c_void_p()
            text = ctypes.c_char_p(name.encode())
            self.call("cuModuleGetFunction", ctypes.byref(found[name]), module, text)
        return found

    def allocate(self, nbytes: int) -> Any:
        """Memory of the device, freed with this object."""
        self.use()
        memory = _Pointer()
        try:
            self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(max(1, nbytes)))
        except DistributedError as error:
            raise DistributedError(f"{error}; cut its rows into more chunks") from error
        self._kept.append(("cuMemFree_v2", memory))
        return memory

    def share(self, array: np.ndarray) -> Any:
        """Refuse: kernels take memory of the device."""
        raise TargetError(f"{self.name} does not share the host's memory")

    def pin(self, array: np.ndarray) -> None:
        """Lock an array's pages, so that it is copied without a detour; not if that fails."""
        if array.nbytes < _PINNED_BYTES or array.ctypes.data in self._arrays:
            return
        self.use()
        address, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        with contextlib.suppress(DistributedError):
            self.call("cuMemHostRegister_v2", address, size, ctypes.c_uint(0))
            self._arrays[array.ctypes.data] = array

    def array(self, memory: Any, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """An array at the address of memory of the device."""
        size = math.prod(shape) * dtype.itemsize
        raw = (ctypes.c_uint8 * size).from_address(memory.value)
        return np.ndarray(shape, dtype, memoryview(raw))

    def queue(self) -> CUDAQueue:
        """Make a queue: a stream that does not wait for the default one."""
        self.use()
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        self._kept.append(("cuStreamDestroy_v2", stream))
        return CUDAQueue(self, stream)

    def event(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        """Event after what is in a stream so far; destroyed by its queue."""
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_NO_TIMING))
        self.call("cuEventRecord", event, stream)
        return event

    def _device_of(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        return device

    def _device_name(self, index: int) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, ctypes.c_int(256), self._device_of(index))
        return text.value.decode()


class CUDAQueue:
    """A stream."""

    def __init__(self, driver: CUDADriver, stream: ctypes.c_void_p) -> None:
        self._driver = driver
        self._stream = stream
        self._events: list[ctypes.c_void_p] = []

    def copy_in(self, dest: Any, place: Place, view: np.ndarray, after: Sequence[Any]) -> Any:
        """Copy an array to the device; returns at once where its pages are locked."""
        self._wait(after)
        for plane in planes(view, place):
            self._copy(dest, plane, into=True)
        return self._record()

    def copy_out(self, view: np.ndarray, source: Any, place: Place, after: Sequence[Any]) -> Any:
        """Copy from the device to an array; returns at once where its pages are locked."""
        self._wait(after)
        for plane in planes(view, place):
            self._copy(source, plane, into=False)
        return self._record()

    def launch(
        self, kernel: Any, launch: Launch, arguments: Sequence[Any], after: Sequence[Any]
    ) -> Any:
        """Launch a kernel; returns at once."""
        if launch.cluster != (1, 1, 1):
            raise OpError(
                f"kernel {launch.kernel!r} is for clusters of blocks, which rows of a device "
                "cannot use; give the device a schedule without them"
            )
        self._wait(after)
        values = [
            argument if isinstance(argument, _Pointer) else np.asarray(argument)
            for argument in arguments
        ]
        addresses = [
            ctypes.addressof(value) if isinstance(value, _Pointer) else value.ctypes.data
            for value in values
        ]
        sizes = [ctypes.c_uint(n) for n in (*launch.grid, *launch.block)]
        self._driver.call(
            "cuLaunchKernel",
            kernel,
            *sizes,
            ctypes.c_uint(0),  # shared memory beside what the kernel declares
            self._stream,
            (ctypes.c_void_p * len(addresses))(*addresses),
            None,
        )
        return self._record()

    def flush(self) -> None:
        """Nothing to do: a stream begins by itself."""

    def finish(self) -> None:
        """Wait for all operations."""
        self._driver.use()
        self._driver.call("cuStreamSynchronize", self._stream)
        while self._events:
            self._driver.call("cuEventDestroy_v2", self._events.pop())

    def _wait(self, after: Sequence[Any]) -> None:
        self._driver.use()
        for event in after:
            self._driver.call("cuStreamWaitEvent", self._stream, event, ctypes.c_uint(0))

    def _record(self) -> ctypes.c_void_p:
        self._events.append(self._driver.event(self._stream))
        return self._events[-1]

    def _copy(self, memory: Any, plane: Plane, into: bool) -> None:
        dense = _Pointer(memory.value + plane.offset)
        if plane.rows == 1:
            host, size = ctypes.c_void_p(plane.address), ctypes.c_size_t(plane.nbytes)
            if into:
                self._driver.call("cuMemcpyHtoDAsync_v2", dense, host, size, self._stream)
            else:
                self._driver.call("cuMemcpyDtoHAsync_v2", host, dense, size, self._stream)
            return
        copy = _Copy2D(WidthInBytes=plane.length, Height=plane.rows)
        host_end, device_end = ("src", "dst") if into else ("dst", "src")
        setattr(copy, f"{host_end}MemoryType", _HOST)
        setattr(copy, f"{host_end}Host", plane.address)
        setattr(copy, f"{host_end}Pitch", plane.pitch)
        setattr(copy, f"{device_end}MemoryType", _DEVICE)
        setattr(copy, f"{device_end}Device", dense.value)
        setattr(copy, f"{device_end}Pitch", plane.offset_pitch)
        self._driver.call("cuMemcpy2DAsync_v2", ctypes.byref(copy), self._stream)


def _free(
    library: Any,
    context: ctypes.c_void_p,
    kept: list[tuple[str, Any]],
    arrays: dict[int, np.ndarray],
) -> None:
    """Release what a driver holds, the last first; errors at the end of a process do not matter."""
    library.cuCtxSetCurrent(context)
    for address in arrays:
        library.cuMemHostUnregister(ctypes.c_void_p(address))
    for function, held in reversed(kept):
        getattr(library, function)(held)
