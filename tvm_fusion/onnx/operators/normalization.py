# SPDX-License-Identifier: Apache-2.0
"""Normalisations that TVM's converters lack or get wrong.

BatchNormalization in training mode is written by the statistics of its input::

    c = x - mean(x);    v = mean(c * c);    y = c / sqrt(v + epsilon) * scale + bias
    running_mean = momentum * input_mean + (1 - momentum) * mean(x);    running_var likewise

in float32 if the data has 16 bits. Weights that are standardised so become constants. A node in
inference mode is computed in float32 if it has data of bfloat16 and statistics of another type.

A LayerNormalization whose mean or deviation is asked for, or of a type that TVM lacks, is::

    c = x - ReduceMean(x);    i = 1 / Sqrt(ReduceMean(c * c) + epsilon);    y = c * i * scale + bias

and of bfloat16 ``Cast(LayerNormalization(Cast(x), Cast(scale), Cast(bias)))`` in float32.

LpNormalization, which TVM lacks, is a norm and a division::

    norm = ReduceL1 or ReduceL2 (x, axis), kept;    y = x / Where(norm == 0, 1, norm)

so that a row of zeros stays zero.

MeanVarianceNormalization is written by the variance of what is left without the mean::

    c = x - ReduceMean(x);    y = c / (Sqrt(ReduceMean(c * c)) + 1e-9)

in float32 if the data has 16 bits. TVM's converter subtracts the squared mean from the mean square,
which cancels, and knows float32 only, and so does the formula by which onnx infers types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..model.expansion import AXES_ARE_INPUTS, HALVES, Expansion
from ..model.graph_edits import (
    all_graphs,
    attribute,
    default_opset,
    is_default_domain,
    replace_nodes,
    set_attributes,
)
from ..model.tensor_facts import GraphFacts
from .casts import widen, widen_sum
from .operator import Operator, operators


def expand_batch_norm(expansion: Expansion) -> None:
    """Write a node by others, once its rank and types are known."""
    facts = expansion.facts
    dims, kinds = (
        facts.dims(expansion.input(0)),
        [facts.dtype(name) for name in expansion.node.input],
    )
    if not expansion.get("training_mode", 0):
        _widen_batch_norm(expansion, kinds)
        return
    if dims is None or not all(kinds):
        return
    wide = TensorProto.FLOAT if kinds[0] in HALVES else kinds[0]
    x, scale, bias, mean, variance = (
        expansion.emit("Cast", name, to=wide) if kind != wide else name
        for name, kind in zip(expansion.node.input, kinds, strict=True)
    )
    means = [axis for axis in range(len(dims)) if axis != 1]
    own_mean = expansion.reduced("ReduceMean", x, means)
    centred = expansion.emit("Sub", x, own_mean)
    squares = expansion.emit("Mul", centred, centred)
    own_variance = expansion.reduced("ReduceMean", squares, means)
    epsilon = expansion.number(expansion.get("epsilon", 1e-5), wide)
    deviation = expansion.emit("Sqrt", expansion.emit("Add", own_variance, epsilon))
    axes = expansion.constant("axes", np.arange(1, len(dims) - 1))
    scale, bias = (expansion.emit("Unsqueeze", name, axes) for name in (scale, bias))
    scaled = expansion.emit("Mul", expansion.emit("Div", centred, deviation), scale)
    results = [expansion.emit("Add", scaled, bias)]
    momentum = expansion.get("momentum", 0.9)
    statistics = (mean, own_mean), (variance, own_variance)
    for old, new in statistics[: len(expansion.node.output) - 1]:
        flat = expansion.emit("Reshape", new, expansion.constant("flat", np.array([-1])))
        parts = [
            expansion.emit("Mul", name, expansion.number(factor, wide))
            for name, factor in ((old, momentum), (flat, 1 - momentum))
        ]
        results.append(expansion.emit("Add", *parts))
    typed = [
        expansion.emit("Cast", name, to=kind) if kind != wide else name
        for name, kind in zip(results, [kinds[0], *kinds[3:]], strict=False)
    ]
    expansion.finish(*typed)


def _widen_batch_norm(expansion: Expansion, kinds: Sequence[Any]) -> None:
    """Compute in float32 on data of bfloat16 by statistics of another type."""
    if kinds[0] != TensorProto.BFLOAT16 or len(set(kinds)) == 1:
        return
    wide = (expansion.emit("Cast", name, to=TensorProto.FLOAT) for name in expansion.node.input)
    epsilon = expansion.get("epsilon", 1e-5)
    result = expansion.emit("BatchNormalization", *wide, epsilon=epsilon)
    expansion.finish(expansion.emit("Cast", result, to=kinds[0]))


def expand_layer_norm(expansion: Expansion) -> None:
    """Replace a LayerNormalization of several outputs, or of bfloat16 or float64.

    It is computed in float32 where ONNX asks for that, but with one output float64 stays so.
    """
    facts = expansion.facts
    dims = facts.dims(expansion.input(0))
    dtype, kind = facts.dtype(expansion.input(0)), expansion.get("stash_type", TensorProto.FLOAT)
    if len(expansion.node.output) < 2:
        if dtype == TensorProto.BFLOAT16:
            widen(expansion, TensorProto.FLOAT, HALVES)
        if dtype != TensorProto.DOUBLE:
            return
        kind = dtype
    if dims is None:
        return
    axes = list(range(expansion.get("axis", -1) % len(dims), len(dims)))
    x, scale, bias = [*expansion.node.input, ""][:3]
    x = x if dtype == kind else expansion.emit("Cast", x, to=kind)
    mean = expansion.reduced("ReduceMean", x, axes)
    centred = expansion.emit("Sub", x, mean)
    squares = expansion.emit("Mul", centred, centred)
    variance = expansion.reduced("ReduceMean", squares, axes)
    epsilon = expansion.number(expansion.get("epsilon", 1e-5), kind)
    deviation = expansion.emit("Sqrt", expansion.emit("Add", variance, epsilon))
    inverse = expansion.emit("Reciprocal", deviation)
    result = expansion.emit("Mul", centred, inverse)
    wide = kind if dtype in HALVES else dtype
    result, scale, bias = (
        expansion.emit("Cast", name, to=wide) if name and kind != dtype else name
        for name in (result, scale, bias)
    )
    result = expansion.emit("Mul", result, scale)
    result = expansion.emit("Add", result, bias) if bias else result
    result = result if dtype == wide else expansion.emit("Cast", result, to=dtype)
    for found, output in zip((result, mean, inverse), expansion.node.output, strict=False):
        if output:
            expansion.nodes.append(helper.make_node("Identity", [found], [output]))


def expand_lp_norm(expansion: Expansion) -> None:
    """Divide by the norm, or by 1 where it is 0."""
    x, kind = expansion.input(0), expansion.facts.dtype(expansion.input(0))
    norm = expansion.reduced(f"ReduceL{expansion.get('p', 2)}", x, [expansion.get("axis", -1)])
    zero, one = (expansion.number(value, kind) for value in (0, 1))
    divisor = expansion.emit("Where", expansion.emit("Equal", norm, zero), one, norm)
    expansion.finish(expansion.emit("Div", x, divisor))


EPSILON = np.array(1e-9, np.float32)


def split_mean_variance(model: onnx.ModelProto) -> None:
    """Replace every MeanVarianceNormalization; needs no shapes."""
    count = -1
    while True:
        left = [node for graph in all_graphs(model) for node in graph.node if _is_norm(node)]
        if not left:
            return
        is_stuck, count = len(left) == count, len(left)
        _split(model, is_stuck)


def _split(model: onnx.ModelProto, all_types: bool) -> None:
    """Replace the nodes whose types are known before others are replaced, or all."""
    types = _element_types(onnx.shape_inference.infer_shapes(model))
    opset = default_opset(model) or 1
    for graph in all_graphs(model):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            kind = types.get(node.input[0], 0) if _is_norm(node) else 0
            is_split = _is_norm(node) and (kind or all_types)
            nodes += _parts(node, opset, kind) if is_split else [node]
        replace_nodes(graph, nodes)


def _is_norm(node: onnx.NodeProto) -> bool:
    return is_default_domain(node) and node.op_type == "MeanVarianceNormalization"


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    types = {}
    for graph in all_graphs(model):
        for value in (*graph.input, *graph.value_info):
            types[value.name] = value.type.tensor_type.elem_type
        types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return types


def _parts(node: onnx.NodeProto, opset: int, kind: int) -> list[onnx.NodeProto]:
    """The nodes of the formula."""
    (x,), (y,) = node.input, node.output
    nodes: list[onnx.NodeProto] = []
    axes = np.array(attribute(node, "axes", [0, 2, 3]), np.int64)

    def emit(op_type: str, *inputs: str, part: str, **attributes: Any) -> str:
        result = f"{y}/{part}"
        nodes.append(helper.make_node(op_type, inputs, [result], name=node.name, **attributes))
        return result

    def constant(part: str, value: np.ndarray) -> str:
        return emit("Constant", part=part, value=numpy_helper.from_array(value))

    def mean(values: str, part: str) -> str:
        if opset < AXES_ARE_INPUTS:
            return emit("ReduceMean", values, part=part, axes=axes.tolist())
        return emit("ReduceMean", values, constant(f"{part}_axes", axes), part=part)

    is_narrow = kind in HALVES
    if is_narrow:
        x = emit("Cast", x, part="wide", to=onnx.TensorProto.FLOAT)
    centred = emit("Sub", x, mean(x, "mean"), part="centred")
    variance = mean(emit("Mul", centred, centred, part="squares"), "variance")
    deviation = emit("Sqrt", variance, part="deviation")
    epsilon = emit("CastLike", constant("epsilon", EPSILON), x, part="typed_epsilon")
    divisor = emit("Add", deviation, epsilon, part="divisor")
    result = emit("Div", centred, divisor, part="result")
    last = {"op_type": "Cast", "to": kind} if is_narrow else {"op_type": "Identity"}
    nodes.append(helper.make_node(inputs=[result], outputs=[y], name=node.name, **last))
    return nodes


def expand_lrn(expansion: Expansion) -> None:
    """Write out a node of an even size or one beyond all channels, of another rank, or float64."""
    facts, x, size = expansion.facts, expansion.input(0), expansion.get("size")
    dims, kind = facts.dims(x), facts.dtype(x)
    if dims is None or len(dims) < 2 or dims[1] is None:
        return
    is_easy = size % 2 and size < 2 * dims[1] and len(dims) in (3, 4)
    if is_easy and kind != onnx.TensorProto.DOUBLE:  # TVM's converter takes these
        return
    pads = np.zeros((2, len(dims)), np.int64)
    # What lies further away than all channels is zero.
    before, after = (min(reach, dims[1] - 1) for reach in ((size - 1) // 2, size // 2))
    pads[:, 1] = before, after
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
        for i in range(before + after + 1)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = expansion.emit("Add", total, part)
    alpha, beta, bias = (
        expansion.number(expansion.get(name, default), kind)
        for name, default in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )
    share = expansion.emit("Mul", total, expansion.emit("Div", alpha, expansion.number(size, kind)))
    power = expansion.emit("Pow", expansion.emit("Add", share, bias), beta)
    expansion.finish(expansion.emit("Div", x, power))


def _batch_norm_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Such a node would have been written by others if its rank were known."""
    is_training = attribute(node, "training_mode", 0)
    return "it is in training mode, and its input's rank is not known" if is_training else None


def widen_group_norm(expansion: Expansion) -> None:
    """Compute in float32, or in float64 if the data is, whatever type ``stash_type`` names."""
    set_attributes(expansion.node, dropped=["stash_type"])
    widen_sum(expansion)


def _lp_norm_defect(node: onnx.NodeProto) -> str | None:
    power = attribute(node, "p", 2)
    return None if power in (1, 2) else f"its p is {power}; ONNX has 1 and 2"


def _lrn_defect(node: onnx.NodeProto) -> str | None:
    size = attribute(node, "size")
    return None if size > 0 else f"its size is {size}; expected 1 or more"


OPERATORS = (
    Operator("BatchNormalization", outputs=1, widen=expand_batch_norm, check=_batch_norm_problem),
    Operator("GroupNormalization", widen=widen_group_norm),
    Operator("InstanceNormalization", widen=widen_sum),
    Operator("LayerNormalization", outputs=3, expand=expand_layer_norm),
    Operator("LpNormalization", defect=_lp_norm_defect, widen=widen_sum, expand=expand_lp_norm),
    Operator("LRN", defect=_lrn_defect, widen=widen_sum, expand=expand_lrn),
    *operators("MeanVarianceNormalization RMSNormalization"),
)
