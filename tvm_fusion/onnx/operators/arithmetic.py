# SPDX-License-Identifier: Apache-2.0
"""Element-wise arithmetic and activations, and products of matrices.

Processors do not define divisions and shifts of integers for every operand. Divisions trap
neither by zero nor of the least integer by -1::

    d = Where(y == 0 or y == -1, 1, y);    x / y = Where(y == -1, -x, x / d)

so that a division by 0 from data gives the dividend, and its remainder is 0. Shifts by a negative
number, or by all bits and more, leave copies of the sign to the right, and zeros else::

    inside = 0 <= y < bits;    x << y = Where(inside, x << Where(inside, y, 0), 0)

An IsInf of one sign is a comparison; TVM's converter always looks for both. TVM tests bfloat16 for
neither infinities nor NaN, so its values are cast first.

The Mod of floats that rounds down is written by the remainder that rounds to zero::

    r = x - trunc(x / y) * y;    y = r or r + y, whichever has the sign of the divisor

Of bfloat16, for which TVM has no remainder, both are computed in float32, where they are exact.
The converter's ``x - floor(x / y) * y`` is NaN for an infinite divisor, and loses the sign of zero.

A Pow becomes products for small integer exponents, else it has operands of one type. A power
function is slow, and with fast arithmetic on a GPU it loses negative bases.

Activations in other types than float32 are written out, as constants of TVM's converters are of it;
those of 16 bits are computed in float32 where the formula has differences::

    Elu, Selu:        Where(x > 0, gamma * x, gamma * alpha * (exp(x) - 1))
    ThresholdedRelu:  Where(x > alpha, x, 0)
    Shrink:           Where(x > lambda, x - bias, Where(x < -lambda, x + bias, 0))
    PRelu:            Where(x < 0, slope * x, x)
    Clip:             Where(c > high, high, c) with c = Where(x < low, low, x)
    Dropout:          x, ConstantOfShape(Shape(x), True)
"""

from __future__ import annotations

import math
import re

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..model.expansion import HALVES, Expansion
from ..model.graph_edits import attribute
from ..model.tensor_facts import INTEGER_TYPES, SIGNED_TYPES, GraphFacts
from .casts import widen, widen_gemm, widen_many, widen_sum
from .operator import Operator, operators


def expand_division(expansion: Expansion) -> None:
    """Replace a Div or a Mod of integers by divisors from data, or by -1."""
    facts = expansion.facts
    x, y = expansion.node.input
    dtype = facts.dtype(x)
    divisor = facts.constant(y)
    if dtype in SIGNED_TYPES and divisor is not None and (divisor == -1).all():
        if expansion.node.op_type == "Mod":
            y = expansion.constant("zero", np.zeros_like(divisor))  # which broadcasts alike
        expansion.finish(expansion.emit("Mul", x, y))
        return
    if dtype not in INTEGER_TYPES or division_problem(expansion.node, facts) is not None:
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
    mode = {"fmod": expansion.get("fmod", 0)} if expansion.node.op_type == "Mod" else {}
    result = expansion.emit(expansion.node.op_type, x, safe, **mode)
    if is_negated and expansion.node.op_type == "Div":
        result = expansion.emit("Where", is_negated, expansion.emit("Sub", zero, x), result)
    expansion.finish(result)


def expand_shift(expansion: Expansion) -> None:
    """Replace a BitShift by numbers that may be outside of the bits."""
    facts = expansion.facts
    x, y = expansion.node.input
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
    direction = expansion.get("direction")
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


def expand_is_inf(expansion: Expansion) -> None:
    """``x == inf``, ``x == -inf``, or for neither sign ``x < x``, which no number is."""
    positive = bool(expansion.get("detect_positive", 1))
    negative = bool(expansion.get("detect_negative", 1))
    x = expansion.input(0)
    if positive and negative:
        _cast_first(expansion)
        return
    if positive or negative:
        infinity = math.inf if positive else -math.inf
        number = expansion.number(infinity, expansion.facts.dtype(x))
        expansion.finish(expansion.emit("Equal", x, number))
    else:
        expansion.finish(expansion.emit("Less", x, x))


