# SPDX-License-Identifier: Apache-2.0
"""Write Unique by comparisons of all elements with each other.

::

    same[i, j] = x[i] == x[j];    first = ArgMax(same, 1);    is_first = first == [0 ... n)
    rank = number of first elements less than x[i], or before i if not sorted
    places = first elements in the order of their ranks

The results are as long as there are different elements, a size that depends on data.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto

from ...model.graph_edits import attribute
from ...model.tensor_facts import INTEGER_TYPES, GraphFacts
from ..expansion import Expansion

MOST = 4096
"""Most elements: the number of comparisons is the square of it."""


def expand_unique(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a Unique that :func:`unique_problem` accepts."""
    facts, x = expansion.facts, node.input[0]
    if unique_problem(node, facts) is not None:
        return
    count = math.prod(facts.shape(x) or ())
    flat = expansion.emit("Reshape", x, expansion.constant("flat", np.array([-1])))
    facts.declare(flat, facts.dtype(x), [count])
    column, row = _compared(expansion, flat, facts.dtype(x))
    same, less = _relations(expansion, column, row, facts.dtype(x))
    numbers = expansion.constant("numbers", np.arange(count))
    as_numbers = expansion.emit("Cast", same, to=TensorProto.INT32)
    first = expansion.emit("ArgMax", as_numbers, axis=1, keepdims=0)
    facts.declare(first, TensorProto.INT64, [count])
    is_first = expansion.emit("Equal", first, numbers)
    if not attribute(node, "sorted", 1):
        below = expansion.emit("Unsqueeze", first, expansion.constant("axis", np.array([1])))
        less = expansion.emit("Less", numbers, below)
    rank = _count(expansion, expansion.emit("And", less, is_first))
    facts.declare(rank, TensorProto.INT64, [count])
    none = expansion.constant("none", np.full(count, count))
    ordered = expansion.emit("ScatterElements", none, rank, first, axis=0)
    is_used = expansion.emit("Less", ordered, expansion.constant("count", np.array(count)))
    facts.declare(ordered, TensorProto.INT64, [count])
    facts.declare(is_used, TensorProto.BOOL, [count])
    places = expansion.emit("Compress", ordered, is_used, axis=0)
    results = [expansion.emit("Gather", flat, places, axis=0), places, rank]
    if len(node.output) > len(results):
        results.append(expansion.emit("Gather", _count(expansion, same), places, axis=0))
    expansion.finish(*results[: len(node.output)])


def unique_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why elements cannot be compared, if any."""
    shape = facts.shape(node.input[0])
    if shape is None:
        return f"the shape of {node.input[0]!r} is only known at run time"
    if attribute(node, "axis") is not None:
        return "it compares slices of an axis; expected elements"
    count = math.prod(shape)
    return None if 0 < count <= MOST else f"it has {count} elements; expected 1 to {MOST}"


def _compared(expansion: Expansion, flat: str, kind: int) -> list[str]:
    """The elements as a column and as a row, in a type that TVM compares."""
    if kind == TensorProto.BFLOAT16:
        flat = expansion.emit("Cast", flat, to=TensorProto.FLOAT)
    axes = [expansion.constant("axis", np.array([axis])) for axis in (1, 0)]
    return [expansion.emit("Unsqueeze", flat, axis) for axis in axes]


def _relations(expansion: Expansion, column: str, row: str, kind: int) -> tuple[str, str]:
    """Compare pairs: they are the same, that of the row is less; NaN is one, and the last."""
    same = expansion.emit("Equal", column, row)
    if kind == TensorProto.BOOL:
        wide = [expansion.emit("Cast", name, to=TensorProto.INT32) for name in (row, column)]
        return same, expansion.emit("Less", *wide)
    less = expansion.emit("Less", row, column)
    if kind in INTEGER_TYPES:
        return same, less
    missing = [expansion.emit("IsNaN", name) for name in (column, row)]
    same = expansion.emit("Or", same, expansion.emit("And", *missing))
    above = expansion.emit("And", missing[0], expansion.emit("Not", missing[1]))
    return same, expansion.emit("Or", less, above)


def _count(expansion: Expansion, flags: str) -> str:
    """Count the flags of each row that are set."""
    numbers = expansion.emit("Cast", flags, to=TensorProto.INT64)
    return expansion.emit(
        "ReduceSum", numbers, expansion.constant("axis", np.array([1])), keepdims=0
    )
