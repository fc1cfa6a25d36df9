# SPDX-License-Identifier: Apache-2.0
"""Epilogues of products of bytes: factors, biases and activations that follow join the call.

Each needs the product to have no other reader. Between a matrix product and its epilogue stands a
reshape, since the product is a convolution of pixels.
"""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import NamedTuple

import numpy as np
from tvm import relax
from tvm.ir import GenericConst
from tvm_ffi import structural_equal

from schedules.workload.conv2d import WORD_BYTES, ByteAddition

from ...core.constants import (
    array_of,
    constant,
    numbers,
    per_channel,
    scaled,
    shifted,
    tensor_constant,
    uniform,
)
from ...core.expressions import Value, op_name
from ...core.graph import Graph
from ...op.conv2d import CONV2D
from ...op.elementwise import BYTE, bounds_of
from ...op.quantized_conv2d import QUANTIZED_CONV2D
from ..conv_chain import read_activation
from .byte_tensors import ROUND_CLIP, bytes_of

_END = 2**31
_NEAR = 2.0**-21  # relative error of whole numbers after a few products in float32


class _Product(NamedTuple):
    """A call without activation, and the reshape after it, if any."""

    call: relax.Call
    reshape: relax.Call | None

    def rebuilt(self, graph: Graph, operands: list[relax.Expr], **attrs: object) -> relax.Expr:
        """The same product with other operands and attributes."""
        changed = dict(self.call.attrs.items()) | attrs
        call = relax.Call(self.call.op, operands, changed)
        if self.reshape is None:
            return call
        return relax.op.reshape(graph.emit(call), self.reshape.args[1])


def fold_byte_bias(graph: Graph, call: relax.Call) -> Value:
    """Add a constant, one number a channel, in the product."""
    match = shifted(call)
    product = None if match is None else _open_product(graph, match[0])
    if match is None or product is None:
        return None
    data, weight, bias, *scale = product.call.args
    ndim, axis = call.ty.ndim, 1 if product.reshape is None else call.ty.ndim - 1
    offset = per_channel(match[1], ndim, int(bias.ty.shape.values[0]), axis)
    total = None if offset is None else _total_bias(graph, product.call, offset)
    return None if total is None else product.rebuilt(graph, [data, weight, total, *scale])


def fold_byte_scale(graph: Graph, call: relax.Call) -> Value:
    """Multiply by a scalar that is known only at run time in the product."""
    for data, factor in (call.args, reversed(call.args)):
        product = _open_product(graph, data)
        if product is None or isinstance(factor, GenericConst) or factor.ty.ndim != 0:
            continue
        if len(product.call.args) < 4:
            return None
        image, weight, bias, scale = product.call.args
        if op_name(product.call) != CONV2D.name and str(bias.ty.dtype) == "float32":
            bias = graph.emit(relax.op.multiply(bias, factor))
        scale = graph.emit(relax.op.multiply(scale, factor))
        return product.rebuilt(graph, [image, weight, bias, scale])
    return None


def fold_byte_activation(graph: Graph, call: relax.Call) -> Value:
    """End the product with the activation of its result."""
    product = _open_product(graph, call.args[0])
    activation = read_activation(relax.VarBinding(graph.current, call))
    if product is None or activation is None:
        return None
    attrs = {"activation": activation.kind, "low": activation.low, "high": activation.high}
    if str(call.ty.dtype) == "uint8":
        attrs["out_dtype"] = "uint8"
    return product.rebuilt(graph, list(product.call.args), **attrs)


def fold_byte_residual(graph: Graph, call: relax.Call) -> Value:
    """Round the sum of a rounded product and of bytes, each with its scale, in the product."""
    total, divisor = call.args[0], 1.0
    quotient = graph.definition(total, "relax.divide")
    if quotient is not None and graph.has_one_use(total):
        total, divisor = quotient.args[0], uniform(numbers(quotient.args[1])) or 0.0
    addition = graph.definition(total, "relax.add")
    if addition is None or not divisor or not graph.has_one_use(total):
        return None
    for bytes_first, own in enumerate(addition.args):
        product = _rounded_product(graph, own)
        residual = bytes_of(graph, addition.args[1 - bytes_first]) if product else None
        if product is None or residual is None or residual.zero is not None:
            continue
        tensors = product.call, residual.data
        alike = all(structural_equal(each.ty.shape, call.ty.shape) for each in tensors)
        if not alike or np.float32(residual.scale) != residual.scale:
            continue
        scales = product.factor, residual.scale, residual.low, divisor
        how = ByteAddition(*scales, *bounds_of(call), bytes_first=bool(bytes_first))
        attrs = dict(product.call.attrs.items()) | {
            "addition": [float(number) for number in astuple(how)],
            "out_dtype": str(call.ty.dtype),
        }
        return relax.Call(product.call.op, [*product.call.args, residual.data], attrs)
    return None


