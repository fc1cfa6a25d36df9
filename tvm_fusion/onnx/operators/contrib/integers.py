# SPDX-License-Identifier: Apache-2.0
"""Operators of ``com.microsoft`` on quantised tensors, written as those of floats.

::

    QLinearAdd:   y = saturate(round(((a - za) * sa + (b - zb) * sb) / sy) + zy)
    MatMulNBits:  y = x @ ((bits of b) - zeros) * scales, transposed
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto

from ...model.expansion import Expansion
from ...model.loader import CONTRIB_DOMAIN
from ...model.narrow_weight import NarrowWeight, narrow_weight
from ..operator import Operator

FLOAT = TensorProto.FLOAT

IN_BYTES = 4
"""Level of accuracy at which a MatMulNBits may round its first operand to 8 bits."""

_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")


def _real(parts: Expansion, x: str, scale: str, zero: str, axis: int = 1) -> str:
    """The floats that a quantised tensor stands for; several scales are those of an axis."""
    scale = _one(parts, scale)
    points = [_one(parts, zero)] if zero else []
    return parts.emit("DequantizeLinear", x, scale, *points, axis=axis)


def _real_at(parts: Expansion, first: int, axis: int = 1) -> str:
    """The floats of the tensor, the scale and the zero point that begin at an input."""
    x, scale, zero = (parts.input(place) for place in range(first, first + 3))
    return _real(parts, x, scale, zero, axis)


def _one(parts: Expansion, name: str) -> str:
    """A number that may be stored as a tensor of one element."""
    dims = parts.facts.dims(name)
    return parts.emit("Reshape", name, parts.integers([])) if dims == (1,) else name


def _finish_quantized(parts: Expansion, value: str, scale: str, zero: str) -> str | None:
    """Let a quantised tensor be the result; without a zero point it is of uint8."""
    kind = parts.facts.dtype(zero) if zero else TensorProto.UINT8
    if kind == TensorProto.UNDEFINED:
        return f"the type of its zero point {zero!r} is not known"
    points = [_one(parts, zero)] if zero else []
    parts.finish(parts.emit("QuantizeLinear", value, _one(parts, scale), *points))
    return None


def qlinear_binary(parts: Expansion) -> str | None:
    """The sum or the product of two tensors."""
    left, right = _real_at(parts, 0), _real_at(parts, 3)
    op_type = parts.node.op_type.removeprefix("QLinear")
    result = parts.emit(op_type, left, right)
    return _finish_quantized(parts, result, parts.input(6), parts.input(7))


def qlinear_unary(parts: Expansion) -> str | None:
    """An activation."""
    op_type = parts.node.op_type.removeprefix("QLinear")
    attributes: dict[str, Any] = {}
    if op_type == "LeakyRelu":
        attributes = {"alpha": parts.get("alpha", 0.01)}
    elif op_type == "Softmax":
        if parts.get("opset", 13) < 13:
            return "it is the Softmax of opset 12, which flattens its input"
        attributes = {"axis": parts.get("axis", -1)}
    x = _real_at(parts, 0)
    return _finish_quantized(
        parts, parts.emit(op_type, x, **attributes), parts.input(3), parts.input(4)
    )


def pool_quantized(parts: Expansion) -> str | None:
    """Means of windows, or of whole images."""
    if parts.get("channels_last", 0):
        return "its channels come last"
    op_type = parts.node.op_type.removeprefix("QLinear")
    given = {name: parts.get(name) for name in _POOL if parts.get(name) is not None}
    x = _real_at(parts, 0)
    return _finish_quantized(parts, parts.emit(op_type, x, **given), parts.input(3), parts.input(4))


def qlinear_concat(parts: Expansion) -> str | None:
    """Tensors of several scales in one."""
    names = list(parts.node.input[2:])
    tensors = [_real(parts, *names[i : i + 3]) for i in range(0, len(names), 3)]
    joined = parts.emit("Concat", *tensors, axis=parts.get("axis", 0))
    return _finish_quantized(parts, joined, parts.input(0), parts.input(1))


def qgemm(parts: Expansion) -> str | None:
    """``alpha * A @ B + C``, quantised again if it has a scale; the scale of C is that of A @ B."""
    flags = {name: parts.get(name, 0) for name in ("transA", "transB")}
    left = _real_at(parts, 0)
    right = _real_at(parts, 3, axis=0 if flags["transB"] else 1)
    result = parts.emit("Gemm", left, right, **flags)
    if parts.input(6):
        scale = parts.emit("Mul", parts.input(1), parts.input(4))
        added = parts.emit("Mul", parts.emit("Cast", parts.input(6), to=FLOAT), scale)
        result = parts.emit("Add", result, added)
    result = parts.scaled(result, parts.get("alpha", 1.0))
    if parts.input(7):
        return _finish_quantized(parts, result, parts.input(7), parts.input(8))
    parts.finish(result)
    return None


def dynamic_matmul(parts: Expansion) -> str | None:
    """``A @ B``, for which A is quantised with the scale of its range."""
    bits, scale, zero = parts.emit_many("DynamicQuantizeLinear", 3, parts.input(0))
    return _float_product(parts, _real(parts, bits, scale, zero), (1, 2, 3), 4)


def integer_matmul(parts: Expansion) -> str | None:
    """``A @ B`` of quantised tensors as floats."""
    left = _real(parts, parts.input(0), parts.input(2), parts.input(4))
    return _float_product(parts, left, (1, 3, 5), 6)


def _float_product(
    parts: Expansion, left: str, right: tuple[int, int, int], bias: int
) -> str | None:
    """The product with the quantised tensor at three inputs, and a bias if there is one."""
    factor, scale, zero = map(parts.input, right)
    product = parts.emit("MatMul", left, _real(parts, factor, scale, zero))
    parts.finish(parts.emit("Add", product, parts.input(bias)) if parts.input(bias) else product)
    return None


def matmul_of_16_bits(parts: Expansion) -> str | None:
    """``A @ B`` in the 32 bits of the result, which has a sign unless neither factor has one."""
    kinds = {parts.facts.dtype(name) for name in parts.node.input}
    kind = TensorProto.UINT32 if kinds == {TensorProto.UINT16} else TensorProto.INT32
    parts.finish(parts.emit("MatMul", *(parts.emit("Cast", x, to=kind) for x in parts.node.input)))
    return None


def as_onnx(parts: Expansion) -> str | None:
    """ONNX's own operator, under another name."""
    node = onnx.NodeProto()
    node.CopyFrom(parts.node)
    node.domain = ""
    parts.nodes.append(node)
    return None


