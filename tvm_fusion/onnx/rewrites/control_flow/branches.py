# SPDX-License-Identifier: Apache-2.0
"""Replacement of an If by the branch that is taken, or by a choice between both results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import helper

from ...model.graph_edits import attribute, drop_unread_nodes, is_default_domain, replace_nodes
from ...model.tensor_facts import GraphFacts
from .splice import Body

_TAKEN = "tvm_fusion.taken"


def splice_branches(model: onnx.ModelProto, facts: GraphFacts) -> bool:
    """Replace each If by the nodes of its branches; return whether there was one.

    Before::

        y = If(true, then_branch={ t = Relu(x); return t }, else_branch={ ... })
        z = If(computed, then_branch={ t = Relu(x); return t }, else_branch={ e = Neg(x) ... })

    After::

        t = Relu(x)
        y = Identity(t)
        t_1 = Relu(x)
        e_1 = Neg(x)
        z = Where(computed, t_1, e_1)

    Both branches are computed where the condition is, so their results must have one shape; others
    stay, and are refused later. An If that only returns empty tensors for an empty one becomes its
    other branch, which detectors have around their suppression of boxes: it must keep that empty.
    Nodes that are computed although they may not be taken are marked, see :func:`taken_if`.
    """
    nodes: list[onnx.NodeProto] = []
    changed = False
    made_by = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        parts = _replacement(model.graph, node, facts, made_by)
        changed = changed or parts is not None
        nodes += [node] if parts is None else parts
    if changed:
        replace_nodes(model.graph, nodes)
        drop_unread_nodes(model)  # conditions on sizes, with which the importer cannot compute
    return changed


def _replacement(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    facts: GraphFacts,
    made_by: Mapping[str, onnx.NodeProto],
) -> list[onnx.NodeProto] | None:
    """The nodes that take the place of an If; None if it is none, or has to stay."""
    if node.op_type != "If" or not is_default_domain(node):
        return None
    branches = [attribute(node, name) for name in ("then_branch", "else_branch")]
    condition = facts.constant(node.input[0])
    taken_always = None
    if condition is not None and condition.size == 1:
        taken_always = branches[not condition.item()]
    elif _asks_if_empty(node.input[0], facts, made_by) and _is_empty(branches[0]):
        taken_always = branches[1]
    if taken_always is not None:
        nodes, results = Body(graph, taken_always, facts).splice({})
        inherit_conditions(node, nodes)
        copies = zip(results, node.output, strict=True)
        return nodes + [helper.make_node("Identity", [one], [other]) for one, other in copies]
    if condition is not None or not _is_choice(branches, facts, node):
        return None
    (nodes, taken), (others, left) = (Body(graph, branch, facts).splice({}) for branch in branches)
    choices = [
        helper.make_node("Where", [node.input[0], *pair], [output], name=node.name)
        for *pair, output in zip(taken, left, node.output, strict=True)
    ]
    around = _conditions(node)
    for side, inners in (("+", nodes), ("-", others)):
        for inner in inners:
            inner.metadata_props.add(key=_TAKEN, value="\n".join([*around, side + node.input[0]]))
    return nodes + others + choices


def taken_if(node: onnx.NodeProto, facts: GraphFacts) -> tuple[list[onnx.NodeProto], str]:
    """A value that tells whether the branch that a node comes from is taken.

    A node of a branch that is not taken must not raise errors.

    Returns
    -------
    list of onnx.NodeProto
        The nodes that compute it.
    str
        Its name, a bool of one element; empty if the node is always taken.
    """
    nodes: list[onnx.NodeProto] = []
    taken = ""
    for condition in _conditions(node):
        name = condition[1:]
        if condition[0] == "-":
            nodes.append(helper.make_node("Not", [name], [facts.fresh(f"{name}/not")]))
            name = nodes[-1].output[0]
        if taken:
            nodes.append(helper.make_node("And", [taken, name], [facts.fresh(f"{name}/and")]))
            name = nodes[-1].output[0]
        taken = name
    return nodes, taken


def inherit_conditions(node: onnx.NodeProto, parts: Iterable[onnx.NodeProto]) -> None:
    """Let the nodes that take the place of one be in the same branch."""
    conditions = _conditions(node)
    for part in parts:
        if conditions and part is not node:
            part.metadata_props.add(key=_TAKEN, value="\n".join(conditions))


def _conditions(node: onnx.NodeProto) -> list[str]:
    """Names of the conditions around a node, each after ``+``, or ``-`` where it must be false."""
    found = [entry.value for entry in node.metadata_props if entry.key == _TAKEN]
    return found[-1].split("\n") if found else []


def _asks_if_empty(name: str, facts: GraphFacts, made_by: Mapping[str, onnx.NodeProto]) -> bool:
    """Return whether a condition is that a tensor has no elements."""
    node = made_by.get(name)
    while node is not None and node.op_type in ("Cast", "Identity"):
        node = made_by.get(node.input[0])
    if node is None or node.op_type != "Equal":
        return False
    values = [facts.constant(each) for each in node.input]
    counts = [made_by.get(each) for each in node.input]
    zeros = [value is not None and value.size == 1 and not value.any() for value in values]
    if zeros not in ([False, True], [True, False]):
        return False
    count = counts[zeros.index(False)]
    if count is not None and count.op_type == "ReduceProd":
        count = made_by.get(count.input[0])
        return count is not None and count.op_type == "Shape"
    return count is not None and count.op_type == "Size"


def _is_empty(branch: onnx.GraphProto) -> bool:
    """Return whether a branch returns nothing but constants without elements."""
    constants = {
        node.output[0]: attribute(node, "value")
        for node in branch.node
        if node.op_type == "Constant"
    }
    constants |= {tensor.name: tensor for tensor in branch.initializer}
    found = [constants.get(result.name) for result in branch.output]
    return all(tensor is not None and 0 in tensor.dims for tensor in found)


def _is_choice(branches: list[onnx.GraphProto], facts: GraphFacts, node: onnx.NodeProto) -> bool:
    """Return whether both branches return tensors of the same known shapes."""
    condition = facts.shape(node.input[0])
    if condition not in ((), (1,)):
        return False
    for pair in zip(*(branch.output for branch in branches), strict=True):
        shapes = [_shape(result, facts) for result in pair]
        if shapes[0] is None or shapes[0] != shapes[1]:
            return False
        if shapes[0] == () != condition:  # Where would give a scalar one dimension more
            return False
    return True


def _shape(result: onnx.ValueInfoProto, facts: GraphFacts) -> tuple[int, ...] | None:
    """Shape of a branch's result, as inferred in the branch or around it."""
    tensor = result.type.tensor_type
    if not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in tensor.shape.dim):
        return facts.shape(result.name)
    return tuple(dim.dim_value for dim in tensor.shape.dim)
