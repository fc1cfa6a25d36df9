# SPDX-License-Identifier: Apache-2.0
"""The table of all operators, and the rules in it applied to a model."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ..graph.loops import loop_problem
from ..graph.tensor_lists import LIST_OPERATORS, list_problem
from ..model.expansion import Expansion, inherit_conditions
from ..model.graph_edits import is_default_domain, replace_nodes
from ..model.tensor_facts import GraphFacts
from . import (
    arithmetic,
    casts,
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
from .casts import widen_sum
from .classical import features, linear, trees
from .classical.refusals import REFUSED
from .contrib import attention, integers, pointwise
from .operator import Operator, Rule, operators

_FAMILIES = (
    *(arithmetic, casts, convolution, indexing, normalization, pooling, quantization, recurrent),
    *(reductions, regions, resampling, selection, shapes, transforms),
    *(attention, integers, pointwise, features, linear, trees),
)


def _branch_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    return "its condition depends on data, and its branches return other shapes; expected the same"


def _draws(node: onnx.NodeProto) -> str:
    return (
        "its numbers are drawn at random; make them an input of the model and draw them by numpy: "
        "export it with the noise as an argument, or delete this node and list its output as a "
        "graph input"
    )


_OTHERS = (
    Operator("If", check=_branch_problem),
    *operators("Loop Scan", check=loop_problem),
    *operators(" ".join(sorted(LIST_OPERATORS)), check=list_problem),
    *operators("Attention CausalConvWithState RotaryEmbedding", is_defined=True),
    *operators(
        "LinearAttention NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss",
        is_defined=True,
        widen=widen_sum,
    ),
    *operators(
        """Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform
        RandomUniformLike""",
        refuse=_draws,
    ),
)
"""Operators with bodies, of lists, that ONNX makes of others, and that draw numbers."""

TABLE = {
    (operator.domain, operator.name): operator
    for entries in (*(family.OPERATORS for family in _FAMILIES), REFUSED, _OTHERS)
    for operator in entries
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

    def parts(node: onnx.NodeProto, kept: frozenset[str]) -> list[onnx.NodeProto]:
        operator = find(node)
        if operator is None or operator.is_foreign or operator.name in kept:
            return [node]
        rule = rule_of(operator)
        if rule is None:
            return [node]
        expansion = Expansion(node, facts)
        rule(expansion)
        inherit_conditions(node, expansion.nodes)
        kept |= {operator.name}
        expanded = [each for part in expansion.nodes for each in parts(part, kept)]
        return expanded or [node]

    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in model.graph.node:
        expanded = parts(node, frozenset())
        changed = changed or len(expanded) > 1 or expanded[0] is not node
        nodes += expanded
    replace_nodes(model.graph, nodes)
    return changed
