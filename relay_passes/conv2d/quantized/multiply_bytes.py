# SPDX-License-Identifier: Apache-2.0
"""Pass ``MultiplyBytes``: convolutions and matrix products of quantised tensors in integers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import GenericConst, IRModule
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.gpu.core.machine import KINDS, GPUInfo
from schedules.gpu.core.tensor_core import CHUNK
from schedules.workload.conv2d import WORD_BYTES, ConvLayer

from ...core.constants import constant, numbers, tensor_constant
from ...core.expressions import Value
from ...core.graph import Graph, function_graphs, pass_target
from ...core.integer_weights import IntegerWeights, integer_weights
from ...op.conv2d import conv2d
from ...op.elementwise import bounds_of, round_clip
from ...op.quantized_conv2d import (
    MOST_PRODUCTS,
    QUANTIZED_CONV2D,
    fits_pairs,
    quantized_conv2d,
)
from ..conv_chain import read_convolution
from .activation_products import (
    QUANTIZE,
    TURN,
    ActivationProducts,
    fold_multiple,
    fold_order,
    fold_rescaling,
    fold_rounding,
    fold_scale,
)
from .byte_epilogue import (
    float_bias,
    fold_byte_activation,
    fold_byte_bias,
    fold_byte_residual,
    fold_byte_rounding,
    fold_byte_scale,
    whole_bias,
)
from .byte_tensors import (
    MAX_POOL,
    ROUND_CLIP,
    ByteTensor,
    bytes_of,
    pool_bytes,
    rounding_of,
)

_CONV2D, _MATMUL = "relax.nn.conv2d", "relax.matmul"
_ACTIVATIONS = (
    *("relax.nn.relu", "relax.nn.relu6", "relax.clip", "relax.sigmoid", "relax.nn.silu"),
    *("relax.nn.gelu", "relax.tvm_fusion.hardswish", ROUND_CLIP),
)


@tvm.transform.module_pass(opt_level=0, name="MultiplyBytes")
class MultiplyBytes:
    """Compute convolutions and matrix products of quantised tensors by quantised weights in bytes.

    Before::

        lv = R.tvm_fusion.round_clip(y, low=0, high=255)           # whole numbers
        lv1 = R.nn.conv2d(lv, w, padding=[1, 1, 1, 1])             # rows of w: scale * integers
        lv2 = R.add(lv1, b)
        lv3 = R.tvm_fusion.round_clip(lv2, low=-3, high=252)

    After::

        lv = R.tvm_fusion.round_clip(y, low=0, high=255, out_dtype="uint8")
        lv3 = R.tvm_fusion.quantized_conv2d(
            lv, w8, b, scale, padding=[1, 1, 1, 1], activation="round_clip", low=-3, high=252,
            out_dtype="uint8",
        )

    For CPUs that multiply bytes (VNNI, dot products of AArch64, or AVX2 in 16 bits), and GPUs whose
    tensor cores do. Products with constant matrices are those of pixels; depthwise convolutions
    read bytes, and multiply whole floats; an image of up to four channels is rounded in its
    convolution; a bias of whole multiples of the scale is one of int32; the sum of a product and of
    other bytes, each with its scale, is rounded in the product; maxima are taken of bytes; other
    readers get floats again.
    Where zero bytes stand for another number than zero, they are padded explicitly.
    Left alone: tensors whose limits are more than 255 apart, convolutions with groups of other than
    multiples of four channels, or of more outputs than inputs or fewer, weights
    whose output channels are no multiples of integers of 8 bits, and sums that 32 bits may not
    hold; on GPUs products of two activations, and matrices with up to 16 rows or columns.

    Parameters
    ----------
    target : Target | None
        Target of the module; None takes the current target.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    @np.errstate(all="ignore")  # a scale that no float holds is refused by its value
    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        target = pass_target(self.target, "MultiplyBytes")
        on_gpu = target.kind.name in KINDS
        cpu = None if on_gpu else CPUInfo.from_target(target)
        if cpu is None:
            word = WORD_BYTES * GPUInfo.from_target(target).has_tensor_cores
        else:
            word = cpu.word_channels
        if not word:
            return mod
        result = mod.clone()
        for name, graph in function_graphs(mod):
            rules = _Rules(word, cpu)
            graph.sweep({_CONV2D: [rules.find_rounding], _MATMUL: [rules.find_rounding]})
            graph.sweep({"relax.add": [rules.find_summands]})
            graph.settle({ROUND_CLIP: [rules.store_bytes]})
            changed = graph.settle(
                {
                    MAX_POOL: [pool_bytes],
                    _CONV2D: [rules.convolve_bytes],
                    _MATMUL: [rules.multiply_matrix],
                    "relax.add": [fold_byte_bias],
                    "relax.multiply": [fold_byte_scale, fold_scale],
                    "relax.divide": [fold_scale],
                    **dict.fromkeys(_ACTIVATIONS, [fold_byte_activation]),
                    ROUND_CLIP: [fold_byte_activation, fold_byte_residual, fold_rounding],
                    QUANTIZE: [fold_rounding],
                }
            )
            if not on_gpu:
                graph.sweep({QUANTIZED_CONV2D.name: [fold_byte_rounding]})
                graph.sweep({"relax.add": [fold_rescaling]})
                graph.sweep({"relax.multiply": [fold_multiple]})
                graph.sweep({TURN: [fold_order]})
            if changed:
                result.update_func(name, relax.analysis.remove_all_unused(graph.to_function()))
        return result


