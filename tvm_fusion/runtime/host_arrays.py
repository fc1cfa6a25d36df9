# SPDX-License-Identifier: Apache-2.0
"""Arrays that begin where vectors do, random ones to try a model on, and their errors.

Imports numpy alone, so that a process which races a peer can use it and holds nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import TVMFusionError


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and element type of one input or output."""

    name: str  # The name which the model gives the tensor.
    shape: tuple[int | str, ...]
    """One entry a dimension; a string names a dimension that is only known when the model runs."""
    dtype: str  # The element type as TVM and numpy spell it, for example ``"float32"``.

    def __str__(self) -> str:
        """Name, type and shape: ``x: float32[1, 3, batch]``."""
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


def refuse_open_shapes(
    inputs: Iterable[TensorSpec], error: type[TVMFusionError], remedy: str
) -> None:
    """Refuse inputs with dimensions that are only known at run time.

    ``error``: class of the exception. ``remedy``: remedy for the caller, as the end of the message.
    """
    for spec in inputs:
        if not all(isinstance(size, int) for size in spec.shape):
            shape = ", ".join(map(str, spec.shape))
            raise error(f"input {spec.name!r} has the open shape ({shape}); {remedy}")


ALIGNMENT = 64
"""Bytes; the alignment that TVM gives its own memory, a cache line on most CPUs."""
PAGE = 4096
"""Bytes of a page of memory."""


def aligned_empty(
    shape: Sequence[int], dtype: Any = "float32", in_page: int | None = None
) -> np.ndarray:
    """Make an uninitialised array that begins at a multiple of 64 bytes.

    Models use any contiguous array in place. Of an aligned one no vector crosses a cache line,
    which can make kernels that do little else than read faster.

    Parameters
    ----------
    shape : Sequence[int]
        Its shape.
    dtype : dtype
        Its type.
    in_page : int, optional
        Where in a page it begins: a multiple of 64 bytes, by default any.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    step = ALIGNMENT if in_page is None else PAGE
    memory = np.empty(size + step, np.uint8)
    start = ((in_page or 0) - memory.ctypes.data) % step
    return memory[start : start + size].view(dtype).reshape(shape)


def random_inputs(
    inputs: Iterable[Any], seed: int | Sequence[int], normal: bool = False, aligned: bool = False
) -> dict[str, np.ndarray]:
    """Random arrays for ``inputs``, the same ones for the same seed.

    Floats are uniform in [-1, 1), or standard normal if ``normal``; integers are 0 or 1, which are
    valid indices nearly everywhere.

    ``inputs``: records with the fields ``name``, ``shape`` (integers only) and ``dtype``. ``seed``:
    seed of the generator. ``normal``: whether floats are drawn from the standard normal
    distribution. ``aligned``: whether the arrays are those of :func:`aligned_empty`, and not where
    numpy puts them.
    """
    generator = np.random.default_rng(seed)
    arrays = {}
    for spec in inputs:
        kind = np.dtype(spec.dtype).kind
        if kind in "iub":
            array = generator.integers(0, 2, spec.shape)
        elif normal:
            array = generator.standard_normal(spec.shape, dtype=np.float32)
        else:
            array = generator.random(spec.shape, dtype=np.float32) * np.float32(2) - np.float32(1)
        make = aligned_empty if aligned else np.empty
        arrays[spec.name] = make(spec.shape, spec.dtype)
        arrays[spec.name][...] = array
    return arrays


def relative_error(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """Return the largest ``max|got - want| / max|want|`` of all outputs, infinity if they disagree.

    Outputs disagree when their number, a shape, or the place of a NaN or an infinity differs.
    """
    if [x.shape for x in got] != [x.shape for x in want]:
        return float("inf")
    return max((_output_error(x, y) for x, y in zip(got, want, strict=True)), default=0.0)


def _output_error(got: np.ndarray, want: np.ndarray) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = np.abs(got[finite] - want[finite]).max()
    if not np.isfinite(difference):
        return float("inf")
    largest = np.abs(want[finite]).max()
    return float(difference / largest) if largest else float(difference and np.inf)
