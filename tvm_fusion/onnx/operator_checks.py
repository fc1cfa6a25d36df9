# SPDX-License-Identifier: Apache-2.0
"""Search for operators of a model that cannot be imported, before any other check."""

from __future__ import annotations

import onnx
from tvm.relax.frontend.onnx import onnx_frontend

from ..errors import UnsupportedOperatorError
from .model.graph_edits import all_graphs, is_default_domain, node_label, opset_of
from .rewrites.classical.refusals import classical_refusal
from .rewrites.contrib.expand import is_contrib
from .rewrites.control_flow.functions import EXPANDED
from .rewrites.norms.lp_norm import REPLACED
from .rewrites.own_ops import OWN_OPS
from .rewrites.recurrent import DEFAULTS as RECURRENT

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
"""Operators whose bodies become nodes of the graph around them."""

WRITTEN = frozenset(
    """Col2Im ConvInteger DFT MaxUnpool MelWeightMatrix QLinearConv QLinearMatMul ReverseSequence
    STFT TensorScatter Unique""".split()
)
"""Operators that the importer lacks, or refuses here, and that rules write by others."""

RANDOM = frozenset(
    """Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform
    RandomUniformLike""".split()
)
"""Operators whose results differ from call to call, which those of compiled code do not."""

_DRAW_OUTSIDE = (
    "its numbers are drawn at random; make them an input of the model and draw them by numpy: "
    "export it with the noise as an argument, or delete this node and list its output as a "
    "graph input"
)

DATA_DEPENDENT = frozenset({"AllClassNMS"})
"""Operators of the importer whose result sizes depend on data."""

Problem = tuple[onnx.NodeProto, str]


def check_operators(model: onnx.ModelProto) -> None:
    """Refuse a model with operators that the importer lacks, naming every such node."""
    importable = set(onnx_frontend._get_convert_map()) | CONTROL_FLOW
    importable = importable.union(EXPANDED, REPLACED, RECURRENT, OWN_OPS, WRITTEN) - DATA_DEPENDENT
    functions = {(function.domain, function.name) for function in model.functions}
    problems = [
        (node, _reason(node))
        for graph in all_graphs(model)
        for node in graph.node
        if (node.domain, node.op_type) not in functions
        and (not is_contrib(node) or classical_refusal(node))
        and not (is_default_domain(node) and node.op_type in importable)
    ]
    refuse_nodes(model, problems)


def _reason(node: onnx.NodeProto) -> str:
    """Return why a node cannot be imported whatever its inputs are, and how to do without it."""
    if is_default_domain(node) and node.op_type in RANDOM:
        return _DRAW_OUTSIDE
    return classical_refusal(node) or "this operator has no translation"


def refuse_nodes(model: onnx.ModelProto, problems: list[Problem]) -> None:
    """Raise one error that names every node with a problem, if there are any."""
    if not problems:
        return
    count = "1 node" if len(problems) == 1 else f"{len(problems)} nodes"
    lines = [f"{count} of the model cannot be imported; export it with other operators:"]
    for node, reason in problems:
        opset = opset_of(model, node.domain)
        version = "no imported opset" if opset is None else f"opset {opset}"
        domain = node.domain or "ai.onnx"
        lines.append(f"  {node_label(node)}: {node.op_type} of {domain}, {version}: {reason}")
    raise UnsupportedOperatorError("\n".join(lines))
