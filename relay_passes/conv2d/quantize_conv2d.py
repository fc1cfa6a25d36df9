# SPDX-License-Identifier: Apache-2.0
"""Pass ``QuantizeConv2D``: convolutions of quantised tensors multiply bytes."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst, IRModule
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.workload.conv2d import ConvLayer

from ..core.constants import (
    constant,
    numbers,
    per_channel,
    scaled,
    shifted,
    tensor_constant,
    uniform,
)
from ..core.expressions import Value, op_name
from ..core.graph import Graph, function_graphs
from ..core.pass_target import pass_target
from ..op.conv2d import CONV2D, conv2d
from ..op.quantized_conv2d import MOST_PRODUCTS, QUANTIZED_CONV2D, quantized_conv2d
from ..op.round_clip import BYTE, bounds_of, in_bytes, round_clip
from .conv_chain import read_activation, read_convolution

_ROUND_CLIP, _MAX_POOL = "relax.tvm_fusion.round_clip", "relax.nn.max_pool2d"
_ACTIVATIONS = (
    *("relax.nn.relu", "relax.clip", "relax.sigmoid", "relax.nn.silu", "relax.nn.gelu"),
    *("relax.nn.relu6", "relax.tvm_fusion.hardswish", _ROUND_CLIP),
)
_LARGEST = 127
_TOLERANCE = 1e-3
"""Of a weight in its scale: products of scales were rounded to float32 a few times."""


@tvm.transform.module_pass(opt_level=0, name="QuantizeConv2D")
class QuantizeConv2D:
    """Compute the convolutions of quantised tensors by quantised weights in integers.

    Before::

        lv = R.tvm_fusion.round_clip(y, low=0, high=255)           # whole numbers
        lv1 = R.nn.conv2d(lv, w, padding=[1, 1, 1, 1])             # rows of w: scale * integers
        lv2 = R.add(lv1, b)
        lv3 = R.tvm_fusion.round_clip(lv2, low=-3, high=252)

    After::

        lv = R.tvm_fusion.round_clip(y, low=0, high=255, out_dtype="uint8")
        lv1 = R.tvm_fusion.quantized_conv2d(
            lv, w8, b, scale, padding=[1, 1, 1, 1], activation="round_clip", low=-3, high=252,
            out_dtype="uint8",
        )

    For CPUs that multiply bytes (VNNI). Depthwise convolutions read bytes, and multiply floats.
    Maxima of pixels are taken of bytes, other readers get floats again, and bytes whose zero stands
    for another number are padded explicitly. Left alone: tensors whose limits are more than 255
    apart, other groups, weights whose output channels are no multiples of integers of 8 bits, and
    sums that 32 bits may not hold.

    Parameters
    ----------
    target : Target | None
        Target of the module; None takes the current target.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        cpu = CPUInfo.from_target(pass_target(self.target, "QuantizeConv2D"))
        if not cpu.multiplies_bytes:
            return mod
        changed = {}
        for name, graph in function_graphs(mod):
            rules = _Rules()
            graph.sweep({"relax.nn.conv2d": [rules.find_sources]})
            if rules.sources:
                graph.settle({_ROUND_CLIP: [rules.store_bytes]})
                graph.settle(
                    {
                        _MAX_POOL: [pool_bytes],
                        "relax.nn.conv2d": [rules.multiply_bytes],
                        "relax.add": [fold_bias],
                        **dict.fromkeys(_ACTIVATIONS, [fold_activation]),
                    }
                )
                changed[name] = graph.to_function()
        result = mod.clone()
        result.update(IRModule(changed))
        return result


class _Bytes(NamedTuple):
    """The numbers ``scale * (data + low)``, with ``data`` of bytes."""

    data: relax.Expr
    scale: float
    low: float


class _Weights(NamedTuple):
    """A weight ``[O, I, kh, kw]`` as integers, and a scale for each output channel."""

    integers: np.ndarray
    scales: np.ndarray


