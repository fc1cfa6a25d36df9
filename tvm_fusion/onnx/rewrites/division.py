# SPDX-License-Identifier: Apache-2.0
"""Integer divisions that trap on no processor: neither by zero nor of the least integer by -1."""

from __future__ import annotations

import numpy as np
import onnx

from ..model.graph_edits import is_default_domain, set_attributes
from ..model.tensor_facts import INTEGER_TYPES, SIGNED_TYPES, GraphFacts


def replace_divisions_by_minus_one(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Write ``x / -1`` as ``x * -1`` and ``x % -1`` as ``x * 0``, which broadcast alike."""
    for node in model.graph.node:
        if not is_default_domain(node) or node.op_type not in ("Div", "Mod"):
            continue
        divisor = facts.constant(node.input[1])
        signed = facts.dtype(node.output[0]) in SIGNED_TYPES
        if not signed or divisor is None or not (divisor == -1).all():
            continue
        if node.op_type == "Mod":
            node.input[1] = facts.add_constant(f"{node.input[1]}/zero", np.zeros_like(divisor))
            set_attributes(node, ("fmod",))
        node.op_type = "Mul"


def division_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why an integer division could crash the process, if any."""
    if facts.dtype(node.output[0]) not in INTEGER_TYPES:
        return None
    divisor = facts.constant(node.input[1])
    if divisor is None:
        return "it divides integers by a number that depends on data; expected a constant"
    if not divisor.all():
        return "it divides integers by zero"
    if (divisor == -1).any():
        return "it divides integers by -1 and by other numbers; expected one or the other"
    return None
