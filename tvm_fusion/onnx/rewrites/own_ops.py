# SPDX-License-Identifier: Apache-2.0
"""Translations to Relax of operators that TVM's importer lacks and that other nodes cannot express.

::

    BitCast:  reinterpret(x);    CumProd:  relax.cumprod(x, axis), turned round if reversed

Those whose results have sizes that depend on data are in ``open_sizes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
from onnx import helper
from tvm import relax, te, tirx

from ..model.graph_edits import attribute
from ..model.tensor_facts import GraphFacts
from .arithmetic.narrow_types import ROUND, translate_round
from .arithmetic.saturation import SATURATE, translate_saturate
from .classical.linear import PAIRWISE_COUPLING, translate_pairwise_coupling
from .classical.trees import TREES, translate_trees
from .determinant import translate_determinant
from .expansion import Expansion
from .indexing.gather import translate_gather
from .indexing.indices import CHECKED_INDICES, translate_checked_indices
from .indexing.wide_concat import WIDE_CONCAT, translate_wide_concat
from .open_sizes import translate_compress, translate_nonzero, translate_suppression
from .open_topk import SORT_FIRST, translate_sort_first
from .recurrent import RECURRENCE, translate_recurrence
from .windows.deform_conv import translate_deform_conv
from .windows.max_places import MAX_PLACES, translate_max_places
from .windows.roi_align import translate_max_roi_pool, translate_roi_align

Translation = Callable[[relax.BlockBuilder, Sequence[Any], dict[str, Any]], "relax.Expr | None"]
"""Expression of a node by its inputs and attributes; None leaves the node to TVM's converter."""


def translate_bit_cast(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """The bits of a tensor as another type of the same size."""
    dtype = str(helper.tensor_dtype_to_np_dtype(attributes["to"]))
    if "bool" in (dtype, str(inputs[0].ty.dtype)):
        return relax.op.astype(inputs[0], dtype)

    def reinterpreted(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: tirx.reinterpret(dtype, x(*i)), name="bit_cast")

    return builder.emit_te(reinterpreted, inputs[0], primfunc_name_hint="bit_cast")


def translate_cumulative_product(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Products of the elements up to each one."""
    data, axis = inputs[0], attributes["axis"]
    is_reversed = bool(attributes.get("reverse", 0))
    data = builder.normalize(relax.op.flip(data, axis)) if is_reversed else data
    is_exclusive = bool(attributes.get("exclusive", 0))
    result = relax.op.cumprod(data, axis, str(data.ty.dtype), is_exclusive)
    return relax.op.flip(builder.normalize(result), axis) if is_reversed else result


def name_axis(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Give a CumProd its constant axis as an attribute."""
    axis = expansion.facts.constant(node.input[1]) if len(node.input) > 1 else None
    if axis is not None:
        kept = {name: attribute(node, name, 0) for name in ("exclusive", "reverse")}
        number = int(axis.item())
        expansion.finish(expansion.emit("CumProd", node.input[0], axis=number, **kept))


def bit_cast_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why bits cannot be reinterpreted, if any."""
    source = facts.dtype(node.input[0])
    target = helper.get_node_attr_value(node, "to")
    sizes = [helper.tensor_dtype_to_np_dtype(kind).itemsize for kind in (source, target)]
    return None if sizes[0] == sizes[1] else f"its types have {sizes[0]} and {sizes[1]} bytes"


OWN_OPS: dict[str, Translation] = {
    "BitCast": translate_bit_cast,
    "Compress": translate_compress,
    "CumProd": translate_cumulative_product,
    "Det": translate_determinant,
    "DeformConv": translate_deform_conv,
    "Gather": translate_gather,
    "MaxRoiPool": translate_max_roi_pool,
    "NonMaxSuppression": translate_suppression,
    "NonZero": translate_nonzero,
    "RoiAlign": translate_roi_align,
    CHECKED_INDICES: translate_checked_indices,
    MAX_PLACES: translate_max_places,
    PAIRWISE_COUPLING: translate_pairwise_coupling,
    RECURRENCE: translate_recurrence,
    ROUND: translate_round,
    SATURATE: translate_saturate,
    SORT_FIRST: translate_sort_first,
    TREES: translate_trees,
    WIDE_CONCAT: translate_wide_concat,
}
"""Operators, and what translates them."""
