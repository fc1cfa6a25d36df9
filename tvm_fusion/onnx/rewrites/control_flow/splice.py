# SPDX-License-Identifier: Apache-2.0
"""Copy the nodes of a nested graph into the graph around it."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ...model.graph_edits import nested_graphs
from ...model.tensor_facts import GraphFacts

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
            From the names of the body's inputs to tensors of the graph around it.
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
