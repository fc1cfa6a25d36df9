# SPDX-License-Identifier: Apache-2.0
"""Casts, numbers of few bits, and types that are too narrow for a sum.

Numbers of 8 bits and fewer that no kernel computes with are carried as bytes::

    float8, float6, float4, as bits:    Cast from:  table[bits];      Cast to:  a kernel rounds
    int4, int2 and those without sign:  Cast from:  the number;       Cast to:  modulo 16 or 4

Tensors that are moved only, as by Reshape, are moved as bytes. The formats are those of
``ml_dtypes``, and a Cast rounds to even and saturates as ONNX defines it.

Casts of clipped floats to whole numbers are one operator::

    Cast(Clip(x, -8, 7), to=INT4)        ->      Saturate(x, low=-8, high=7, to=INT4)

TVM's converter looks for infinities and wraps what is out of range, in expressions that repeat
their operand; a few of them in a row take TVM half a minute to simplify.

What TVM cannot compute in the model's type is computed in a wider one, and cast back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tvm import relax, te, tirx

from ..model.expansion import HALVES, Expansion
from ..model.graph_edits import attribute, is_default_domain, replace_nodes
from ..model.narrow_weight import NarrowWeight
from ..model.tensor_facts import INTEGER_TYPES, GraphFacts
from ..model.weights import Weights, to_array
from .operator import Operator

FLOAT8 = frozenset(
    getattr(TensorProto, f"FLOAT8{name}")
    for name in ("E4M3FN", "E4M3FNUZ", "E5M2", "E5M2FNUZ", "E8M0")
)
NARROW_FLOATS = FLOAT8 | {
    TensorProto.FLOAT4E2M1,
    TensorProto.FLOAT6E2M3,
    TensorProto.FLOAT6E3M2,
}
NARROW_INTEGERS: dict[int, int] = {
    TensorProto.INT2: TensorProto.INT8,
    TensorProto.INT4: TensorProto.INT8,
    TensorProto.UINT2: TensorProto.UINT8,
    TensorProto.UINT4: TensorProto.UINT8,
}
"""Types, and those that carry their numbers."""

NARROW = NARROW_FLOATS.union(NARROW_INTEGERS)

ROUND = "tvm_fusion.RoundToNarrow"
"""Operator for the kernel of a Cast from float32 to bits of ``to``."""

INFINITY = 0x7F800000
"""Bits of an infinity of float32; those of NaN are higher."""

BIAS = 127
"""Bias of the exponents of float32."""


def carry_narrow_types(model: onnx.ModelProto, facts: GraphFacts, weights: Weights) -> None:
    """Let bytes take the place of all narrow types but those of the model's inputs and outputs."""
    graph = model.graph
    inputs, outputs = (
        {value.name: value.type.tensor_type.elem_type for value in values}
        for values in (graph.input, graph.output)
    )
    ends = [name for name, kind in (inputs | outputs).items() if kind in NARROW]
    bits = {name: facts.fresh(f"{name}/bits") for name in ends if name not in weights}
    nodes = [_bit_cast(name, bits[name], TensorProto.UINT8) for name in inputs if name in bits]
    for node in graph.node:
        nodes += _carried(node, facts, bits)
    nodes += [_bit_cast(bits[name], name, kind) for name, kind in outputs.items() if name in bits]
    if len(nodes) == len(graph.node) and not any(t.data_type in NARROW for t in graph.initializer):
        if not any(map(_is_narrow, weights.values())):
            return
    replace_nodes(graph, nodes)
    for tensor in graph.initializer:
        if tensor.data_type in NARROW:
            name = bits.get(tensor.name, tensor.name)
            tensor.CopyFrom(numpy_helper.from_array(_bytes(to_array(tensor)), name))
    for name, value in weights.items():
        if isinstance(value, np.ndarray) and _is_narrow(value):
            weights[name] = _bytes(value)


def _bit_cast(source: str, result: str, kind: int) -> onnx.NodeProto:
    return helper.make_node("BitCast", [source], [result], name=result, to=kind)


