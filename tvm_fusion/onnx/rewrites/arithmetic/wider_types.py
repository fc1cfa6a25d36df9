# SPDX-License-Identifier: Apache-2.0
"""Compute in a wider type what TVM cannot compute in the model's, and cast the result back."""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import TensorProto, helper

from ...model.graph_edits import attribute, set_attributes
from ...model.tensor_facts import INTEGER_TYPES
from ..expansion import Expansion, Rule
from .saturation import saturate

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def widen_cast(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Cast bfloat16 to whole numbers by way of float32: the importer looks for infinities."""
    x, target = node.input[0], attribute(node, "to")
    if expansion.facts.dtype(x) == TensorProto.BFLOAT16 and target in INTEGER_TYPES:
        wide = expansion.emit("Cast", x, to=TensorProto.FLOAT)
        expansion.finish(expansion.emit("Cast", wide, to=target))


def always_sort(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Sort the results of a TopK, as any order will do: the importer insists on it."""
    set_attributes(node, ("sorted",))


def widen_scattered(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Combine bools as integers, where TVM's kernel would compare them as floats."""
    is_bool = expansion.facts.dtype(node.input[0]) == TensorProto.BOOL
    if is_bool and attribute(node, "reduction", "none") != "none":
        widen(node, expansion, TensorProto.INT32, [TensorProto.BOOL])


def widen_sum(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Compute an operator of 16-bit floats in float32, and round its results once."""
    if any(expansion.facts.dtype(name) in HALVES for name in node.input):
        widen(node, expansion, TensorProto.FLOAT, HALVES)


def widen_many(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Add more than two tensors of 16-bit floats in float32."""
    if len(node.input) > 2:
        widen_sum(node, expansion)


def widen_gemm(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Compute a Gemm with factors in a type that holds them; the importer multiplies by each.

    A ``C`` of factor 0 goes away, as in ONNX Runtime and PyTorch: it may hold NaN.
    """
    factors = [attribute(node, name, 1.0) for name in ("alpha", "beta")]
    if factors[1] == 0:
        del node.input[2:]
    kind = expansion.facts.dtype(node.input[0])
    if kind in INTEGER_TYPES and not all(factor.is_integer() for factor in factors):
        widen(node, expansion, TensorProto.DOUBLE, [kind])
    elif factors != [1, 1]:
        widen_sum(node, expansion)


def widen_overlaps(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Add bools as floats, where a sum of any is true, and 16-bit floats in float32."""
    if expansion.facts.dtype(node.input[0]) == TensorProto.BOOL:
        widen(node, expansion, TensorProto.FLOAT, [TensorProto.BOOL])
    widen_sum(node, expansion)


def widen_resize(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Bound whole numbers by their type, which cubic weights leave, and widen 16-bit floats."""
    kind = expansion.facts.dtype(node.input[0])
    if kind in INTEGER_TYPES and attribute(node, "mode", "nearest") == "cubic":
        wide = expansion.emit("Cast", node.input[0], to=TensorProto.FLOAT)
        inner = onnx.NodeProto()
        inner.CopyFrom(node)
        inner.input[0], inner.output[0] = wide, expansion.facts.fresh(f"{node.output[0]}/wide")
        expansion.nodes.append(inner)
        saturate(expansion, inner.output[0], kind)
    widen_sum(node, expansion)


SUMS: dict[str, Rule] = {
    **dict.fromkeys(
        """AffineGrid DFT DeformConv Det Einsum GlobalLpPool GroupNormalization
        InstanceNormalization LRN LinearAttention LpNormalization LpPool Mean
        NegativeLogLikelihoodLoss ReduceL2 ReduceLogSum ReduceLogSumExp RoiAlign STFT
        SoftmaxCrossEntropyLoss""".split(),
        widen_sum,
    ),
    "Col2Im": widen_overlaps,
    "Gemm": widen_gemm,
    "Resize": widen_resize,
    "Sum": widen_many,
}
"""Operators that accumulate and that become several ops, each of which would round its result.

Those that become one op are left to the pass ``WidenSums``."""


def widen(node: onnx.NodeProto, expansion: Expansion, wide: int, narrow: Collection[int]) -> None:
    """Cast the inputs of the types ``narrow`` to ``wide``, and such outputs back."""
    facts = expansion.facts
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    for index, name in enumerate(node.input):
        if facts.dtype(name) in narrow:
            inner.input[index] = expansion.emit("Cast", name, to=wide)
    expansion.nodes.append(inner)
    for index, name in enumerate(node.output):
        if facts.dtype(name) in narrow:
            inner.output[index] = facts.fresh(f"{name}/wide")
            cast = helper.make_node(
                "Cast", inner.output[index : index + 1], [name], to=facts.dtype(name)
            )
            expansion.nodes.append(cast)
