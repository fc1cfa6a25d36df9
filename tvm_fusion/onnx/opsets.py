# SPDX-License-Identifier: Apache-2.0
"""Versions of ONNX's operators: models of old ones, and nodes that are newer than their model."""

from __future__ import annotations

import warnings

import onnx
from onnx import helper, version_converter

from ..errors import InvalidModelError, ModelWarning
from .checks import refuse_nodes
from .model.graph_edits import (
    all_graphs,
    attribute,
    default_opset,
    is_default_domain,
    node_label,
    replace_nodes,
    set_attributes,
)

OLDEST_OPSET = 13
"""First opset in which axes, pads and the like are inputs, as TVM's converter expects."""

CONVERTED_OPSET = 17

FIRST_SCAN_WITHOUT_BATCH = 9

FIRST_COORDINATE_MODES = 11
"""Before this opset, Upsample and Resize had one coordinate mode, which the converter drops."""

FIRST_SOFTMAX_OF_AN_AXIS = 13
"""Before this opset, Hardmax had a matrix, which the converter ignores."""

GROUP_NORM_OF_GROUPS = range(18, 21)
"""Opsets in which a GroupNormalization has a scale for each group; deprecated, and used."""

NEWER = "tvm_fusion.newer"
"""Domain of newer nodes while the model is converted."""


def admit_newer_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a model to the opset of its newest node, with a warning that names such nodes.

    Exporters write them, and ONNX Runtime takes some.

    Warns
    -----
    ModelWarning
        If a node is newer than the opset of the model.
    """
    opset = default_opset(model) or 1
    if opset in GROUP_NORM_OF_GROUPS:
        _write_group_norms(model)
    nodes = [node for graph in all_graphs(model) for node in graph.node if is_default_domain(node)]
    unknown = {n.op_type for n in nodes if not onnx.defs.has(n.op_type, opset, "")}
    if not unknown or model.functions:
        return model
    first = _first_versions(unknown)
    newer = [node for node in nodes if node.op_type in first]
    if not newer:
        return model
    told = [f"{node_label(n)} ({n.op_type}, of opset {first[n.op_type]})" for n in newer]
    warnings.warn(
        f"the model says opset {opset}, and newer operators are in it: {', '.join(told)}; they are "
        "taken as of the first opset that has them: export the model with that opset",
        ModelWarning,
        stacklevel=2,
    )
    for node in newer:
        node.domain = NEWER
    model.opset_import.add(domain=NEWER, version=1)
    wanted = max(first.values())
    model = _converted(model, max(wanted, CONVERTED_OPSET) if opset < OLDEST_OPSET else wanted)
    for graph in all_graphs(model):
        for node in graph.node:
            if node.domain == NEWER:
                node.ClearField("domain")
    kept = [entry for entry in model.opset_import if entry.domain != NEWER]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return model


def _first_versions(names: set[str]) -> dict[str, int]:
    """First opsets of those of some operators that ONNX has, and never gave another meaning."""
    schemas = [
        schema
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.name in names and schema.domain == ""
    ]
    changed = {schema.name for schema in schemas if schema.deprecated}
    found: dict[str, int] = {}
    for schema in schemas:
        if schema.name not in changed:
            found[schema.name] = min(schema.since_version, found.get(schema.name, 1 << 30))
    return found


def upgrade_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a model of an old opset to one that TVM's converter handles exactly."""
    opset = default_opset(model)
    if opset is None or opset >= OLDEST_OPSET:
        return model
    return _converted(model, CONVERTED_OPSET)


def _converted(model: onnx.ModelProto, target: int) -> onnx.ModelProto:
    """Convert a model, and correct what ONNX's converter misses."""
    opset = default_opset(model) or 1
    if opset < FIRST_SCAN_WITHOUT_BATCH:
        nodes = [node for graph in all_graphs(model) for node in graph.node]
        scans = [node for node in nodes if node.op_type == "Scan" and is_default_domain(node)]
        reason = "this version has a batch; expected opset 9"
        refuse_nodes(model, [(node, reason) for node in scans])
    try:
        converted = version_converter.convert_version(model, target)
    except (version_converter.ConvertError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InvalidModelError(
            f"the model of opset {opset} cannot be converted to {target} ({reason}); "
            f"export it again with opset {max(OLDEST_OPSET, target)} or newer"
        ) from error
    if opset < FIRST_COORDINATE_MODES:
        _place_pixels_as_before(converted)
    if opset < FIRST_SOFTMAX_OF_AN_AXIS:
        _flatten_hardmax(converted)
    return converted


def _place_pixels_as_before(model: onnx.ModelProto) -> None:
    for graph in all_graphs(model):
        for node in graph.node:
            if node.op_type == "Resize" and is_default_domain(node):
                set_attributes(
                    node, coordinate_transformation_mode="asymmetric", nearest_mode="floor"
                )


def _flatten_hardmax(model: onnx.ModelProto) -> None:
    """Give each Hardmax the matrix that it made of its input itself."""
    for graph in all_graphs(model):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            if node.op_type != "Hardmax" or not is_default_domain(node):
                nodes.append(node)
                continue
            x, y = node.input[0], node.output[0]
            sizes, flat, found = (f"{y}/{hint}" for hint in ("sizes", "flat", "found"))
            nodes += [
                helper.make_node("Shape", [x], [sizes]),
                helper.make_node("Flatten", [x], [flat], axis=attribute(node, "axis", 1)),
                helper.make_node("Hardmax", [flat], [found], node.name, axis=-1),
                helper.make_node("Reshape", [found, sizes], [y]),
            ]
        replace_nodes(graph, nodes)


def _write_group_norms(model: onnx.ModelProto) -> None:
    """Write normalisations by the scales of groups as those of instances, whose channels they are.

    ::

        y = Reshape(InstanceNormalization(Reshape(x, [0, groups, -1]), scale, bias), Shape(x))
    """
    for graph in all_graphs(model):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            count = attribute(node, "num_groups")
            is_sound = count is not None and len(node.input) == 3
            if node.op_type != "GroupNormalization" or not is_default_domain(node) or not is_sound:
                nodes.append(node)
                continue
            (x, scale, bias), y, name = node.input, node.output[0], node.name
            sizes, split, parts, normalized = (
                f"{y}/{k}" for k in ("sizes", "split", "parts", "found")
            )
            groups = helper.make_tensor(split, onnx.TensorProto.INT64, [3], [0, count, -1])
            epsilon = attribute(node, "epsilon", 1e-5)
            nodes += [
                helper.make_node("Shape", [x], [sizes]),
                helper.make_node("Constant", [], [split], value=groups),
                helper.make_node("Reshape", [x, split], [parts]),
                helper.make_node(
                    "InstanceNormalization",
                    [parts, scale, bias],
                    [normalized],
                    name,
                    epsilon=epsilon,
                ),
                helper.make_node("Reshape", [normalized, sizes], [y]),
            ]
        replace_nodes(graph, nodes)
