# SPDX-License-Identifier: Apache-2.0
"""TopK of as many elements as there are, up to a constant: ``k = min(300, n)``.

::

    k = ReduceMin(Concat([300], Shape(s)[0]))          values, indices = SortFirst(x, s, most=300)
    values, indices = TopK(x, k)

This is how detectors take their best candidates, whose number depends on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper
from tvm import relax, te, tirx

from ..model.graph_edits import attribute, drop_unread_nodes, is_default_domain
from ..model.tensor_facts import GraphFacts

SORT_FIRST = "tvm_fusion.SortFirst"
"""Operator that :func:`translate_sort_first` translates."""

_MOVES = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_MINIMA = frozenset({"Concat", "Min", "ReduceMin"})

Size = tuple[str, int]
"""A tensor and one of its axes."""


def bound_topk(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Let a :data:`SORT_FIRST` take the place of each TopK of such a number of elements."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    changed = False
    for node in model.graph.node:
        is_open = node.op_type == "TopK" and is_default_domain(node)
        if not is_open or facts.constant(node.input[1]) is not None:
            continue
        bounds = _least(node.input[1], made_by, facts)
        numbers = [bound for bound in bounds or [] if isinstance(bound, int)]
        sizes = [bound for bound in bounds or [] if not isinstance(bound, int)]
        if not sizes:
            continue
        axis, largest = attribute(node, "axis", -1), attribute(node, "largest", 1)
        inputs = [node.input[0], *(name for name, _ in sizes)]
        replacement = helper.make_node(
            SORT_FIRST,
            inputs,
            list(node.output),
            node.name,
            axis=axis,
            largest=largest,
            sizes=[place for _, place in sizes],
            numbers=numbers,
        )
        node.CopyFrom(replacement)
        changed = True
    if changed:
        drop_unread_nodes(model)  # the importer cannot compute with sizes


def _least(
    name: str, made_by: dict[str, onnx.NodeProto], facts: GraphFacts
) -> list[int | Size] | None:
    """The numbers and sizes of which a tensor of one element is the least, if it is that."""
    value = facts.constant(name)
    if value is not None:
        return [int(value.item())] if value.size == 1 else None
    node = made_by.get(name)
    if node is None or not is_default_domain(node):
        return None
    if node.op_type in _MOVES:
        return _least(node.input[0], made_by, facts)
    if node.op_type == "Gather":
        return _one_size(node, made_by, facts)
    if node.op_type not in _MINIMA:
        return None
    parts = node.input[:1] if node.op_type == "ReduceMin" else node.input
    found: list[int | Size] = []
    for part in parts:
        bounds = _least(part, made_by, facts)
        if bounds is None:
            return None
        found += bounds
    return found


def _one_size(
    node: onnx.NodeProto, made_by: dict[str, onnx.NodeProto], facts: GraphFacts
) -> list[int | Size] | None:
    """The size that a Gather takes of a shape."""
    place, source = facts.constant(node.input[1]), made_by.get(node.input[0])
    is_shape = source is not None and source.op_type == "Shape" and not source.attribute
    if not is_shape or place is None or place.size != 1:
        return None
    return [(source.input[0], int(place.item()))]  # type: ignore[union-attr]


def translate_sort_first(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """The first elements of a sorted axis, and where they were."""
    x, *sized = inputs
    rank = len(x.ty.shape)
    axis = attributes["axis"] % rank
    bounds = [tirx.const(number, "int64") for number in attributes.get("numbers", [])]
    bounds += [each.ty.shape[place] for each, place in zip(sized, attributes["sizes"], strict=True)]
    count = bounds[0]
    for bound in bounds[1:]:
        count = tirx.min(count, bound)
    is_falling = bool(attributes["largest"])
    order = builder.emit(relax.op.argsort(x, axis, is_falling, "int64"))
    values = builder.emit(relax.op.gather_elements(x, order, axis))
    extents = [*x.ty.shape]
    extents[axis] = count

    def first(whole: te.Tensor) -> te.Tensor:
        return te.compute(extents, lambda *i: whole(*i), name="first")

    parts = [builder.emit_te(first, one, primfunc_name_hint="first") for one in (values, order)]
    return relax.Tuple(parts)
