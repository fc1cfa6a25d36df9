# SPDX-License-Identifier: Apache-2.0
"""Casts of clipped floats to whole numbers, as one operator.

::

    Cast(Clip(x, -8, 7), to=INT4)        ->      Saturate(x, low=-8, high=7, to=INT4)

TVM's importer looks for infinities and wraps what is out of range, in expressions that repeat their
operand; a few of them in a row take TVM half a minute to simplify.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper
from tvm import relax, te, tirx

from ...model.graph_edits import attribute, is_default_domain, replace_nodes
from ...model.tensor_facts import INTEGER_TYPES, GraphFacts
from ..expansion import Expansion
from .narrow_types import NARROW_INTEGERS

SATURATE = "tvm_fusion.Saturate"
"""Operator that :func:`translate_saturate` translates."""

_EXACT_BITS = 16
"""Limits of larger types may be no floats, as which they are an operator's attributes."""


def saturate_casts(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Replace each Cast of a Clip whose limits are in the range of the Cast's type."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    nodes = [_saturated(node, made_by, facts) or node for node in model.graph.node]
    replace_nodes(model.graph, nodes)


def _saturated(
    node: onnx.NodeProto, made_by: dict[str, onnx.NodeProto], facts: GraphFacts
) -> onnx.NodeProto | None:
    """Replacement of a Cast of a Clip, if that is possible."""
    clip = made_by.get(node.input[0]) if node.op_type == "Cast" else None
    if clip is None or clip.op_type != "Clip" or len(clip.input) != 3:
        return None
    if not is_default_domain(node) or not is_default_domain(clip):
        return None
    kind = attribute(node, "to")
    limits = [facts.constant(name) for name in clip.input[1:] if name]
    if len(limits) != 2 or any(limit is None for limit in limits):
        return None
    if kind not in INTEGER_TYPES and kind not in NARROW_INTEGERS:
        return None
    low, high = (float(limit.item()) for limit in limits if limit is not None)
    own = ml_dtypes.iinfo(helper.tensor_dtype_to_np_dtype(kind))
    if own.bits > _EXACT_BITS and facts.dtype(clip.input[0]) in INTEGER_TYPES:
        return None
    if not own.min <= low <= high <= own.max:
        return None
    attributes = {"to": kind, "low": low, "high": high}
    return helper.make_node(SATURATE, clip.input[:1], node.output, node.name, **attributes)


def saturate(expansion: Expansion, value: str, kind: int) -> None:
    """Clip floats to the range of a type of whole numbers, and let the cast ones be the result."""
    limits = ml_dtypes.iinfo(helper.tensor_dtype_to_np_dtype(kind))
    most = np.float32(limits.max)
    most = most if int(most) <= limits.max else np.nextafter(most, np.float32(0))
    ends = [expansion.number(end, TensorProto.FLOAT) for end in (int(limits.min), most)]
    expansion.finish(expansion.emit("Cast", expansion.emit("Clip", value, *ends), to=kind))


def translate_saturate(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Numbers cut to a range, without their fractions."""
    kind, low, high = (attributes[name] for name in ("to", "low", "high"))
    dtype = str(helper.tensor_dtype_to_np_dtype(NARROW_INTEGERS.get(kind, kind)))

    def saturated(x: te.Tensor) -> te.Tensor:
        wide = "float32" if x.dtype in ("float16", "bfloat16") else x.dtype
        least, most = (tirx.const(end, wide) for end in (low, high))

        def element(*i: tirx.Var) -> tirx.Expr:
            # The second of two where they have no order: NaN becomes the least.
            return tirx.Cast(dtype, tirx.min(tirx.max(tirx.Cast(wide, x(*i)), least), most))

        return te.compute(x.shape, element, name="saturate")

    return builder.emit_te(saturated, inputs[0], primfunc_name_hint="saturate")
