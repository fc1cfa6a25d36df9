# SPDX-License-Identifier: Apache-2.0
"""``GroupQueryAttention``: causal attention whose heads share keys and values in groups.

The sequences of a batch have lengths of their own (``seqlens_k + 1``, with the new elements): those
of the past that a sequence has not are left out. The present is as long as the past and the new
elements together, or as the past if that is a buffer with room for both.
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
    if any(parts.node.input[12:]) or parts.missing(3):
        return "it has inputs after head_sink, or outputs after present_value"
    length = shape[0]
    total = _present_length(parts, length, past[0])
    if total is None:
        return (
            "its total_sequence_length is no constant, and its output present_key declares neither "
            f"the length {past[0]} of the past nor {past[0] + length}, with the new elements"
        )
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
    width = shape[1] // (heads if parts.input(1) else heads + 2 * groups)
    if past[0]:
        about = (past[0], length, total), (groups, width)
        key, value = (
            _after_past(parts, parts.input(position), new, before, *about)
            for position, new in ((3, key), (4, value))
        )
    allowed = _allowed(parts, rows, total)
    scale = parts.get("scale", 0.0) or 1 / math.sqrt(width)
    keys, values = (_repeated(parts, each, heads // groups, total) for each in (key, value))
    scores = parts.emit(
        "MatMul", parts.scaled(query, scale), parts.emit("Transpose", keys, perm=[0, 1, 3, 2])
    )
    cap = parts.get("softcap", 0.0)
    if cap > 0:
        scores = parts.scaled(parts.emit("Tanh", parts.scaled(scores, 1 / cap)), cap)
    bias = parts.input(10)
    if bias:
        seen = sizes(parts, bias, [3])
        if seen is not None and seen[0] < total:  # of a buffer that is not full
            bias = parts.emit("Pad", bias, parts.integers([0] * 7 + [total - seen[0]]))
        scores = parts.emit("Add", scores, bias)
    scores = parts.emit("Where", allowed, scores, parts.number_like(LOWEST, scores))
    mixed = parts.emit("MatMul", _weights(parts, scores, heads, total), values)
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


def _present_length(parts: ContribExpansion, length: int, past: int) -> int | None:
    """Number of elements of the keys and values that result; None if it cannot be known."""
    if not past:
        return length
    stated = parts.facts.constant(parts.input(6))
    if stated is not None:
        return max(past, int(stated.item()))
    present = parts.node.output[1] if len(parts.node.output) > 1 else ""
    declared = sizes(parts, present, [2]) if present else None
    return declared[0] if declared and declared[0] in (past, past + length) else None


def _allowed(parts: ContribExpansion, rows: str, total: int) -> str:
    """Which keys each query sees, [batch, 1, queries, keys]: none after it, or before a window."""
    columns = parts.integers(np.arange(total).reshape(1, 1, 1, total))
    row = parts.emit("Unsqueeze", rows, parts.integers([1, 3]))
    allowed = parts.emit("Not", parts.emit("Less", row, columns))
    window = parts.get("local_window_size", -1)
    if window <= 0:
        return allowed
    end = parts.emit("Add", columns, parts.integers(window))
    return parts.emit("And", allowed, parts.emit("Less", row, end))


def _weights(parts: ContribExpansion, scores: str, heads: int, total: int) -> str:
    """Softmax of the scores; one more, which has no value, takes a part of the weights."""
    sink = parts.input(11)
    if not sink and parts.get("smooth_softmax", 0) != 1:
        return parts.emit("Softmax", scores, axis=-1)
    first = [parts.integers([at]) for at in (0, 1, 3)]
    shape = parts.emit("Shape", parts.emit("Slice", scores, *first))
    score = parts.reshape(sink, 1, heads, 1, 1) if sink else parts.number_like(0.0, scores)
    more = parts.emit("Expand", score, shape)
    every = parts.emit("Softmax", parts.emit("Concat", scores, more, axis=3), axis=-1)
    return parts.emit("Slice", every, first[0], parts.integers([total]), first[2])


def _before(parts: ContribExpansion, length: int, past: int) -> str:
    """Number of elements of the past of each sequence, [batch, 1]."""
    last = parts.emit("Cast", parts.reshape(parts.input(5), -1, 1), to=7)
    if not past:
        return parts.emit("Mul", last, parts.integers(0))
    count = parts.emit("Sub", last, parts.integers(length - 1))
    return parts.emit("Max", count, parts.integers(0))


def _after_past(
    parts: ContribExpansion,
    past: str,
    new: str,
    before: str,
    lengths: tuple[int, int, int],
    heads: tuple[int, int],
) -> str:
    """The new elements right behind those of the past that a sequence has, then zeros."""
    size, length, total = lengths
    places = parts.integers([np.arange(total)])
    moved = parts.emit("Sub", parts.emit("Add", places, parts.integers(size)), before)
    moved = parts.emit("Min", moved, parts.integers(size + length - 1))
    source = parts.emit("Where", parts.emit("Less", places, before), places, moved)
    both = parts.emit("Concat", past, new, axis=2)
    wide = parts.emit("Unsqueeze", source, parts.integers([1, 3]))
    wide = parts.emit("Expand", wide, parts.integers([1, heads[0], 1, heads[1]]))
    found = parts.emit("GatherElements", both, wide, axis=2)
    end = parts.emit("Add", before, parts.integers(length))
    is_there = parts.emit("Unsqueeze", parts.emit("Less", places, end), parts.integers([1, 3]))
    return parts.emit("Where", is_there, found, parts.number_like(0.0, found))


def _repeated(parts: ContribExpansion, x: str, count: int, total: int) -> str:
    """Keys or values for each head of a query."""
    if count == 1:
        return x
    apart = parts.emit("Unsqueeze", x, parts.integers([2]))
    every = parts.emit("Expand", apart, parts.integers([1, 1, count, 1, 1]))
    merged = parts.emit("Transpose", every, perm=[0, 3, 4, 1, 2])
    return parts.emit("Transpose", parts.reshape(merged, 0, 0, 0, -1), perm=[0, 3, 1, 2])
