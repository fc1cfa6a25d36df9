# SPDX-License-Identifier: Apache-2.0
"""Replacement of the operators of ``com.microsoft`` and ``ai.onnx.ml``, whose shapes onnx lacks."""

from __future__ import annotations

import onnx

from ..errors import UnsupportedOperatorError
from .model.expansion import Expansion
from .model.graph_edits import node_label, replace_nodes
from .model.shapes import infer_shapes
from .model.tensor_facts import GraphFacts
from .model.weights import Weights
from .operators.classical.carriers import HAS_TREE_ENSEMBLE, is_carrier
from .operators.operator import ML_DOMAIN, Operator
from .operators.table import find


def is_classical(node: onnx.NodeProto) -> bool:
    """Return whether the node's operator is one of ``ai.onnx.ml`` that has a translation."""
    return node.domain == ML_DOMAIN and _foreign(node) is not None


def _foreign(node: onnx.NodeProto) -> Operator | None:
    """The entry of an operator that onnx does not know, or None."""
    operator = None if is_carrier(node) else find(node)
    return operator if operator and operator.is_foreign else None


def expand_foreign(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """Return the model with ONNX's own operators, and with what stands for operators of ours.

    Parameters
    ----------
    model : onnx.ModelProto
        Changed in place.
    weights : Weights
        The weights stored outside the model; tables of trees are added.

    Raises
    ------
    UnsupportedOperatorError
        If a node uses an operator in a way that has no translation.
    """
    if not any(map(_foreign, model.graph.node)):
        return model
    _replace(model, False, weights)
    while any(map(_foreign, model.graph.node)):
        model = infer_shapes(model)
        if not (_replace(model, True, weights) or _replace(model, True, weights, False)):
            break
        del model.graph.value_info[:]
    for node in filter(is_classical, model.graph.node):
        raise _refusal(node, f"the shape or type of {node.input[0]!r} is only known at run time")
    return model


def _refusal(node: onnx.NodeProto, reason: str) -> UnsupportedOperatorError:
    domain = node.domain or "ai.onnx"
    return UnsupportedOperatorError(f"{node_label(node)}: {node.op_type} of {domain}: {reason}")


def _replace(
    model: onnx.ModelProto, needs_shapes: bool, weights: Weights, is_patient: bool = True
) -> bool:
    """Replace the operators that need shapes, where they are known, or those that need none.

    The number of features of a classical model is waited for; some can do without.
    """
    facts = GraphFacts(model, weights)
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in model.graph.node:
        operator = _foreign(node)
        is_chosen = operator is not None and operator.needs_shapes == needs_shapes
        if operator is None or operator.expand is None or not is_chosen:
            nodes.append(node)
            continue
        dims = facts.dims(node.input[0]) if needs_shapes else ()
        is_ready = dims is not None
        if dims is not None and is_classical(node):
            is_ready = bool(facts.dtype(node.input[0])) and not (is_patient and None in dims[-1:])
        if not is_ready:
            nodes.append(node)
            continue
        parts = Expansion(node, facts)
        reason = operator.expand(parts)
        if reason is not None:
            raise _refusal(node, reason)
        nodes += parts.nodes
        changed = True
    if changed:
        replace_nodes(model.graph, nodes)
    if any(map(is_carrier, nodes)):
        for entry in model.opset_import:
            if entry.domain == ML_DOMAIN:
                entry.version = max(entry.version, HAS_TREE_ENSEMBLE)
    return changed
