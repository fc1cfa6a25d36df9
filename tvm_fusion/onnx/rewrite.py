# SPDX-License-Identifier: Apache-2.0
"""Rewriting of an ONNX model into the subset of ONNX that TVM's importer translates correctly.

Each rewrite is one function that changes a model, or returns a new one, and keeps its meaning.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .guards import check_translations
from .model.graph_edits import (
    all_graphs,
    attribute,
    default_opset,
    is_default_domain,
    replace_nodes,
    used_names,
    write_defaults,
)
from .model.shapes import infer_first, infer_shapes, infer_shapes_anew, static_shape
from .model.tensor_facts import GraphFacts
from .model.weights import Weights
from .node_checks import OUTPUTS, check_nodes
from .opsets import upgrade_opset
from .rewrites.arithmetic.activations import (
    expand_clip,
    expand_dropout,
    expand_elu,
    expand_prelu,
    expand_selu,
    expand_shrink,
    expand_thresholded_relu,
)
from .rewrites.arithmetic.division import (
    expand_division,
    expand_shift,
    replace_divisions_by_minus_one,
)
from .rewrites.arithmetic.is_inf import expand_is_inf, expand_is_nan
from .rewrites.arithmetic.modulo import expand_modulo
from .rewrites.arithmetic.narrow_types import carry_narrow_types
from .rewrites.arithmetic.powers import expand_power, replace_powers
from .rewrites.arithmetic.reductions import REDUCTIONS, ReductionRule
from .rewrites.arithmetic.saturation import saturate_casts
from .rewrites.arithmetic.wider_types import (
    SUMS,
    always_sort,
    widen_cast,
    widen_scattered,
    widen_sum,
)
from .rewrites.classical.carriers import unload_carriers
from .rewrites.control_flow.branches import splice_branches
from .rewrites.control_flow.functions import expand_operators, inline_functions
from .rewrites.control_flow.loops import unroll_loops
from .rewrites.control_flow.tensor_lists import write_out_lists
from .rewrites.expansion import Expansion, Rule, expand_nodes
from .rewrites.fold import fold_constants
from .rewrites.fourier import expand_dft, expand_stft, write_sides
from .rewrites.indexing.indices import check_indices, clamp_diagonal
from .rewrites.indexing.one_hot import expand_eye_like, expand_one_hot
from .rewrites.indexing.sequences import expand_reverse_sequence, expand_tensor_scatter
from .rewrites.indexing.unique import expand_unique
from .rewrites.indexing.wide_concat import name_wide_concat
from .rewrites.norms.batch_norm import BatchNormRule
from .rewrites.norms.layer_norm import LayerNormRule
from .rewrites.norms.lp_norm import replace_lp_norms
from .rewrites.norms.mean_variance import split_mean_variance
from .rewrites.open_sizes import name_limits, place_numbers
from .rewrites.open_topk import bound_topk
from .rewrites.own_ops import name_axis
from .rewrites.quantized import (
    expand_conv_integer,
    expand_dequantize,
    expand_dynamic_quantize,
    expand_matmul_integer,
    expand_qlinear_conv,
    expand_qlinear_matmul,
    expand_quantize,
    take_products_as_floats,
)
from .rewrites.recurrent import expand_recurrent
from .rewrites.run_time_axes import choose_axes
from .rewrites.windows.auto_pad import expand_pad, pad_pools
from .rewrites.windows.conv_transpose import pad_transposed_convolutions
from .rewrites.windows.grid_sample import expand_grid_sample
from .rewrites.windows.max_places import expand_max_pool
from .rewrites.windows.p_norms import expand_p_norm
from .rewrites.windows.resize import normalize_resizes
from .rewrites.windows.resize_taps import expand_resize
from .rewrites.windows.roi_align import RoiAlignRule
from .rewrites.windows.unfolded import expand_col2im, expand_max_unpool, expand_space_to_depth


def expand_sum(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Add one after the other; the importer stacks the inputs and reduces that."""
    total, *terms = node.input
    for term in terms:
        total = expansion.emit("Add", total, term)
    if terms:
        expansion.finish(total)


