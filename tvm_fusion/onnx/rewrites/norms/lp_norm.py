# SPDX-License-Identifier: Apache-2.0
"""Rewriting of LpNormalization, which the importer lacks, as a norm and a division.

::

    norm = ReduceL1 or ReduceL2 (x, axis), kept;    y = x / Where(norm == 0, 1, norm)

so that a row of zeros stays zero.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from ...model.graph_edits import attribute, default_opset, is_default_domain, replace_nodes
from ...model.tensor_facts import GraphFacts

REPLACED = ("LpNormalization",)

AXES_ARE_INPUTS = 18
"""First opset in which ReduceL1 and ReduceL2 take their axes as an input."""


def replace_lp_norms(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Replace every LpNormalization of the main graph."""
    opset = default_opset(model) or 1
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        is_norm = is_default_domain(node) and node.op_type in REPLACED
        nodes += _division(node, facts, opset) if is_norm else [node]
    replace_nodes(model.graph, nodes)


def _division(node: onnx.NodeProto, facts: GraphFacts, opset: int) -> list[onnx.NodeProto]:
    """The nodes that divide by the norm, or by 1 where it is 0."""
    axis = [attribute(node, "axis", -1)]
    norm, is_zero, divisor = (
        facts.fresh(f"{node.output[0]}/{part}") for part in ("norm", "is_zero", "divisor")
    )
    reduction = helper.make_node(
        f"ReduceL{attribute(node, 'p', 2)}", [node.input[0]], [norm], name=node.name
    )
    if opset < AXES_ARE_INPUTS:
        reduction.attribute.append(helper.make_attribute("axes", axis))
    else:
        reduction.input.append(facts.add_constant(f"{norm}/axes", np.array(axis, np.int64)))
    dtype = helper.tensor_dtype_to_np_dtype(facts.dtype(node.input[0]))
    zero, one = (facts.add_constant(f"{norm}/{n}", np.array(n, dtype)) for n in (0, 1))
    return [
        reduction,
        helper.make_node("Equal", [norm, zero], [is_zero]),
        helper.make_node("Where", [is_zero, one, norm], [divisor]),
        helper.make_node("Div", [node.input[0], divisor], [node.output[0]]),
    ]
