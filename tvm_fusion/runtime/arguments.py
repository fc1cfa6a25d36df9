# SPDX-License-Identifier: Apache-2.0
"""Conversion of a call's arguments to TVM tensors, and of its results to numpy arrays.

Kernels for CPUs read and write arrays wherever their elements may lie, so a contiguous array is
used in place. Any other input is copied into our own memory first. Files of earlier versions hold
kernels that crash on data which does not begin at a multiple of 64 bytes; for those such inputs are
copied, too.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import InvalidInputError
from .host_arrays import TensorSpec
from .tvm_runtime import get_function

_CPU = 1
_CARRIERS = {2: "uint16", 1: "uint8"}
"""Types that are passed between TVM and numpy by name where DLPack lacks the true type."""
_READ_ONLY_SINCE = (1, 0)
"""Version of DLPack that can say that a tensor is read-only."""
_PARALLEL_COPY = 1 << 20
"""Bytes from which on a copy is worth the start of threads, some 50 us each."""


@cache
def numpy_dtype(name: str) -> np.dtype:
    """The numpy type of a TVM type, those of ``ml_dtypes`` (bfloat16, float8) included."""
    try:
        dtype = _find_dtype(name)
        same_layout = tvm_ffi.dtype(name).bits == 8 * dtype.itemsize  # TVM packs int4 and such
    except (TypeError, ValueError):
        same_layout = False
    if not same_layout:
        raise InvalidInputError(f"the element type {name!r} has no match in numpy")
    return dtype


def _find_dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # only few models need it

        return np.dtype(getattr(ml_dtypes, name, name))


def bind(specs: Sequence[TensorSpec], args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Put positional and named arguments into the order of the inputs.

    Raises InvalidInputError if one is missing, unknown, given twice, or if there are too many.
    """
    if not named and len(args) == 1 and not isinstance(args[0], np.ndarray):
        if isinstance(args[0], Mapping):
            named, args = args[0], []
    if not named and len(args) == len(specs):
        return list(args)
    names = [spec.name for spec in specs]
    if len(args) > len(names):
        raise InvalidInputError(
            f"got {len(args)} inputs; expected {len(names)}: {_list(names) or 'none'}"
        )
    values = dict(zip(names, args, strict=False))
    for name, value in named.items():
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidInputError(
                f"no input is called {name!r}; the inputs are {_list(names) or 'none'}{hint}"
            )
        if name in values:
            raise InvalidInputError(f"input {name!r} is given twice, by position and by name")
        values[name] = value
    missing = [name for name in names if name not in values]
    if missing:
        raise InvalidInputError(f"missing input {_list(missing)}; the inputs are {_list(names)}")
    return [values[name] for name in names]


def check(
    specs: Sequence[TensorSpec],
    values: Sequence[Any],
    view: Callable[[TensorSpec, Any], Any] | None = None,
) -> list[Any]:
    """View each value as a numpy array, without copying, of the type and shape of its input.

    ``view``: makes the array, or a TVM tensor, of an input and its value; by default
    :func:`as_array`. Raises InvalidInputError if a value does not match; the message names the
    input, its value and the expected type.
    """
    sizes: dict[str, tuple[int, str]] = {}
    arrays = []
    for spec, value in zip(specs, values, strict=True):
        if view is not None:
            array = view(spec, value)
        else:
            array = value if type(value) is np.ndarray else as_array(spec, value)
        expected: Any = numpy_dtype(spec.dtype)
        if not isinstance(array, np.ndarray):
            expected = spec.dtype
        if array.dtype != expected:
            raise InvalidInputError(
                f"input {spec.name!r} has the element type {array.dtype}; expected {spec.dtype}: "
                f"convert it, for example with .astype({spec.dtype!r})"
            )
        if array.shape != spec.shape:
            _check_shape(spec, tuple(array.shape), sizes)
        arrays.append(array)
    return arrays


def _check_shape(
    spec: TensorSpec, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]
) -> None:
    fits = len(shape) == len(spec.shape) and all(
        got == size for got, size in zip(shape, spec.shape, strict=True) if isinstance(size, int)
    )
    if not fits:
        raise InvalidInputError(
            f"input {spec.name!r} has the shape {shape}; expected {_shape_text(spec)}"
        )
    for got, size in zip(shape, spec.shape, strict=True):
        if isinstance(size, str):
            known, where = sizes.setdefault(size, (got, spec.name))
            if known != got:
                raise InvalidInputError(
                    f"dimension {size!r} is {got} in input {spec.name!r} and {known} in input "
                    f"{where!r}; expected one size"
                )