def matmul_of_few_bits(parts: Expansion) -> str | None:
    """The product with columns of 2, 4 or 8 bits that have a scale for each block of rows."""
    rows, columns, bits = parts.get("K"), parts.get("N"), parts.get("bits", 4)
    size = parts.get("block_size")
    if bits not in (2, 4, 8):
        return f"its numbers have {bits} bits; expected 2, 4 or 8"
    if parts.input(4):
        return f"its rows are reordered by {parts.input(4)!r}; expected them in order"
    blocks = -(-rows // size)
    weight = _narrow_matrix(parts, (rows, columns), bits, size)
    if weight is not None:
        right = parts.facts.add_weight(f"{parts.node.output[0]}/weight", weight)
        return _finish_product(parts, right)
    numbers = parts.emit("Cast", _unpacked(parts, parts.input(1), bits), to=FLOAT)
    numbers = parts.reshape(numbers, columns, blocks, size)
    zeros = parts.input(3)
    if not zeros:
        centred = parts.emit("Sub", numbers, parts.number_like(1 << (bits - 1), numbers))
    else:
        if parts.facts.dtype(zeros) == TensorProto.UINT8:
            per_byte = 8 // bits
            packed = parts.reshape(zeros, columns, -(-blocks // per_byte))
            wide = parts.emit("Cast", _unpacked(parts, packed, bits), to=FLOAT)
            zeros = parts.emit("Slice", wide, *map(parts.integers, ([0], [blocks], [1])))
        else:
            zeros = parts.emit("Cast", zeros, to=FLOAT)
        centred = parts.emit("Sub", numbers, parts.reshape(zeros, columns, blocks, 1))
    scales = parts.emit("Cast", parts.input(2), to=FLOAT)
    weights = parts.emit("Mul", centred, parts.reshape(scales, columns, blocks, 1))
    flat = parts.reshape(weights, columns, blocks * size)
    flat = parts.emit("Slice", flat, *map(parts.integers, ([0], [rows], [1])))
    right = parts.emit("CastLike", parts.emit("Transpose", flat, perm=[1, 0]), parts.input(0))
    return _finish_product(parts, right)


def gather_in_blocks(parts: Expansion) -> str | None:
    """Rows of a constant matrix of 4 or 8 bits whose rows have a scale for each block."""
    places = (0, 2, 3) if parts.input(3) else (0, 2)
    given = [parts.facts.constant(parts.input(place)) for place in places]
    known = [tensor for tensor in given if tensor is not None]
    if len(known) < len(given):
        return "its data, scales or zero points are only known at run time"
    data, scales, *zeros = known
    axes = parts.get("gather_axis", 0), parts.get("quantize_axis", 1)
    if data.ndim != 2 or axes not in ((0, 1), (0, -1)):
        return f"it gathers along axis {axes[0]} of {data.ndim} with blocks along {axes[1]}"
    size, bits, is_packed = parts.get("block_size", 128), parts.get("bits", 4), False
    if data.dtype == np.uint8:
        if bits not in (4, 8):
            return f"its numbers have {bits} bits; expected 4 or 8"
        is_packed = bits == 4
        zeros = zeros or [np.full(scales.shape, 1 << (bits - 1), np.uint8)]
    if is_packed:
        data = _split(data, 4).astype(ml_dtypes.uint4)
        zeros = (
            [_split(zero, 4)[:, : scales.shape[1]] for zero in zeros] if parts.input(3) else zeros
        )
    blocks = data.shape[0], -(-data.shape[1] // size)
    if any(tensor.shape != blocks for tensor in (scales, *zeros)):
        return f"its scales have shape {scales.shape}; expected {blocks} for blocks of {size}"
    zero = zeros[0] if zeros else None
    found = narrow_weight(data, scales, zero, axis=1, block=size)
    name = f"{parts.node.output[0]}/weight"
    if found is not None:
        table = parts.facts.add_weight(name, found)
    else:
        columns = np.arange(data.shape[1]) // size
        numbers = data.astype(np.float32)
        if zero is not None:
            numbers = numbers - zero.astype(np.float32)[:, columns]
        numbers = (numbers * scales.astype(np.float32)[:, columns]).astype(scales.dtype)
        table = parts.facts.add_constant(name, numbers)
    parts.finish(parts.emit("Gather", table, parts.input(1), axis=0))
    return None


def _finish_product(parts: Expansion, right: str) -> str | None:
    product = parts.emit("MatMul", parts.input(0), right)
    parts.finish(parts.emit("Add", product, parts.input(5)) if parts.input(5) else product)
    return None


def _narrow_matrix(
    parts: Expansion, shape: tuple[int, int], bits: int, block: int
) -> NarrowWeight | None:
    """The matrix of a MatMulNBits as it is stored, if it is a constant that kernels read so."""
    rows, columns = shape
    given = [parts.facts.constant(parts.input(place)) for place in (1, 2, 3)]
    packed, scales, zeros = given
    if packed is None or scales is None or (parts.input(3) and zeros is None):
        return None
    blocks = -(-rows // block)
    integers = _split(packed.reshape(columns, -1), bits)[:, :rows]
    if zeros is not None:
        is_packed = zeros.dtype == np.uint8
        zeros = _split(zeros.reshape(columns, -1), bits) if is_packed else zeros
        zeros = zeros.reshape(columns, -1)[:, :blocks]
    else:
        zeros = np.full((columns, blocks), 1 << (bits - 1), np.uint8)
    # As bytes they are of 8 bits: the type tells how many there are.
    kind = {2: ml_dtypes.uint2, 4: ml_dtypes.uint4, 8: np.uint8}[bits]
    found = narrow_weight(
        integers.astype(kind), scales.reshape(columns, blocks), zeros, axis=1, block=block
    )
    if found is None:
        return None
    return replace(found.transposed(), by_bytes=parts.get("accuracy_level", 0) == IN_BYTES)


def _split(packed: np.ndarray, bits: int) -> np.ndarray:
    """The numbers that share bytes along the last axis, the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return numbers.reshape(*packed.shape[:-1], -1)


def _unpacked(parts: Expansion, packed: str, bits: int) -> str:
    """The numbers that share bytes, the lowest bits first, along the last axis; [n, numbers]."""
    if bits == 8:
        return packed
    base = parts.constant("base", np.array(1 << bits, np.uint8))
    numbers = []
    rest = packed
    for _ in range(8 // bits):
        number = parts.emit("Mod", rest, base)
        numbers.append(parts.emit("Unsqueeze", number, parts.integers([-1])))
        rest = parts.emit("Div", rest, base)
    joined = parts.emit("Concat", *numbers, axis=-1)
    return parts.reshape(joined, 0, -1)


OPERATORS = [
    Operator(
        "MatMulInteger16",
        CONTRIB_DOMAIN,
        is_foreign=True,
        needs_shapes=True,
        expand=matmul_of_16_bits,
    ),
    *(
        Operator(name, CONTRIB_DOMAIN, is_foreign=True, expand=rule)
        for name, rule in (
            ("DequantizeLinear", as_onnx),
            ("DynamicQuantizeMatMul", dynamic_matmul),
            ("MatMulIntegerToFloat", integer_matmul),
            ("GatherBlockQuantized", gather_in_blocks),
            ("MatMulNBits", matmul_of_few_bits),
            ("QGemm", qgemm),
            ("QLinearAdd", qlinear_binary),
            ("QLinearAveragePool", pool_quantized),
            ("QLinearConcat", qlinear_concat),
            ("QLinearGlobalAveragePool", pool_quantized),
            ("QLinearLeakyRelu", qlinear_unary),
            ("QLinearMul", qlinear_binary),
            ("QLinearSigmoid", qlinear_unary),
            ("QLinearSoftmax", qlinear_unary),
            ("QuantizeLinear", as_onnx),
        )
    ),
]
