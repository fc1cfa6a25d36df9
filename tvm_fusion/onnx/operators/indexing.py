# SPDX-License-Identifier: Apache-2.0
"""Gather, scatter, OneHot, and places along an axis that depend on the batch.

A Gather is one op; TVM's converter computes the extent at run time. An index out of bounds is an
error, as ONNX defines it. Constant ones are checked now, others when the model runs::

    y = Gather(x, i)      ->      y = Gather(x, tvm_fusion.CheckedIndices(i, x))

In a branch that may not be taken, a third input says whether it is: only then an index is an error.

OneHot is written as comparisons; TVM's converter takes only integers for its depth::

    i = Unsqueeze(indices, axis);    y = Where(i == [0 ... depth) or i == [-depth ... 0), on, off)

Places of ReverseSequence and TensorScatter along one axis depend on the batch::

    ReverseSequence:  t = [0 ... time);    y = GatherElements(x, Where(t < n, n - 1 - t, t))
    TensorScatter:    t = [0 ... length) - start, or that modulo length;
                      y = Where(0 <= t < steps, GatherElements(update, Clip(t)), past)

Where an update does not fit behind its start, its end is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from tvm import relax, te, tirx
from tvm.ir import GenericConst

from relay_passes.op.elementwise import checked_indices, is_checked
from schedules.tir.extents import constant
from tvm_fusion.errors import InvalidModelError

from ..model.expansion import Expansion, taken_if
from ..model.graph_edits import attribute, node_label
from ..model.tensor_facts import GraphFacts
from .casts import widen
from .operator import Operator, operators


def translate_gather(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr | None:
    """``take`` of a tensor along an axis, or a kernel if its extent is symbolic; None for shapes.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Where the kernel is added.
    inputs : sequence
        Data, and int32 or int64 indices from 0 to ``extent - 1``; where the extent is a number,
        others are taken modulo the extent unless they are constant or were checked.
    attributes : dict
        ``axis``, by default 0.

    Returns
    -------
    relax.Expr or None
    """
    (data, indices), axis = inputs, attributes.get("axis", 0)
    if not all(isinstance(each.ty, relax.TensorType) for each in inputs):
        return None  # a shape
    are_constant = [isinstance(each, GenericConst) for each in inputs]
    if all(are_constant) or not isinstance(data.ty.shape, relax.ShapeExpr):
        return None
    if not isinstance(data.ty.shape.values[axis], tirx.IntImm):
        first = axis % len(data.ty.shape)
        return builder.emit_te(_take, data, indices, first, primfunc_name_hint="take")
    mode = "clip" if are_constant[1] or is_checked(builder, indices) else "wrap"
    return relax.op.take(data, indices, axis, mode=mode)


def _take(data: te.Tensor, indices: te.Tensor, axis: int) -> te.Tensor:
    """Slices of an axis; 0 where it is empty."""
    count = len(indices.shape)

    def element(*i: tirx.Var) -> tirx.Expr:
        value = data(*i[:axis], indices(*i[axis : axis + count]), *i[axis + count :])
        return tirx.if_then_else(data.shape[axis] > 0, value, tirx.const(0, data.dtype))

    shape = [*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]]
    return te.compute(shape, element, name="take")


ALONG_AXIS = frozenset({"Gather", "GatherElements", "ScatterElements"})

CHECKED_INDICES = "tvm_fusion.CheckedIndices"
"""Operator that :func:`translate_checked_indices` translates."""

_FAR = (1 << 31) - 1
_MESSAGE = "tvm_fusion.message"


def set_message(node: onnx.NodeProto, message: str) -> None:
    """Let an error of a node's indices at run time have another message."""
    node.metadata_props.add(key=_MESSAGE, value=message)


def check_indices(expansion: Expansion) -> None:
    """Check constant indices, and let the model check those that are computed at run time.

    Bools are combined as integers, where TVM's kernel would compare them as floats.
    """
    node = expansion.node
    expansion.nodes += _check(node, expansion.facts)
    is_bool = expansion.facts.dtype(node.input[0]) == onnx.TensorProto.BOOL
    if is_bool and expansion.get("reduction", "none") != "none":
        widen(expansion, onnx.TensorProto.INT32, [onnx.TensorProto.BOOL])
    elif expansion.nodes:
        expansion.nodes.append(node)


def _check(node: onnx.NodeProto, facts: GraphFacts) -> list[onnx.NodeProto]:
    """Make the node's indices safe; return the nodes that must come before it."""
    what = f"{node_label(node)} ({node.op_type})"
    data, indices = node.input[0], node.input[1]
    extents = _extents(node, facts)
    value = facts.constant(indices)
    if value is None or extents is None:
        return _checked_later(node, facts)
    bad = (value >= extents) | (value < -extents)
    if bad.any():
        raise InvalidModelError(
            f"{what} has the index {value[bad][0]}; {data!r} has the shape {facts.shape(data)}"
        )
    positive = np.where(value < 0, value + extents, value).astype(value.dtype)
    node.input[1] = facts.add_constant(f"{indices}/positive", positive)
    return []