def expand_is_nan(expansion: Expansion) -> None:
    """Test the values of a bfloat16 tensor as float32."""
    _cast_first(expansion)


def _cast_first(expansion: Expansion) -> None:
    """Emit the node behind a cast of its input to float32, if that is bfloat16."""
    x = expansion.input(0)
    if expansion.facts.dtype(x) == TensorProto.BFLOAT16:
        wide = expansion.emit("Cast", x, to=TensorProto.FLOAT)
        expansion.finish(expansion.emit(expansion.node.op_type, wide))


def expand_modulo(expansion: Expansion) -> None:
    """Replace a Mod of floats with ``fmod=0`` or of bfloat16, or of integers by unsafe divisors."""
    dtype = expansion.facts.dtype(expansion.input(0))
    if dtype in INTEGER_TYPES:
        expand_division(expansion)
    truncated, is_wide = bool(expansion.get("fmod", 0)), dtype == TensorProto.BFLOAT16
    if not dtype or dtype in INTEGER_TYPES or (truncated and not is_wide):
        return
    x, divisor = expansion.node.input
    if is_wide:
        wide = [expansion.emit("Cast", name, to=TensorProto.FLOAT) for name in expansion.node.input]
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


LARGEST_PRODUCT = 8
"""Largest exponent that becomes products, at most four of them."""

WIDER: dict[int | None, int] = {
    TensorProto.BFLOAT16: TensorProto.FLOAT,
    **dict.fromkeys(INTEGER_TYPES, TensorProto.DOUBLE),
}
"""Types that TVM has no power of, and the one that it is computed in."""


def expand_power(expansion: Expansion) -> None:
    """Write products for small exponents, else compute in a type that TVM has powers of.

    ::

        integers:  Cast(Pow(Cast(x, double), Cast(y, double)))
        bfloat16:  Cast(Pow(Cast(x, float), Cast(y, float)))
        floats:    Pow(x, Cast(y))
    """
    node, facts = expansion.node, expansion.facts
    power = _small_exponent(node, facts)
    if power is not None:
        expansion.nodes += _products(node, power, facts)
        return
    base, exponent = facts.dtype(node.input[0]), facts.constant(node.input[1])
    kind = WIDER.get(base)
    if kind is not None:
        wide = [expansion.emit("Cast", name, to=kind) for name in node.input]
        expansion.finish(expansion.emit("Cast", expansion.emit("Pow", *wide), to=base))
    elif exponent is not None:
        _cast_exponent(node, exponent, facts)
    elif facts.dtype(node.input[1]) != base:
        cast = expansion.emit("Cast", node.input[1], to=base)
        expansion.finish(expansion.emit("Pow", node.input[0], cast))


def _small_exponent(node: onnx.NodeProto, facts: GraphFacts) -> int | None:
    base = facts.dtype(node.input[0])
    if not base or base in INTEGER_TYPES:
        return None
    exponent, dims = facts.constant(node.input[1]), facts.dims(node.input[0])
    if exponent is None or exponent.size != 1 or dims is None or exponent.ndim > len(dims):
        return None
    value = float(exponent.reshape(()))
    return int(value) if value in range(2, LARGEST_PRODUCT + 1) else None


def _products(node: onnx.NodeProto, exponent: int, facts: GraphFacts) -> list[onnx.NodeProto]:
    """The products of squares that make up a power."""
    square, result = node.input[0], ""
    pairs: list[tuple[str, str]] = []
    names: list[str] = []

    def multiply(x: str, y: str) -> str:
        pairs.append((x, y))
        names.append(facts.fresh(f"{node.output[0]}/product"))
        return names[-1]

    while exponent:
        if exponent % 2:
            result = multiply(result, square) if result else square
        exponent //= 2
        square = multiply(square, square) if exponent else square
    names[-1] = node.output[0]
    return [
        helper.make_node("Mul", pair, [name], name=f"{node.name}/{index}" if node.name else "")
        for index, (pair, name) in enumerate(zip(pairs, names, strict=True))
    ]