def as_array(spec: TensorSpec, value: Any, place: str = "the CPU") -> np.ndarray:
    """View a value as a numpy array, without copying; ``place`` is where else it may be moved to.

    Raises InvalidInputError if it is no array of the CPU.
    """
    if isinstance(value, (np.ndarray, np.generic)):  # a union type would be built in each call
        return np.asarray(value)
    has_dlpack = hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")
    if not has_dlpack or isinstance(value, type):
        raise InvalidInputError(
            f"input {spec.name!r} is a {type(value).__name__}; expected a numpy array or an "
            "object with DLPack (__dlpack__)"
        )
    _refuse_lazy_view(spec, value)
    kind, _ = dlpack_device(spec, value)
    if kind != _CPU:
        raise InvalidInputError(
            f"input {spec.name!r} is on another device (DLPack type {kind}); move it to {place}"
        )
    is_numpys_own = numpy_dtype(spec.dtype).isbuiltin == 1
    try:
        return np.from_dlpack(value) if is_numpys_own else as_numpy(tvm_ffi.from_dlpack(value))
    except Exception as error:  # an object's own methods raise anything
        raise _unreadable(spec, value, error) from error


def dlpack_device(spec: TensorSpec, value: Any) -> tuple[int, int]:
    """The device of an object with DLPack, as its type and its number.

    Raises InvalidInputError if the object does not tell.
    """
    try:
        kind, index = (int(number) for number in value.__dlpack_device__())
    except Exception as error:  # an object's own methods raise anything
        raise _unreadable(spec, value, error) from error
    return kind, index


def call_error(error: Exception) -> InvalidInputError:
    """The error of a call whose program stopped, from that of TVM."""
    reason = str(error).strip().splitlines()[-1]
    return InvalidInputError(f"the model cannot run on these inputs: {reason}")


def _unreadable(spec: TensorSpec, value: Any, error: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"input {spec.name!r} ({type(value).__name__}) cannot be read through DLPack: {error}"
    )


def _refuse_lazy_view(spec: TensorSpec, value: Any) -> None:
    """Refuse tensors of PyTorch whose memory holds other numbers, or none; DLPack does not tell."""
    if getattr(value, "is_meta", False) or hasattr(value, "fake_mode"):
        raise InvalidInputError(
            f"input {spec.name!r} is a meta or fake tensor, which has no data; expected a tensor "
            "on the CPU"
        )
    for view in ("conj", "neg"):
        is_view = getattr(value, f"is_{view}", None)
        if is_view is not None and is_view():
            raise InvalidInputError(
                f"input {spec.name!r} is a {view} view, whose memory holds other numbers; pass "
                f"{spec.name}.resolve_{view}()"
            )


class InputBuffers:
    """Our own memory for the inputs that cannot be used in place.

    ``alignment``: bytes at a multiple of which kernels expect data to begin. ``threads``: threads
    of a copy.
    """

    def __init__(self, specs: Sequence[TensorSpec], alignment: int = 1, threads: int = 1) -> None:
        self._dtypes = [spec.dtype for spec in specs]
        self._alignment = alignment
        self._threads = threads
        self._places: list[tuple[Any, np.ndarray] | None] = [None] * len(specs)

    def tensors(self, arrays: Sequence[np.ndarray]) -> tuple[list[Any], list[np.ndarray]]:
        """Tensors with the content of ``arrays``, and their memory.

        They are valid until the next call.
        """
        tensors, memory = [], []
        for index, array in enumerate(arrays):
            tensor, place = in_place(array, self._dtypes[index], self._alignment), array
            if tensor is None:
                tensor, place = self._copy(index, array)
            tensors.append(tensor)
            memory.append(place)
        return tensors, memory

    def _copy(self, index: int, array: np.ndarray) -> tuple[Any, np.ndarray]:
        place = self._places[index]
        if place is None or place[1].shape != array.shape:
            tensor = empty(array.shape, self._dtypes[index], tvm_ffi.device("cpu", 0))
            place = self._places[index] = (tensor, as_numpy(tensor))
        _copy_on_threads(place[1], array, self._threads)
        return place


