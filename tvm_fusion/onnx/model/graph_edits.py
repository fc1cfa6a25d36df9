# SPDX-License-Identifier: Apache-2.0
"""Traversals and edits of ONNX models, and the order of their nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import onnx

from tvm_fusion.errors import InvalidModelError

DEFAULT_DOMAINS = ("", "ai.onnx")


def default_opset(model: onnx.ModelProto) -> int | None:
    """Return the version of the default operators that the model imports."""
    return opset_of(model, "")


def opset_of(model: onnx.ModelProto, domain: str) -> int | None:
    """Return the version of ``domain`` that the model imports."""
    names = DEFAULT_DOMAINS if domain in DEFAULT_DOMAINS else (domain,)
    return next((entry.version for entry in model.opset_import if entry.domain in names), None)


def all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Yield the main graph, the model's functions, and the graphs nested in their nodes."""
    stack: list[onnx.GraphProto | onnx.FunctionProto] = [*reversed(model.functions), model.graph]
    while stack:
        graph = stack.pop()
        yield graph
        for node in graph.node:
            stack.extend(nested_graphs(node))


def nested_graphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs among the attributes of a node."""
    graphs = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            graphs.append(attribute.g)
        graphs.extend(attribute.graphs)
    return graphs


def node_label(node: onnx.NodeProto) -> str:
    """Return the name of a node in messages: its own, or its output if it has none."""
    if node.name:
        return f"node {node.name!r}"
    output = next((name for name in node.output if name), "")
    return f"the unnamed node that computes {output!r}"


def is_default_domain(node: onnx.NodeProto) -> bool:
    """Return whether the node's operator is one of ONNX itself."""
    return node.domain in DEFAULT_DOMAINS


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """Return the value of a node's attribute, strings decoded."""
    for entry in node.attribute:
        if entry.name == name:
            value = onnx.helper.get_attribute_value(entry)
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return default


def used_names(model: onnx.ModelProto) -> set[str]:
    """Return the names of all tensors that a node reads or that are outputs of a graph."""
    names: set[str] = set()
    for graph in all_graphs(model):
        names.update(name for node in graph.node for name in node.input)
        if isinstance(graph, onnx.GraphProto):
            names.update(value.name for value in graph.output)
    return names


def replace_nodes(
    graph: onnx.GraphProto | onnx.FunctionProto, nodes: Iterable[onnx.NodeProto]
) -> None:
    """Replace the nodes of a graph."""
    nodes = list(nodes)
    del graph.node[:]
    graph.node.extend(nodes)


def drop_unread_nodes(model: onnx.ModelProto) -> None:
    """Remove the nodes of the main graph that no output depends on; they are in order."""
    read = {value.name for value in model.graph.output}
    for graph in all_graphs(model):
        if graph is not model.graph:
            read.update(name for node in graph.node for name in node.input)
            read.update(value.name for value in getattr(graph, "output", ()) if value.name)
    kept = []
    for node in reversed(model.graph.node):
        if not read.isdisjoint(node.output):
            read.update(node.input)
            kept.append(node)
    replace_nodes(model.graph, reversed(kept))


def write_defaults(
    model: onnx.ModelProto, is_wanted: Callable[[onnx.NodeProto, Any], bool]
) -> None:
    """Give nodes the attributes that they lack, as ONNX's schemas have them.

    Parameters
    ----------
    model : onnx.ModelProto
        Is changed.
    is_wanted : callable
        Function of a node and of an attribute of its schema.
    """
    opset = default_opset(model) or 1
    schemas: dict[str, Any] = {}
    for graph in all_graphs(model):
        for node in graph.node:
            if not is_default_domain(node):
                continue
            if node.op_type not in schemas:
                has_schema = onnx.defs.has(node.op_type, opset, "")
                schemas[node.op_type] = (
                    onnx.defs.get_schema(node.op_type, opset).attributes if has_schema else {}
                )
            given = {entry.name for entry in node.attribute}
            for name, entry in schemas[node.op_type].items():
                if name not in given and entry.default_value.name and is_wanted(node, entry):
                    node.attribute.append(entry.default_value)


def set_attributes(node: onnx.NodeProto, dropped: Iterable[str] = (), **values: Any) -> None:
    """Drop a node's attributes by name, then set others."""
    gone = {*dropped, *values}
    kept = [entry for entry in node.attribute if entry.name not in gone]
    kept += [onnx.helper.make_attribute(name, value) for name, value in values.items()]
    del node.attribute[:]
    node.attribute.extend(kept)


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Sort the nodes of a graph and of those nested in it; an order that is right stays.

    ONNX requires that each comes after those that it reads, and ONNX Runtime does not: converters
    append nodes, such as the casts of a model in float16, at the end.

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