def _cast_exponent(node: onnx.NodeProto, exponent: np.ndarray, facts: GraphFacts) -> None:
    """Cast the constant exponent of a Pow to the type of its base, which TVM expects.

    A number becomes a vector of one: of a number from 3 on TVM warns on standard error.
    """
    is_number = exponent.ndim == 0 and bool(facts.dims(node.input[0]))
    base = facts.dtype(node.input[0])
    if base and (is_number or facts.dtype(node.input[1]) != base):
        cast = exponent.astype(helper.tensor_dtype_to_np_dtype(base))
        cast = cast.reshape(1) if is_number else cast
        node.input[1] = facts.add_constant(f"{node.input[1]}/cast", cast)


def expand_sum(expansion: Expansion) -> None:
    """Add one after the other; TVM's converter stacks the inputs and reduces that."""
    total, *terms = expansion.node.input
    for term in terms:
        total = expansion.emit("Add", total, term)
    if terms:
        expansion.finish(total)


def _einsum_defect(node: onnx.NodeProto) -> str | None:
    equation = attribute(node, "equation", "")
    is_known = re.fullmatch(r"[A-Za-z,.>\- ]+", equation)
    return None if is_known else f"its equation is {equation!r}"


SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def expand_dropout(expansion: Expansion) -> None:
    """Replace a Dropout whose mask is read, unless it is in training mode."""
    training = expansion.input(2)
    value = expansion.facts.constant(training) if training else np.array(False)
    if len(expansion.node.output) < 2 or value is None or value.any():
        return
    shape = expansion.emit("Shape", expansion.input(0))
    kept = onnx.numpy_helper.from_array(np.array([True]))
    expansion.finish(expansion.input(0), expansion.emit("ConstantOfShape", shape, value=kept))


def expand_elu(expansion: Expansion) -> None:
    """Replace an Elu of another type than float32."""
    _expand_exponential(expansion, expansion.get("alpha", 1.0), 1.0)


def expand_selu(expansion: Expansion) -> None:
    """Replace a Selu of another type than float32."""
    alpha = expansion.get("alpha", SELU_ALPHA)
    _expand_exponential(expansion, alpha, expansion.get("gamma", SELU_GAMMA))


def _expand_exponential(expansion: Expansion, alpha: float, gamma: float) -> None:
    x = expansion.input(0)
    dtype = expansion.facts.dtype(x)
    if dtype in HALVES:
        widen(expansion, TensorProto.FLOAT, HALVES)
    if dtype != TensorProto.DOUBLE:
        return
    zero, one, left, right = (
        expansion.number(value, dtype) for value in (0.0, 1.0, gamma * alpha, gamma)
    )
    less_one = expansion.emit("Sub", expansion.emit("Exp", x), one)
    below = expansion.emit("Mul", left, less_one)
    above = expansion.emit("Mul", right, x) if gamma != 1 else x
    is_above = expansion.emit("Greater", x, zero)
    expansion.finish(expansion.emit("Where", is_above, above, below))


def expand_prelu(expansion: Expansion) -> None:
    """Replace a PRelu that TVM's converter refuses: of integers, bfloat16, or a single number."""
    x, slope = expansion.node.input
    facts = expansion.facts
    sizes, slopes = (facts.dims(name) or () for name in (x, slope))
    pairs = zip(reversed(sizes), reversed(slopes), strict=False)
    is_known = bool(sizes) and all(count in (1, size) for size, count in pairs)
    if is_known and facts.dtype(x) in _OF_PRELU:
        return
    is_below = expansion.emit("Less", x, expansion.number(0, facts.dtype(x)))
    scaled = expansion.emit("Mul", x, slope)
    expansion.finish(expansion.emit("Where", is_below, scaled, x))


_OF_PRELU = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