class _Rules:
    """Rules of one function.

    Attributes
    ----------
    sources : set[relax.Var]
        The roundings whose results become bytes.
    """

    def __init__(self) -> None:
        self.sources: set[relax.Var] = set()
        self._weights: dict[GenericConst, _Weights | None] = {}

    def find_sources(self, graph: Graph, call: relax.Call) -> None:
        """Note the rounding that the data of a convolution come from."""
        source = call.args[0]
        value = graph.definition(source)
        while op_name(value) == _MAX_POOL or uniform(_factor(value)) is not None:
            source = value.args[0] if op_name(value) == _MAX_POOL else scaled(value)[0]
            value = graph.definition(source)
        if op_name(value) == _ROUND_CLIP and not in_bytes(value):
            low, high = bounds_of(value)
            layer = read_convolution(relax.VarBinding(graph.current, call))
            takes_bytes = layer is not None and self._takes_bytes(layer, call.args[1])
            if high - low <= BYTE and takes_bytes:
                self.sources.add(source)

    def store_bytes(self, graph: Graph, call: relax.Call) -> Value:
        """Compute bytes, of which the floats are made."""
        if graph.current not in self.sources:
            return None
        low, high = bounds_of(call)
        floats = relax.op.astype(
            graph.emit(round_clip(call.args[0], low, high, "uint8")), "float32"
        )
        if not low:
            return floats
        return relax.op.add(graph.emit(floats), tensor_constant(np.array(low), "float32"))

    def multiply_bytes(self, graph: Graph, call: relax.Call) -> Value:
        """Convolve bytes; what they are short of the numbers is part of the bias."""
        data = _bytes_of(graph, call.args[0])
        layer = read_convolution(relax.VarBinding(graph.current, call))
        if data is None or layer is None or not self._takes_bytes(layer, call.args[1]):
            return None
        if layer.is_depthwise:
            weight = numbers(call.args[1]) * data.scale
            operands = [constant(weight, "float32")]
        else:
            integers, scales = self._weights_of(call.args[1])
            operands = [tensor_constant(integers, "int8"), constant(scales * data.scale, "float32")]
            weight = integers * (scales * data.scale)[:, None, None, None]
        bias = constant(data.low * weight.sum(axis=(1, 2, 3)), "float32")
        if bias is None or any(operand is None for operand in operands):
            return None
        image, attrs = data.data, layer.to_attrs()
        if data.low and any(layer.padding):  # the ops pad with zero bytes
            top, left, bottom, right = layer.padding
            widths = [0, 0, 0, 0, top, bottom, left, right]
            image = graph.emit_once(relax.op.nn.pad(image, widths, pad_value=-data.low))
            attrs["padding"] = [0, 0, 0, 0]
        if layer.is_depthwise:
            return conv2d(image, operands[0], bias, **attrs)
        del attrs["groups"]
        return quantized_conv2d(image, operands[0], bias, operands[1], **attrs)

    def _takes_bytes(self, layer: ConvLayer, weight: relax.Expr) -> bool:
        """Return whether a layer of whole numbers can read bytes."""
        if layer.is_depthwise:
            return isinstance(weight, GenericConst)
        products = layer.in_channels * prod(layer.kernel)
        return (
            layer.groups == 1 and products <= MOST_PRODUCTS and self._weights_of(weight) is not None
        )

    def _weights_of(self, expr: relax.Expr) -> _Weights | None:
        if not isinstance(expr, GenericConst):
            return None
        if expr not in self._weights:
            values = numbers(expr)
            self._weights[expr] = None if values is None else _integers(values)
        return self._weights[expr]


