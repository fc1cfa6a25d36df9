# SPDX-License-Identifier: Apache-2.0
"""Compute in a wider type what TVM cannot compute in the model's, and cast the result back."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ...model.graph_edits import attribute, set_attributes
from ...model.tensor_facts import INTEGER_TYPES, GraphFacts
from ..expansion import Expansion

SORTED_AS: dict[int, int] = {
    TensorProto.BFLOAT16: TensorProto.FLOAT,
    TensorProto.INT16: TensorProto.INT32,
    TensorProto.UINT16: TensorProto.INT32,
    TensorProto.UINT32: TensorProto.INT64,
}
"""Types that TVM's sort lacks, or takes for others, and types that hold all their numbers."""

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def widen_cast(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Cast bfloat16 to whole numbers by way of float32: the importer looks for infinities."""
    x, target = node.input[0], attribute(node, "to")
    if expansion.facts.dtype(x) == TensorProto.BFLOAT16 and target in INTEGER_TYPES:
        wide = expansion.emit("Cast", x, to=TensorProto.FLOAT)
        expansion.finish(expansion.emit("Cast", wide, to=target))


def widen_extremes(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Reduce bools as integers: TVM knows no largest and no smallest bool."""
    if expansion.facts.dtype(node.input[0]) == TensorProto.BOOL:
        widen(node, expansion, TensorProto.INT32)


def widen_sort(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Sort the types of ``SORTED_AS`` as others, and always sort: the importer insists on it."""
    set_attributes(node, ("sorted",))
    wide = SORTED_AS.get(expansion.facts.dtype(node.input[0]))
    if wide is not None:
        widen(node, expansion, wide)


def widen_norm(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Normalise 16-bit data in float32: the importer adds a constant of float32."""
    if expansion.facts.dtype(node.input[0]) in HALVES:
        widen(node, expansion, TensorProto.FLOAT)


def norm_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Say why the importer cannot normalise a tensor, if so: its constants have float32."""
    if facts.dtype(node.input[0]) == TensorProto.DOUBLE:
        return "its input has float64; expected float32 or 16 bits: cast it"
    return None


def sort_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Say why TVM cannot sort a tensor, if so."""
    if facts.dtype(node.input[0]) == TensorProto.UINT64:
        return "it sorts uint64; expected another type, as int64: cast its input"
    return None


def widen(node: onnx.NodeProto, expansion: Expansion, wide: int, count: int = 1) -> None:
    """Cast the first inputs of the node, ``count`` of them, and its first output back."""
    narrow = expansion.facts.dtype(node.input[0])
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    for index, name in enumerate(node.input[:count]):
        if name:
            inner.input[index] = expansion.emit("Cast", name, to=wide)
    inner.output[0] = expansion.facts.fresh(f"{node.output[0]}/wide")
    expansion.nodes.append(inner)
    expansion.finish(expansion.emit("Cast", inner.output[0], to=narrow))
