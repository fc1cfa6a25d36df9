# SPDX-License-Identifier: Apache-2.0
"""Cases of kernels as ONNX models."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper, numpy_helper

from ..offline.kernel_cases import KernelCase

_OPSET = 23


def onnx_model(case: KernelCase) -> onnx.ModelProto:
    """A case as an ONNX model."""

    def info(tensors: Any) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, _onnx_type(dtype), shape)
            for name, (dtype, shape) in tensors.items()
        ]

    nodes = []
    for op, inputs, outputs, attributes in case.nodes:
        node = helper.make_node(op, inputs, outputs)
        node.attribute.extend(
            helper.make_attribute(name, _onnx_type(value) if name == "to" else value)
            for name, value in attributes.items()
        )
        nodes.append(node)
    weights = [numpy_helper.from_array(array, name) for name, array in case.weights().items()]
    graph = helper.make_graph(nodes, "case", info(case.inputs), info(case.outputs), weights)
    opsets = [helper.make_opsetid("", _OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _onnx_type(dtype: str) -> int:
    return int(getattr(onnx.TensorProto, {"float32": "FLOAT"}.get(dtype, dtype.upper())))
