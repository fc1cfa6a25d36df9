# SPDX-License-Identifier: Apache-2.0
"""Operators whose results have a size that depends on data: a new symbolic dimension.

::

    rows, size = call_tir(find_nonzero, x)                  # room for all; how many there are
    part = reshape(rows, tensor_to_shape(size))             # a view of the first
    result = match_cast(part, R.Tensor((n, 2), "int64"))

All that is computed from the result has the symbolic size ``n``; it may be 0.

A TopK may take as many elements as there are, up to a constant, as ``k = min(300, n)``::

    k = ReduceMin(Concat([300], Shape(s)[0]))          values, indices = SortFirst(x, s, most=300)
    values, indices = TopK(x, k)

This is how detectors take their best candidates, whose number depends on data.

Unique is written by comparisons of all items with each other, elements or slices of an axis::

    same[i, j] = x[i] == x[j];    first = ArgMax(same, 1);    is_first = first == [0 ... n)
    rank = number of first items less than x[i], or before i if not sorted
    places = first items in the order of their ranks

Of two slices the elements at the first place where they differ decide which is less. There are as
many results as different items, a size that depends on data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from tvm import relax, te, tirx

from schedules.cpu.loops.selections import find_nonzero, suppress_boxes

from ..model.expansion import Expansion
from ..model.graph_edits import attribute, drop_unread_nodes, is_default_domain, set_attributes
from ..model.tensor_facts import INTEGER_TYPES, GraphFacts
from .operator import Operator

MOST = "most"
"""Attribute for the constant input ``max_output_boxes_per_class``."""


def translate_nonzero(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Coordinates of the elements that are not 0, [rank, n]."""
    return relax.op.permute_dims(_places(builder, inputs[0]), [1, 0])


def place_number(expansion: Expansion) -> None:
    """Make a vector of the number that a NonZero reads, whose place ONNX Runtime returns."""
    if expansion.facts.dims(expansion.input(0)) == ():
        one = expansion.constant("one", np.array([1]))
        vector = expansion.emit("Reshape", expansion.input(0), one)
        expansion.finish(expansion.emit("NonZero", vector))


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


def name_limits(expansion: Expansion) -> None:
    """Give a NonMaxSuppression all its inputs, and the most boxes of a class as an attribute."""
    if suppression_problem(expansion.node, expansion.facts) is not None:
        return
    facts = expansion.facts
    boxes, scores, most, overlap, score = [*expansion.node.input, "", "", ""][:5]
    limit = facts.constant(most).item() if most else 0  # type: ignore[union-attr]
    limit = max(0, min(int(limit), np.iinfo("int32").max))
    values = (
        _vector(expansion, name, default) for name, default in ((overlap, 0), (score, -np.inf))
    )
    is_centred = expansion.get("center_point_box", 0)
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
        )
        if numbers:
            replacement.attribute.append(helper.make_attribute("numbers", numbers))
        node.CopyFrom(replacement)
        changed = True
    if changed:
        drop_unread_nodes(model)  # converters cannot compute with sizes


def always_sort(expansion: Expansion) -> None:
    """Sort the results of a TopK, as any order will do: TVM's converter insists on it."""
    set_attributes(expansion.node, ("sorted",))


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
    sizes: list[int | Size] = []
    for part in parts:
        bounds = _least(part, made_by, facts)
        if bounds is None:
            return None
        sizes += bounds
    return sizes


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


MOST_COMPARED = 4096
"""Most elements: the number of comparisons is the square of it, also of the elements of slices."""


def expand_unique(expansion: Expansion) -> None:
    """Replace a Unique that :func:`unique_problem` accepts."""
    facts, x = expansion.facts, expansion.input(0)
    if unique_problem(expansion.node, facts) is not None:
        return
    shape, axis = facts.shape(x) or (), expansion.get("axis")
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
    if not expansion.get("sorted", 1):
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
    if len(expansion.node.output) > len(results):
        results.append(expansion.emit("Gather", _count(expansion, same), places, axis=0))
    expansion.finish(*results[: len(expansion.node.output)])


def unique_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why items cannot be compared, if any."""
    shape, axis = facts.shape(node.input[0]), attribute(node, "axis")
    if shape is None:
        return f"the shape of {node.input[0]!r} is only known at run time"
    count = math.prod(shape)
    if axis is None:
        return (
            None
            if 0 < count <= MOST_COMPARED
            else f"it has {count} elements; expected 1 to {MOST_COMPARED}"
        )
    if not -len(shape) <= axis < len(shape):
        return f"its axis is {axis}; expected one of {len(shape)} dimensions"
    pairs = count * shape[axis]
    if 0 < pairs <= MOST_COMPARED**2:
        return None
    return f"it compares {pairs} pairs of elements along its axis; expected 1 to {MOST_COMPARED**2}"


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


OPERATORS = (
    Operator("Compress", check=compress_problem, translate=translate_compress),
    Operator(
        "NonMaxSuppression",
        scalars=(2, 3, 4),
        expand=name_limits,
        check=suppression_problem,
        translate=translate_suppression,
    ),
    Operator("NonZero", reshape=place_number, translate=translate_nonzero),
    Operator("TopK", expand=always_sort, shape_inputs=(1,)),
    Operator("Unique", expand=expand_unique, check=unique_problem),
    Operator(SORT_FIRST, translate=translate_sort_first),
)
