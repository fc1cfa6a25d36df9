# SPDX-License-Identifier: Apache-2.0
"""Weights of a model as one contiguous block, each tensor aligned as the kernels need it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import tvm_ffi

from .host_arrays import ALIGNMENT, aligned_empty
from .tensor_spec import TensorSpec

_DTYPES = frozenset(
    ["float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


def weight_specs(weights: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Describe tensors; their names are the parameters of ``main`` that take them."""
    return tuple(
        TensorSpec(f"weight{index}", tuple(map(int, weight.shape)), str(weight.dtype))
        for index, weight in enumerate(weights)
    )


def stored_bytes(specs: Sequence[TensorSpec]) -> int:
    """Number of bytes of the tensors, with the gaps between them.

    Raises
    ------
    ValueError, TypeError
        If a shape is not one of known sizes, or an element type is none of weights.
    """
    return sum(size + gap for _, size, gap in _layout(specs))


def digest(weight: Any) -> bytes:
    """SHA-256 of a tensor's type, shape and bytes."""
    array = np.from_dlpack(weight)
    found = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    found.update(array.reshape(-1).view(np.uint8).data)
    return found.digest()


def write_weights(file: BinaryIO, weights: Sequence[Any]) -> None:
    """Write tensors one after the other."""
    for weight, (_, _, gap) in zip(weights, _layout(weight_specs(weights)), strict=True):
        file.write(np.from_dlpack(weight).reshape(-1).view(np.uint8).data)
        file.write(bytes(gap))


def read_weights(file: BinaryIO, specs: Sequence[TensorSpec]) -> list[tvm_ffi.Tensor]:
    """Read the tensors of :func:`write_weights` into memory that they share.

    The bytes go from the file directly to the memory that the kernels read.

    Raises
    ------
    OSError
        If the file ends too early.
    """
    total = stored_bytes(specs)
    memory = aligned_empty((total,), np.uint8)
    if file.readinto(memory.data) != total:  # type: ignore[attr-defined]
        raise OSError(None, "it ends within the weights")
    tensors, begin = [], 0
    for spec, (dtype, size, gap) in zip(specs, _layout(specs), strict=True):
        array = memory[begin : begin + size].view(dtype).reshape(spec.shape)
        tensors.append(tvm_ffi.from_dlpack(array))
        begin += size + gap
    return tensors


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