def expand_lrn(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Write one of an even number of channels, or of float64, by its formula."""
    facts, x, size = expansion.facts, node.input[0], attribute(node, "size")
    dims, kind = facts.dims(x), facts.dtype(x)
    if dims is None or dims[1] is None or (size % 2 and kind != onnx.TensorProto.DOUBLE):
        return
    pads = np.zeros((2, len(dims)), np.int64)
    pads[:, 1] = (size - 1) // 2, size // 2
    padded = expansion.emit(
        "Pad", expansion.emit("Mul", x, x), expansion.constant("pads", pads.ravel())
    )
    axis = expansion.constant("axis", np.array([1]))
    parts = [
        expansion.emit(
            "Slice",
            padded,
            *(expansion.constant("at", np.array([i + n])) for n in (0, dims[1])),
            axis,
        )
        for i in range(size)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = expansion.emit("Add", total, part)
    alpha, beta, bias = (
        expansion.number(attribute(node, name, default), kind)
        for name, default in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )
    share = expansion.emit("Mul", total, expansion.emit("Div", alpha, expansion.number(size, kind)))
    power = expansion.emit("Pow", expansion.emit("Add", share, bias), beta)
    expansion.finish(expansion.emit("Div", x, power))


def take_as_vector(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Make a vector of axes, or of a shape, that is a scalar, as ONNX Runtime takes it."""
    value = expansion.facts.constant(node.input[1]) if len(node.input) > 1 else None
    if value is not None and not value.ndim:
        vector = expansion.constant("vector", value.reshape(1))
        expansion.finish(expansion.emit(node.op_type, node.input[0], vector))


EXPANSIONS: dict[str, Rule] = {
    "BitShift": expand_shift,
    "Cast": widen_cast,
    "Clip": expand_clip,
    "Col2Im": expand_col2im,
    "Concat": name_wide_concat,
    "ConvInteger": expand_conv_integer,
    "CumProd": name_axis,
    "DFT": expand_dft,
    "DequantizeLinear": expand_dequantize,
    "DynamicQuantizeLinear": expand_dynamic_quantize,
    "Div": expand_division,
    "Dropout": expand_dropout,
    "Elu": expand_elu,
    "Expand": take_as_vector,
    "EyeLike": expand_eye_like,
    "GRU": expand_recurrent,
    "Gelu": widen_sum,
    "GlobalLpPool": expand_p_norm,
    "GridSample": expand_grid_sample,
    "HardSigmoid": widen_sum,
    "IsInf": expand_is_inf,
    "IsNaN": expand_is_nan,
    "LRN": expand_lrn,
    "LSTM": expand_recurrent,
    "LpPool": expand_p_norm,
    "MatMulInteger": expand_matmul_integer,
    "MaxPool": expand_max_pool,
    "MaxUnpool": expand_max_unpool,
    "Mish": widen_sum,
    "Mod": expand_modulo,
    "NonMaxSuppression": name_limits,
    "OneHot": expand_one_hot,
    "PRelu": expand_prelu,
    "Pad": expand_pad,
    "Pow": expand_power,
    "QLinearConv": expand_qlinear_conv,
    "QLinearMatMul": expand_qlinear_matmul,
    "QuantizeLinear": expand_quantize,
    "RNN": expand_recurrent,
    "Resize": expand_resize,
    "ReverseSequence": expand_reverse_sequence,
    "STFT": expand_stft,
    "ScatterElements": widen_scattered,
    "ScatterND": widen_scattered,
    "Selu": expand_selu,
    "Shrink": expand_shrink,
    "SpaceToDepth": expand_space_to_depth,
    "Sum": expand_sum,
    "TensorScatter": expand_tensor_scatter,
    "ThresholdedRelu": expand_thresholded_relu,
    "TopK": always_sort,
    "Trilu": clamp_diagonal,
    "Unique": expand_unique,
    "Unsqueeze": take_as_vector,
}
"""Operators whose nodes become several, none of which depends on another of these."""


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
    while pad_transposed_convolutions(model, facts) or place_numbers(model, facts):
        model = infer_shapes_anew(model)
        facts = GraphFacts(model, weights)
    bound_topk(model, facts)
    if choose_axes(model, facts):
        model = fold_constants(infer_shapes(model), weights)  # reductions of nothing
        facts = GraphFacts(model, weights)
    opset = default_opset(model) or 1
    by_opset: dict[str, Rule] = {
        "LayerNormalization": LayerNormRule(opset),
        "RoiAlign": RoiAlignRule(opset),
        **dict.fromkeys(REDUCTIONS, ReductionRule(opset)),
    }
    take_products_as_floats(model, facts)
    expand_nodes(model, facts, {**EXPANSIONS, **by_opset})
    replace_powers(model, facts)
    replace_lp_norms(model, facts)
    replace_divisions_by_minus_one(model, facts)
    pad_pools(model, facts)
    normalize_resizes(model, facts)
    check_indices(model, facts)
    unload_carriers(model)
    drop_identities(model, facts)
    check_translations(model, facts)
    saturate_casts(model, facts)
    carry_narrow_types(model, facts, weights)
    return model


def _simplify(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """Fold constants, splice branches, unroll loops and expand operators until none is left."""
    while True:
        model = fold_constants(_widen_sums(infer_shapes(model), weights), weights)
        facts = GraphFacts(model, weights)
        changed = splice_branches(model, facts)
        changed = unroll_loops(model, GraphFacts(model, weights)) or changed
        changed = write_out_lists(model, GraphFacts(model, weights)) or changed
        if changed:
            del model.graph.value_info[:]
            continue
        expanded = expand_operators(model)
        if expanded is model:
            return model
        model = expanded


def _widen_sums(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """Widen 16-bit operators before they are folded, or written out in the types that they have."""
    count = len(model.graph.node)
    norm = BatchNormRule(default_opset(model) or 1)
    expand_nodes(model, GraphFacts(model, weights), {**SUMS, "BatchNormalization": norm})
    return model if len(model.graph.node) == count else infer_shapes(model)


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
    """Remove optional outputs without readers; the importer computes all outputs that are named.

    A BatchNormalization in training mode must have all of its.
    """
    used = used_names(model)
    for graph in all_graphs(model):
        for node in graph.node:
            is_optional = node.op_type in OUTPUTS and not attribute(node, "training_mode", 0)
            if is_optional and is_default_domain(node):
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

    Of an open size the importer would write another formula, which is not known to be the same.
    """
    starts, ends = (facts.constant(name) for name in node.input[1:3])
    step_name = node.input[4] if len(node.input) > 4 else ""
    steps = facts.constant(step_name) if step_name else np.ones(1)
    if starts is None or ends is None or steps is None:
        return False
    reaches_end = (ends >= np.iinfo("int32").max).all()
    return bool(reaches_end and not starts.any() and (steps == 1).all())
