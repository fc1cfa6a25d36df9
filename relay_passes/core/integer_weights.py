# SPDX-License-Identifier: Apache-2.0
"""Integers of 8 bits and scales of weights that were quantised, from the numbers they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_LARGEST = 127
_TOLERANCE = 1e-5
"""Error of a weight relative to the largest of its row: scales are multiplied in float32 before."""
_SAMPLE = 64  # weights of a row by which most scales are ruled out


class IntegerWeights(NamedTuple):
    """A weight ``[O, ...]`` as integers, and a scale for each output channel."""

    integers: np.ndarray
    scales: np.ndarray


def integer_weights(weight: np.ndarray) -> IntegerWeights | None:
    """Write each row as multiples of a scale by -128 to 127.

    Parameters
    ----------
    weight : np.ndarray
        ``[O, ...]`` in float64.

    Returns
    -------
    IntegerWeights | None
        int8 and float64; None where a row has no such scale. Where the products of integers and a
        scale of float32, rounded to float32, are the weights, it is that scale.
    """
    with np.errstate(over="ignore"):
        rows = weight.reshape(len(weight), -1).astype("float32")
    largest = np.abs(rows).max(axis=1, initial=0).astype("float64")
    if not np.isfinite(largest).all():
        return None
    scales, integers = np.ones(len(rows)), np.zeros(rows.shape, np.int8)
    left = np.flatnonzero(largest)
    for tried in _scales(largest):
        likely = left[_fit(rows[left, :_SAMPLE], tried[left])]
        found = likely[_fit(rows[likely], tried[likely])]
        scales[found] = tried[found]
        integers[found] = np.rint(rows[found] / tried[found, None].astype("float32"))
        left = np.setdiff1d(left, found, assume_unique=True)
        if not left.size:
            break
    if left.size:
        return None
    scales = _exact(rows, integers, scales)
    # As small as they can be: products of small ones fit in 16 bits.
    bits = np.bitwise_or.reduce(integers, axis=1)
    while (even := (bits & 1 == 0) & (bits != 0)).any():
        integers[even] //= 2
        scales[even] *= 2
        bits[even] //= 2
    return IntegerWeights(integers.reshape(weight.shape), scales)


def rescaled_weights(weight: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Multiply rows by factors, and keep those of quantised weights multiples of a float32.

    ONNX Runtime multiplies scales in float32: sums of bytes need the same for the same bits.

    Parameters
    ----------
    weight, factors : np.ndarray
        ``[O, ...]``, with elements of float32, and ``[O]`` or one number; in float64.

    Returns
    -------
    np.ndarray
        Like ``weight``, rounded to float32 or to be rounded to it.
    """
    shape, axes = (-1, *[1] * (weight.ndim - 1)), tuple(range(1, weight.ndim))
    found = integer_weights(weight)
    if found is None:
        return weight * factors.reshape(shape)
    integers = found.integers.astype("float32")
    with np.errstate(over="ignore"):
        before, after = (
            each.astype("float32").reshape(shape) for each in (found.scales, found.scales * factors)
        )
    is_exact = (integers * before == weight).all(axis=axes, keepdims=True)
    products = integers * after
    return (
        products
        if is_exact.all()
        else np.where(is_exact, products, weight * factors.reshape(shape))
    )


def rounded_weights(rows: np.ndarray) -> IntegerWeights:
    """The integers nearest to finite weights ``[O, ...]``, the largest of a row being 127."""
    largest = np.abs(rows).max(axis=1, initial=0)
    scales = np.where(largest, largest / _LARGEST, 1.0)
    return IntegerWeights(np.rint(rows / scales[:, None]).astype(np.int8), scales)


def _scales(largest: np.ndarray) -> Iterator[np.ndarray]:
    """Scales to try, likely ones first: of each row its own, or one for all."""
    yield largest / _LARGEST
    yield np.ones_like(largest)
    for steps in (_LARGEST, _LARGEST + 1):
        yield np.full_like(largest, largest.max(initial=0) / steps)
    for steps in (_LARGEST + 1, *range(_LARGEST - 1, 0, -1)):
        yield largest / steps


def _exact(rows: np.ndarray, integers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 next to the scales with which products, rounded to float32, are the rows."""
    if not rows.shape[1]:
        return scales
    largest = np.abs(integers.astype("int16")).argmax(axis=1)[:, None]
    first = np.arange(rows.shape[1])[None, :_SAMPLE].repeat(len(rows), axis=0)
    wanted, factors = (
        np.take_along_axis(each, np.concatenate([first, largest], axis=1), axis=1).astype("float32")
        for each in (rows, integers)
    )
    near = scales.astype("float32")
    exact, left = scales.copy(), np.ones(len(rows), bool)
    for step in (0, 1, -1, 2, -2):
        tried = near + np.float32(step) * np.spacing(near)
        fits = left & (factors * tried[:, None] == wanted).all(axis=1)
        exact[fits] = tried[fits]
        left &= ~fits
    return exact


def _fit(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return which rows are multiples of their scales."""
    with np.errstate(all="ignore"):
        units = rows / scales[:, None].astype("float32")
    whole = np.rint(units)
    limits = _TOLERANCE * np.abs(units).max(axis=1, initial=0)
    near = np.abs(units - whole).max(axis=1, initial=0) <= limits
    bounds = whole.min(axis=1, initial=0), whole.max(axis=1, initial=0)
    return near & (bounds[0] >= -_LARGEST - 1) & (bounds[1] <= _LARGEST)