def pool_bytes(graph: Graph, call: relax.Call) -> Value:
    """Take maxima of bytes in place of those of the numbers they stand for."""
    data = _bytes_of(graph, call.args[0])
    if data is None or data.scale <= 0:
        return None
    attrs = {name: call.attrs[name] for name in ("pool_size", "strides", "padding", "dilation")}
    layouts = {"layout": call.attrs.layout, "out_layout": call.attrs.out_layout}
    pooled = relax.op.nn.max_pool2d(data.data, ceil_mode=call.attrs.ceil_mode, **attrs, **layouts)
    value = relax.op.astype(graph.emit(pooled), "float32")
    if data.low:
        value = relax.op.add(graph.emit(value), tensor_constant(np.array(data.low), "float32"))
    if data.scale == 1:
        return value
    return relax.op.multiply(graph.emit(value), tensor_constant(np.array(data.scale), "float32"))


def fold_bias(graph: Graph, call: relax.Call) -> Value:
    """Add one number a channel in the convolution of bytes."""
    match = shifted(call)
    product = None if match is None else _open_product(graph, match[0])
    if match is None or product is None:
        return None
    data, weight, bias, *scale = product.args
    before = numbers(bias)
    offset = per_channel(match[1], 4, before.size)
    total = None if offset is None else constant(before + offset, "float32")
    if total is None:
        return None
    return relax.Call(product.op, [data, weight, total, *scale], product.attrs)


def fold_activation(graph: Graph, call: relax.Call) -> Value:
    """End the convolution of bytes with the activation of its result."""
    product = _open_product(graph, call.args[0])
    activation = read_activation(relax.VarBinding(graph.current, call))
    if product is None or activation is None:
        return None
    ended = {"activation": activation.kind, "low": activation.low, "high": activation.high}
    if str(call.ty.dtype) == "uint8":
        ended["out_dtype"] = "uint8"
    return relax.Call(product.op, product.args, dict(product.attrs.items()) | ended)


def _open_product(graph: Graph, expr: relax.Expr) -> relax.Call | None:
    """The convolution of bytes without activation whose result nothing else reads."""
    product = graph.definition(expr, QUANTIZED_CONV2D.name, CONV2D.name)
    if product is None or not graph.has_one_use(expr):
        return None
    return product if str(product.attrs["activation"]) == "none" else None


def _factor(value: Value) -> np.ndarray | None:
    match = scaled(value)
    return None if match is None else match[1]


def _bytes_of(graph: Graph, expr: relax.Expr) -> _Bytes | None:
    """The bytes that ``expr`` is made of."""
    value = graph.definition(expr)
    if op_name(value) == "relax.astype":
        data = value.args[0]
        return _Bytes(data, 1.0, 0.0) if str(data.ty.dtype) == "uint8" else None
    match, is_factor = scaled(value), True
    if match is None:
        match, is_factor = shifted(value), False
    number = None if match is None else uniform(match[1])
    source = None if number is None else _bytes_of(graph, match[0])
    if source is None:
        return None
    if is_factor:
        return source._replace(scale=source.scale * number)
    whole = source.scale == 1 and number == np.rint(number)
    return source._replace(low=source.low + number) if whole else None


def _integers(weight: np.ndarray) -> _Weights | None:
    """The largest scale of each row of which all its elements are multiples by -128 to 127."""
    rows = weight.reshape(len(weight), -1)
    largest = np.abs(rows).max(axis=1)
    scales, integers = np.zeros(len(rows)), np.zeros(rows.shape, np.int8)
    scales[largest == 0] = 1
    for steps in (_LARGEST, _LARGEST + 1, *range(_LARGEST - 1, 0, -1)):
        left = np.flatnonzero(scales == 0)
        if not left.size:
            break
        units = rows[left] * (steps / largest[left])[:, None]
        whole = np.rint(units)
        fits = (np.abs(units - whole).max(axis=1) < _TOLERANCE) & (whole.max(axis=1) <= _LARGEST)
        found = left[fits]
        scales[found], integers[found] = largest[found] / steps, whole[fits]
    if not scales.all():
        return None
    return _Weights(integers.reshape(weight.shape), scales)
