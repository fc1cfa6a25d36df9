# SPDX-License-Identifier: Apache-2.0
"""Write an IsInf of one sign as a comparison; the importer always looks for both.

TVM tests bfloat16 for neither infinities nor NaN, so its values are cast first.
"""

from __future__ import annotations

import math

import onnx
from onnx import TensorProto

from ...model.graph_edits import attribute
from ..expansion import Expansion


def expand_is_inf(node: onnx.NodeProto, expansion: Expansion) -> None:
    """``x == inf``, ``x == -inf``, or for neither sign ``x < x``, which no number is."""
    positive = bool(attribute(node, "detect_positive", 1))
    negative = bool(attribute(node, "detect_negative", 1))
    x = node.input[0]
    if positive and negative:
        _cast_first(node, expansion)
        return
    if positive or negative:
        infinity = math.inf if positive else -math.inf
        number = expansion.number(infinity, expansion.facts.dtype(x))
        expansion.finish(expansion.emit("Equal", x, number))
    else:
        expansion.finish(expansion.emit("Less", x, x))


def expand_is_nan(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Test the values of a bfloat16 tensor as float32."""
    _cast_first(node, expansion)


def _cast_first(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Emit the node behind a cast of its input to float32, if that is bfloat16."""
    x = node.input[0]
    if expansion.facts.dtype(x) == TensorProto.BFLOAT16:
        wide = expansion.emit("Cast", x, to=TensorProto.FLOAT)
        expansion.finish(expansion.emit(node.op_type, wide))
