# SPDX-License-Identifier: Apache-2.0
"""Replacement of an If with a known condition by the taken branch."""

from __future__ import annotations

import onnx
from onnx import helper

from ..model.graph_edits import attribute, is_default_domain, nested_graphs, replace_nodes
from ..model.tensor_facts import GraphFacts


def splice_branches(model: onnx.ModelProto, facts: GraphFacts) -> bool:
    """Replace each If with a constant condition by its branch; return whether there was one.

    Before::

        y = If(true, then_branch={ t = Relu(x); return t }, else_branch={ ... })

    After::

        t = Relu(x)
        y = Identity(t)
    """
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in model.graph.node:
        branch = _taken_branch(node, facts)
        if branch is None:
            nodes.append(node)
            continue
        changed = True
        nodes += _spliced(model.graph, node, branch, facts)
    if changed:
        replace_nodes(model.graph, nodes)
    return changed


def _taken_branch(node: onnx.NodeProto, facts: GraphFacts) -> onnx.GraphProto | None:
    if node.op_type != "If" or not is_default_domain(node):
        return None
    condition = facts.constant(node.input[0])
    if condition is None or condition.size != 1:
        return None
    return attribute(node, "then_branch" if condition.item() else "else_branch")


def _spliced(
    graph: onnx.GraphProto, node: onnx.NodeProto, branch: onnx.GraphProto, facts: GraphFacts
) -> list[onnx.NodeProto]:
    """The branch's nodes under fresh names, then copies to the If's outputs."""
    names: dict[str, str] = {}
    for tensor in branch.initializer:
        names[tensor.name] = facts.fresh(tensor.name)
        graph.initializer.add().CopyFrom(tensor)
        graph.initializer[-1].name = names[tensor.name]
    for inner in branch.node:
        names.update((name, facts.fresh(name)) for name in inner.output if name)
    nodes = []
    for inner in branch.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(inner)
        _rename(copy, names)
        nodes.append(copy)
    for result, output in zip(branch.output, node.output, strict=True):
        source = names.get(result.name, result.name)
        nodes.append(helper.make_node("Identity", [source], [output]))
    return nodes


def _rename(node: onnx.NodeProto, names: dict[str, str]) -> None:
    """Rename tensors in a node and in the graphs below it."""
    for tensors in (node.input, node.output):
        for index, name in enumerate(tensors):
            tensors[index] = names.get(name, name)
    for graph in nested_graphs(node):
        for inner in graph.node:
            _rename(inner, names)
        for result in graph.output:
            result.name = names.get(result.name, result.name)
