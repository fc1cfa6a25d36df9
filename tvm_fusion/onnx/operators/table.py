# SPDX-License-Identifier: Apache-2.0
"""The table of all operators, and the rules in it applied to a model."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ..model.expansion import Expansion, inherit_conditions
from ..model.graph_edits import is_default_domain, replace_nodes
from ..model.tensor_facts import GraphFacts
from . import (
    activations,
    arithmetic,
    casts,
    control_flow,
    convolution,
    indexing,
    normalization,
    pooling,
    quantization,
    recurrent,
    reductions,
    regions,
    resampling,
    selection,
    shapes,
    transforms,
)
from .classical import features, linear, trees
from .classical.refusals import REFUSED
from .contrib import attention, integers, pointwise
from .operator import Operator, Rule

_FAMILIES = (
    *(activations, arithmetic, casts, control_flow, convolution, indexing, normalization, pooling),
    *(quantization, recurrent, reductions, regions, resampling, selection, shapes, transforms),
    *(attention, integers, pointwise, features, linear, trees),
)

TABLE = {
    (operator.domain, operator.name): operator
    for operators in (*(family.OPERATORS for family in _FAMILIES), REFUSED)
    for operator in operators
}
"""Operators by domain and name; those of our own have names that begin with ``tvm_fusion.``."""


def find(node: onnx.NodeProto) -> Operator | None:
    """Return the entry of a node's operator."""
    return TABLE.get(("" if is_default_domain(node) else node.domain, node.op_type))


def expand_nodes(
    model: onnx.ModelProto, facts: GraphFacts, rule_of: Callable[[Operator], Rule | None]
) -> bool:
    """Ask the rule of each node's operator what replaces it; return whether anything does.

    Nodes that were emitted are asked again, unless one of the operator of their own came before.
    """

    def parts(node: onnx.NodeProto, asked: frozenset[str]) -> list[onnx.NodeProto]:
        operator = find(node)
        if operator is None or operator.is_foreign or operator.name in asked:
            return [node]
        rule = rule_of(operator)
        if rule is None:
            return [node]
        expansion = Expansion(node, facts)
        rule(expansion)
        inherit_conditions(node, expansion.nodes)
        asked |= {operator.name}
        found = [each for part in expansion.nodes for each in parts(part, asked)]
        return found or [node]

    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in model.graph.node:
        found = parts(node, frozenset())
        count += found != [node]
        nodes += found
    replace_nodes(model.graph, nodes)
    return bool(count)
