# SPDX-License-Identifier: Apache-2.0
"""Bounds of indices: TVM's gather and scatter kernels do not check them.

In ONNX an index out of range is an error, so no correct model changes its meaning.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from tvm_fusion.errors import InvalidModelError

from ...model.graph_edits import attribute, is_default_domain, node_label, replace_nodes
from ...model.tensor_facts import GraphFacts
from ..expansion import Expansion

ALONG_AXIS = frozenset({"Gather", "GatherElements", "ScatterElements"})
BY_COORDINATES = frozenset({"GatherND", "ScatterND"})

_FAR = (1 << 31) - 1


def clamp_indices(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Check constant indices now, and clamp those that are computed at run time."""
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if is_default_domain(node) and node.op_type in ALONG_AXIS | BY_COORDINATES:
            nodes += _clamp(node, facts)
        nodes.append(node)
    replace_nodes(model.graph, nodes)


def _clamp(node: onnx.NodeProto, facts: GraphFacts) -> list[onnx.NodeProto]:
    """Make the node's indices safe; return the nodes that must come before it."""
    what = f"{node_label(node)} ({node.op_type})"
    data, indices = node.input[0], node.input[1]
    extents = _extents(node, facts)
    value = facts.constant(indices)
    if node.op_type == "Gather" and (value is None or extents is None):
        return []  # its translation stays within the tensor
    if extents is None:
        raise InvalidModelError(
            f"{what} needs the size of the indexed tensor {data!r}; give every dimension of the "
            "model's inputs a number, or use tvm_fusion.specialize"
        )
    if value is not None:
        bad = (value >= extents) | (value < -extents)
        if bad.any():
            raise InvalidModelError(
                f"{what} has the index {value[bad][0]}; {data!r} has the shape {facts.shape(data)}"
            )
        positive = np.where(value < 0, value + extents, value).astype(value.dtype)
        node.input[1] = facts.add_constant(f"{indices}/positive", positive)
        return []
    dtype = helper.tensor_dtype_to_np_dtype(facts.dtype(indices))
    low = facts.add_constant(f"{indices}/low", np.asarray(-extents, dtype))
    high = facts.add_constant(f"{indices}/high", np.asarray(extents - 1, dtype))
    bounded, clamped = facts.fresh(f"{indices}/bounded"), facts.fresh(f"{indices}/clamped")
    node.input[1] = clamped
    return [
        helper.make_node("Max", [indices, low], [bounded]),
        helper.make_node("Min", [bounded, high], [clamped]),
    ]


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
