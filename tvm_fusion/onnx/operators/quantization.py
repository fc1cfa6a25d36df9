# SPDX-License-Identifier: Apache-2.0
"""Write products and convolutions of quantised tensors by those of floats.

::

    QLinearMatMul:  y = saturate(round((a - za) @ (b - zb) * (sa * sb / sy)) + zy)
    MatMulInteger:  y = (a - za) @ (b - zb)

Sums of products of 8-bit numbers are exact in float32 below 2**24; longer ones take float64 where
the result is an integer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from tvm import relax

from relay_passes.op.elementwise import dynamic_quantize

from ..model.expansion import Expansion, conv_attributes
from ..model.graph_edits import all_graphs, attribute, is_default_domain, replace_nodes
from ..model.narrow_weight import is_divisor
from ..model.tensor_facts import GraphFacts
from .casts import NARROW, NARROW_FLOATS, saturate
from .operator import Operator

LARGEST_PRODUCT = 255 * 255

EXACT_FLOAT32 = 1 << 24


def expand_qlinear_matmul(expansion: Expansion) -> None:
    """Replace a QLinearMatMul."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = expansion.node.input
    shapes = [expansion.facts.shape(scale) for scale in (a_scale, b_scale)]
    if all(shape is not None and len(shape) <= 1 and 1 not in shape for shape in shapes):
        left = expansion.emit("DequantizeLinear", a, a_scale, a_zero, axis=-2)
        right = expansion.emit("DequantizeLinear", b, b_scale, b_zero, axis=-1)
        result = expansion.emit("MatMul", left, right)
        expansion.finish(expansion.emit("QuantizeLinear", result, y_scale, y_zero))
        return
    kind = TensorProto.FLOAT
    product = expansion.emit(
        "MatMul",
        _centred(expansion, a, _as_rows(expansion, a_zero), kind),
        _centred(expansion, b, b_zero, kind),
    )
    scales = _as_rows(expansion, a_scale), b_scale
    _requantize(expansion, product, scales, y_scale, y_zero)


def expand_qlinear_conv(expansion: Expansion) -> None:
    """Replace a QLinearConv by the convolution of the floats that its tensors stand for."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *bias = expansion.node.input
    operands = [
        expansion.emit("DequantizeLinear", x, x_scale, x_zero),
        expansion.emit("DequantizeLinear", w, w_scale, w_zero, axis=0),
    ]
    if bias and bias[0]:
        scale = expansion.emit("Mul", x_scale, w_scale)
        operands.append(expansion.emit("DequantizeLinear", bias[0], scale, axis=0))
    result = expansion.emit("Conv", *operands, **conv_attributes(expansion.node))
    expansion.finish(expansion.emit("QuantizeLinear", result, y_scale, y_zero))


def expand_matmul_integer(expansion: Expansion) -> None:
    """Replace a MatMulInteger."""
    dims = expansion.facts.dims(expansion.input(0)) or (None,)
    kind = _exact(dims[-1])
    _finish_integer(expansion, _matmul_of_integers(expansion, kind), kind)


def expand_conv_integer(expansion: Expansion) -> None:
    """Replace a ConvInteger."""
    shape = expansion.facts.shape(expansion.input(1))
    kind = _exact(None if shape is None else math.prod(shape[1:]))
    _finish_integer(expansion, _conv_of_integers(expansion, kind), kind)


def _finish_integer(expansion: Expansion, value: str, kind: int) -> None:
    """Let a whole number be the result; one of float32 fits, and is clipped so that it shows."""
    if kind == TensorProto.FLOAT:
        bounds = (expansion.number(end, kind) for end in (-EXACT_FLOAT32, EXACT_FLOAT32))
        value = expansion.emit("Clip", value, *bounds)
    expansion.finish(expansion.emit("Cast", value, to=TensorProto.INT32))


def take_products_as_floats(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Compute in float32 each MatMulInteger and ConvInteger that is only read as such.

    ::

        Cast(MatMulInteger(a, b, za, zb), to=FLOAT)   ->   MatMul(Cast(a) - za, Cast(b) - zb)

    That is how models whose activations are quantised at run time read them.
    """
    readers: dict[str, list[onnx.NodeProto]] = {}
    for graph in all_graphs(model):
        for node in graph.node:
            for name in node.input:
                readers.setdefault(name, []).append(node)
    kept = {value.name for value in model.graph.output}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        expansion = Expansion(node, facts)
        product = _PRODUCTS.get(node.op_type) if is_default_domain(node) else None
        casts = [] if product is None else readers.get(node.output[0], [])
        if product and casts and node.output[0] not in kept and all(map(_is_to_float, casts)):
            result = product(expansion, TensorProto.FLOAT)
            for cast in casts:
                cast.op_type = "Identity"
                cast.input[0] = result
                del cast.attribute[:]
        nodes += expansion.nodes or [node]
    replace_nodes(model.graph, nodes)


