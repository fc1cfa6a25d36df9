# SPDX-License-Identifier: Apache-2.0
"""Write MeanVarianceNormalization by the variance of what is left without the mean.

::

    c = x - ReduceMean(x);    y = c / (Sqrt(ReduceMean(c * c)) + 1e-9)

in float32 if the data has 16 bits. The importer subtracts the squared mean from the mean square,
which cancels, and knows float32 only, and so does the formula by which onnx infers types.
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
from ..arithmetic.wider_types import HALVES

EPSILON = np.array(1e-9, np.float32)

AXES_ARE_INPUTS = 18
"""From this opset on, ReduceMean takes its axes as an input."""


def split_mean_variance(model: onnx.ModelProto) -> None:
    """Replace every MeanVarianceNormalization; needs no shapes."""
    count = -1
    while True:
        left = [node for graph in all_graphs(model) for node in graph.node if _is_norm(node)]
        if not left:
            return
        is_stuck, count = len(left) == count, len(left)
        _split(model, is_stuck)


def _split(model: onnx.ModelProto, all_types: bool) -> None:
    """Replace the nodes whose types are known before others are replaced, or all."""
    types = _element_types(onnx.shape_inference.infer_shapes(model))
    opset = default_opset(model) or 1
    for graph in all_graphs(model):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            kind = types.get(node.input[0], 0) if _is_norm(node) else 0
            is_split = _is_norm(node) and (kind or all_types)
            nodes += _parts(node, opset, kind) if is_split else [node]
        replace_nodes(graph, nodes)


def _is_norm(node: onnx.NodeProto) -> bool:
    return is_default_domain(node) and node.op_type == "MeanVarianceNormalization"


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    types = {}
    for graph in all_graphs(model):
        for value in (*graph.input, *graph.value_info):
            types[value.name] = value.type.tensor_type.elem_type
        types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return types


def _parts(node: onnx.NodeProto, opset: int, kind: int) -> list[onnx.NodeProto]:
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

    is_narrow = kind in HALVES
    if is_narrow:
        x = emit("Cast", x, part="wide", to=onnx.TensorProto.FLOAT)
    centred = emit("Sub", x, mean(x, "mean"), part="centred")
    variance = mean(emit("Mul", centred, centred, part="squares"), "variance")
    deviation = emit("Sqrt", variance, part="deviation")
    epsilon = emit("CastLike", constant("epsilon", EPSILON), x, part="typed_epsilon")
    divisor = emit("Add", deviation, epsilon, part="divisor")
    result = emit("Div", centred, divisor, part="result")
    last = {"op_type": "Cast", "to": kind} if is_narrow else {"op_type": "Identity"}
    nodes.append(helper.make_node(inputs=[result], outputs=[y], name=node.name, **last))
    return nodes
