# SPDX-License-Identifier: Apache-2.0
"""Axes that are only known at run time, of reductions, CumSum and CumProd.

All results that the model's shapes allow are computed, and the axes choose one of them::

    y = ReduceSum(x, axes)          s = Concat(Unsqueeze(ReduceSum(x, [0])), Unsqueeze(...), ...)
                            ->      y = Gather(s, place of axes among the candidates)

A reduction needs the shape that the model declares of its result: axes that give another one are an
error of the call. There are few candidates, mostly one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx

from ..model.graph_edits import attribute, node_label
from ..model.tensor_facts import GraphFacts
from .arithmetic.reductions import REDUCTIONS
from .expansion import Expansion, Rule, expand_nodes
from .indexing.indices import set_message

_MOST_CANDIDATES = 8
_MOST_DIMENSIONS = 8


def choose_axes(model: onnx.ModelProto, facts: GraphFacts) -> bool:
    """Replace nodes whose axes depend on data; return whether there was one."""
    count = len(model.graph.node)
    rules: dict[str, Rule] = dict.fromkeys(REDUCTIONS, _choose_reduction)
    expand_nodes(model, facts, rules | dict.fromkeys(("CumProd", "CumSum"), _choose_scan))
    return len(model.graph.node) != count


def _choose_reduction(node: onnx.NodeProto, expansion: Expansion) -> None:
    facts = expansion.facts
    if len(node.input) < 2 or not node.input[1] or facts.constant(node.input[1]) is not None:
        return
    shape, wanted = facts.shape(node.input[0]), facts.shape(node.output[0])
    count = facts.shape(node.input[1])
    if shape is None or wanted is None or count is None or len(count) != 1:
        return
    keeps = bool(attribute(node, "keepdims", 1))
    fitting = _candidates(shape, count[0], wanted, keeps)
    if not 0 < len(fitting) <= _MOST_CANDIDATES or len(shape) > _MOST_DIMENSIONS:
        return
    # Each set of axes is a sum of powers of two, which no axis twice gives.
    table = np.full(1 << len(shape), len(fitting), np.int64)
    for number, axes in enumerate(fitting):
        table[sum(1 << axis for axis in axes)] = number
    powers = expansion.constant("powers", np.array([1 << axis for axis in range(len(shape))]))
    about = f"{node_label(node)} ({node.op_type}) has axes"
    bits = expansion.emit("Gather", powers, node.input[1])
    bounds = f"{about} out of bounds; {node.input[0]!r} has the shape {shape}"
    set_message(expansion.nodes[-1], bounds)
    code = expansion.emit("ReduceSum", bits, keepdims=0)
    place = expansion.emit("Gather", expansion.constant("places", table), code)
    message = f"{about} that do not give the shape {wanted} of its result"
    set_message(expansion.nodes[-1], message)
    results = [_with_axes(node, expansion, np.array(axes, np.int64)) for axes in fitting]
    _choose(expansion, results, place, message)


def _candidates(
    shape: Sequence[int], count: int, wanted: Sequence[int], keeps: bool
) -> list[tuple[int, ...]]:
    """Sets of so many axes that reduce a shape to another one."""
    found = []
    for axes in itertools.combinations(range(len(shape)), count):
        kept = [1 if axis in axes else size for axis, size in enumerate(shape)]
        left = kept if keeps else [size for axis, size in enumerate(shape) if axis not in axes]
        if list(left) == list(wanted):
            found.append(axes)
    return found


def _choose_scan(node: onnx.NodeProto, expansion: Expansion) -> None:
    facts = expansion.facts
    if len(node.input) < 2 or facts.constant(node.input[1]) is not None:
        return
    shape, sizes = facts.shape(node.input[0]), facts.shape(node.input[1])
    if shape is None or sizes is None or math.prod(sizes) != 1:
        return
    if not 0 < len(shape) <= _MOST_CANDIDATES:
        return
    no_sizes = expansion.constant("scalar", np.zeros(0, np.int64))
    place = expansion.emit("Reshape", node.input[1], no_sizes)
    axes = range(len(shape))
    results = [_with_axes(node, expansion, np.array(axis, np.int64)) for axis in axes]
    about = f"{node_label(node)} ({node.op_type}) has an axis"
    _choose(
        expansion, results, place, f"{about} out of bounds; {node.input[0]!r} has the shape {shape}"
    )


def _with_axes(node: onnx.NodeProto, expansion: Expansion, axes: np.ndarray) -> str:
    """The node with constant axes."""
    result = expansion.emit(node.op_type, node.input[0], expansion.constant("axes", axes))
    expansion.nodes[-1].attribute.extend(node.attribute)
    return result


def _choose(expansion: Expansion, results: Sequence[str], place: str, message: str) -> None:
    """Let the result at a place be the node's; another place is an error with the message."""
    first = expansion.constant("first", np.zeros(1, np.int64))
    rows = [expansion.emit("Unsqueeze", result, first) for result in results]
    chosen = expansion.emit("Gather", expansion.emit("Concat", *rows, axis=0), place, axis=0)
    set_message(expansion.nodes[-1], message)
    expansion.finish(chosen)