def _copy_on_threads(target: np.ndarray, source: np.ndarray, threads: int) -> None:
    """Copy an array, whose longest axis the threads share; numpy copies without Python's lock."""
    if source.nbytes < _PARALLEL_COPY or threads < 2:
        np.copyto(target, source)
        return
    axis = int(np.argmax(source.shape))
    parts = zip(
        np.array_split(target, threads, axis), np.array_split(source, threads, axis), strict=True
    )
    workers = [threading.Thread(target=np.copyto, args=pair) for pair in parts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def export(array: np.ndarray, alignment: int) -> Any:
    """A tensor in the memory of an array of a type that DLPack knows.

    Raises BufferError if the array is not contiguous, or begins elsewhere than at a multiple of
    ``alignment`` bytes; or if it is read-only, and numpy older than 2.1.
    """
    lent = array if array.flags.writeable else array.__dlpack__(max_version=_READ_ONLY_SINCE)
    return tvm_ffi.from_dlpack(lent, require_alignment=alignment, require_contiguous=True)


def in_place(array: np.ndarray, dtype: str, alignment: int = 1) -> Any:
    """A tensor of type ``dtype`` in an array's own memory; None if kernels cannot use it there."""
    if not array.size:
        return None
    is_numpys_own = numpy_dtype(dtype).isbuiltin == 1  # an unpickled type of numpy's is not
    try:
        carrier = array if is_numpys_own else array.view(_CARRIERS[array.itemsize])
        tensor = export(carrier, max(alignment, array.itemsize))
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None
    return tensor if is_numpys_own else _viewed(tensor, dtype)


def check_outputs(specs: Sequence[TensorSpec], out: Any) -> tuple[np.ndarray | None, ...]:
    """The array that a caller gives for each output, None where he gives none.

    ``out``: an array if there is one output; else one for each output in order, or by name, where
    some may be missing or None. Raises InvalidInputError if one is of another type or shape than
    its output or read-only, if two share memory, or if they are too many or too few.
    """
    names = [spec.name for spec in specs]
    if isinstance(out, Mapping):
        unknown = [name for name in out if name not in names]
        if unknown:
            raise InvalidInputError(
                f"no output is called {unknown[0]!r}; the outputs are {_list(names)}"
            )
        values = [out.get(name) for name in names]
    else:
        values = list(out) if isinstance(out, tuple | list) else [out]
    if len(values) != len(specs):
        raise InvalidInputError(
            f"out has {len(values)} arrays; expected {len(specs)}, for {_list(names)}"
        )
    arrays = [
        None if value is None else _output_array(spec, value)
        for spec, value in zip(specs, values, strict=True)
    ]
    taken: list[np.ndarray] = []
    for spec, array in zip(specs, arrays, strict=True):
        if array is not None:
            if overlaps(array, taken):
                raise InvalidInputError(
                    f"the array given for output {spec.name!r} shares memory with that of another "
                    "output; expected arrays apart"
                )
            taken.append(array)
    return tuple(arrays)


def _output_array(spec: TensorSpec, value: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise InvalidInputError(
            f"out for output {spec.name!r} is a {type(value).__name__}; expected a numpy array"
        )
    if value.dtype != numpy_dtype(spec.dtype):
        raise InvalidInputError(
            f"out for output {spec.name!r} has the element type {value.dtype}; expected "
            f"{spec.dtype}"
        )
    sizes = [size for size in spec.shape if isinstance(size, int)]
    if len(sizes) == len(spec.shape):
        check_output_shape(spec, value, spec.shape)
    if not value.flags.writeable:
        raise InvalidInputError(f"out for output {spec.name!r} is read-only")
    return value


def check_output_shape(spec: TensorSpec, array: np.ndarray, shape: Sequence[int | str]) -> None:
    """Check that an array given for an output has its shape.

    Raises InvalidInputError if not.
    """
    if array.shape != tuple(shape):
        raise InvalidInputError(
            f"out for output {spec.name!r} has the shape {array.shape}; expected {tuple(shape)}"
        )


def results(
    outputs: Sequence[Any],
    fresh: Sequence[bool],
    inputs: Sequence[np.ndarray],
    places: Sequence[np.ndarray | None] | None = None,
) -> list[np.ndarray]:
    """Results as numpy arrays that the caller may keep and change.

    ``outputs``: results of the function. ``fresh``: whether each was created by this call.
    ``inputs``: memory of the inputs; results that overlap with it are copied, like those not fresh.
    ``places``: array in whose memory the program has written a result, or None for any other
    result.
    """
    arrays: list[np.ndarray] = []
    taken = list(inputs)
    for tensor, new, place in zip(outputs, fresh, places or [None] * len(outputs), strict=True):
        array = as_numpy(tensor) if place is None else place
        if place is None and (not new or overlaps(array, taken)):
            array = array.copy()
        arrays.append(array)
        taken.append(array)
    return arrays


def overlaps(array: np.ndarray, others: Sequence[np.ndarray]) -> bool:
    """Return whether an array may share memory with one of the others."""
    for other in others:
        if np.may_share_memory(array, other):
            return True
    return False


def empty(shape: Sequence[int], dtype: str, device: tvm_ffi.Device) -> Any:
    """An empty TVM tensor, with its alignment."""
    allocate = get_function("runtime.TVMTensorAllocWithScope")
    return allocate(tvm_ffi.Shape(tuple(shape)), tvm_ffi.dtype(dtype), device, None)


def as_numpy(tensor: Any) -> np.ndarray:
    """A numpy array in the memory of a tensor."""
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError):  # a type that numpy lacks
        dtype = numpy_dtype(str(tensor.dtype))
    return np.from_dlpack(_viewed(tensor, _CARRIERS[dtype.itemsize])).view(dtype)


def _viewed(tensor: Any, dtype: str) -> Any:
    """A tensor of another type of the same size in the memory of ``tensor``."""
    create_view = get_function("runtime.TVMTensorCreateView")
    return create_view(tensor, tensor.shape, tvm_ffi.dtype(dtype), 0)


def _shape_text(spec: TensorSpec) -> str:
    inner = ", ".join(map(str, spec.shape))
    return f"({inner},)" if len(spec.shape) == 1 else f"({inner})"


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