def _is_to_float(node: onnx.NodeProto) -> bool:
    is_cast = node.op_type == "Cast" and is_default_domain(node)
    return is_cast and attribute(node, "to") == TensorProto.FLOAT


def expand_quantize(expansion: Expansion) -> None:
    """Replace a QuantizeLinear with a scale for each block of an axis, of or to other types."""
    x, scale, zero = [*expansion.node.input, ""][:3]
    facts = expansion.facts
    kind = facts.dtype(zero) if zero else expansion.get("output_dtype", 0) or TensorProto.UINT8
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UNDEFINED)
    is_known = facts.dtype(x) in kinds
    is_own = is_known and not _is_wider_inside(kind, facts.dtype(scale))
    if is_own and not expansion.get("block_size", 0):
        return
    if quantization_problem(expansion.node, facts):
        return  # which refuses the node later
    wide = expansion.emit("Cast", x, to=TensorProto.FLOAT)
    divisor = expansion.emit("Cast", _blocked(expansion, scale), to=TensorProto.FLOAT)
    quotient = expansion.emit("Div", wide, divisor)
    if kind in NARROW_FLOATS:
        is_clipped = expansion.get("saturate", 1)
        expansion.finish(expansion.emit("Cast", quotient, to=kind, saturate=is_clipped))
        return
    rounded = expansion.emit("Round", quotient)
    if zero:
        added = expansion.emit("Cast", _blocked(expansion, zero), to=TensorProto.FLOAT)
        rounded = expansion.emit("Add", rounded, added)
    saturate(expansion, rounded, kind)


def translate_dynamic_quantize(
    builder: relax.BlockBuilder, inputs: Sequence[Any], _: dict[str, Any]
) -> relax.Expr:
    """The op of a DynamicQuantizeLinear."""
    return builder.emit(dynamic_quantize(inputs[0]))


def expand_dequantize(expansion: Expansion) -> None:
    """Replace a DequantizeLinear with a scale for each block, or from a narrow type."""
    x, scale, zero = [*expansion.node.input, ""][:3]
    types = expansion.facts.dtype(x), expansion.facts.dtype(scale)
    if not expansion.get("block_size", 0) and not _is_wider_inside(*types):
        return
    if quantization_problem(expansion.node, expansion.facts):
        return  # which refuses the node later
    kind = expansion.get("output_dtype", 0) or expansion.facts.dtype(scale)
    centred = expansion.emit("Cast", x, to=TensorProto.FLOAT)
    if zero:
        taken = expansion.emit("Cast", _blocked(expansion, zero), to=TensorProto.FLOAT)
        centred = expansion.emit("Sub", centred, taken)
    factor = expansion.emit("Cast", _blocked(expansion, scale), to=TensorProto.FLOAT)
    product = expansion.emit("Mul", centred, factor)
    expansion.finish(expansion.emit("Cast", product, to=kind))


def _is_wider_inside(kind: int | None, scale: int | None) -> bool:
    """Return whether TVM's own type cannot hold a quantised number and its zero point."""
    is_short = scale in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return kind in NARROW or (is_short and kind in (TensorProto.INT16, TensorProto.UINT16))


def _blocked(expansion: Expansion, name: str) -> str:
    """A scale or zero point repeated for the elements of each block, or along its axis."""
    size = expansion.get("block_size", 0)
    if not size:
        rank = len(expansion.facts.dims(expansion.input(0)) or ())
        return _along(expansion, name, expansion.get("axis", 1), rank, name)
    shape = expansion.facts.shape(name)
    data = expansion.facts.shape(expansion.input(0))
    assert shape is not None and data is not None, "blocks of unknown shape were refused"
    axis = expansion.get("axis", 1) % len(shape)
    places = np.arange(data[axis]) // size
    return expansion.emit("Gather", name, expansion.constant("blocks", places), axis=axis)