def fold_byte_rounding(graph: Graph, call: relax.Call) -> Value:
    """Round an image of floats to bytes in the product, with the bytes around it."""
    data, attrs = call.args[0], dict(call.attrs.items())
    pad = graph.definition(data, "relax.nn.pad") if graph.has_one_use(data) else None
    image = data if pad is None else pad.args[0]
    rounds = graph.definition(image, ROUND_CLIP) if graph.has_one_use(image) else None
    weight = call.args[1].ty.shape.values
    channels, *taps = (int(extent) for extent in weight[1:])
    has_form = channels <= WORD_BYTES and "groups" not in attrs and taps != [1, 1]
    if rounds is None or not has_form or "rounding" in attrs:
        return None
    source, divisor = rounds.args[0], 1.0
    quotient = graph.definition(source, "relax.divide")
    if quotient is not None and graph.has_one_use(source):
        divisor = uniform(numbers(quotient.args[1])) or 0.0
        source = quotient.args[0]
    low, high = bounds_of(rounds)
    if not (math.isfinite(divisor) and divisor and low <= 0 <= high):
        return None
    if str(source.ty.dtype) != "float32" or not structural_equal(source.ty.shape, image.ty.shape):
        return None
    if low and any(attrs["padding"]):  # by zero bytes, which stand for another number
        return None
    if pad is not None:
        *channels_too, top, bottom, left, right = (int(width) for width in pad.attrs.pad_width)
        if any(channels_too) or float(pad.attrs.pad_value) != -low or any(attrs["padding"]):
            return None
        attrs["padding"] = [top, left, bottom, right]
    attrs["rounding"] = [divisor, low, high]
    return relax.Call(call.op, [source, *call.args[1:]], attrs)


class _RoundedProduct(NamedTuple):
    """A product of bytes that rounds, and the factor of its numbers."""

    call: relax.Call
    factor: float


def _rounded_product(graph: Graph, expr: relax.Expr) -> _RoundedProduct | None:
    """The product that ``expr`` is a multiple of, if nothing else reads it."""
    factor, low = 1.0, 0.0

    def source(name: str) -> relax.Call | None:
        return graph.definition(expr, name) if graph.has_one_use(expr) else None

    if (match := scaled(source("relax.multiply"))) is not None:
        expr, factor = match[0], uniform(match[1]) or 0.0
    if (match := shifted(source("relax.add"))) is not None:
        expr, low = match[0], uniform(match[1]) or 0.0
    if (cast := source("relax.astype")) is not None:
        expr = cast.args[0]
    call = source(QUANTIZED_CONV2D.name)
    if call is None or not factor or "addition" in call.attrs.keys():
        return None
    in_bytes = str(call.attrs["out_dtype"]) == "uint8"
    is_rounded = str(call.attrs["activation"]) == "round_clip"
    stands_for = low == (float(call.attrs["low"]) if in_bytes else 0.0)
    is_cast = (cast is not None) == in_bytes
    return _RoundedProduct(call, factor) if is_rounded and stands_for and is_cast else None


def _open_product(graph: Graph, expr: relax.Expr) -> _Product | None:
    """The product without activation whose result nothing else reads."""
    reshape = graph.definition(expr, "relax.reshape")
    if reshape is not None and not graph.has_one_use(expr):
        return None
    source = expr if reshape is None else reshape.args[0]
    call = graph.definition(source, QUANTIZED_CONV2D.name, CONV2D.name)
    if call is None or not graph.has_one_use(source) or str(call.attrs["activation"]) != "none":
        return None
    is_float = op_name(call) != QUANTIZED_CONV2D.name
    if is_float and (reshape is not None or str(call.args[0].ty.dtype) != "uint8"):
        return None
    return _Product(call, reshape)


def whole_bias(values: np.ndarray, weight: np.ndarray) -> relax.Expr | None:
    """Whole ``values`` as a bias of int32, if that holds them with all products; else None."""
    products = np.abs(weight.astype("int16")).sum(axis=(1, 2, 3), dtype="int64")
    is_held = (BYTE * products + np.abs(values) < _END).all()
    return tensor_constant(values, "int32") if is_held else None


def float_bias(graph: Graph, bias: relax.Expr, scale: relax.Expr) -> relax.Expr:
    """What a constant bias of int32 adds to the float32 of a product."""
    factors = numbers(scale)
    product = None if factors is None else constant(array_of(bias) * factors, "float32")
    if product is not None:
        return product
    floats = graph.emit(relax.op.astype(bias, "float32"))
    return graph.emit(relax.op.multiply(floats, scale))


def _total_bias(graph: Graph, call: relax.Call, offset: np.ndarray) -> relax.Expr | None:
    """The bias of a product and an offset, in int32 where both are whole multiples of its scale."""
    weight, bias, scale = call.args[1:4]
    of_floats = op_name(call) == CONV2D.name
    if not of_floats and str(bias.ty.dtype) != "int32":
        return _sum(graph, bias, offset)
    if (factors := numbers(scale)) is not None:
        with np.errstate(all="ignore"):
            units = offset / factors
            whole = np.rint(units)
            is_whole = (np.abs(units - whole) <= _NEAR * np.abs(units)).all()
        if of_floats:
            return _sum(graph, bias, whole if is_whole else units)
        total = whole_bias(array_of(bias) + whole, array_of(weight)) if is_whole else None
        if total is not None:
            return total
    return None if of_floats else _sum(graph, float_bias(graph, bias, scale), offset)


def _sum(graph: Graph, bias: relax.Expr, offset: np.ndarray) -> relax.Expr | None:
    before = numbers(bias)
    if before is not None:
        return constant(before + offset, "float32")
    added = constant(offset, "float32")
    return None if added is None else graph.emit(relax.op.add(bias, added))
