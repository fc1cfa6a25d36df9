# SPDX-License-Identifier: Apache-2.0
"""Attention of ``com.microsoft``, and its rotary embeddings.

``RotaryEmbedding`` turns pairs of numbers of each head by an angle that grows with the place::

    a, b   ->   a * cos - b * sin,  b * cos + a * sin

The pairs are neighbours (``interleaved``), or lie in the two halves of a head.

``Attention`` and ``MultiHeadAttention`` are softmax(scale * Q @ K.T + bias) @ V. Heads are the
second of four axes in between: [batch, heads, length, size].

``GroupQueryAttention`` is causal, and its heads share keys and values in groups. The sequences of a
batch have lengths of their own (``seqlens_k + 1``, with the new elements): those of the past that a
sequence has not are left out. The present is as long as the past and the new elements together, or
as the past if that is a buffer with room for both.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from ...model.expansion import Expansion, sizes
from ...model.loader import CONTRIB_DOMAIN
from ..operator import Operator


def rotary_embedding(parts: Expansion) -> str | None:
    """Turn the pairs of all heads."""
    x, positions = parts.input(0), parts.input(1)
    rank, half = len(parts.facts.dims(x) or ()), sizes(parts, parts.input(2), [1])
    if rank not in (3, 4) or half is None or parts.facts.dims(positions) is None:
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
    if len(parts.facts.dims(positions) or ()) == 1:
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


def angles(parts: Expansion, cache: str, positions: str) -> str:
    """Cosines or sines of positions, [batch, 1, length, half]."""
    rows = parts.emit("Gather", cache, positions, axis=0)
    return parts.emit("Unsqueeze", rows, parts.integers([1]))


def turned(
    parts: Expansion,
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


def _slice(parts: Expansion, x: str, start: int, end: int, step: int = 1) -> str:
    return parts.emit("Slice", x, *(parts.integers([at]) for at in (start, end, -1, step)))


LOWEST = -65504.0
"""Number that a causal mask adds, the lowest float16: no weight is left of it."""


def attention(parts: Expansion) -> str | None:
    """The product of the input with all weights, then attention."""
    heads = parts.get("num_heads")
    widths = parts.get("qkv_hidden_sizes") or _thirds(sizes(parts, parts.input(1), [-1]))
    if widths is None:
        return "the size of its weights is only known at run time"
    if parts.input(6) or parts.get("do_rotary", 0) or parts.get("past_present_share_buffer", 0):
        return "it has rotary embeddings or a past of a length that depends on data"
    product = parts.emit("MatMul", parts.input(0), parts.input(1))
    if parts.input(2):
        product = parts.emit("Add", product, parts.input(2))
    ends = np.cumsum([0, *widths])
    axis = parts.integers([-1])
    places = [parts.integers([int(end)]) for end in ends]
    query, key, value = (
        _split_heads(parts, parts.emit("Slice", product, *places[i : i + 2], axis), heads)
        for i in range(3)
    )
    present = ""
    if parts.input(4):
        pair = [
            parts.emit("Gather", parts.input(4), parts.integers(number), axis=0)
            for number in (0, 1)
        ]
        key = parts.emit("Concat", pair[0], key, axis=2)
        value = parts.emit("Concat", pair[1], value, axis=2)
    if len(parts.node.output) > 1 and parts.node.output[1]:
        both = [parts.emit("Unsqueeze", one, parts.integers([0])) for one in (key, value)]
        present = parts.emit("Concat", *both, axis=0)
    scale = parts.get("scale", 0.0) or 1 / math.sqrt(widths[0] / heads)
    past = sizes(parts, parts.input(4), [3]) if parts.input(4) else [0]
    length = sizes(parts, parts.input(0), [1])
    mask, causal = parts.input(3), _causal(length, length, past)
    problem = _problem(parts, mask, causal)
    if problem is not None:
        return problem
    mask = _as_rows(parts, mask, parts.input(0))
    result = _attend(parts, (query, key, value), scale, mask, parts.input(5), causal)
    parts.finish(result, present)
    return None


def multi_head_attention(parts: Expansion) -> str | None:
    """Attention of a query, keys and values, in one tensor, in two, or in three."""
    heads = parts.get("num_heads")
    names = [parts.input(position) for position in range(3)]
    ranks = [len(parts.facts.dims(name) or ()) for name in names]
    if ranks != [3, 3, 3] and ranks != [3, 4, 4]:
        return f"its query, key and value have {ranks} dimensions; expected 3, or 4 for both others"
    width = sizes(parts, names[0], [-1])
    if width is None:
        return f"the last size of {names[0]!r} is only known at run time"
    if [name for name in parts.node.input[8:] if name] or parts.missing(3):
        return "it has inputs after past_value, or outputs after present_value"
    if parts.input(3):
        names = _with_bias(parts, names, width[0]) if ranks[1] == 3 else []
        if not names:
            return "it has a bias of keys whose heads are split"
    query, key, value = (
        _split_heads(parts, name, heads) if rank == 3 else name
        for name, rank in zip(names, ranks, strict=True)
    )
    past = [0]
    if parts.input(6):
        past = sizes(parts, parts.input(6), [2]) or []
        key = parts.emit("Concat", parts.input(6), key, axis=2)
        value = parts.emit("Concat", parts.input(7), value, axis=2)
    scale = parts.get("scale", 0.0) or 1 / math.sqrt(width[0] / heads)
    length, new = sizes(parts, parts.input(0), [1]), sizes(parts, parts.input(1), [-2])
    mask, causal = parts.input(4), _causal(length, new, past)
    problem = _problem(parts, mask, causal)
    if problem is not None:
        return problem
    mask = _as_rows(parts, mask, parts.input(1))
    result = _attend(parts, (query, key, value), scale, mask, parts.input(5), causal)
    parts.finish(result, key, value)
    return None


def _thirds(width: list[int] | None) -> list[int] | None:
    return None if width is None else [width[0] // 3] * 3


def _with_bias(parts: Expansion, names: list[str], width: int) -> list[str]:
    """Add to each of three tensors its part of the bias; query and key are equally wide."""
    ends = [0, width, 2 * width, 2**31 - 1]
    return [
        parts.emit(
            "Add",
            name,
            parts.emit("Slice", parts.input(3), *(parts.integers([at]) for at in ends[i : i + 2])),
        )
        for i, name in enumerate(names)
    ]


def _split_heads(parts: Expansion, name: str, heads: int) -> str:
    return parts.emit("Transpose", parts.reshape(name, 0, 0, heads, -1), perm=[0, 2, 1, 3])


def _causal(
    length: list[int] | None, new: list[int] | None, past: list[int] | None
) -> np.ndarray | None:
    """Return the causal mask to add to the scores; None if a length is not known.

    Where there are more keys than queries, ONNX Runtime lets the last query see all of them.
    """
    if not length or not new or not past:
        return None
    allowed = np.tri(length[0], new[0] + past[0], past[0], dtype=bool)
    allowed[-1] = True
    return np.where(allowed, 0, LOWEST).astype(np.float32)


def _problem(parts: Expansion, mask: str, causal: np.ndarray | None) -> str | None:
    """The reason why scores cannot be masked, if any."""
    rank = len(parts.facts.dims(mask) or ()) if mask else 2
    if rank not in (1, 2, 3):
        return f"its mask {mask!r} has {rank} dimensions; expected 1 to 3"
    if rank == 1:
        batch, counts = sizes(parts, parts.input(0), [0]), sizes(parts, mask, [0])
        has_past = parts.input(4 if parts.node.op_type == "Attention" else 6)
        if (
            has_past
            or batch is None
            or batch != counts
            or len(parts.facts.dims(parts.input(1)) or ()) > 3
        ):
            return (
                f"its mask {mask!r} has one dimension; expected a length of each key, without past"
            )
    if parts.get("unidirectional", 0) and causal is None:
        return "it is causal, and its lengths are only known at run time"
    return None


def _attend(
    parts: Expansion,
    heads: tuple[str, str, str],
    scale: float,
    mask: str,
    bias: str,
    causal: np.ndarray | None,
) -> str:
    """The result in three axes."""
    query, key, value = heads
    turned = parts.emit("Transpose", key, perm=[0, 1, 3, 2])
    scores = parts.emit("MatMul", parts.scaled(query, scale), turned)
    if mask:
        rank = len(parts.facts.dims(mask) or (0, 0))  # written out by :func:`_as_rows`, it has two
        added = _added_by_mask(parts, mask, scores)
        scores = parts.emit(
            "Add", scores, parts.emit("Unsqueeze", added, parts.integers([1, 2][: 4 - rank]))
        )
    if bias:
        scores = parts.emit("Add", scores, bias)
    if parts.get("unidirectional", 0):
        assert causal is not None, "lengths that are not known were refused"
        scores = parts.emit("Add", scores, parts.number_like(causal, scores))
    mixed = parts.emit("MatMul", parts.emit("Softmax", scores, axis=-1), value)
    return parts.reshape(parts.emit("Transpose", mixed, perm=[0, 2, 1, 3]), 0, 0, -1)


def _as_rows(parts: Expansion, mask: str, keys: str) -> str:
    """A mask of the number of keys of each sequence as one of its keys; any other mask itself."""
    if not mask or len(parts.facts.dims(mask) or ()) != 1:
        return mask
    first = parts.integers(1)
    length = parts.emit("Gather", parts.emit("Shape", keys), first)
    places = parts.emit("Range", parts.integers(0), length, first)
    counts = parts.emit("Unsqueeze", parts.emit("Cast", mask, to=7), parts.integers([1]))
    return parts.emit("Less", places, counts)


def _added_by_mask(parts: Expansion, mask: str, scores: str) -> str:
    """0 where the mask is above 0, else the filter value."""
    filter_value = parts.number_like(parts.get("mask_filter_value", -10000.0), scores)
    numbers = parts.emit("Cast", mask, to=TensorProto.INT32)
    is_kept = parts.emit("Greater", numbers, parts.constant("none", np.array(0, np.int32)))
    return parts.emit("Where", is_kept, parts.number_like(0.0, scores), filter_value)


def group_query_attention(parts: Expansion) -> str | None:
    """Rotary embeddings, keys and values of the past before the new ones, then attention."""
    heads, groups = parts.get("num_heads"), parts.get("kv_num_heads")
    shape = sizes(parts, parts.input(0), [1, 2])
    past = sizes(parts, parts.input(3), [2]) if parts.input(3) else [0]
    if shape is None or past is None or len(parts.facts.dims(parts.input(0)) or ()) != 3:
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
        if seen is not None and seen[0] < total:  # The buffer is not full.
            bias = parts.emit("Pad", bias, parts.integers([0] * 7 + [total - seen[0]]))
        scores = parts.emit("Add", scores, bias)
    scores = parts.emit("Where", allowed, scores, parts.number_like(LOWEST, scores))
    mixed = parts.emit("MatMul", _weights(parts, scores, heads, total), values)
    result = parts.reshape(parts.emit("Transpose", mixed, perm=[0, 2, 1, 3]), 0, 0, -1)
    parts.finish(result, key, value)
    return None


def _heads(parts: Expansion, width: int, heads: int, groups: int) -> list[str]:
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


def _present_length(parts: Expansion, length: int, past: int) -> int | None:
    """Number of elements of the keys and values that result; None if it cannot be known."""
    if not past:
        return length
    stated = parts.facts.constant(parts.input(6))
    if stated is not None:
        return max(past, int(stated.item()))
    present = parts.node.output[1] if len(parts.node.output) > 1 else ""
    declared = sizes(parts, present, [2]) if present else None
    return declared[0] if declared and declared[0] in (past, past + length) else None


def _allowed(parts: Expansion, rows: str, total: int) -> str:
    """Mask of visible keys, [batch, 1, queries, keys]: none after the query, or before a window."""
    columns = parts.integers(np.arange(total).reshape(1, 1, 1, total))
    row = parts.emit("Unsqueeze", rows, parts.integers([1, 3]))
    allowed = parts.emit("Not", parts.emit("Less", row, columns))
    window = parts.get("local_window_size", -1)
    if window <= 0:
        return allowed
    end = parts.emit("Add", columns, parts.integers(window))
    return parts.emit("And", allowed, parts.emit("Less", row, end))


def _weights(parts: Expansion, scores: str, heads: int, total: int) -> str:
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


def _before(parts: Expansion, length: int, past: int) -> str:
    """Number of elements of the past of each sequence, [batch, 1]."""
    last = parts.emit("Cast", parts.reshape(parts.input(5), -1, 1), to=7)
    if not past:
        return parts.emit("Mul", last, parts.integers(0))
    count = parts.emit("Sub", last, parts.integers(length - 1))
    return parts.emit("Max", count, parts.integers(0))


def _after_past(
    parts: Expansion,
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


def _repeated(parts: Expansion, x: str, count: int, total: int) -> str:
    """Keys or values for each head of a query."""
    if count == 1:
        return x
    apart = parts.emit("Unsqueeze", x, parts.integers([2]))
    every = parts.emit("Expand", apart, parts.integers([1, 1, count, 1, 1]))
    merged = parts.emit("Transpose", every, perm=[0, 3, 4, 1, 2])
    return parts.emit("Transpose", parts.reshape(merged, 0, 0, 0, -1), perm=[0, 3, 1, 2])


OPERATORS = [
    Operator(name, CONTRIB_DOMAIN, is_foreign=True, needs_shapes=True, expand=rule)
    for name, rule in (
        ("Attention", attention),
        ("GroupQueryAttention", group_query_attention),
        ("MultiHeadAttention", multi_head_attention),
        ("RotaryEmbedding", rotary_embedding),
    )
]
