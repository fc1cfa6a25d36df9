# SPDX-License-Identifier: Apache-2.0
"""``Attention`` and ``MultiHeadAttention``: softmax(scale * Q @ K.T + bias) @ V.

Heads are the second of four axes in between: [batch, heads, length, size].
"""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from .contrib_expansion import ContribExpansion, sizes
from .pointwise import Refusal

LOWEST = -65504.0
"""Number that a causal mask adds, the lowest float16: no weight is left of it."""


def attention(parts: ContribExpansion) -> Refusal:
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


def multi_head_attention(parts: ContribExpansion) -> Refusal:
    """Attention of a query, keys and values, in one tensor, in two, or in three."""
    heads = parts.get("num_heads")
    names = [parts.input(position) for position in range(3)]
    ranks = [len(parts.dims(name) or ()) for name in names]
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


def _with_bias(parts: ContribExpansion, names: list[str], width: int) -> list[str]:
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


def _split_heads(parts: ContribExpansion, name: str, heads: int) -> str:
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


def _problem(parts: ContribExpansion, mask: str, causal: np.ndarray | None) -> Refusal:
    """The reason why scores cannot be masked, if any."""
    rank = len(parts.dims(mask) or ()) if mask else 2
    if rank not in (1, 2, 3):
        return f"its mask {mask!r} has {rank} dimensions; expected 1 to 3"
    if rank == 1:
        batch, counts = sizes(parts, parts.input(0), [0]), sizes(parts, mask, [0])
        has_past = parts.input(4 if parts.node.op_type == "Attention" else 6)
        if (
            has_past
            or batch is None
            or batch != counts
            or len(parts.dims(parts.input(1)) or ()) > 3
        ):
            return (
                f"its mask {mask!r} has one dimension; expected a length of each key, without past"
            )
    if parts.get("unidirectional", 0) and causal is None:
        return "it is causal, and its lengths are only known at run time"
    return None


def _attend(
    parts: ContribExpansion,
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
        rank = len(parts.dims(mask) or (0, 0))  # written out by :func:`_as_rows`, it has two
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


def _as_rows(parts: ContribExpansion, mask: str, keys: str) -> str:
    """A mask of the number of keys of each sequence as one of its keys; any other mask itself."""
    if not mask or len(parts.dims(mask) or ()) != 1:
        return mask
    first = parts.integers(1)
    length = parts.emit("Gather", parts.emit("Shape", keys), first)
    places = parts.emit("Range", parts.integers(0), length, first)
    counts = parts.emit("Unsqueeze", parts.emit("Cast", mask, to=7), parts.integers([1]))
    return parts.emit("Less", places, counts)


def _added_by_mask(parts: ContribExpansion, mask: str, scores: str) -> str:
    """0 where the mask is above 0, else the filter value."""
    filter_value = parts.number_like(parts.get("mask_filter_value", -10000.0), scores)
    numbers = parts.emit("Cast", mask, to=TensorProto.INT32)
    is_kept = parts.emit("Greater", numbers, parts.constant("none", np.array(0, np.int32)))
    return parts.emit("Where", is_kept, parts.number_like(0.0, scores), filter_value)
