# SPDX-License-Identifier: Apache-2.0
"""Strides of views, by PyTorch's rules: which reshapes need no copy."""

from __future__ import annotations

from collections.abc import Sequence

Sizes = tuple[int, ...]


def contiguous(shape: Sequence[int]) -> Sizes:
    """Strides in elements of a tensor in row-major order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor lies in row-major order; strides of unit axes do not matter."""
    pairs = zip(shape, strides, contiguous(shape), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


def view(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> Sizes | None:
    """Strides of a view with another shape; None if the elements must be copied.

    Axes that lie one after the other in memory are merged to runs; each new axis must divide one.
    """
    kept = [(size, step) for size, step in zip(shape, strides, strict=True) if size != 1]
    runs: list[list[int]] = []
    for size, step in kept:
        if runs and runs[-1][1] == size * step:
            runs[-1] = [runs[-1][0] * size, step]
        else:
            runs.append([size, step])
    found: list[int] = []
    for size in reversed(new):
        if size == 1:
            found.append(found[-1] if found else 1)
            continue
        while runs and runs[-1][0] == 1:
            runs.pop()
        if not runs or runs[-1][0] % size:
            return None
        found.append(runs[-1][1])
        runs[-1] = [runs[-1][0] // size, runs[-1][1] * size]
    return tuple(reversed(found))