def _checked_later(node: onnx.NodeProto, facts: GraphFacts) -> list[onnx.NodeProto]:
    """Let the node read checked indices; return the nodes that check them."""
    data, indices = node.input[0], node.input[1]
    node.input[1] = facts.fresh(f"{indices}/checked")
    along = {"axis": attribute(node, "axis", 0)}
    first = {"batch_dims": attribute(node, "batch_dims", 0)}
    decisions, taken = taken_if(node, facts)
    message = next((entry.value for entry in node.metadata_props if entry.key == _MESSAGE), "")
    check = helper.make_node(
        CHECKED_INDICES,
        [indices, data, *([taken] if taken else [])],
        [node.input[1]],
        name=node.name,
        about=f"{node_label(node)} ({node.op_type})",
        message=message,
        data=data,
        guarded=int(node.op_type == "Gather"),
        **(along if node.op_type in ALONG_AXIS else first),
    )
    return [*decisions, check]


def translate_checked_indices(
    _builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """The indices checked against the sizes of the data; those into a shape as they are."""
    indices, data, *taken = inputs
    if not all(isinstance(each.ty, relax.TensorType) for each in (indices, data)):
        return indices
    about, name = attributes["about"].decode(), attributes["data"].decode()
    if not isinstance(data.ty.shape, relax.ShapeExpr):
        raise InvalidModelError(f"the shape of the indexed tensor {name!r} is unknown")
    sizes = [constant(extent) or extent for extent in data.ty.shape]
    if "axis" in attributes:
        extents = [sizes[attributes["axis"]]]
    else:
        first, count = attributes["batch_dims"], constant(indices.ty.shape[-1])
        if count is None:
            raise InvalidModelError(f"the number of coordinates of {name!r} depends on data")
        extents = sizes[first : first + count]
    shape = ", ".join(map(str, sizes))
    message = attributes["message"].decode()
    message = message or f"{about} has an index out of bounds; {name!r} has the shape ({shape})"
    return checked_indices(indices, extents, message, bool(attributes["guarded"]), *taken)


def _extents(node: onnx.NodeProto, facts: GraphFacts) -> np.ndarray | None:
    """Sizes of the indexed dimensions: one number, or one a coordinate."""
    dims, index_dims = facts.dims(node.input[0]), facts.dims(node.input[1])
    if dims is None or index_dims is None:
        return None
    if node.op_type in ALONG_AXIS:
        axis = attribute(node, "axis", 0)
        if not -len(dims) <= axis < len(dims):
            raise InvalidModelError(
                f"{node_label(node)} ({node.op_type}) has the axis {axis}; {node.input[0]!r} has "
                f"{len(dims)} dimensions"
            )
        counted: tuple[int | None, ...] = (dims[axis],)
    else:
        first = attribute(node, "batch_dims", 0)
        if index_dims[-1] is None:
            return None
        counted = dims[first : first + index_dims[-1]]
    if None in counted:
        return None
    extents = np.array(counted, np.int64)
    return extents[0] if node.op_type in ALONG_AXIS else extents


def clamp_diagonal(expansion: Expansion) -> None:
    """Give a Trilu whose diagonal lies far outside of any matrix one that fits into int32."""
    value = expansion.facts.constant(expansion.input(1))
    if value is None or abs(int(value.item())) <= _FAR:
        return
    far = expansion.constant("diagonal", np.clip(value, -_FAR, _FAR))
    upper = expansion.get("upper", 1)
    expansion.finish(expansion.emit("Trilu", expansion.input(0), far, upper=upper))


def expand_one_hot(expansion: Expansion) -> None:
    """Replace a OneHot whose depth is constant."""
    indices, depth_name, values = expansion.node.input
    depth, dims = expansion.facts.constant(depth_name), expansion.facts.dims(indices)
    if depth is None or depth.size != 1 or dims is None:
        return
    rank = len(dims) + 1
    axis = expansion.get("axis", -1) % rank
    count = int(depth.item())
    numbers = np.arange(count, dtype=np.int64).reshape([count] + [1] * (rank - 1 - axis))
    off, on = _values(values, expansion)
    whole = expansion.emit("Cast", indices, to=TensorProto.INT64)
    places = expansion.emit("Unsqueeze", whole, expansion.constant("axis", np.array([axis])))
    hits = [
        expansion.emit("Equal", places, expansion.constant("numbers", numbers - start))
        for start in (0, count)
    ]
    expansion.finish(expansion.emit("Where", expansion.emit("Or", *hits), on, off))


def expand_eye_like(expansion: Expansion) -> None:
    """Give an EyeLike a tensor of the type of its result; TVM's converter takes no other."""
    x, kind = expansion.input(0), expansion.get("dtype", 0)
    if kind and kind != expansion.facts.dtype(x):
        cast = expansion.emit("Cast", x, to=kind)
        expansion.finish(expansion.emit("EyeLike", cast, k=expansion.get("k", 0), dtype=kind))


def _values(name: str, expansion: Expansion) -> list[str]:
    """The names of the two values, each a tensor of one element."""
    value = expansion.facts.constant(name)
    if value is not None:
        return [expansion.constant("value", part) for part in np.split(value, 2)]
    ends = [expansion.constant("end", np.array([end])) for end in range(3)]
    return [expansion.emit("Slice", name, ends[i], ends[i + 1]) for i in range(2)]


def expand_reverse_sequence(expansion: Expansion) -> None:
    """Replace a ReverseSequence of known shape."""
    x, lengths = expansion.node.input
    shape = expansion.facts.shape(x)
    time, batch = (expansion.get(n, d) for n, d in (("time_axis", 0), ("batch_axis", 1)))
    if shape is None or not 0 <= min(time, batch) < max(time, batch) < len(shape):
        return
    steps = _along(expansion, np.arange(shape[time]), time, len(shape))
    count = _batched(expansion, lengths, batch, len(shape))
    last = expansion.emit("Sub", count, _number(expansion, 1))
    inside = expansion.emit("Less", steps, count)
    places = expansion.emit("Where", inside, expansion.emit("Sub", last, steps), steps)
    expansion.finish(_gather(expansion, x, places, shape, time))


def expand_tensor_scatter(expansion: Expansion) -> None:
    """Replace a TensorScatter of known shapes."""
    facts = expansion.facts
    past, update, starts = [*expansion.node.input, ""][:3]
    shape, part = facts.shape(past), facts.shape(update)
    if shape is None or part is None:
        return
    axis = expansion.get("axis", -2) % len(shape)
    length, steps = shape[axis], part[axis]
    places = _along(expansion, np.arange(length), axis, len(shape))
    if starts:
        start = _batched(expansion, starts, 0, len(shape))
        places = expansion.emit("Sub", places, start)
        if expansion.get("mode", "linear") == "circular":
            places = expansion.emit("Mod", places, _number(expansion, length))
    low, high = _number(expansion, 0), _number(expansion, steps - 1)
    within = expansion.emit("Min", expansion.emit("Max", places, low), high)
    is_new = expansion.emit("Equal", within, places)
    new = _gather(expansion, update, within, shape, axis)
    expansion.finish(expansion.emit("Where", is_new, new, past))


def sequence_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why a node of this family cannot be written out, if any."""
    names = node.input[: 1 if node.op_type == "ReverseSequence" else 2]
    unknown = [name for name in names if facts.shape(name) is None]
    if unknown:
        return f"the shape of {unknown[0]!r} is only known at run time"
    if node.op_type == "ReverseSequence":  # all others were replaced
        return "its time_axis and batch_axis are not two of the dimensions of its input"
    return None


def _number(expansion: Expansion, value: int) -> str:
    return expansion.constant("number", np.array(value, np.int64))


def _along(expansion: Expansion, values: np.ndarray, axis: int, rank: int) -> str:
    """Numbers along one axis of several."""
    sizes = [1] * rank
    sizes[axis] = -1
    return expansion.constant("steps", values.astype(np.int64).reshape(sizes))


def _batched(expansion: Expansion, name: str, axis: int, rank: int) -> str:
    """A vector of whole numbers along the axis of the batch."""
    sizes = np.ones(rank, np.int64)
    sizes[axis] = -1
    wide = expansion.emit("Cast", name, to=TensorProto.INT64)
    return expansion.emit("Reshape", wide, expansion.constant("sizes", sizes))


def _gather(expansion: Expansion, x: str, places: str, shape: tuple[int, ...], axis: int) -> str:
    """Elements at places that broadcast to the shape of the result."""
    sizes = expansion.constant("sizes", np.array(shape, np.int64))
    whole = expansion.emit("Expand", places, sizes)
    expansion.facts.declare(whole, TensorProto.INT64, shape)
    return expansion.emit("GatherElements", x, whole, axis=axis)


def _batch_defect(node: onnx.NodeProto) -> str | None:
    """Refuse a number of axes below zero, of which onnx's inference of shapes crashes."""
    wrong = [entry.i for entry in node.attribute if entry.name == "batch_dims" and entry.i < 0]
    return f"its attribute batch_dims is {wrong[0]}; expected 0 or more" if wrong else None


OPERATORS = (
    Operator("EyeLike", expand=expand_eye_like),
    Operator("Gather", expand=check_indices, translate=translate_gather),
    Operator("GatherND", refuse=_batch_defect, defect=_batch_defect, expand=check_indices),
    *operators("GatherElements ScatterElements ScatterND", expand=check_indices),
    Operator("OneHot", shape_inputs=(1,), expand=expand_one_hot),
    Operator("ReverseSequence", expand=expand_reverse_sequence, check=sequence_problem),
    Operator("Scatter"),
    Operator("TensorScatter", expand=expand_tensor_scatter, check=sequence_problem),
    Operator("Trilu", scalars=(1,), expand=clamp_diagonal),
    Operator(CHECKED_INDICES, translate=translate_checked_indices),
)
