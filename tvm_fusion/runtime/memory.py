# SPDX-License-Identifier: Apache-2.0
"""Memory of a compiled model's tensors: that of the host, or that of a GPU.

Both kinds of memory do the same things: they check the arguments of a call, place them where the
kernels read them, choose where results are written, and return these as numpy arrays or as tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tvm_ffi

from schedules.workload.workspace_layout import FAILED, WATCHED, is_workspace

from ..errors import InvalidInputError, TargetError
from .arguments import (
    InputBuffers,
    as_array,
    check,
    dlpack_device,
    empty,
    in_place,
    numpy_dtype,
    overlaps,
    results,
)
from .fast_call import OutputPool
from .host_arrays import ALIGNMENT, TensorSpec
from .tvm_runtime import get_function

_CUDA = 2
_LEGACY_STREAM = 1
"""DLPack's number of the stream on which TVM launches its kernels."""


class Memory(Protocol):
    """Interface of the memory of a compiled model."""

    device: tvm_ffi.Device

    def check(self, values: Sequence[Any]) -> list[Any]:
        """View each value of a call as an array or a tensor of the type and shape of its input."""

    def place(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Tensors that kernels can read, valid until the next call, and their memory."""

    def receive(
        self, out: Sequence[np.ndarray | None], inputs: Sequence[Any]
    ) -> tuple[list[np.ndarray | None], list[Any]]:
        """Arrays in which results come, None for those of the program's own memory, and tensors.

        The tensors are those that the program takes to write results to. ``out`` are the arrays of
        the caller, None for each output without one.
        """

    def arrays(
        self,
        outputs: Sequence[Any],
        fresh: Sequence[bool],
        inputs: Sequence[Any],
        places: Sequence[np.ndarray | None] | None = None,
    ) -> list[np.ndarray]:
        """Results as numpy arrays that the caller may keep and change.

        ``places`` are the arrays of :meth:`receive`, if that was called.
        """

    def upload(self, weights: Sequence[Any]) -> list[Any]:
        """The weights where kernels can read them."""

    def synchronize(self) -> None:
        """Wait until all launched work is done."""


class HostMemory:
    """Memory of the host: inputs are used in place if they are contiguous.

    ``lifted``: for each output, whether the program takes the tensor to write it to; nothing if
    none is. ``alignment``: bytes at a multiple of which kernels expect data to begin; by default as
    TVM's code does. ``threads``: threads that copy an input.
    """

    arrays = staticmethod(results)

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec] = (),
        lifted: Sequence[bool] = (),
        alignment: int = ALIGNMENT,
        threads: int = 1,
    ) -> None:
        self.device = tvm_ffi.device("cpu", 0)
        self._specs = specs
        self._stage = InputBuffers(specs, alignment, threads)
        chosen = lifted or [False] * len(outputs)
        self.pools = [
            OutputPool(spec) if is_lifted else None
            for spec, is_lifted in zip(outputs, chosen, strict=True)
        ]

    def check(self, values: Sequence[Any]) -> list[np.ndarray]:
        """Check values as :meth:`Memory.check` states; nothing is copied."""
        return check(self._specs, values)

    def place(self, values: Sequence[np.ndarray]) -> tuple[list[Any], list[np.ndarray]]:
        """Place values as :meth:`Memory.place` states; copies what cannot be used in place."""
        return self._stage.tensors(values)

    def receive(
        self, out: Sequence[np.ndarray | None], inputs: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray | None], list[Any]]:
        """Take outputs as :meth:`Memory.receive` states; the memory of inputs is not written to."""
        arrays: list[np.ndarray | None] = []
        tensors = []
        for array, pool in zip(out, self.pools, strict=True):
            tensor = None
            if pool is None:
                arrays.append(None)
                continue
            if array is not None and not overlaps(array, inputs):
                tensor = in_place(array, pool.spec.dtype)
            if tensor is None:
                array, tensor = pool.take()
            arrays.append(array)
            tensors.append(tensor)
        return arrays, tensors

    def upload(self, weights: Sequence[Any]) -> list[Any]:
        """The weights as they are."""
        return list(weights)

    def synchronize(self) -> None:
        """Do nothing: calls are synchronous."""


class DeviceMemory:
    """Memory of a GPU: inputs are copied to it, unless they are there; results are copied back."""

    def __init__(self, specs: Sequence[TensorSpec], device: tvm_ffi.Device) -> None:
        self.device = device
        self._specs = specs
        self._places: list[Any] = [None] * len(specs)

    def check(self, values: Sequence[Any]) -> list[Any]:
        """Check values as :meth:`Memory.check` states; numpy arrays stay until they are placed.

        Raises InvalidInputError if a value is not of its input's type and shape, or is on another
        device.
        """
        return check(self._specs, values, self._view)

    def place(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Place values as :meth:`Memory.place` states.

        Raises TargetError if the device has too little memory for them.
        """
        with _own_errors(self.device):
            tensors = [self._placed(index, value) for index, value in enumerate(values)]
        return tensors, tensors

    def receive(
        self, out: Sequence[np.ndarray | None], inputs: Sequence[Any]
    ) -> tuple[list[np.ndarray | None], list[Any]]:
        """Take outputs as :meth:`Memory.receive` states; programs take no tensors to write to."""
        contiguous = [each if each is not None and each.flags.carray else None for each in out]
        return contiguous, []

    def arrays(
        self,
        outputs: Sequence[Any],
        fresh: Sequence[bool],
        inputs: Sequence[Any],
        places: Sequence[np.ndarray | None] | None = None,
    ) -> list[np.ndarray]:
        """Make arrays as :meth:`Memory.arrays` states; waits for the kernels.

        Raises TargetError if a kernel failed.
        """
        with _own_errors(self.device):
            targets = places or [None] * len(outputs)
            return [download(*pair) for pair in zip(outputs, targets, strict=True)]

    def upload(self, weights: Sequence[Any]) -> list[Any]:
        """Copies of the weights on the device."""
        places = [empty(weight.shape, str(weight.dtype), self.device) for weight in weights]
        for weight, place in zip(weights, places, strict=True):
            _copy(weight, place)
        self.synchronize()
        return places

    def synchronize(self) -> None:
        """Wait until all launched work is done.

        Raises TargetError if a kernel failed.
        """
        with _own_errors(self.device):
            get_function("runtime.Device_StreamSync")(self.device, 0)

    def _view(self, spec: TensorSpec, value: Any) -> Any:
        """A tensor of the device, or an array of the host."""
        if isinstance(value, np.ndarray | type) or not hasattr(value, "__dlpack_device__"):
            return as_array(spec, value)
        kind, index = dlpack_device(spec, value)
        if kind != self.device.dlpack_device_type():
            return as_array(spec, value, f"the CPU or to {self.device}")
        if index != self.device.index:
            raise InvalidInputError(
                f"input {spec.name!r} is on the device number {index}; move it to {self.device}"
            )
        return _import(spec, value, kind)

    def _placed(self, index: int, value: Any) -> Any:
        on_device = isinstance(value, tvm_ffi.Tensor)
        if on_device and (kind_of(value) != _CUDA or value.data_ptr() % ALIGNMENT == 0):
            return value
        shape, place = tuple(value.shape), self._places[index]
        if place is None or tuple(place.shape) != shape:
            place = self._places[index] = empty(shape, self._specs[index].dtype, self.device)
        if on_device:
            _copy(value, place)
        elif value.size:
            upload(value, place)
        return place


def own_tensors(outputs: Sequence[Any], fresh: Sequence[bool], inputs: Sequence[Any]) -> list[Any]:
    """Results as tensors that the caller may keep and change, without waiting for them.

    ``outputs``: results of the function. ``fresh``: whether each was created by this call; others
    are copied. ``inputs``: results that overlap with them are copied, too. Raises TargetError if
    the device has too little memory for a copy.
    """
    taken = [_extent(tensor) for tensor in inputs]
    owned = []
    for tensor, new in zip(outputs, fresh, strict=True):
        begin, end = _extent(tensor)
        if not new or any(begin < other[1] and other[0] < end for other in taken):
            with _own_errors(tensor.device):
                copy = empty(tensor.shape, str(tensor.dtype), tensor.device)
                _copy(tensor, copy)
            tensor = copy
        taken.append(_extent(tensor))
        owned.append(tensor)
    return owned


def kind_of(tensor: Any) -> int:
    """DLPack's number of the device kind of a tensor."""
    return int(tensor.device.dlpack_device_type())


@contextlib.contextmanager
def _own_errors(device: tvm_ffi.Device) -> Iterator[None]:
    """Turn errors of TVM's runtime about a device into our errors."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise TargetError(f"{device} failed: {reason}") from error


def _import(spec: TensorSpec, value: Any, kind: int) -> Any:
    """A tensor of another library in place; the device waits for pending writes to it."""
    try:
        if not isinstance(value, tvm_ffi.Tensor):
            stream = {"stream": _LEGACY_STREAM} if kind == _CUDA else {}
            value = value.__dlpack__(**stream)
        tensor = tvm_ffi.from_dlpack(value, require_contiguous=True)
        str(tensor.dtype)  # fails where TVM has no such type, as for complex numbers
    except Exception as error:  # an object's own methods raise anything
        raise InvalidInputError(
            f"input {spec.name!r} ({type(value).__name__}) cannot be read through DLPack: {error}; "
            f"expected a contiguous tensor of {spec.dtype}"
        ) from error
    return tensor


def upload(value: np.ndarray, place: Any) -> None:
    """Copy an array to a tensor of a device."""
    data = np.ascontiguousarray(value)
    pointer = data.ctypes.data_as(ctypes.c_void_p)
    get_function("runtime.TVMTensorCopyFromBytes")(place, pointer, data.nbytes)


def download(tensor: Any, array: np.ndarray | None = None) -> np.ndarray:
    """Copy a tensor of a device to an array, a new one if None, after all launches of its stream.

    An array of another shape stays as it is, and a new one is returned.
    """
    if array is None or array.shape != tuple(tensor.shape):
        array = np.empty(tuple(tensor.shape), numpy_dtype(str(tensor.dtype)))
    if array.size:
        pointer = array.ctypes.data_as(ctypes.c_void_p)
        get_function("runtime.TVMTensorCopyToBytes")(tensor, pointer, array.nbytes)
    return array


def _copy(source: Any, target: Any) -> None:
    if math.prod(target.shape):
        get_function("runtime.TVMTensorCopyFromTo")(source, target)


def _extent(tensor: Any) -> tuple[int, int]:
    """The addresses of a tensor's bytes."""
    size = math.prod(tensor.shape) * numpy_dtype(str(tensor.dtype)).itemsize
    begin = int(tensor.data_ptr())
    return begin, begin + size


# A thread gives up after several seconds: quicker calls need no look at the device's memory.
_SECONDS = 0.5


class Workspaces:
    """The workspaces of a model's kernels on a device.

    ``tensors``: their memory (:mod:`schedules.gpu.core.workspace_slot`).
    """

    def __init__(self, tensors: Sequence[Any] = ()) -> None:
        self._tensors = list(tensors)
        self._launched: float | None = None

    @classmethod
    def among(cls, weights: Sequence[Any], places: Sequence[Any]) -> Workspaces:
        """Those of the places whose weights are workspaces, which are told of the checks."""
        pairs = zip(weights, places, strict=True)
        found = cls([place for weight, place in pairs if is_workspace(np.from_dlpack(weight))])
        found.reset()
        return found

    def launched(self) -> None:
        """Note that kernels were launched."""
        if self._tensors and self._launched is None:
            self._launched = time.monotonic()

    @property
    def are_suspect(self) -> bool:
        """Whether a launch since the last check may have taken so long that it has failed."""
        return self._launched is not None and time.monotonic() - self._launched > _SECONDS

    def check(self) -> None:
        """Look whether a launch has failed; all must be done, and none may begin meanwhile.

        Raises TargetError if one has. The workspaces are reset by then.
        """
        suspect, self._launched = self.are_suspect, None
        if suspect and any(download(tensor)[FAILED] for tensor in self._tensors):
            self.reset()
            raise TargetError(
                "a reduction found no free slot of its workspace, or no results of its other "
                "blocks: too many streams ran it at once, or something wrote to its memory. The "
                "results since the last call that ended well are wrong; CompiledModel.reset() was "
                "called, so the next call begins anew"
            )

    def reset(self) -> None:
        """Set all but the word that tells of the checks to zero; no launch may be under way."""
        for tensor in self._tensors:
            content = np.zeros(tuple(tensor.shape), "int32")
            content[WATCHED] = 1
            upload(content, tensor)