def expand_thresholded_relu(expansion: Expansion) -> None:
    """Replace a ThresholdedRelu of any type: TVM's converter makes NaN of 0 times an infinity."""
    x = expansion.input(0)
    dtype = expansion.facts.dtype(x)
    alpha, zero = (expansion.number(v, dtype) for v in (expansion.get("alpha", 1.0), 0.0))
    expansion.finish(expansion.emit("Where", expansion.emit("Greater", x, alpha), x, zero))


def expand_shrink(expansion: Expansion) -> None:
    """Replace a Shrink: of integers TVM's converter would cut off what is behind the points."""
    x, kind = expansion.input(0), expansion.facts.dtype(expansion.input(0))
    wide = TensorProto.DOUBLE if kind in INTEGER_TYPES else kind
    size = x if wide == kind else expansion.emit("Cast", x, to=wide)
    limit, bias = expansion.get("lambd", 0.5), expansion.get("bias", 0.0)
    high, low, moved, zero = (expansion.number(v, wide) for v in (limit, -limit, bias, 0.0))
    is_above = expansion.emit("Greater", size, high)
    is_below = expansion.emit("Less", size, low)
    above, below = (expansion.emit(op, size, moved) for op in ("Sub", "Add"))
    result = expansion.emit(
        "Where", is_above, above, expansion.emit("Where", is_below, below, zero)
    )
    expansion.finish(result if wide == kind else expansion.emit("Cast", result, to=kind))


def expand_clip(expansion: Expansion) -> None:
    """Replace a Clip by limits from data, of which NaN is none; NaN among the numbers stays."""
    limits = [*expansion.node.input[1:], "", ""][:2]
    if all(not name or expansion.facts.constant(name) is not None for name in limits):
        return
    result = expansion.input(0)
    for name, compare in zip(limits, ("Less", "Greater"), strict=True):
        if name:
            is_beyond = expansion.emit(compare, result, name)
            result = expansion.emit("Where", is_beyond, name, result)
    expansion.finish(result)


def _dropout_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    mode = facts.constant(node.input[2]) if len(node.input) > 2 else None
    asked = len(node.input) > 2 and node.input[2] and (mode is None or mode.any())
    if not asked:
        return None
    return "it is in training mode, and drops numbers at random; export the model after .eval()"


OPERATORS = (
    *operators(
        """Abs Acos Acosh Add And Asin Asinh Atan Atanh BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
        Ceil Cos Cosh Equal Erf Exp Floor Greater GreaterOrEqual Less LessOrEqual Log MatMul Max Min
        Mul Neg Not Or Reciprocal Round Sign Sin Sinh Sqrt Sub Tan Where Xor"""
    ),
    Operator("BitShift", expand=expand_shift),
    Operator("Div", expand=expand_division, check=division_problem),
    Operator("Einsum", defect=_einsum_defect, widen=widen_sum),
    Operator("Gemm", widen=widen_gemm),
    Operator("IsInf", expand=expand_is_inf),
    Operator("IsNaN", expand=expand_is_nan),
    Operator("Mean", widen=widen_sum),
    Operator("Mod", expand=expand_modulo, check=division_problem),
    Operator("Pow", expand=expand_power),
    Operator("Sum", widen=widen_many, expand=expand_sum),
    *operators(
        """Hardmax HardSwish LeakyRelu LogSoftmax Relu Sigmoid Softmax Softplus Softsign Tanh"""
    ),
    *operators("Celu SwiGLU Swish", is_defined=True),
    *operators("Gelu HardSigmoid Mish", expand=widen_sum),
    Operator("Clip", expand=expand_clip),
    Operator("Dropout", outputs=2, expand=expand_dropout, check=_dropout_problem),
    Operator("Elu", expand=expand_elu),
    Operator("PRelu", expand=expand_prelu),
    Operator("Selu", expand=expand_selu),
    Operator("Shrink", expand=expand_shrink),
    Operator("ThresholdedRelu", expand=expand_thresholded_relu),
)
