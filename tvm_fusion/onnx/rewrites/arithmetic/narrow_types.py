# SPDX-License-Identifier: Apache-2.0
"""Numbers of 8 bits and fewer that no kernel computes with, carried as bytes.

::

    float8, float6, float4, as bits:    Cast from:  table[bits];      Cast to:  a kernel rounds
    int4, int2 and those without sign:  Cast from:  the number;       Cast to:  modulo 16 or 4

Tensors that are moved only, as by Reshape, are moved as bytes. The formats are those of
``ml_dtypes``, and a Cast rounds to even and saturates as ONNX defines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tvm import relax, te, tirx

from ...model.graph_edits import attribute, is_default_domain, replace_nodes
from ...model.narrow_weight import NarrowWeight
from ...model.tensor_facts import GraphFacts
from ...model.weights import Weights, to_array
from ..expansion import Expansion

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
        _expand_cast(node, expansion)
        nodes = expansion.nodes or nodes
    for each in nodes:
        for side in (each.input, each.output):
            for index, name in enumerate(side):
                side[index] = names.get(name, name)
    return nodes


def _expand_cast(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a Cast from or to a narrow type."""
    x, kind, target = node.input[0], expansion.facts.dtype(node.input[0]), attribute(node, "to")
    if kind in NARROW_FLOATS:
        places = expansion.emit("Cast", x, to=TensorProto.INT32)
        x = expansion.emit("Gather", expansion.constant("table", _values(kind)), places, axis=0)
        kind = TensorProto.FLOAT
    elif kind not in NARROW_INTEGERS and target not in NARROW:
        return
    if target in NARROW_FLOATS:
        x = x if kind == TensorProto.FLOAT else expansion.emit("Cast", x, to=TensorProto.FLOAT)
        mode = attribute(node, "round_mode", "up")
        saturate = attribute(node, "saturate", 1)
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