def _carried(
    node: onnx.NodeProto, facts: GraphFacts, names: dict[str, str]
) -> list[onnx.NodeProto]:
    """The nodes that do with bytes what a node does; ``names`` has other names of tensors."""
    nodes = [node]
    if node.op_type == "Cast" and is_default_domain(node):
        expansion = Expansion(node, facts)
        _expand_cast(expansion)
        nodes = expansion.nodes or nodes
    for each in nodes:
        for side in (each.input, each.output):
            for index, name in enumerate(side):
                side[index] = names.get(name, name)
    return nodes


def _expand_cast(expansion: Expansion) -> None:
    """Replace a Cast from or to a narrow type."""
    x, kind, target = (
        expansion.input(0),
        expansion.facts.dtype(expansion.input(0)),
        expansion.get("to"),
    )
    if kind in NARROW_FLOATS:
        places = expansion.emit("Cast", x, to=TensorProto.INT32)
        x = expansion.emit("Gather", expansion.constant("table", _values(kind)), places, axis=0)
        kind = TensorProto.FLOAT
    elif kind not in NARROW_INTEGERS and target not in NARROW:
        return
    if target in NARROW_FLOATS:
        x = x if kind == TensorProto.FLOAT else expansion.emit("Cast", x, to=TensorProto.FLOAT)
        mode = expansion.get("round_mode", "up")
        saturate = expansion.get("saturate", 1)
        x = expansion.emit(ROUND, x, to=target, saturate=saturate, round_mode=mode)
    elif target in NARROW_INTEGERS:
        x = _wrapped(expansion, x, target)
    else:
        x = expansion.emit("Cast", x, to=target)
    expansion.finish(x)


