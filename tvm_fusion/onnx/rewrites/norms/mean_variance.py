# SPDX-License-Identifier: Apache-2.0
"""Write MeanVarianceNormalization by the variance of what is left without the mean.

::

    c = x - ReduceMean(x);    y = c / (Sqrt(ReduceMean(c * c)) + 1e-9)

The importer subtracts the squared mean from the mean square, which cancels, and knows float32
only; onnx infers no shape of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ...model.graph_edits import (
    all_graphs,
    attribute,
    default_opset,
    is_default_domain,
    replace_nodes,
)

EPSILON = np.array(1e-9, np.float32)

AXES_ARE_INPUTS = 18
"""From this opset on, ReduceMean takes its axes as an input."""


def split_mean_variance(model: onnx.ModelProto) -> None:
    """Replace every MeanVarianceNormalization; needs no shapes and no types."""
    opset = default_opset(model) or 1
    for graph in all_graphs(model):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            is_norm = is_default_domain(node) and node.op_type == "MeanVarianceNormalization"
            nodes += _parts(node, opset) if is_norm else [node]
        replace_nodes(graph, nodes)


def _parts(node: onnx.NodeProto, opset: int) -> list[onnx.NodeProto]:
    """The nodes of the formula."""
    (x,), (y,) = node.input, node.output
    nodes: list[onnx.NodeProto] = []
    axes = np.array(attribute(node, "axes", [0, 2, 3]), np.int64)

    def emit(op_type: str, *inputs: str, part: str, **attributes: Any) -> str:
        result = f"{y}/{part}"
        nodes.append(helper.make_node(op_type, inputs, [result], name=node.name, **attributes))
        return result

    def constant(part: str, value: np.ndarray) -> str:
        return emit("Constant", part=part, value=numpy_helper.from_array(value))

    def mean(values: str, part: str) -> str:
        if opset < AXES_ARE_INPUTS:
            return emit("ReduceMean", values, part=part, axes=axes.tolist())
        return emit("ReduceMean", values, constant(f"{part}_axes", axes), part=part)

    centred = emit("Sub", x, mean(x, "mean"), part="centred")
    variance = mean(emit("Mul", centred, centred, part="squares"), "variance")
    deviation = emit("Sqrt", variance, part="deviation")
    epsilon = emit("CastLike", constant("epsilon", EPSILON), x, part="typed_epsilon")
    divisor = emit("Add", deviation, epsilon, part="divisor")
    nodes.append(helper.make_node("Div", [centred, divisor], [y], name=node.name))
    return nodes
