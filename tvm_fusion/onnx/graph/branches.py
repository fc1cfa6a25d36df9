# SPDX-License-Identifier: Apache-2.0
"""Nodes of nested graphs in the graph around them: copies of a body, and those of an If.

An If becomes the branch that is taken, or a choice between both results.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from ..model.expansion import inherit_conditions, mark_taken
from ..model.graph_edits import (
    attribute,
    drop_unread_nodes,
    is_default_domain,
    nested_graphs,
    replace_nodes,
)
from ..model.tensor_facts import GraphFacts

Spliced = tuple[list[onnx.NodeProto], list[str]]


class Body:
    """A nested graph, whose initialisers become those of the graph around it.

    Parameters
    ----------
    graph : onnx.GraphProto
        The graph around it; initialisers are added.
    body : onnx.GraphProto
        The nested graph.
    facts : GraphFacts
        Gives fresh names.
    """

    def __init__(self, graph: onnx.GraphProto, body: onnx.GraphProto, facts: GraphFacts) -> None:
        self._body, self._facts = body, facts
        self._constants: dict[str, str] = {}
        for tensor in body.initializer:
            self._constants[tensor.name] = facts.fresh(tensor.name)
            graph.initializer.add().CopyFrom(tensor)
            graph.initializer[-1].name = self._constants[tensor.name]

    def splice(self, inputs: Mapping[str, str]) -> Spliced:
        """Return a copy of the nodes under fresh names, and the names of the results.

        Parameters
        ----------
        inputs : mapping
            Tensors of the graph around it by the names of the body's inputs.
        """
        names = {**self._constants, **inputs}
        for inner in self._body.node:
            names.update((name, self._facts.fresh(name)) for name in inner.output if name)
        nodes = []
        for inner in self._body.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(inner)
            _rename(copy, names)
            nodes.append(copy)
        return nodes, [names.get(result.name, result.name) for result in self._body.output]


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Rename tensors in a node and in the graphs below it."""
    for tensors in (node.input, node.output):
        for index, name in enumerate(tensors):
            tensors[index] = names.get(name, name)
    for graph in nested_graphs(node):
        del graph.value_info[:]
        for inner in graph.node:
            _rename(inner, names)
        for result in graph.output:
            result.name = names.get(result.name, result.name)


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
    Nodes that are computed although they may not be taken are marked, see :func:`mark_taken`.
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
        drop_unread_nodes(model)  # conditions on sizes, with which converters cannot compute
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
    for side, inners in (("+", nodes), ("-", others)):
        mark_taken(inners, node, side + node.input[0])
    return nodes + others + choices


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
