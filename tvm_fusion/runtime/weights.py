# SPDX-License-Identifier: Apache-2.0
"""Weights of models in a file, each tensor aligned as the kernels need it, equal ones once."""

from __future__ import annotations

import hashlib
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import tvm_ffi

from .host_arrays import ALIGNMENT, TensorSpec, aligned_empty

_DTYPES = frozenset(
    ["float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_maps: weakref.WeakValueDictionary[tuple[int, ...], mmap.mmap] = weakref.WeakValueDictionary()


def weight_specs(weights: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Describe tensors; their names are the parameters of ``main`` that take them."""
    return tuple(
        TensorSpec(f"weight{index}", tuple(map(int, weight.shape)), str(weight.dtype))
        for index, weight in enumerate(weights)
    )


def stored_bytes(specs: Sequence[TensorSpec]) -> int:
    """Number of bytes of the tensors, with the gaps between them.

    Raises ValueError, TypeError if a shape is not one of known sizes, or an element type is none of
    weights.
    """
    return sum(size + gap for _, size, gap in _layout(specs))


def digest(weight: Any) -> bytes:
    """SHA-256 of a tensor's type, shape and bytes."""
    array = np.from_dlpack(weight)
    found = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    found.update(array.reshape(-1).view(np.uint8).data)
    return found.digest()


def write_weights(
    file: BinaryIO, weights: Sequence[Any], places: dict[bytes, int]
) -> tuple[int, ...]:
    """Write tensors one after the other, and return where each begins in the file.

    ``file``: a file at a multiple of 64 bytes. ``places``: where tensors begin that are in the
    file, by their digests. They are not written again, and new ones are added.
    """
    digests = [digest(weight) for weight in weights]
    layout = _layout(weight_specs(weights))
    for known, weight, (_, _, gap) in zip(digests, weights, layout, strict=True):
        if known not in places:
            places[known] = file.tell()
            file.write(np.from_dlpack(weight).reshape(-1).view(np.uint8).data)
            file.write(bytes(gap))
    return tuple(places[known] for known in digests)


def places_from(begin: int, specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Begins of tensors that lie one after the other from ``begin`` on."""
    sizes = (size + gap for _, size, gap in _layout(specs))
    return tuple(itertools.accumulate(sizes, initial=begin))[:-1]


def fit_into(size: int, specs: Sequence[TensorSpec], places: Sequence[int]) -> bool:
    """Return whether tensors that begin at ``places`` lie within so many bytes."""
    layout = zip(places, _layout(specs), strict=True)
    return all(0 <= place <= size - extent for place, (_, extent, _) in layout)


def map_weights(
    file: BinaryIO, specs: Sequence[TensorSpec], places: Sequence[int]
) -> list[tvm_ffi.Tensor]:
    """Tensors in the pages of a file, which all that map it share, in this process and others.

    Those that do not begin at multiples of 64 bytes, as in files of early formats, are copied.

    Raises OSError if the file ends too early.
    """
    memory = np.frombuffer(_mapped(file), np.uint8)
    if not fit_into(memory.size, specs, places):
        raise OSError(None, "it ends within the weights")
    tensors = []
    for spec, begin, (dtype, size, _) in zip(specs, places, _layout(specs), strict=True):
        array = memory[begin : begin + size]
        if begin % ALIGNMENT:
            array = aligned_empty(array.shape, np.uint8)
            array[...] = memory[begin : begin + size]
        tensors.append(tvm_ffi.from_dlpack(array.view(dtype).reshape(spec.shape)))
    return tensors


def _mapped(file: BinaryIO) -> mmap.mmap:
    """The pages of a file; the same ones as long as somebody uses them and it is unchanged.

    DLPack of numpy before 2.1 takes no read-only memory, so that writes would be private instead.
    """
    about = os.fstat(file.fileno())
    key = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
    pages = _maps.get(key)
    if pages is None:
        pages = _maps[key] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return pages


def _layout(specs: Sequence[TensorSpec]) -> Iterator[tuple[np.dtype, int, int]]:
    """Element type of each tensor, its bytes, and those of the gap after it."""
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ValueError(f"{spec.name!r} has the element type {spec.dtype!r}")
        dtype = np.dtype(spec.dtype)
        extents = [extent for extent in spec.shape if isinstance(extent, int) and extent >= 0]
        if len(extents) < len(spec.shape):
            raise ValueError(f"{spec.name!r} has the shape {spec.shape}")
        size = math.prod(extents) * dtype.itemsize
        yield dtype, size, -size % ALIGNMENT
