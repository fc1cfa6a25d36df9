# SPDX-License-Identifier: Apache-2.0
"""Arrays that begin where vectors do, random ones to try a model on, and their errors.

Imports numpy alone, so that a process which races a peer can use it and holds nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

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
    inputs: Iterable[Any],
    seed: int | Sequence[int],
    normal: bool = False,
    aligned: bool = False,
) -> dict[str, np.ndarray]:
    """Random arrays for ``inputs``, the same ones for the same seed.

    Floats are uniform in [-1, 1), or standard normal if ``normal``; integers are 0 or 1, which are
    valid indices nearly everywhere.

    Parameters
    ----------
    inputs : iterable
        Records with the fields ``name``, ``shape`` (integers only) and ``dtype``.
    seed : int or sequence of int
        Seed of the generator.
    normal : bool
        Whether floats are drawn from the standard normal distribution.
    aligned : bool
        Whether the arrays are those of :func:`aligned_empty`, and not where numpy puts them.
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
