# SPDX-License-Identifier: Apache-2.0
"""``RotaryEmbedding``: pairs of numbers of each head, turned by an angle that grows with the place.

::

    a, b   ->   a * cos - b * sin,  b * cos + a * sin

The pairs are neighbours (``interleaved``), or lie in the two halves of a head.
"""

from __future__ import annotations

import numpy as np

from .contrib_expansion import ContribExpansion, sizes
from .pointwise import Refusal


def rotary_embedding(parts: ContribExpansion) -> Refusal:
    """Turn the pairs of all heads."""
    x, positions = parts.input(0), parts.input(1)
    rank, half = len(parts.dims(x) or ()), sizes(parts, parts.input(2), [1])
    if rank not in (3, 4) or half is None or parts.dims(positions) is None:
        return "the ranks of its data and positions, or the width of its cache are not known"
    if parts.get("is_packed_batching", 0):
        return "its batch is packed"
    heads = parts.get("num_heads", 0)
    if rank == 3:
        width = sizes(parts, x, [2])
        if width is None:
            return f"the last size of {x!r} is only known at run time"
        split = parts.reshape(x, 0, 0, heads or width[0] // (2 * half[0]), -1)
        x = parts.emit("Transpose", split, perm=[0, 2, 1, 3])
    if len(parts.dims(positions) or ()) == 1:
        length = sizes(parts, parts.input(0), [rank - 2])
        if length is None:
            return "its length is only known at run time; expected one position an element"
        places = parts.emit("Add", positions, parts.integers(np.arange(length[0])))
        positions = parts.emit("Unsqueeze", places, parts.integers([0]))
    cos, sin = (angles(parts, parts.input(cache), positions) for cache in (2, 3))
    has_rest = bool(parts.get("rotary_embedding_dim", 0))
    result = turned(parts, x, half[0], cos, sin, bool(parts.get("interleaved", 0)), has_rest)
    if rank == 3:
        result = parts.emit("Transpose", result, perm=[0, 2, 1, 3])
        result = parts.reshape(result, 0, 0, -1)
    parts.finish(result)
    return None


def angles(parts: ContribExpansion, cache: str, positions: str) -> str:
    """Cosines or sines of positions, [batch, 1, length, half]."""
    rows = parts.emit("Gather", cache, positions, axis=0)
    return parts.emit("Unsqueeze", rows, parts.integers([1]))


def turned(
    parts: ContribExpansion,
    x: str,
    half: int,
    cos: str,
    sin: str,
    is_interleaved: bool,
    has_rest: bool,
) -> str:
    """The first ``2 * half`` numbers of the last axis, turned; any others as they are."""
    ends = [(0, 2 * half, 2), (1, 2 * half, 2)] if is_interleaved else [(0, half), (half, 2 * half)]
    a, b = (_slice(parts, x, *end) for end in ends)
    results = [
        parts.emit("Sub", parts.emit("Mul", a, cos), parts.emit("Mul", b, sin)),
        parts.emit("Add", parts.emit("Mul", b, cos), parts.emit("Mul", a, sin)),
    ]
    if is_interleaved:
        columns = [parts.emit("Unsqueeze", each, parts.integers([-1])) for each in results]
        results = [parts.reshape(parts.emit("Concat", *columns, axis=-1), 0, 0, 0, -1)]
    if has_rest:
        results.append(_slice(parts, x, 2 * half, 2**31 - 1))
    return parts.emit("Concat", *results, axis=-1) if len(results) > 1 else results[0]


def _slice(parts: ContribExpansion, x: str, start: int, end: int, step: int = 1) -> str:
    return parts.emit("Slice", x, *(parts.integers([at]) for at in (start, end, -1, step)))
