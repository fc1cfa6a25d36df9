# SPDX-License-Identifier: Apache-2.0
"""Write the test for rows of nothing but minus infinity without their maximum.

::

    Equal(ReduceMax(x), -inf)    becomes    Cast(ReduceMin(Cast(Equal(x, -inf), int32)), bool)

TVM's maximum begins with the lowest finite number, which the rows of a mask may hold as well.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..model.graph_edits import is_default_domain, replace_nodes
from ..model.tensor_facts import GraphFacts


def compare_masked_rows(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Replace each comparison of a maximum with minus infinity."""
    maxima = {
        node.output[0]: node
        for node in model.graph.node
        if node.op_type == "ReduceMax" and is_default_domain(node)
    }
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        maximum = maxima.get(node.input[0]) if node.op_type == "Equal" else None
        value = facts.constant(node.input[1]) if maximum is not None else None
        if maximum is None or value is None or value.size != 1 or value.item() != -np.inf:
            nodes.append(node)
        else:
            nodes += _all_lowest(node, maximum, facts)
    replace_nodes(model.graph, nodes)


def _all_lowest(
    node: onnx.NodeProto, maximum: onnx.NodeProto, facts: GraphFacts
) -> list[onnx.NodeProto]:
    """Whether all elements are minus infinity, by the maximum's axes."""
    names = [facts.fresh(f"{node.output[0]}/{part}") for part in ("is_lowest", "number", "all")]
    reduction = onnx.NodeProto()
    reduction.CopyFrom(maximum)
    reduction.op_type = "ReduceMin"
    reduction.input[0], reduction.output[0] = names[1], names[2]
    return [
        helper.make_node("Equal", [maximum.input[0], node.input[1]], [names[0]]),
        helper.make_node("Cast", [names[0]], [names[1]], to=TensorProto.INT32),
        reduction,
        helper.make_node("Cast", [names[2]], [node.output[0]], to=TensorProto.BOOL),
    ]