class _Rules:
    """Rules of one function; no CPU stands for a GPU.

    The target multiplies ``word`` channels at once.
    """

    def __init__(self, word: int, cpu: CPUInfo | None) -> None:
        self._word = word
        self._activations = None if cpu is None else ActivationProducts(cpu)
        self._roundings: set[relax.Var] = set()  # whose results become bytes
        self._weights: dict[GenericConst, IntegerWeights | None] = {}

    def find_rounding(self, graph: Graph, call: relax.Call) -> None:
        """Note the rounded numbers that a product reads."""
        source = rounding_of(graph, call.args[0])
        if source is not None and self._layer(graph, call) is not None:
            self._roundings.add(source)
        if call.op.name == _MATMUL and self._activations is not None:
            self._roundings.update(self._activations.roundings(graph, call))

    def find_summands(self, graph: Graph, call: relax.Call) -> None:
        """Note two rounded tensors that are added up: the sum joins the product that is one."""
        sources = [rounding_of(graph, summand) for summand in call.args]
        found = [source for source in sources if source is not None]
        if len(found) == len(sources):
            self._roundings.update(found)

    def store_bytes(self, graph: Graph, call: relax.Call) -> Value:
        """Round to bytes, of which the floats are made."""
        if graph.current not in self._roundings:
            return None
        low, high = bounds_of(call)
        data = graph.emit(round_clip(call.args[0], low, high, "uint8"))
        return ByteTensor(data, low=low).floats(graph)

    def convolve_bytes(self, graph: Graph, call: relax.Call) -> Value:
        """Convolve bytes; what they are short of the numbers is part of the bias."""
        source = bytes_of(graph, call.args[0])
        layer = None if source is None else self._layer(graph, call)
        if source is None or layer is None:
            return None
        attrs = layer.to_attrs()
        if any(layer.padding) and (source.low or source.zero is not None):
            if source.zero is not None:
                return None
            top, left, bottom, right = layer.padding  # the ops pad with zero bytes
            widths = [0, 0, 0, 0, top, bottom, left, right]
            padded = relax.op.nn.pad(source.data, widths, pad_value=-source.low)
            source = source._replace(data=graph.emit_once(padded))
            attrs["padding"] = [0, 0, 0, 0]
        if not layer.is_depthwise:
            return self._product(graph, call, source, attrs)
        values = numbers(call.args[1])
        if values is None or source.zero is not None:
            return None
        whole = self._integers(call)
        if whole is None:
            whole = IntegerWeights(values, np.ones(len(values)))
        scale = constant(whole.scales * source.scale, "float32")
        weight = constant(whole.integers, "float32")
        sums = whole.integers.sum(axis=(1, 2, 3), dtype="float64")
        bias = constant(source.low * sums, "float32")
        if weight is None or bias is None or scale is None:
            return None
        return conv2d(source.data, weight, bias, scale=scale, **attrs)

    def multiply_matrix(self, graph: Graph, call: relax.Call) -> Value:
        """Multiply rows of bytes, each the channels of a pixel, by a matrix."""
        if self._activations is not None and self._activations.takes(graph):
            return self._activations.multiply(graph, call)
        source = bytes_of(graph, call.args[0])
        if source is None or self._layer(graph, call) is None:
            return None
        *rows, channels = source.data.ty.shape.values
        count = math.prod(rows, start=tirx.IntImm("int64", 1))
        pixels = graph.emit_once(relax.op.reshape(source.data, (count, channels, 1, 1)))
        product = self._product(graph, call, source._replace(data=pixels), {})
        return None if product is None else relax.op.reshape(graph.emit(product), call.ty.shape)

    def _product(
        self, graph: Graph, call: relax.Call, source: ByteTensor, attrs: dict[str, Any]
    ) -> relax.Call | None:
        """The product of bytes by the weight of ``call``."""
        weights = self._integers(call)
        if weights is None:
            return None
        integers, scale = weights.integers, constant(weights.scales * source.scale, "float32")
        sums = integers.sum(axis=(1, 2, 3), dtype="int64")
        bias = whole_bias(source.low * sums, integers)
        if scale is None or bias is None:
            return None
        if source.zero is not None:
            bias = float_bias(graph, bias, scale)
            factors = tensor_constant(sums * weights.scales * source.scale, "float32")
            short = graph.emit(relax.op.multiply(factors, source.zero))
            bias = graph.emit(relax.op.subtract(bias, short))
        weight = tensor_constant(integers, "int8")
        return quantized_conv2d(source.data, weight, bias, scale, **attrs)

    def _layer(self, graph: Graph, call: relax.Call) -> ConvLayer | None:
        """The layer of a convolution or matrix product that can read bytes, else None."""
        weight = call.args[1]
        if not isinstance(weight, GenericConst):
            return None
        if call.op.name == _MATMUL:
            if str(call.ty.dtype) != "float32" or weight.ty.ndim != 2 or call.args[0].ty.ndim < 2:
                return None
            channels, outputs = (int(extent) for extent in weight.ty.shape.values)
            if self._activations is None and min(channels, outputs) <= CHUNK:
                return None
            layer = ConvLayer(channels, outputs, (1, 1)) if channels and outputs else None
        else:
            layer = read_convolution(relax.VarBinding(graph.current, call))
        if layer is None or layer.is_depthwise:
            return layer
        own = layer.in_channels // layer.groups
        if own * math.prod(layer.kernel) > MOST_PRODUCTS:
            return None
        weights = self._integers(call)
        takes = weights is not None and (layer.groups == 1 or self._takes_groups(layer, weights))
        return layer if takes else None

    def _takes_groups(self, layer: ConvLayer, weights: IntegerWeights) -> bool:
        """Return whether kernels read the groups of a layer in words, and faster than floats.

        Groups of four channels in two words of 16 bits take longer.
        """
        own, is_alike = layer.in_channels // layer.groups, layer.in_channels == layer.out_channels
        if own % WORD_BYTES or not is_alike:
            return False
        in_bytes = np.moveaxis(weights.integers, 1, -1)
        return own > WORD_BYTES or self._word == WORD_BYTES or fits_pairs(in_bytes)

    def _integers(self, call: relax.Call) -> IntegerWeights | None:
        """The weight of a call ``[O, I, kh, kw]`` as integers."""
        weight = call.args[1]
        if weight not in self._weights:
            values = numbers(weight)
            if values is not None and call.op.name == _MATMUL:
                values = values.T[:, :, None, None]
            self._weights[weight] = None if values is None else integer_weights(values)
        return self._weights[weight]