def _values(kind: int) -> np.ndarray:
    """The numbers of all bits of a type; those beyond its own repeat."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    codes = np.arange(256) % (1 << ml_dtypes.finfo(dtype).bits)
    return codes.astype(np.uint8).view(dtype).astype(np.float32)


def _wrapped(expansion: Expansion, x: str, target: int) -> str:
    """Numbers modulo the range of a type, by bits: TVM simplifies divisions for half a minute."""
    kind = NARROW_INTEGERS[target]
    limits = ml_dtypes.iinfo(helper.tensor_dtype_to_np_dtype(target))
    lowest, mask = int(limits.min), int(limits.max) - int(limits.min)
    bits = expansion.emit("Cast", x, to=kind)
    bits = expansion.emit("BitwiseAnd", bits, expansion.number(mask, kind))
    if not lowest:
        return bits
    half = expansion.number(-lowest, kind)
    return expansion.emit("Sub", expansion.emit("BitwiseXor", bits, half), half)


def _is_narrow(value: np.ndarray | NarrowWeight) -> bool:
    is_known = value.dtype.isbuiltin != 1 and value.dtype.itemsize == 1
    return is_known and helper.np_dtype_to_tensor_dtype(value.dtype) in NARROW


def _bytes(value: np.ndarray) -> np.ndarray:
    """Return what carries an array of a narrow type."""
    kind = NARROW_INTEGERS.get(helper.np_dtype_to_tensor_dtype(value.dtype))
    if kind is None:
        return value.view(np.uint8)
    return value.astype(helper.tensor_dtype_to_np_dtype(kind))


def translate_round(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """The bits of float32 numbers in a narrow type."""
    kind, is_clipped = attributes["to"], bool(attributes["saturate"])
    rounding: _Rounding | _PowerOfTwo
    if kind == TensorProto.FLOAT8E8M0:
        rounding = _PowerOfTwo(attributes["round_mode"], is_clipped)
    else:
        rounding = _Rounding(helper.tensor_dtype_to_np_dtype(kind), is_clipped)
    return builder.emit_te(rounding.compute, inputs[0], primfunc_name_hint="round")


def _bits(value: int) -> tirx.Expr:
    return tirx.const(value, "uint32")  # signed ones become int64, as indices do


class _Rounding:
    """Rounds to a type with a sign: the code of a positive number counts steps from 0.

    Parameters
    ----------
    dtype : np.dtype
        The type.
    saturate : bool
        Whether numbers out of range become the last one.
    """

    def __init__(self, dtype: np.dtype, saturate: bool) -> None:
        limits = ml_dtypes.finfo(dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            numbers = np.array([limits.max, np.nan, np.inf], np.float32).astype(dtype)
        last, self._nan, above = (int(code) for code in numbers.view(np.uint8))
        self._last, self._above = last, last if saturate else above
        self._bits, self._digits, self._least = limits.bits, limits.nmant, limits.minexp
        with np.errstate(invalid="ignore"):
            self._signed_zero = bool(np.signbit(np.float32(np.array(-0.0, dtype))))

    def compute(self, x: te.Tensor) -> te.Tensor:
        """The codes of a tensor."""
        return te.compute(x.shape, lambda *i: self._code(x(*i)), name="round")

    def _code(self, x: tirx.Expr) -> tirx.Expr:
        digits, least = self._digits, _bits(self._least + BIAS)
        bits = tirx.reinterpret("uint32", x)
        size = bits & _bits(0x7FFFFFFF)
        exponent = tirx.max(size >> _bits(23), least)
        factor = tirx.reinterpret("float32", (_bits(digits + 2 * BIAS) - exponent) << _bits(23))
        scaled = tirx.reinterpret("float32", size) * factor
        # What overflows counts as the first number after the exponent's last.
        most = tirx.const(float(2 << digits), "float32")
        steps = tirx.Cast("uint32", tirx.nearbyint(tirx.min(scaled, most)))
        code = steps + ((exponent - least) << _bits(digits))
        code = tirx.Select(code > _bits(self._last), _bits(self._above), code)
        negative = (bits >> _bits(31)) << _bits(self._bits - 1)
        if not self._signed_zero:
            negative = tirx.Select(code == _bits(0), _bits(0), negative)
        code = tirx.Select(size > _bits(INFINITY), _bits(self._nan), code | negative)
        return tirx.Cast("uint8", code)


class _PowerOfTwo:
    """Rounds to powers of two; a sign is left out.

    Parameters
    ----------
    mode : bytes
        ``b"up"``, ``b"down"`` or ``b"nearest"``.
    saturate : bool
        Whether numbers out of range become the last one, not NaN.
    """

    def __init__(self, mode: bytes, saturate: bool) -> None:
        self._added = {b"up": (1 << 23) - 1, b"nearest": 1 << 22}.get(mode, 0)
        self._above = 254 if saturate else 255

    def compute(self, x: te.Tensor) -> te.Tensor:
        """The codes of a tensor."""
        return te.compute(x.shape, lambda *i: self._code(x(*i)), name="round")

    def _code(self, x: tirx.Expr) -> tirx.Expr:
        size = tirx.reinterpret("uint32", x) & _bits(0x7FFFFFFF)
        code = (size + _bits(self._added)) >> _bits(23)
        code = tirx.Select(code > _bits(254), _bits(self._above), code)
        return tirx.Cast("uint8", tirx.Select(size >= _bits(INFINITY), _bits(255), code))


SATURATE = "tvm_fusion.Saturate"
"""Operator that :func:`translate_saturate` translates."""

_EXACT_BITS = 16
"""Limits of larger types may be no floats, as which they are an operator's attributes."""


