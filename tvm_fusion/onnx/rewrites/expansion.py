# SPDX-License-Identifier: Apache-2.0
"""Put several nodes in the place of one, by rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ..model.graph_edits import attribute, is_default_domain, replace_nodes
from ..model.tensor_facts import GraphFacts
from .control_flow.branches import inherit_conditions

AXES_ARE_INPUTS = 18
"""From this opset on, ReduceMean takes its axes as an input."""

_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def conv_attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a Conv that a node of another operator has."""
    found = {name: attribute(node, name) for name in _CONV}
    return {name: value for name, value in found.items() if value is not None}


class Expansion:
    """The nodes that take the place of one.

    Parameters
    ----------
    node : onnx.NodeProto
        The node that will be replaced.
    facts : GraphFacts
        Where constants are added.
    """

    def __init__(self, node: onnx.NodeProto, facts: GraphFacts) -> None:
        self.node, self.facts = node, facts
        self.nodes: list[onnx.NodeProto] = []
        self._name = next((name for name in node.output if name), "")

    def emit(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append a node and return the name of its result."""
        return self.emit_many(op_type, 1, *inputs, **attributes)[0]

    def emit_many(self, op_type: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Append a node of several results and return their names."""
        results = [self.facts.fresh(f"{self._name}/{op_type}") for _ in range(count)]
        name = self.node.name
        self.nodes.append(helper.make_node(op_type, inputs, results, name=name, **attributes))
        return results

    def constant(self, hint: str, value: np.ndarray) -> str:
        """Add a constant and return its name."""
        return self.facts.add_constant(f"{self._name}/{hint}", value)

    def number(self, value: float, dtype: int) -> str:
        """Add a constant number of an ONNX element type and return its name."""
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        return self.constant("number", np.asarray(value).astype(kind))

    def finish(self, *results: str) -> None:
        """Let the results be the node's outputs; an empty name is an output that nobody reads."""
        if len(results) == 1 and self.nodes and list(self.nodes[-1].output) == [*results]:
            self.nodes[-1].output[0] = self.node.output[0]
            return
        for result, output in zip(results, self.node.output, strict=False):
            if output and result:
                self.nodes.append(helper.make_node("Identity", [result], [output]))


Rule = Callable[[onnx.NodeProto, Expansion], None]
"""Emits what replaces a node; a node for which nothing was emitted stays."""


def expand_nodes(model: onnx.ModelProto, facts: GraphFacts, rules: Mapping[str, Rule]) -> None:
    """Ask the rule of each node's operator what replaces it."""
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        expansion = Expansion(node, facts)
        if node.op_type in rules and is_default_domain(node):
            rules[node.op_type](node, expansion)
            inherit_conditions(node, expansion.nodes)
        nodes += expansion.nodes or [node]
    replace_nodes(model.graph, nodes)
