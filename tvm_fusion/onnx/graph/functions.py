# SPDX-License-Identifier: Apache-2.0
"""Inlining of functions: the model's own, and ONNX's for operators without a TVM op."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import onnx
from onnx import inliner

from tvm_fusion.errors import InvalidModelError, UnsupportedOperatorError

from ..model.expansion import inherit_conditions
from ..model.graph_edits import (
    default_opset,
    is_default_domain,
    nested_graphs,
    node_label,
    write_defaults,
)
from ..model.shapes import infer_shapes

BODIES = "tvm_fusion.bodies"
"""Domain of the functions that stand for such operators while they are inlined."""

MAX_NODES = 200_000
"""Most nodes of an inlined model: nested functions can grow it without bound."""

FunctionKey = tuple[str, str]


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its own functions inlined."""
    if not model.functions:
        return model
    _check_growth(model)
    try:
        return inliner.inline_local_functions(model)
    except (RuntimeError, ValueError) as error:
        raise InvalidModelError(f"the model's functions cannot be inlined: {error}") from error


def expand_operators(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """Return the model with some operators as ONNX defines them by others, and shapes inferred.

    Their bodies depend on types, which are inferred in the main graph only: splice branches first.
    """
    before = _to_expand(model, names)
    if not before:
        return model
    write_defaults(model, lambda node, _: node.op_type in names)  # the inliner ignores them
    _declare_constants(model)
    _name_bodies(model, names)
    wanted = [("", name) for name in names]
    try:
        model = inliner.inline_local_functions(model, True) if model.functions else model
        model = inliner.inline_selected_functions(model, wanted, inline_schema_functions=True)
    except (RuntimeError, ValueError) as error:
        raise InvalidModelError(f"operators of the model cannot be expanded: {error}") from error
    for key, node in _to_expand(model, names).items():
        if key in before:
            raise UnsupportedOperatorError(
                f"{node_label(node)} ({node.op_type}) cannot be imported: ONNX defines it by no "
                "other operators with these attributes and inputs"
            )
    _inherit_conditions(model, before.values())
    return infer_shapes(model)


def _inherit_conditions(model: onnx.ModelProto, expanded: Iterable[onnx.NodeProto]) -> None:
    """Let what was written out for nodes be in their branches; the inliner drops that."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    for node in expanded:
        parts: dict[str, onnx.NodeProto] = {}
        names = list(node.output)
        while names:
            part = made_by.get(names.pop())
            if part is not None and part.output[0] not in parts:
                parts[part.output[0]] = part
                names += set(part.input) - set(node.input)
        inherit_conditions(node, parts.values())


def _to_expand(
    model: onnx.ModelProto, names: Collection[str]
) -> dict[tuple[str, ...], onnx.NodeProto]:
    """Nodes of some operators, by operator and outputs."""
    nodes = (node for node in model.graph.node if node.op_type in names)
    return {(node.op_type, *node.output): node for node in nodes if is_default_domain(node)}


def _declare_constants(model: onnx.ModelProto) -> None:
    """Let the initialisers be declared as other tensors are; the inliner reads no others' types."""
    graph = model.graph
    known = {info.name for info in (*graph.input, *graph.value_info, *graph.output)}
    graph.value_info.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in graph.initializer
        if tensor.name not in known
    )


def _name_bodies(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Make calls of functions of nodes whose body depends on types, and that lack an input."""
    opset = default_opset(model) or 1
    infos = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    types = {info.name: info.type.SerializeToString() for info in infos}
    for index, node in enumerate(model.graph.node):
        schema = _body_schema(node, opset) if node.op_type in names else None
        if schema is None or all(node.input):
            continue
        known = schema.context_dependent_function_opset_versions
        body = onnx.FunctionProto.FromString(
            schema.get_context_dependent_function_with_opset_version(
                max(version for version in known if version <= opset),
                node.SerializeToString(),
                [types.get(name, b"") for name in node.input],
            )
        )
        node.domain = body.domain = BODIES
        node.op_type = body.name = f"body_{index}"
        model.functions.append(body)
    if model.functions:
        model.opset_import.append(onnx.helper.make_operatorsetid(BODIES, 1))


def _body_schema(node: onnx.NodeProto, opset: int) -> Any:
    """The schema of a node to be expanded whose body depends on its inputs, or None."""
    if not is_default_domain(node):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset)
    return schema if schema.has_context_dependent_function else None


def _check_growth(model: onnx.ModelProto) -> None:
    """Refuse functions that call themselves or that expand to too many nodes."""
    functions = {(f.domain, f.name): f for f in model.functions}
    sizes: dict[FunctionKey, int] = {}

    def size_of(nodes: list[onnx.NodeProto], callers: tuple[FunctionKey, ...]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key in callers:
                raise InvalidModelError(f"the model's function {node.op_type!r} calls itself")
            if key in functions:
                if key not in sizes:
                    sizes[key] = size_of(list(functions[key].node), (*callers, key))
                total += sizes[key]
            total += 1 + sum(size_of(list(g.node), callers) for g in nested_graphs(node))
        if total > MAX_NODES:
            raise InvalidModelError(
                f"the model has more than {MAX_NODES} nodes once its functions are inlined"
            )
        return total

    try:
        size_of(list(model.graph.node), ())
    except RecursionError as error:
        raise InvalidModelError("the model's functions are nested too deeply") from error
