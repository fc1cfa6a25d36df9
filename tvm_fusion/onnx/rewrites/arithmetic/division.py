# SPDX-License-Identifier: Apache-2.0
"""Operations of integers that processors do not define for every operand: divisions and shifts.

Divisions trap neither by zero nor of the least integer by -1::

    d = Where(y == 0 or y == -1, 1, y);    x / y = Where(y == -1, -x, x / d)

so that a division by 0 from data gives the dividend, and its remainder is 0. Shifts by a negative
number, or by all bits and more, leave copies of the sign to the right, and zeros else::

    inside = 0 <= y < bits;    x << y = Where(inside, x << Where(inside, y, 0), 0)
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from ...model.graph_edits import attribute, is_default_domain, set_attributes
from ...model.tensor_facts import INTEGER_TYPES, SIGNED_TYPES, GraphFacts
from ..expansion import Expansion


def replace_divisions_by_minus_one(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Write ``x / -1`` as ``x * -1`` and ``x % -1`` as ``x * 0``, which broadcast alike."""
    for node in model.graph.node:
        if not is_default_domain(node) or node.op_type not in ("Div", "Mod"):
            continue
        divisor = facts.constant(node.input[1])
        signed = facts.dtype(node.output[0]) in SIGNED_TYPES
        if not signed or divisor is None or not (divisor == -1).all():
            continue
        if node.op_type == "Mod":
            node.input[1] = facts.add_constant(f"{node.input[1]}/zero", np.zeros_like(divisor))
            set_attributes(node, ("fmod",))
        node.op_type = "Mul"


def expand_division(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a Div or a Mod of integers by divisors from data, or by -1 and others."""
    facts = expansion.facts
    x, y = node.input
    dtype = facts.dtype(x)
    divisor = facts.constant(y)
    if dtype not in INTEGER_TYPES or division_problem(node, facts) is not None:
        return
    if divisor is not None and not ((divisor == -1).any() and (divisor != -1).any()):
        return
    zero, one = (expansion.number(value, dtype) for value in (0, 1))
    unsafe = expansion.emit("Equal", y, zero)
    is_negated = ""
    if dtype in SIGNED_TYPES:
        is_negated = expansion.emit("Equal", y, expansion.number(-1, dtype))
        unsafe = expansion.emit("Or", unsafe, is_negated)
    safe = expansion.emit("Where", unsafe, one, y)
    mode = {"fmod": attribute(node, "fmod", 0)} if node.op_type == "Mod" else {}
    result = expansion.emit(node.op_type, x, safe, **mode)
    if is_negated and node.op_type == "Div":
        result = expansion.emit("Where", is_negated, expansion.emit("Sub", zero, x), result)
    expansion.finish(result)


def expand_shift(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a BitShift by numbers that may be outside of the bits."""
    facts = expansion.facts
    x, y = node.input
    dtype, places = facts.dtype(x), facts.constant(y)
    if dtype not in INTEGER_TYPES:
        return
    bits = 8 * helper.tensor_dtype_to_np_dtype(dtype).itemsize
    if places is not None and ((places >= 0) & (places < bits)).all():
        return
    zero = expansion.number(0, dtype)
    inside = expansion.emit("Less", y, expansion.number(bits, dtype))
    if dtype in SIGNED_TYPES:
        inside = expansion.emit("And", inside, expansion.emit("GreaterOrEqual", y, zero))
    direction = attribute(node, "direction")
    fills = dtype in SIGNED_TYPES and direction == "RIGHT"
    other = expansion.number(bits - 1, dtype) if fills else zero
    safe = expansion.emit("Where", inside, y, other)
    shifted = expansion.emit("BitShift", x, safe, direction=direction)
    expansion.finish(shifted if fills else expansion.emit("Where", inside, shifted, zero))


def division_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why an integer division could crash the process, if any."""
    if facts.dtype(node.output[0]) not in INTEGER_TYPES:
        return None
    divisor = facts.constant(node.input[1])
    if divisor is not None and not divisor.all():
        return "it divides integers by zero"
    return None
