# SPDX-License-Identifier: Apache-2.0
"""Sequences and optionals of tensors, whose operators only choose names if lengths are constant.

A sequence is the list of the names of its tensors; an optional is its value, a sequence or the name
of a tensor, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx

from ..model.expansion import Expansion
from ..model.graph_edits import attribute, drop_unread_nodes, is_default_domain, replace_nodes
from ..model.tensor_facts import GraphFacts


class TensorList(NamedTuple):
    """Names of the tensors of a sequence, or that of the tensor that an optional has."""

    items: tuple[str, ...]
    is_sequence: bool = True


Lists = dict[str, TensorList]
Rule = Callable[[onnx.NodeProto, Expansion, Lists], "TensorList | bool"]
"""The list that a node makes, or whether it has emitted nodes in its place."""


def _input(node: onnx.NodeProto, index: int) -> str:
    return node.input[index] if index < len(node.input) else ""


def _place(node: onnx.NodeProto, index: int, expansion: Expansion, default: int) -> int | None:
    """The position that an input holds; None if it is not constant."""
    name = _input(node, index)
    value = expansion.facts.constant(name) if name else np.array(default)
    return None if value is None else int(value.item())


def _construct(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> TensorList:
    return TensorList(tuple(node.input))


def _insert(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> TensorList | bool:
    items = lists[node.input[0]].items
    place = _place(node, 2, expansion, len(items))
    if place is None or not -len(items) <= place <= len(items):
        return False
    place += len(items) if place < 0 else 0
    return TensorList((*items[:place], node.input[1], *items[place:]))


def _erase(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> TensorList | bool:
    items = lists[node.input[0]].items
    place = _place(node, 1, expansion, -1)
    if place is None or not -len(items) <= place < len(items):
        return False
    place += len(items) if place < 0 else 0
    return TensorList(items[:place] + items[place + 1 :])


def _at(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> bool:
    items = lists[node.input[0]].items
    place = _place(node, 1, expansion, 0)
    if place is None or not -len(items) <= place < len(items):
        return False
    expansion.finish(items[place])
    return True


def _length(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> bool:
    count = np.array(len(lists[node.input[0]].items), np.int64)
    expansion.finish(expansion.constant("length", count))
    return True


def _concat(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> bool:
    items, axis = lists[node.input[0]].items, attribute(node, "axis", 0)
    if not items:
        return False
    if attribute(node, "new_axis", 0):
        axes = expansion.constant("axes", np.array([axis], np.int64))
        items = tuple(expansion.emit("Unsqueeze", item, axes) for item in items)
    expansion.finish(expansion.emit("Concat", *items, axis=axis))
    return True


def _split(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> TensorList | bool:
    data, axis = node.input[0], attribute(node, "axis", 0)
    name = _input(node, 1)
    sizes = expansion.facts.constant(name) if name else np.array(1)
    if sizes is None:
        return False
    if sizes.ndim == 0:
        dims = expansion.facts.dims(data)
        size = None if dims is None else dims[axis]
        if not size:
            return False
        ends = np.arange(0, size, int(sizes))
        sizes = np.diff(np.append(ends, size))
    where = expansion.constant("sizes", sizes.astype(np.int64))
    parts = expansion.emit_many("Split", len(sizes), data, where, axis=axis)
    if not name and not attribute(node, "keepdims", 1):
        axes = expansion.constant("axes", np.array([axis], np.int64))
        parts = [expansion.emit("Squeeze", part, axes) for part in parts]
    return TensorList(tuple(parts))


def _pass(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> TensorList:
    return lists[node.input[0]]


def _optional(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> TensorList:
    name = _input(node, 0)
    return lists.get(name, TensorList((name,) if name else (), is_sequence=False))


def _element(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> TensorList | bool:
    found = lists.get(node.input[0], TensorList((node.input[0],), is_sequence=False))
    if found.is_sequence or not found.items:
        return found if found.is_sequence else False
    expansion.finish(*found.items)
    return True


def _has_element(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> bool:
    name = _input(node, 0)
    found = lists.get(name, TensorList((name,) if name else (), is_sequence=False))
    is_there = np.array(found.is_sequence or bool(found.items))
    expansion.finish(expansion.constant("has_element", is_there))
    return True


_OF_LISTS: dict[str, Rule] = {
    "ConcatFromSequence": _concat,
    "Identity": _pass,
    "SequenceAt": _at,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
}
"""Operators that need to know the list that is their first input."""

_OTHERS: dict[str, Rule] = {
    "Optional": _optional,
    "OptionalGetElement": _element,
    "OptionalHasElement": _has_element,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _construct,
    "SplitToSequence": _split,
}

LIST_OPERATORS = (_OF_LISTS.keys() | _OTHERS.keys()) - {"Identity"}


def write_out_lists(model: onnx.ModelProto, facts: GraphFacts) -> bool:
    """Replace the operators of sequences and optionals whose lengths and positions are constant.

    Returns
    -------
    bool
        Whether anything has changed.
    """
    lists: Lists = {}
    nodes: list[onnx.NodeProto] = []
    count, changed = len(model.graph.node), False
    for node in model.graph.node:
        expansion = Expansion(node, facts)
        applied = _apply(node, expansion, lists)
        if isinstance(applied, TensorList):
            lists[node.output[0]] = applied
        nodes += expansion.nodes
        if applied is not True:
            nodes.append(node)
        changed = changed or applied is True
    if not lists and not changed:
        return False
    replace_nodes(model.graph, nodes)
    drop_unread_nodes(model)  # Nobody reads some lists any more.
    return changed or len(model.graph.node) != count


def _apply(node: onnx.NodeProto, expansion: Expansion, lists: Lists) -> TensorList | bool:
    if not is_default_domain(node):
        return False
    if node.input and node.input[0] in lists and node.op_type in _OF_LISTS:
        return _OF_LISTS[node.op_type](node, expansion, lists)
    return _OTHERS[node.op_type](node, expansion, lists) if node.op_type in _OTHERS else False


def list_problem(node: onnx.NodeProto, facts: GraphFacts) -> str:
    """Return the reason why an operator of lists is still there."""
    return "the length of its sequence, or a position in it, is not constant, or is out of range"
