# SPDX-License-Identifier: Apache-2.0
"""Checks of a model: what cannot be imported is refused, each node by its name and the reason.

TVM's converters ignore what they do not know: an attribute, an output, a mode. Every case that an
operator's entry checks gave wrong numbers or a crash; a clear error is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import onnx
from onnx.defs import OpSchema

from ..errors import UnsupportedOperatorError
from .model.graph_edits import (
    all_graphs,
    attribute,
    default_opset,
    is_default_domain,
    node_label,
    opset_of,
)
from .model.tensor_facts import GraphFacts
from .operators.table import find

MAX_ATTRIBUTE = 2**31 - 1
"""The compilers cast sizes and axes to 32 bits."""

UNBOUNDED = ("starts", "ends", "start", "end")
"""Attributes of Slice and Shape in which a huge number means the end."""

Problem = tuple[onnx.NodeProto, str]


def check_operators(model: onnx.ModelProto) -> None:
    """Refuse a model with operators that have no translation, before any other check."""
    functions = {(function.domain, function.name) for function in model.functions}
    nodes = [node for graph in all_graphs(model) for node in graph.node]
    nodes = [node for node in nodes if (node.domain, node.op_type) not in functions]
    _refuse_by(model, nodes, _refusal)


def _refusal(node: onnx.NodeProto) -> str | None:
    """Return why a node cannot be imported whatever its inputs are, and how to do without it."""
    operator = find(node)
    if operator is None:
        return "this operator has no translation"
    return operator.refuse(node) if operator.refuse else None


def check_nodes(model: onnx.ModelProto) -> None:
    """Refuse nodes that onnx's checker accepts and that then crash onnx's or TVM's code."""
    opset = default_opset(model) or 1
    nodes = [node for graph in all_graphs(model) for node in graph.node if is_default_domain(node)]
    _refuse_by(model, nodes, partial(_defect, opset=opset))


def _defect(node: onnx.NodeProto, opset: int) -> str | None:
    """Return the defect of a node that would end in a crash, if any; needs no shapes."""
    operator = find(node)
    schema = onnx.defs.get_schema(node.op_type, opset)
    for index, name in enumerate(node.input):
        formal = schema.inputs[min(index, len(schema.inputs) - 1)] if schema.inputs else None
        if not name and (
            formal is None or formal.option != OpSchema.FormalParameterOption.Optional
        ):
            return f"its input {index} is missing"
    is_training = node.op_type == "BatchNormalization" and attribute(node, "training_mode", 0)
    for name in node.output[(operator and operator.outputs) or len(node.output) :]:
        if name and not is_training:
            return f"its output {name!r} is not supported"
    for entry in node.attribute:
        if node.op_type == "Constant" or entry.name in UNBOUNDED:
            continue
        for value in (entry.i, *entry.ints):
            if abs(value) > MAX_ATTRIBUTE:
                return f"its attribute {entry.name} is {value}"
    return operator.defect(node) if operator and operator.defect else None


def check_scalars(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Refuse nodes with several numbers, or none, where the rules of their operators take one."""
    nodes = filter(is_default_domain, model.graph.node)
    _refuse_by(model, nodes, partial(_not_scalar, facts=facts))


def _not_scalar(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    operator = find(node)
    scalars = operator.scalars if operator else ()
    for name in (node.input[k] for k in scalars if k < len(node.input)):
        shape = facts.shape(name) if name else None
        if shape is not None and math.prod(shape) != 1:
            return f"its input {name!r} has the shape {shape}; expected one number"
    return None


def check_translations(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Refuse nodes that would be translated wrongly, or into reads out of bounds."""
    nodes = filter(is_default_domain, model.graph.node)
    _refuse_by(model, nodes, partial(_mistranslation, facts=facts))


def _mistranslation(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    operator = find(node)
    if operator is None:
        return None
    for index in operator.shape_inputs:
        if index < len(node.input) and facts.depends_on_data(node.input[index]):
            return f"its input {node.input[index]!r} depends on data; expected a constant"
    return operator.check(node, facts) if operator.check else None


def _refuse_by(
    model: onnx.ModelProto,
    nodes: Iterable[onnx.NodeProto],
    reason_of: Callable[[onnx.NodeProto], str | None],
) -> None:
    """Refuse all nodes that have a reason, by one error."""
    reasons = ((node, reason_of(node)) for node in nodes)
    refuse_nodes(model, [(node, reason) for node, reason in reasons if reason])


def refuse_nodes(model: onnx.ModelProto, problems: list[Problem]) -> None:
    """Raise one error that names every node with a problem, if there are any."""
    if not problems:
        return
    count = "1 node" if len(problems) == 1 else f"{len(problems)} nodes"
    lines = [f"{count} of the model cannot be imported:"]
    for node, reason in problems:
        if "; " not in reason:  # it does not say what to do
            reason += "; export the model with other operators"
        opset = opset_of(model, node.domain)
        version = "no imported opset" if opset is None else f"opset {opset}"
        domain = node.domain or "ai.onnx"
        lines.append(f"  {node_label(node)}: {node.op_type} of {domain}, {version}: {reason}")
    raise UnsupportedOperatorError("\n".join(lines))
