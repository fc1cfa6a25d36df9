# SPDX-License-Identifier: Apache-2.0
"""Rewriting of an ONNX model into operators that are translated rightly.

Each rewrite is one function that changes a model, or returns a new one, and keeps its meaning.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .checks import check_nodes, check_scalars, check_translations
from .graph.branches import splice_branches
from .graph.fold import fold_constants
from .graph.functions import expand_operators, inline_functions
from .graph.loops import unroll_loops
from .graph.tensor_lists import write_out_lists
from .model.graph_edits import (
    all_graphs,
    attribute,
    is_default_domain,
    replace_nodes,
    used_names,
    write_defaults,
)
from .model.shapes import infer_first, infer_shapes, infer_shapes_anew, static_shape
from .model.tensor_facts import GraphFacts
from .model.weights import Weights
from .operators.casts import carry_narrow_types, saturate_casts
from .operators.classical.carriers import unload_carriers
from .operators.normalization import split_mean_variance
from .operators.quantization import take_products_as_floats
from .operators.selection import bound_topk
from .operators.table import TABLE, expand_nodes, find
from .operators.transforms import write_sides
from .opsets import upgrade_opset

_DEFINED = sorted(name for (_, name), operator in TABLE.items() if operator.is_defined)


def mend(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """Apply every rewrite and return the model, all its shapes inferred."""
    model = inline_functions(model)
    drop_unused_outputs(model)
    check_nodes(model)
    model = upgrade_opset(model)
    write_defaults(model, lambda _, entry: entry.type == onnx.defs.OpSchema.AttrType.FLOAT)
    store_empty_inputs(model)
    split_mean_variance(model)
    write_sides(model)
    model = _simplify(infer_first(model), weights)
    facts = GraphFacts(model, weights)
    check_scalars(model, facts)
    while expand_nodes(model, facts, lambda operator: operator.reshape):
        model = infer_shapes_anew(model)
        facts = GraphFacts(model, weights)
    bound_topk(model, facts)
    if expand_nodes(model, facts, lambda operator: operator.choose):
        model = fold_constants(infer_shapes(model), weights)  # reductions of nothing
        facts = GraphFacts(model, weights)
    take_products_as_floats(model, facts)
    expand_nodes(model, facts, lambda operator: operator.expand)
    unload_carriers(model)
    drop_identities(model, facts)
    check_translations(model, facts)
    saturate_casts(model, facts)
    carry_narrow_types(model, facts, weights)
    return model


def _simplify(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """Fold constants, splice branches, unroll loops and expand operators until none is left."""
    while True:
        model = fold_constants(_widen(infer_shapes(model), weights), weights)
        facts = GraphFacts(model, weights)
        changed = splice_branches(model, facts)
        changed = unroll_loops(model, GraphFacts(model, weights)) or changed
        changed = write_out_lists(model, GraphFacts(model, weights)) or changed
        if changed:
            del model.graph.value_info[:]
            continue
        expanded = expand_operators(model, _DEFINED)
        if expanded is model:
            return model
        model = expanded


def _widen(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """Widen 16-bit operators before they are folded, or written out in the types that they have."""
    changed = expand_nodes(model, GraphFacts(model, weights), lambda operator: operator.widen)
    return infer_shapes(model) if changed else model


def drop_initializers_from_inputs(model: onnx.ModelProto) -> None:
    """Keep only real inputs; old models list their weights there, too."""
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.ir_version = max(model.ir_version, 4)


def store_empty_inputs(model: onnx.ModelProto) -> None:
    """Let constants take the place of inputs without elements, whose values are known."""
    graph = model.graph
    for value in graph.input:
        shape = static_shape(value)
        if shape is None or 0 not in shape:
            continue
        name = f"{value.name}/empty"
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        graph.initializer.append(numpy_helper.from_array(np.empty(shape, kind), name))
        for inner in all_graphs(model):
            for node in inner.node:
                _rename_inputs(node, {value.name: name})


def drop_unused_outputs(model: onnx.ModelProto) -> None:
    """Remove optional outputs without readers; TVM's converter computes all outputs that are named.

    A BatchNormalization in training mode must have all of its.
    """
    used = used_names(model)
    for graph in all_graphs(model):
        for node in graph.node:
            operator = find(node) if is_default_domain(node) else None
            if operator and operator.outputs and not attribute(node, "training_mode", 0):
                while len(node.output) > 1 and node.output[-1] not in used:
                    del node.output[-1]


def drop_identities(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Replace Identity, Dropout as it is at inference and a Slice of all by their input."""
    outputs = {value.name for value in model.graph.output}
    replaced: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        _rename_inputs(node, replaced)
        if _does_nothing(node, facts) and node.output[0] not in outputs:
            replaced[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    for graph in all_graphs(model):
        if graph is not model.graph:
            for node in graph.node:
                _rename_inputs(node, replaced)
    replace_nodes(model.graph, kept)


def _rename_inputs(node: onnx.NodeProto, names: dict[str, str]) -> None:
    for index, name in enumerate(node.input):
        node.input[index] = names.get(name, name)


def _does_nothing(node: onnx.NodeProto, facts: GraphFacts) -> bool:
    """Return whether the node's first output always equals its first input, without other uses."""
    if not is_default_domain(node) or len(node.output) > 1:
        return False
    if node.op_type == "Slice":
        return _takes_all(node, facts)
    if node.op_type != "Dropout" or len(node.input) < 3 or not node.input[2]:
        return node.op_type in ("Identity", "Dropout")
    training = facts.constant(node.input[2])
    return training is not None and not training.any()


def _takes_all(node: onnx.NodeProto, facts: GraphFacts) -> bool:
    """Whether a Slice goes from 0 to the largest integer by steps of 1.

    For an open size TVM's converter writes another formula, which is not known to be the same.
    """
    starts, ends = (facts.constant(name) for name in node.input[1:3])
    step_name = node.input[4] if len(node.input) > 4 else ""
    steps = facts.constant(step_name) if step_name else np.ones(1)
    if starts is None or ends is None or steps is None:
        return False
    reaches_end = (ends >= np.iinfo("int32").max).all()
    return bool(reaches_end and not starts.any() and (steps == 1).all())
