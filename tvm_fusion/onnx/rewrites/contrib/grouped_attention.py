# SPDX-License-Identifier: Apache-2.0
"""``GroupQueryAttention``: causal attention whose heads share keys and values in groups.

The sequences of a batch have lengths of their own (``seqlens_k + 1``, with the new elements): those
of the past that a sequence has not are left out.
"""

from __future__ import annotations

import math

import numpy as np

from .attention import LOWEST
from .contrib_expansion import ContribExpansion, sizes
from .pointwise import Refusal
from .rotary import angles, turned


def group_query_attention(parts: ContribExpansion) -> Refusal:
    """Rotary embeddings, keys and values of the past before the new ones, then attention."""
    heads, groups = parts.get("num_heads"), parts.get("kv_num_heads")
    shape = sizes(parts, parts.input(0), [1, 2])
    past = sizes(parts, parts.input(3), [2]) if parts.input(3) else [0]
    if shape is None or past is None or len(parts.dims(parts.input(0)) or ()) != 3:
        return "its lengths or widths are only known at run time"
    unknown = ("local_window_size", -1), ("smooth_softmax", 0), ("softcap", 0.0)
    if any(parts.get(name, default) not in (default, 0) for name, default in unknown):
        return "it has a window, a cap or a smooth softmax"
    if any(parts.node.input[10:]) or parts.missing(3):
        return "it has inputs after position_ids, or outputs after present_value"
    length, total = shape[0], shape[0] + past[0]
    stated = parts.facts.constant(parts.input(6))
    if past[0] and (stated is None or stated.item() != total):
        return f"its total_sequence_length is not the constant {total}, of the past and the new"
    query, key, value = _heads(parts, shape[1], heads, groups)
    before = _before(parts, length, past[0])
    rows = parts.emit("Add", before, parts.integers([np.arange(length)]))
    if parts.get("do_rotary", 0):
        places = parts.input(9) or rows
        cos, sin = (angles(parts, parts.input(cache), places) for cache in (7, 8))
        half = sizes(parts, parts.input(7), [1])
        if half is None:
            return "the width of its cache is only known at run time"
        style = half[0], cos, sin, bool(parts.get("rotary_interleaved", 0)), True
        query, key = turned(parts, query, *style), turned(parts, key, *style)
    if past[0]:
        key, value = (
            _after_past(parts, parts.input(position), new, before, past[0], total)
            for position, new in ((3, key), (4, value))
        )
    columns = parts.integers(np.arange(total).reshape(1, 1, total))
    row = parts.emit("Unsqueeze", rows, parts.integers([2]))
    allowed = parts.emit("Not", parts.emit("Less", row, columns))
    width = shape[1] // (heads if parts.input(1) else heads + 2 * groups)
    scale = parts.get("scale", 0.0) or 1 / math.sqrt(width)
    keys, values = (_repeated(parts, each, heads // groups, total) for each in (key, value))
    scores = parts.emit(
        "MatMul", parts.scaled(query, scale), parts.emit("Transpose", keys, perm=[0, 1, 3, 2])
    )
    mask = parts.emit("Unsqueeze", allowed, parts.integers([1]))
    scores = parts.emit("Where", mask, scores, parts.number_like(LOWEST, scores))
    mixed = parts.emit("MatMul", parts.emit("Softmax", scores, axis=-1), values)
    result = parts.reshape(parts.emit("Transpose", mixed, perm=[0, 2, 1, 3]), 0, 0, -1)
    parts.finish(result, key, value)
    return None


def _heads(parts: ContribExpansion, width: int, heads: int, groups: int) -> list[str]:
    """Query, keys and values with their heads apart; one tensor may hold all of them."""
    names = [parts.input(position) for position in range(3)]
    if not names[1]:
        size = width // (heads + 2 * groups)
        ends = [size * count for count in (0, heads, heads + groups, heads + 2 * groups)]
        places = [parts.integers([end]) for end in ends]
        names = [
            parts.emit("Slice", names[0], *places[i : i + 2], parts.integers([2])) for i in range(3)
        ]
    counts = heads, groups, groups
    split = [parts.reshape(name, 0, 0, n, -1) for name, n in zip(names, counts, strict=True)]
    return [parts.emit("Transpose", each, perm=[0, 2, 1, 3]) for each in split]


def _before(parts: ContribExpansion, length: int, past: int) -> str:
    """Number of elements of the past of each sequence, [batch, 1]."""
    last = parts.emit("Cast", parts.reshape(parts.input(5), -1, 1), to=7)
    if not past:
        return parts.emit("Mul", last, parts.integers(0))
    count = parts.emit("Sub", last, parts.integers(length - 1))
    return parts.emit("Max", count, parts.integers(0))


def _after_past(
    parts: ContribExpansion, past: str, new: str, before: str, size: int, total: int
) -> str:
    """The new elements right behind those of the past that a sequence has."""
    places = parts.integers([np.arange(total)])
    moved = parts.emit("Sub", parts.emit("Add", places, parts.integers(size)), before)
    moved = parts.emit("Min", moved, parts.integers(total - 1))
    source = parts.emit("Where", parts.emit("Less", places, before), places, moved)
    both = parts.emit("Concat", past, new, axis=2)
    wide = parts.emit("Unsqueeze", source, parts.integers([1, 3]))
    wide = parts.emit("Expand", wide, parts.emit("Shape", both))
    return parts.emit("GatherElements", both, wide, axis=2)


def _repeated(parts: ContribExpansion, x: str, count: int, total: int) -> str:
    """Keys or values for each head of a query."""
    if count == 1:
        return x
    apart = parts.emit("Unsqueeze", x, parts.integers([2]))
    every = parts.emit("Expand", apart, parts.integers([1, 1, count, 1, 1]))
    merged = parts.emit("Transpose", every, perm=[0, 3, 4, 1, 2])
    return parts.emit("Transpose", parts.reshape(merged, 0, 0, 0, -1), perm=[0, 3, 1, 2])
