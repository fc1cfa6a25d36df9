# SPDX-License-Identifier: Apache-2.0
"""Operators with bodies, of lists and optionals, and those of ONNX that are made of others."""

from __future__ import annotations

import onnx

from ..graph.loops import loop_problem
from ..graph.tensor_lists import LIST_OPERATORS, list_problem
from ..model.tensor_facts import GraphFacts
from .casts import widen_sum
from .operator import Operator, operators


def _branch_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    return "its condition depends on data, and its branches return other shapes; expected the same"


def _draws(node: onnx.NodeProto) -> str:
    return (
        "its numbers are drawn at random; make them an input of the model and draw them by numpy: "
        "export it with the noise as an argument, or delete this node and list its output as a "
        "graph input"
    )


OPERATORS = (
    Operator("If", check=_branch_problem),
    *operators("Loop Scan", check=loop_problem),
    *operators(" ".join(LIST_OPERATORS), check=list_problem),
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
