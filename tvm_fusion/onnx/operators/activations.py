# SPDX-License-Identifier: Apache-2.0
"""Write activations in other types than float32; constants of TVM's converters are of this type.

Also the mask of a Dropout at inference, which drops nothing::

    y, mask = x, ConstantOfShape(Shape(x), True)

::

    Elu, Selu:        Where(x > 0, gamma * x, gamma * alpha * (exp(x) - 1))
    ThresholdedRelu:  Where(x > alpha, x, 0)
    Shrink:           Where(x > lambda, x - bias, Where(x < -lambda, x + bias, 0))
    PRelu:            Where(x < 0, slope * x, x)
    Clip:             Where(c > high, high, c) with c = Where(x < low, low, x)

Those of 16 bits are computed in float32 where the formula has differences.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from ..model.expansion import HALVES, Expansion
from ..model.tensor_facts import INTEGER_TYPES, GraphFacts
from .casts import widen, widen_sum
from .operator import Operator, operators

SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def expand_dropout(expansion: Expansion) -> None:
    """Replace a Dropout whose mask is read, unless it is in training mode."""
    training = expansion.input(2) if len(expansion.node.input) > 2 else ""
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
    return "it is in training mode" if asked else None


OPERATORS = (
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
