# SPDX-License-Identifier: Apache-2.0
"""Operators whose results have a size that depends on data: a new symbolic dimension.

::

    rows, size = call_tir(find_nonzero, x)                  # room for all; how many there are
    part = reshape(rows, tensor_to_shape(size))             # a view of the first
    result = match_cast(part, R.Tensor((n, 2), "int64"))

All that is computed from the result has the symbolic size ``n``; it may be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from tvm import relax, tirx

from schedules.cpu.loops.selections import find_nonzero, suppress_boxes

from ..model.graph_edits import attribute
from ..model.tensor_facts import GraphFacts
from .expansion import Expansion, expand_nodes

MOST = "most"
"""Attribute for the constant input ``max_output_boxes_per_class``."""


def translate_nonzero(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Coordinates of the elements that are not 0, [rank, n]."""
    return relax.op.permute_dims(_places(builder, inputs[0]), [1, 0])


def place_numbers(model: onnx.ModelProto, facts: GraphFacts) -> bool:
    """Make vectors of the numbers that a NonZero reads, whose place ONNX Runtime returns.

    Return whether there was one; ONNX infers another shape.
    """

    def give_axis(node: onnx.NodeProto, expansion: Expansion) -> None:
        if facts.dims(node.input[0]) == ():
            one = expansion.constant("one", np.array([1]))
            vector = expansion.emit("Reshape", node.input[0], one)
            expansion.finish(expansion.emit("NonZero", vector))

    count = len(model.graph.node)
    expand_nodes(model, facts, {"NonZero": give_axis})
    return len(model.graph.node) > count


def _places(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """Coordinates of the elements that are not 0, [n, rank]."""
    if not len(x.ty.shape):
        x = builder.normalize(relax.op.reshape(x, (1,)))
    shape = list(x.ty.shape)
    kernel = builder.add_func(find_nonzero(shape, str(x.ty.dtype)), "nonzero")
    return _selected(builder, kernel, [x], _product(shape), len(shape))


def translate_compress(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Slices of an axis, or elements, where a condition holds, which may be shorter."""
    data, condition = inputs
    axis = attributes.get("axis")
    if axis is None:
        data, axis = builder.normalize(relax.op.reshape(data, (-1,))), 0
    places = _places(builder, condition)
    flat = builder.normalize(relax.op.squeeze(places, 1))
    return relax.op.take(data, flat, axis, mode="clip")


def translate_suppression(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Boxes that overlap no better one, [n, 3]: image, class and box."""
    boxes, scores, overlap, score = inputs
    batch, classes, count = scores.ty.shape
    most = int(attributes[MOST])
    kept = tirx.min(tirx.const(most, "int64"), count)
    by_score = relax.op.argsort(scores, axis=-1, descending=True, dtype="int64")
    order = builder.emit(by_score)
    is_centred = bool(attributes.get("center_point_box", 0))
    dtype = str(boxes.ty.dtype)
    kernel = builder.add_func(
        suppress_boxes(batch, classes, count, most, is_centred, dtype), "suppress_boxes"
    )
    given = [boxes, scores, order, overlap, score]
    return _selected(builder, kernel, given, _product([batch, classes, kept]), 3)


def _selected(
    builder: relax.BlockBuilder, kernel: Any, inputs: list[Any], room: Any, columns: int
) -> relax.Expr:
    """The rows that a kernel selects, [n, columns]; ``room`` is the most of them."""
    types = [relax.TensorType((room, columns), "int64"), relax.TensorType((2,), "int64")]
    both = builder.emit(relax.call_tir(kernel, inputs, types))
    rows, size = (builder.emit(relax.TupleGetItem(both, i)) for i in range(2))
    shape = builder.emit(relax.op.tensor_to_shape(size))
    # A view of the first rows; what uses the new size depends on it, also for passes that sort.
    part = relax.call_pure_packed(
        "vm.builtin.reshape", rows, shape, ty_args=relax.TensorType(dtype="int64", ndim=2)
    )
    count = tirx.Var(builder.get_unique_name("selected"), "int64")
    return builder.match_cast(builder.emit(part), relax.TensorType((count, columns), "int64"))


def _product(extents: Sequence[Any]) -> Any:
    result = extents[0]
    for extent in extents[1:]:
        result = result * extent
    return result


def name_limits(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Give a NonMaxSuppression all its inputs, and the most boxes of a class as an attribute."""
    if suppression_problem(node, expansion.facts) is not None:
        return
    facts = expansion.facts
    boxes, scores, most, overlap, score = [*node.input, "", "", ""][:5]
    limit = facts.constant(most).item() if most else 0  # type: ignore[union-attr]
    limit = max(0, min(int(limit), np.iinfo("int32").max))
    values = (
        _vector(expansion, name, default) for name, default in ((overlap, 0), (score, -np.inf))
    )
    is_centred = attribute(node, "center_point_box", 0)
    attributes = {MOST: limit, "center_point_box": is_centred}
    expansion.finish(expansion.emit("NonMaxSuppression", boxes, scores, *values, **attributes))


def _vector(expansion: Expansion, name: str, default: float) -> str:
    """A threshold as a tensor of one element."""
    if not name:
        return expansion.constant("threshold", np.array([default], np.float32))
    value = expansion.facts.constant(name)
    if value is not None:
        return expansion.constant("threshold", value.reshape(1))
    return expansion.emit("Reshape", name, expansion.constant("shape", np.array([1], np.int64)))


def suppression_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why boxes cannot be suppressed, if any."""
    if attribute(node, MOST) is not None:
        return None
    most = node.input[2] if len(node.input) > 2 else ""
    if most and facts.constant(most) is None:
        return f"its input {most!r} depends on data; expected a constant"
    if facts.dtype(node.input[0]) not in (TensorProto.FLOAT, TensorProto.UNDEFINED):
        return "its boxes are not of float32"
    return None


def compress_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why a tensor cannot be compressed, if any."""
    for name in node.input:
        if facts.shape(name) is None:
            return f"the shape of {name!r} is only known at run time"
    return None
