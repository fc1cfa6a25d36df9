# SPDX-License-Identifier: Apache-2.0
"""Transform matrices of Winograd's minimal filtering F(m, 3), by the Toom-Cook construction.

::

    y = AT [(G g) * (BT d)]        m outputs y from m + 2 inputs d and 3 taps g

with m + 2 multiplications instead of 3 m (Lavin and Gray, arXiv 1509.09308). The points of F(4, 3)
are chosen for accuracy: on random data the largest error with 0, +-3/4, +-3/2 is a quarter of that
with the usual 0, +-1, +-2 (on such choices Barabasz et al., arXiv 1803.10986). All entries of
``AT`` and ``BT`` are exact in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.polynomial import polynomial

TAPS = 3
TILE_SIZES = (2, 4)
WHOLE_TILE, WHOLE_FACTOR = 2, 4
"""Tiles for which data stays whole, and the factor by which weights become so."""
_AT_ONCE = 1 << 14
_MAGNITUDES = {2: (1.0,), 4: (0.75, 1.5)}


@dataclass(frozen=True)
class Transforms:
    """The three matrices of F(m, 3), in float64."""

    inverse: np.ndarray
    """``AT``, of shape ``[m, m + 2]``; its columns come in pairs for a point and its negative."""
    weight: np.ndarray  # ``G``, of shape ``[m + 2, 3]``.
    data: np.ndarray  # ``BT``, of shape ``[m + 2, m + 2]``; its rows come in the same pairs.


@lru_cache(maxsize=8)
def transforms(size: int) -> Transforms:
    """The matrices for ``size`` outputs (one of ``TILE_SIZES``): point 0, pairs, infinity."""
    pairs = [sign * point for point in _MAGNITUDES[size] for sign in (1.0, -1.0)]
    points = np.array([0.0, *pairs])
    count = size + TAPS - 1
    inverse, weight = np.zeros((size, count)), np.zeros((count, TAPS))
    data = np.zeros((count, count))
    for j, point in enumerate(points):
        others = np.delete(points, j)
        inverse[:, j] = point ** np.arange(size)
        weight[j] = point ** np.arange(TAPS) / np.prod(point - others)
        data[j, : count - 1] = polynomial.polyfromroots(others)
    inverse[-1, -1] = weight[-1, -1] = 1.0
    data[-1] = polynomial.polyfromroots(points)
    return Transforms(inverse, weight, data)


def transform_weight(weight: np.ndarray, size: int) -> np.ndarray:
    """``G g GT`` of every pair of channels, computed in float64.

    Parameters
    ----------
    weight : np.ndarray
        Packed, ``[B(O), B(I), 3, 3, x, x]``.
    size : int
        One of ``TILE_SIZES``.

    Returns
    -------
    np.ndarray
        ``[(size + 2)**2, B(O), B(I), x, x]``, of the element type of ``weight``.
    """
    matrix = transforms(size).weight
    both = np.kron(matrix, matrix)
    taps = np.moveaxis(weight, (2, 3), (0, 1)).reshape(TAPS**2, -1)
    points = np.empty((len(both), taps.shape[1]), weight.dtype)
    for start in range(0, taps.shape[1], _AT_ONCE):  # so that float64 stays in the cache
        some = slice(start, start + _AT_ONCE)
        with np.errstate(invalid="ignore"):  # an infinity becomes NaN, as in the data
            points[:, some] = both @ taps[:, some].astype("float64")
    return points.reshape(-1, *weight.shape[:2], *weight.shape[4:])


def transform_words(weight: np.ndarray, word: int, size: int = WHOLE_TILE) -> np.ndarray:
    """``G g GT`` of floats, or ``4 G g GT`` of integers for tiles of 2x2.

    Parameters
    ----------
    weight : np.ndarray
        Packed in words, ``[B(O), B(I), 3, 3, x / w, x, w]`` of int8 or int16, or of a float.
    word : int
        Input channels of a word of the result.
    size : int
        One of ``TILE_SIZES``; of integers 2.

    Returns
    -------
    np.ndarray
        ``[(size + 2)**2, B(O), B(I), x / word, x, word]``: of int16, at most 9 * 128, or of the
        element type of ``weight``.
    """
    lanes, are_whole = weight.shape[5], np.issubdtype(weight.dtype, np.integer)
    plain = np.moveaxis(weight, 6, 5).reshape(*weight.shape[:4], lanes, lanes)
    points = transform_weight(plain.astype("float64" if are_whole else "float32"), size)
    points = np.rint(WHOLE_FACTOR * points) if are_whole else points
    words = points.reshape(*points.shape[:3], lanes // word, word, lanes)
    dtype = np.dtype("int16") if are_whole else weight.dtype
    return np.ascontiguousarray(np.moveaxis(words, 4, 5), dtype)