def quantization_problem(node: onnx.NodeProto, facts: Any) -> str | None:
    """Return the reason why a node's scales and zero points do not fit its tensor, if any."""
    size = attribute(node, "block_size", 0)
    shapes = {name: facts.shape(name) for name in filter(None, node.input)}
    data, *others = shapes.values()
    for name, shape in shapes.items():
        if size and shape is None:
            return f"the shape of {name!r} is only known at run time"
    if size and len({len(shape) for shape in shapes.values()}) > 1:
        return f"with blocks its inputs need as many dimensions as each other; got {shapes}"
    axis = attribute(node, "axis", 1)
    is_one = all(shape is not None and math.prod(shape) == 1 for shape in others)
    if data is not None and not is_one:
        if not -len(data) <= axis < len(data):
            return f"its axis is {axis}; expected one of {len(data)} dimensions"
        expected = [data[axis]]
        if size:
            expected = [*data]
            expected[axis] = -(-data[axis] // size)
        for name, shape in list(shapes.items())[1:]:
            is_single = shape is None or (not size and math.prod(shape) == 1)
            if not is_single and list(shape) != expected:
                per = f"each block of {size} numbers" if size else "each number"
                return (
                    f"{name!r} has shape {shape}; expected {tuple(expected)}, one for {per} along "
                    f"axis {axis}"
                )
    scale = facts.constant(node.input[1]) if node.op_type == "QuantizeLinear" else None
    if scale is not None and not is_divisor(scale):
        return f"its scale {node.input[1]!r} is 0 or NaN; expected numbers to divide by"
    return None


def _exact(count: int | None) -> int:
    """A type in which a sum of ``count`` products is exact."""
    is_short = count is not None and count * LARGEST_PRODUCT < EXACT_FLOAT32
    return TensorProto.FLOAT if is_short else TensorProto.DOUBLE


def _centred(expansion: Expansion, name: str, zero: str, kind: int) -> str:
    """A quantised tensor without its zero point, as floats."""
    wide = expansion.emit("Cast", name, to=kind)
    return expansion.emit("Sub", wide, expansion.emit("Cast", zero, to=kind)) if zero else wide


def _as_rows(expansion: Expansion, name: str) -> str:
    """A number for each row, so that it broadcasts along them; a single number stays."""
    shape = expansion.facts.shape(name) if name else None
    if shape is None or len(shape) != 1 or shape[0] == 1:
        return name
    return expansion.emit("Unsqueeze", name, expansion.constant("axis", np.array([1])))


def _along(expansion: Expansion, name: str, axis: int, rank: int, known: str) -> str:
    """A vector along an axis of a tensor; a single number stays."""
    shape = expansion.facts.shape(known)
    if shape is None or len(shape) != 1 or shape[0] == 1:
        return name
    sizes = np.ones(rank, np.int64)
    sizes[axis] = shape[0]
    return expansion.emit("Reshape", name, expansion.constant("shape", sizes))


def _matmul_of_integers(expansion: Expansion, kind: int) -> str:
    a, b, a_zero, b_zero = [*expansion.node.input, "", ""][:4]
    left = _centred(expansion, a, _as_rows(expansion, a_zero), kind)
    return expansion.emit("MatMul", left, _centred(expansion, b, b_zero, kind))


def _conv_of_integers(expansion: Expansion, kind: int) -> str:
    x, w, x_zero, w_zero = [*expansion.node.input, "", ""][:4]
    rank = len(expansion.facts.dims(w) or ())
    zeros = _along(expansion, w_zero, 0, rank, w_zero) if w_zero else ""
    data, weights = _centred(expansion, x, x_zero, kind), _centred(expansion, w, zeros, kind)
    return expansion.emit("Conv", data, weights, **conv_attributes(expansion.node))


_PRODUCTS = {"ConvInteger": _conv_of_integers, "MatMulInteger": _matmul_of_integers}


def _requantize(
    expansion: Expansion,
    value: str,
    scales: tuple[str, str],
    y_scale: str,
    y_zero: str,
) -> None:
    """Scale, round, add the zero point and saturate."""
    kind = TensorProto.FLOAT
    left, right, below = (expansion.emit("Cast", name, to=kind) for name in (*scales, y_scale))
    factor = expansion.emit("Div", expansion.emit("Mul", left, right), below)
    rounded = expansion.emit("Round", expansion.emit("Mul", value, factor))
    moved = expansion.emit("Add", rounded, expansion.emit("Cast", y_zero, to=kind))
    saturate(expansion, moved, expansion.facts.dtype(y_zero))


OPERATORS = (
    Operator("ConvInteger", expand=expand_conv_integer),
    Operator("DequantizeLinear", expand=expand_dequantize, check=quantization_problem),
    Operator("DynamicQuantizeLinear", translate=translate_dynamic_quantize),
    Operator("MatMulInteger", expand=expand_matmul_integer),
    Operator("QLinearConv", expand=expand_qlinear_conv),
    Operator("QLinearMatMul", expand=expand_qlinear_matmul),
    Operator("QuantizeLinear", expand=expand_quantize, check=quantization_problem),
)
