# SPDX-License-Identifier: Apache-2.0
"""Nodes in an order in which each comes after those that it reads.

ONNX requires it, and ONNX Runtime does not: converters append nodes, such as the casts of a model
in float16, at the end.
"""

from __future__ import annotations

import onnx

from tvm_fusion.errors import InvalidModelError

from .graph_edits import nested_graphs, node_label, replace_nodes


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Sort the nodes of a graph and of those nested in it; an order that is right stays.

    Raises
    ------
    InvalidModelError
        If nodes read each other's results in a circle.
    """
    nodes = list(graph.node)
    for node in nodes:
        for nested in nested_graphs(node):
            sort_nodes(nested)
    producers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    waits = [{producers[name] for name in _reads(node) if name in producers} for node in nodes]
    if all(other < index for index, others in enumerate(waits) for other in others):
        return
    order: list[int] = []
    state = [0] * len(nodes)  # 1 while the nodes that it reads are placed, 2 once it is placed
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            index = stack[-1]
            missing = [other for other in sorted(waits[index]) if state[other] != 2]
            if state[index] == 2:
                stack.pop()
            elif not missing:
                state[index] = 2
                order.append(index)
                stack.pop()
            elif state[index] == 1 or any(state[other] == 1 for other in missing):
                raise InvalidModelError(
                    f"{node_label(nodes[index])} ({nodes[index].op_type}) reads its own result; "
                    "expected a graph without circles"
                )
            else:
                state[index] = 1
                stack.extend(missing)
    replace_nodes(graph, [nodes[index] for index in order])


def _reads(node: onnx.NodeProto) -> set[str]:
    """Tensors that a node reads, also by the graphs nested in it."""
    names = set(node.input)
    for graph in nested_graphs(node):
        own = {tensor.name for tensor in graph.initializer} | {v.name for v in graph.input}
        inner: set[str] = {value.name for value in graph.output}
        for each in graph.node:
            inner |= _reads(each)
            own.update(each.output)
        names |= inner - own
    return names
