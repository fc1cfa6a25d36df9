# SPDX-License-Identifier: Apache-2.0
"""Write Unique by comparisons of all items with each other: elements, or slices of an axis.

::

    same[i, j] = x[i] == x[j];    first = ArgMax(same, 1);    is_first = first == [0 ... n)
    rank = number of first items less than x[i], or before i if not sorted
    places = first items in the order of their ranks

Of two slices the elements at the first place where they differ decide which is less. There are as
many results as different items, a size that depends on data.
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
"""Most elements: the number of comparisons is the square of it, also of the elements of slices."""


def expand_unique(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a Unique that :func:`unique_problem` accepts."""
    facts, x = expansion.facts, node.input[0]
    if unique_problem(node, facts) is not None:
        return
    shape, axis = facts.shape(x) or (), attribute(node, "axis")
    kind = facts.dtype(x)
    if axis is None:
        shape, axis = (math.prod(shape),), 0
        x = expansion.emit("Reshape", x, expansion.constant("flat", np.array([-1])))
        facts.declare(x, kind, shape)
    count = shape[axis]
    same, less = _relations(expansion, *_compared(expansion, x, shape, axis), kind)
    if math.prod(shape) > count:
        same, less = _of_slices(expansion, same, less, count)
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
    results = [expansion.emit("Gather", x, places, axis=axis), places, rank]
    if len(node.output) > len(results):
        results.append(expansion.emit("Gather", _count(expansion, same), places, axis=0))
    expansion.finish(*results[: len(node.output)])


def unique_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why items cannot be compared, if any."""
    shape, axis = facts.shape(node.input[0]), attribute(node, "axis")
    if shape is None:
        return f"the shape of {node.input[0]!r} is only known at run time"
    count = math.prod(shape)
    if axis is None:
        return None if 0 < count <= MOST else f"it has {count} elements; expected 1 to {MOST}"
    if not -len(shape) <= axis < len(shape):
        return f"its axis is {axis}; expected one of {len(shape)} dimensions"
    pairs = count * shape[axis]
    if 0 < pairs <= MOST**2:
        return None
    return f"it compares {pairs} pairs of elements along its axis; expected 1 to {MOST**2}"


def _compared(expansion: Expansion, x: str, shape: tuple[int, ...], axis: int) -> tuple[str, str]:
    """The items as a column and as a row, in a type that TVM compares; slices are flat."""
    if expansion.facts.dtype(x) == TensorProto.BFLOAT16:
        x = expansion.emit("Cast", x, to=TensorProto.FLOAT)
    first = axis % len(shape)
    if first:
        others = [place for place in range(len(shape)) if place != first]
        x = expansion.emit("Transpose", x, perm=[first, *others])
    count, size = shape[axis], math.prod(shape) // shape[axis]
    sizes = [[count, 1, size], [1, count, size]] if size > 1 else [[count, 1], [1, count]]
    column, row = (
        expansion.emit("Reshape", x, expansion.constant("sizes", np.array(one))) for one in sizes
    )
    return column, row


def _of_slices(expansion: Expansion, same: str, less: str, count: int) -> tuple[str, str]:
    """Relations of slices from those of their elements, [slices, slices, elements]."""
    differ = expansion.emit("Cast", expansion.emit("Not", same), to=TensorProto.INT32)
    first = expansion.emit("ArgMax", differ, axis=2, keepdims=1)  # 0 where they are the same
    flat = expansion.constant("pairs", np.array([count, count]))
    same, less = (
        expansion.emit("Reshape", expansion.emit("GatherElements", flags, first, axis=2), flat)
        for flags in (same, less)
    )
    return same, less


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
