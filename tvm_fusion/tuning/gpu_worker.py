# SPDX-License-Identifier: Apache-2.0
"""Measuring process of a tuning job on a GPU: as :mod:`.worker`, with the device's own clock.

A kernel is timed by two events around its launch, after the second-level cache was filled with
other data and the device was idle: TVM's time evaluator does so on CUDA and on OpenCL. The launch
is part of the time, the same for all candidates. The reference is computed on the host, by the
function without a schedule.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi

from tvm_fusion.runtime.arguments import empty
from tvm_fusion.runtime.host_arrays import aligned_empty
from tvm_fusion.runtime.tvm_runtime import get_function, load_device_library
from tvm_fusion.tuning.worker import REFERENCE, TOLERANCES, Races, serve

from ..runtime.tvm_runtime import device_of

FLUSH_BYTES = 256 << 20
"""Bytes that are copied before each run: more than the second-level cache of any GPU has."""


class DeviceCandidate:
    """Kernel of one library, with its arguments on the device.

    Parameters
    ----------
    about : mapping
        Description as in :class:`.worker.Candidate`, with one call and without buffers.
    common : sequence of Tensor
        The task's tensors on the device.
    device : tvm_ffi.Device
        The device.
    """

    def __init__(self, about: Mapping[str, Any], common: Sequence[Any], device: Any) -> None:
        library = tvm_ffi.load_module(about["library"])
        [(name, numbers)] = about["calls"]
        arrays = (np.load(path, allow_pickle=False) for path in about["constants"])
        every = [*common, *(on_device(array, device) for array in arrays)]
        self._arguments = [every[number] for number in numbers]
        self._call = library[name]
        place = device.dlpack_device_type(), device.index
        once = (1, 1, 0, 0, 0, 0)  # number, repeats, no least time, no pauses
        evaluator = get_function("runtime.RPCTimeEvaluator")
        self._timed = evaluator(library, name, *place, *once, FLUSH_BYTES, "")

    def run(self) -> None:
        """Launch the kernel."""
        self._call(*self._arguments)

    def seconds(self) -> float:
        """Time one launch by events, with a cold cache."""
        return float(np.frombuffer(self._timed(*self._arguments), "float64")[0])


class DeviceBench(Races[DeviceCandidate]):
    """Races on a GPU.

    Parameters
    ----------
    kind : str
        ``cuda`` or ``opencl``; ``cpu`` for the host, as if it were a device.
    beacon : memory map
        Memory of the size of :data:`.worker.BEACON`.
    """

    def __init__(self, kind: str, beacon: mmap.mmap) -> None:
        super().__init__(beacon)
        if kind != "cpu":
            load_device_library(kind)
        self._device = device_of(kind)

    def prepare(
        self, arrays: Sequence[str], outputs: int, reference: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Read the tensors and compute the reference; the last ``outputs`` tensors are outputs."""
        host = [_aligned(np.load(path, allow_pickle=False)) for path in arrays]
        self._wanted = host[len(host) - outputs :]
        self.tolerance = max(map(_tolerance, self._wanted))
        for array in self._wanted:
            poison(array)
        self._tensors = [on_device(array, self._device) for array in host]
        self.begin(REFERENCE)
        library = tvm_ffi.load_module(reference["library"])
        [(name, numbers)] = reference["calls"]
        tensors = [tvm_ffi.from_dlpack(array) for array in host]
        library[name](*(tensors[number] for number in numbers))
        return {"finite": all(bool(np.isfinite(array).all()) for array in self._wanted)}

    def load(self, about: Mapping[str, Any], racers: int) -> DeviceCandidate:
        """Load a candidate."""
        return DeviceCandidate(about, self._tensors, self._device)

    def error_of(self, candidate: DeviceCandidate) -> float:
        """Run a candidate on poisoned outputs; return the largest relative error.

        Errors of outputs of the more exact types weigh more.
        """
        pairs = list(zip(self._tensors[-len(self._wanted) :], self._wanted, strict=True))
        for tensor, array in pairs:
            upload(poison(np.empty_like(array)), tensor)
        candidate.run()
        errors = [
            relative_error(download(tensor, array), array) * self.tolerance / _tolerance(array)
            for tensor, array in pairs
        ]
        return float(np.max(errors))  # NaN, if one is

    def seconds_of(self, candidate: DeviceCandidate, state: int) -> float:
        """Time one launch by events, with a cold cache."""
        return candidate.seconds()


def _tolerance(array: np.ndarray) -> float:
    return TOLERANCES[array.dtype.name]


def poison(array: np.ndarray) -> np.ndarray:
    """Fill an array with NaN, byte by byte, and return it."""
    array.reshape(-1).view("uint8")[...] = 0xFF
    return array


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest error, relative to the largest magnitude."""
    wide = wanted.astype("float64")
    scale = float(np.abs(wide).max(initial=0.0)) or 1.0
    return float(np.abs(found.astype("float64") - wide).max(initial=0.0)) / scale


def on_device(array: np.ndarray, device: Any) -> Any:
    """A tensor of the device with the content of an array."""
    tensor = empty(array.shape, array.dtype.name, device)
    upload(array, tensor)
    return tensor


def upload(array: np.ndarray, tensor: Any) -> None:
    """Copy an array to a tensor of the same shape and type."""
    pointer = array.ctypes.data_as(ctypes.c_void_p)
    get_function("runtime.TVMTensorCopyFromBytes")(tensor, pointer, array.nbytes)


def download(tensor: Any, like: np.ndarray) -> np.ndarray:
    """Copy a tensor to a new array of the shape and type of another."""
    array = np.empty_like(like)
    pointer = array.ctypes.data_as(ctypes.c_void_p)
    get_function("runtime.TVMTensorCopyToBytes")(tensor, pointer, array.nbytes)
    return array


def _aligned(array: np.ndarray) -> np.ndarray:
    other = aligned_empty(array.shape, array.dtype)
    other[...] = array
    return other


def main() -> None:
    """Serve until standard input ends: ``gpu_worker.py CHANNEL BEACON KIND``."""
    serve(DeviceBench)


if __name__ == "__main__":
    main()
