# SPDX-License-Identifier: Apache-2.0
"""Write LpPool and GlobalLpPool by powers, so that whole ones become products.

::

    y = Pow(AveragePool(Pow(Abs(x), p)) * window, 1 / p)
"""

from __future__ import annotations

import math

import numpy as np
import onnx

from ...model.graph_edits import attribute
from ...model.tensor_facts import GraphFacts
from ..expansion import Expansion, conv_attributes


def expand_p_norm(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a pool of p-norms, but one that :func:`p_norm_problem` refuses."""
    facts, x = expansion.facts, node.input[0]
    dims, kind, power = facts.dims(x), facts.dtype(x), attribute(node, "p", 2)
    if dims is None or p_norm_problem(node, facts) is not None:
        return
    size = expansion.emit("Abs", x)
    facts.declare(size, kind, dims)
    if power != 1:
        size = expansion.emit("Pow", size, expansion.number(power, kind))
        facts.declare(size, kind, dims)
    if node.op_type == "GlobalLpPool":
        axes = expansion.constant("axes", np.arange(2, len(dims)))
        total = expansion.emit("ReduceSum", size, axes, keepdims=1)
    else:
        given = conv_attributes(node)
        mean = expansion.emit("AveragePool", size, count_include_pad=1, **given)
        window = math.prod(given["kernel_shape"])
        total = expansion.emit("Mul", mean, expansion.number(window, kind))
    if power == 2:
        total = expansion.emit("Sqrt", total)
    elif power != 1:
        total = expansion.emit("Pow", total, expansion.number(1 / power, kind))
    expansion.finish(total)


def p_norm_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why norms cannot be pooled, if any: a mean has no whole last window."""
    return "its ceil_mode is 1" if attribute(node, "ceil_mode", 0) else None