def saturate_casts(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Replace each Cast of a Clip whose limits are in the range of the Cast's type."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    nodes = [_saturated_cast(node, made_by, facts) or node for node in model.graph.node]
    replace_nodes(model.graph, nodes)


def _saturated_cast(
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


def widen_cast(expansion: Expansion) -> None:
    """Cast bfloat16 to whole numbers by way of float32: TVM's converter looks for infinities."""
    x, target = expansion.input(0), expansion.get("to")
    if expansion.facts.dtype(x) == TensorProto.BFLOAT16 and target in INTEGER_TYPES:
        wide = expansion.emit("Cast", x, to=TensorProto.FLOAT)
        expansion.finish(expansion.emit("Cast", wide, to=target))


def widen_sum(expansion: Expansion) -> None:
    """Compute an operator of 16-bit floats in float32, and round its results once."""
    if any(expansion.facts.dtype(name) in HALVES for name in expansion.node.input):
        widen(expansion, TensorProto.FLOAT, HALVES)


def widen_many(expansion: Expansion) -> None:
    """Add more than two tensors of 16-bit floats in float32."""
    if len(expansion.node.input) > 2:
        widen_sum(expansion)


def widen_gemm(expansion: Expansion) -> None:
    """Compute a Gemm with factors in a type that holds them; TVM's converter multiplies by each.

    A ``C`` of factor 0 goes away, as in ONNX Runtime and PyTorch: it may hold NaN.
    """
    factors = [expansion.get(name, 1.0) for name in ("alpha", "beta")]
    if factors[1] == 0:
        del expansion.node.input[2:]
    kind = expansion.facts.dtype(expansion.input(0))
    if kind in INTEGER_TYPES and not all(factor.is_integer() for factor in factors):
        widen(expansion, TensorProto.DOUBLE, [kind])
    elif factors != [1, 1]:
        widen_sum(expansion)


def widen_overlaps(expansion: Expansion) -> None:
    """Add bools as floats, where a sum of any is true, and 16-bit floats in float32."""
    if expansion.facts.dtype(expansion.input(0)) == TensorProto.BOOL:
        widen(expansion, TensorProto.FLOAT, [TensorProto.BOOL])
    widen_sum(expansion)


def widen_resize(expansion: Expansion) -> None:
    """Bound whole numbers by their type, which cubic weights leave, and widen 16-bit floats."""
    kind = expansion.facts.dtype(expansion.input(0))
    if kind in INTEGER_TYPES and expansion.get("mode", "nearest") == "cubic":
        wide = expansion.emit("Cast", expansion.input(0), to=TensorProto.FLOAT)
        inner = onnx.NodeProto()
        inner.CopyFrom(expansion.node)
        inner.input[0], inner.output[0] = (
            wide,
            expansion.facts.fresh(f"{expansion.node.output[0]}/wide"),
        )
        expansion.nodes.append(inner)
        saturate(expansion, inner.output[0], kind)
    widen_sum(expansion)


def widen(expansion: Expansion, wide: int, narrow: Collection[int]) -> None:
    """Cast the inputs of the types ``narrow`` to ``wide``, and such outputs back."""
    facts = expansion.facts
    inner = onnx.NodeProto()
    inner.CopyFrom(expansion.node)
    for index, name in enumerate(expansion.node.input):
        if facts.dtype(name) in narrow:
            inner.input[index] = expansion.emit("Cast", name, to=wide)
    expansion.nodes.append(inner)
    for index, name in enumerate(expansion.node.output):
        if facts.dtype(name) in narrow:
            inner.output[index] = facts.fresh(f"{name}/wide")
            cast = helper.make_node(
                "Cast", inner.output[index : index + 1], [name], to=facts.dtype(name)
            )
            expansion.nodes.append(cast)


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


def bit_cast_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why bits cannot be reinterpreted, if any."""
    source = facts.dtype(node.input[0])
    target = helper.get_node_attr_value(node, "to")
    sizes = [helper.tensor_dtype_to_np_dtype(kind).itemsize for kind in (source, target)]
    return None if sizes[0] == sizes[1] else f"its types have {sizes[0]} and {sizes[1]} bytes"


OPERATORS = (
    Operator("BitCast", check=bit_cast_problem, translate=translate_bit_cast),
    Operator("Cast", expand=widen_cast),
    Operator("CastLike"),
    Operator(ROUND, translate=translate_round),
    Operator(SATURATE, translate=translate_saturate),
)
