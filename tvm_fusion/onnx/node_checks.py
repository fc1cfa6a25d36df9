# SPDX-License-Identifier: Apache-2.0
"""Checks for nodes that onnx's checker accepts and that then crash onnx's or TVM's code."""

from __future__ import annotations

import re

import onnx
from onnx.defs import OpSchema

from .model.graph_edits import all_graphs, attribute, default_opset, is_default_domain
from .operator_checks import refuse_nodes

OUTPUTS = {"BatchNormalization": 1, "Dropout": 2, "LayerNormalization": 3, "MaxPool": 2}
"""Number of outputs that the importer computes; it ignores the rest."""

MAX_ATTRIBUTE = 2**31 - 1
"""The compilers cast sizes and axes to 32 bits."""

UNBOUNDED = ("starts", "ends", "start", "end")
"""Attributes of Slice and Shape in which a huge number means the end."""


def check_nodes(model: onnx.ModelProto) -> None:
    """Refuse a model with broken nodes, naming every one of them."""
    opset = default_opset(model) or 1
    problems = []
    for graph in all_graphs(model):
        for node in graph.node:
            reason = _defect(node, opset) if is_default_domain(node) else None
            if reason is not None:
                problems.append((node, reason))
    refuse_nodes(model, problems)


def _defect(node: onnx.NodeProto, opset: int) -> str | None:
    """Return the defect of a node that would end in a crash, if any; needs no shapes."""
    schema = onnx.defs.get_schema(node.op_type, opset)
    for index, name in enumerate(node.input):
        formal = schema.inputs[min(index, len(schema.inputs) - 1)] if schema.inputs else None
        if not name and (
            formal is None or formal.option != OpSchema.FormalParameterOption.Optional
        ):
            return f"its input {index} is missing"
    is_training = node.op_type == "BatchNormalization" and attribute(node, "training_mode", 0)
    for name in node.output[OUTPUTS.get(node.op_type, len(node.output)) :]:
        if name and not is_training:
            return f"its output {name!r} is not supported"
    for entry in node.attribute:
        if node.op_type == "Constant" or entry.name in UNBOUNDED:
            continue
        for value in (entry.i, *entry.ints):
            if abs(value) > MAX_ATTRIBUTE:
                return f"its attribute {entry.name} is {value}"
    equation = attribute(node, "equation", "")
    if node.op_type == "Einsum" and not re.fullmatch(r"[A-Za-z,.>\- ]+", equation):
        return f"its equation is {equation!r}"
    parts = attribute(node, "num_outputs")
    if node.op_type == "Split" and parts is not None and parts != len(node.output):
        return f"its num_outputs is {parts}, and it has {len(node.output)} outputs"
    power = attribute(node, "p", 2)
    if node.op_type == "LpNormalization" and power not in (1, 2):
        return f"its p is {power}; ONNX has 1 and 2"
    return None
