# SPDX-License-Identifier: Apache-2.0
"""Write the Mod of floats that rounds down by the remainder that rounds to zero.

::

    r = x - trunc(x / y) * y;    y = r or r + y, whichever has the sign of the divisor

Of bfloat16, for which TVM has no remainder, both are computed in float32, where they are exact.
The importer's ``x - floor(x / y) * y`` is NaN for an infinite divisor, and loses the sign of zero.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ...model.graph_edits import attribute
from ...model.tensor_facts import INTEGER_TYPES
from ..expansion import Expansion
from .division import expand_division


def expand_modulo(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a Mod of floats with ``fmod=0`` or of bfloat16, or of integers by unsafe divisors."""
    dtype = expansion.facts.dtype(node.input[0])
    if dtype in INTEGER_TYPES:
        expand_division(node, expansion)
    truncated, is_wide = bool(attribute(node, "fmod", 0)), dtype == TensorProto.BFLOAT16
    if not dtype or dtype in INTEGER_TYPES or (truncated and not is_wide):
        return
    x, divisor = node.input
    if is_wide:
        wide = [expansion.emit("Cast", name, to=TensorProto.FLOAT) for name in node.input]
        remainder = expansion.emit("Cast", expansion.emit("Mod", *wide, fmod=1), to=dtype)
    else:
        remainder = expansion.emit("Mod", x, divisor, fmod=1)
    if truncated:
        expansion.finish(remainder)
        return
    zero, minus_zero = (expansion.number(value, dtype) for value in (0.0, -0.0))
    is_negative = expansion.emit("Less", divisor, zero)
    apart = expansion.emit("Xor", expansion.emit("Less", remainder, zero), is_negative)
    moved = expansion.emit("Add", remainder, divisor)
    other = expansion.emit("Where", apart, moved, remainder)
    signed_zero = expansion.emit("Where", is_negative, minus_zero, zero)
    is_zero = expansion.emit("Equal", remainder, zero)
    expansion.finish(expansion.emit("Where", is_zero, signed_zero, other))
