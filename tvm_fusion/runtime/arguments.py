# SPDX-License-Identifier: Apache-2.0
"""Conversion of a call's arguments to TVM tensors, and of its results to numpy arrays.

Compiled kernels read their inputs with aligned instructions: TVM promises them 64 bytes, does not
check it, and a smaller alignment crashes the process. So an input that is contiguous, aligned and
writable is passed in place, and any other one is copied into our own memory.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import InvalidInputError
from .host_arrays import ALIGNMENT
from .tensor_spec import TensorSpec
from .tvm_runtime import get_function

_CPU = 1
_CARRIERS = {2: "uint16", 1: "uint8"}
"""Types that are passed between TVM and numpy by name where DLPack lacks the true type."""


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

    Raises
    ------
    InvalidInputError
        If one is missing, unknown, given twice, or if there are too many.
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

    Parameters
    ----------
    specs : sequence of TensorSpec
        The inputs.
    values : sequence
        A value for each.
    view : callable, optional
        Makes the array, or a TVM tensor, of an input and its value; by default :func:`as_array`.

    Raises
    ------
    InvalidInputError
        If a value does not match; the message names the input, its value and the expected type.
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

    Raises
    ------
    InvalidInputError
        If it is no array of the CPU.
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
        return np.from_dlpack(value) if is_numpys_own else _as_numpy(tvm_ffi.from_dlpack(value))
    except Exception as error:  # an object's own methods raise anything
        raise _unreadable(spec, value, error) from error


def dlpack_device(spec: TensorSpec, value: Any) -> tuple[int, int]:
    """The device of an object with DLPack, as its type and its number.

    Raises
    ------
    InvalidInputError
        If the object does not tell.
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

    Parameters
    ----------
    specs : sequence of TensorSpec
        The inputs.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._dtypes = [spec.dtype for spec in specs]
        self._places: list[tuple[Any, np.ndarray] | None] = [None] * len(specs)

    def tensors(self, arrays: Sequence[np.ndarray]) -> tuple[list[Any], list[np.ndarray]]:
        """Tensors with the content of ``arrays``, and their memory.

        They are valid until the next call.
        """
        tensors, memory = [], []
        for index, array in enumerate(arrays):
            tensor, place = _in_place(array), array
            if tensor is None:
                tensor, place = self._copy(index, array)
            tensors.append(tensor)
            memory.append(place)
        return tensors, memory

    def _copy(self, index: int, array: np.ndarray) -> tuple[Any, np.ndarray]:
        place = self._places[index]
        if place is None or place[1].shape != array.shape:
            tensor = empty(array.shape, self._dtypes[index], tvm_ffi.device("cpu", 0))
            place = self._places[index] = (tensor, _as_numpy(tensor))
        np.copyto(place[1], array)
        return place


def _in_place(array: np.ndarray) -> Any:
    """A tensor in the array's own memory; None if kernels cannot read it there."""
    # contiguous, and writable: numpy exports no read-only arrays
    if not array.flags.carray or not array.size or array.dtype.isbuiltin != 1:
        return None
    tensor = tvm_ffi.from_dlpack(array)
    return None if tensor.data_ptr() % ALIGNMENT else tensor


def results(
    outputs: Sequence[Any], fresh: Sequence[bool], inputs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Results as numpy arrays that the caller may keep and change.

    Parameters
    ----------
    outputs : sequence of tvm_ffi.Tensor
        Results of the function.
    fresh : sequence of bool
        Whether each was created by this call.
    inputs : sequence of numpy.ndarray
        Memory of the inputs; results that overlap with it are copied, like those not fresh.
    """
    if len(outputs) == 1 and fresh[0]:
        return [_as_numpy(outputs[0])]
    arrays: list[np.ndarray] = []
    taken = list(inputs)
    for tensor, new in zip(outputs, fresh, strict=True):
        array = _as_numpy(tensor)
        if not new or _overlaps(array, taken):
            array = array.copy()
        arrays.append(array)
        taken.append(array)
    return arrays


def _overlaps(array: np.ndarray, others: Sequence[np.ndarray]) -> bool:
    for other in others:
        if np.may_share_memory(array, other):
            return True
    return False


def empty(shape: Sequence[int], dtype: str, device: tvm_ffi.Device) -> Any:
    """An empty TVM tensor, with its alignment."""
    allocate = get_function("runtime.TVMTensorAllocWithScope")
    return allocate(tvm_ffi.Shape(tuple(shape)), tvm_ffi.dtype(dtype), device, None)


def _as_numpy(tensor: Any) -> np.ndarray:
    """A numpy array in the memory of a tensor."""
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError):  # a type that numpy lacks
        dtype = numpy_dtype(str(tensor.dtype))
    create_view = get_function("runtime.TVMTensorCreateView")
    view = create_view(tensor, tensor.shape, tvm_ffi.dtype(_CARRIERS[dtype.itemsize]), 0)
    return np.from_dlpack(view).view(dtype)


def _shape_text(spec: TensorSpec) -> str:
    inner = ", ".join(map(str, spec.shape))
    return f"({inner},)" if len(spec.shape) == 1 else f"({inner})"


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
