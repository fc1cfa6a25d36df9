# SPDX-License-Identifier: Apache-2.0
"""Bounds of indices: an index outside of them is an error, as ONNX defines it.

Constant ones are checked now, others when the model runs::

    y = Gather(x, i)      ->      y = Gather(x, tvm_fusion.CheckedIndices(i, x))

In a branch that may not be taken, a third input says whether it is: only then an index is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from tvm import relax

from relay_passes.op.checked_indices import checked_indices
from schedules.workload.reduce import constant
from tvm_fusion.errors import InvalidModelError

from ...model.graph_edits import attribute, is_default_domain, node_label, replace_nodes
from ...model.tensor_facts import GraphFacts
from ..control_flow.branches import taken_if
from ..expansion import Expansion

ALONG_AXIS = frozenset({"Gather", "GatherElements", "ScatterElements"})
BY_COORDINATES = frozenset({"GatherND", "ScatterND"})

CHECKED_INDICES = "tvm_fusion.CheckedIndices"
"""Operator that :func:`translate_checked_indices` translates."""

_FAR = (1 << 31) - 1
_MESSAGE = "tvm_fusion.message"


def set_message(node: onnx.NodeProto, message: str) -> None:
    """Let an error of a node's indices at run time have another message."""
    node.metadata_props.add(key=_MESSAGE, value=message)


def check_indices(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Check constant indices, and let the model check those that are computed at run time."""
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if is_default_domain(node) and node.op_type in ALONG_AXIS | BY_COORDINATES:
            nodes += _check(node, facts)
        nodes.append(node)
    replace_nodes(model.graph, nodes)


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


def clamp_diagonal(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Give a Trilu whose diagonal lies far outside of any matrix one that fits into int32."""
    value = expansion.facts.constant(node.input[1]) if len(node.input) > 1 else None
    if value is None or abs(int(value.item())) <= _FAR:
        return
    far = expansion.constant("diagonal", np.clip(value, -_FAR, _FAR))
    upper = attribute(node, "upper", 1)
    expansion.finish(expansion.emit("Trilu", node.input[0], far, upper=upper))
