# SPDX-License-Identifier: Apache-2.0
"""Packed forms of the convolution ops."""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.ir import GenericConst, Op

from relay_passes.op.channels import pack
from relay_passes.op.conv2d import CONV2D
from relay_passes.op.conv_types import ConvOp, read_kernel
from relay_passes.op.quantized_conv2d import (
    FUSED_QUANTIZED_CONV2D,
    QUANTIZED_CONV2D,
    fits_pairs,
    read_fused_quantized,
    read_quantized,
)
from schedules.workload.conv2d import (
    BOUNDED,
    ITEM_BYTES,
    WORD_BYTES,
    WORDS,
    Activation,
    ChannelBlocks,
    Conv2DKernel,
    ConvLayer,
)

from ...op.conv2d import FUSED_CONV2D
from ...op.elementwise import BYTE
from .packing_state import Packed, Result, Rule, Scope, Takes, is_single_pixel
from .weight_packing import weight_form

_OPS = {op.name: op for op in (CONV2D, FUSED_CONV2D)}
_OPS_OF_BYTES = {op.name: op for op in (QUANTIZED_CONV2D, FUSED_QUANTIZED_CONV2D)}


def read_convolution(call: relax.Call, blocks: ChannelBlocks, takes: Takes) -> Conv2DKernel | None:
    """The kernel of a convolution call in NCHW that has a packed form, else None.

    Parameters
    ----------
    call : relax.Call
        Any call.
    blocks : ChannelBlocks
        Lanes of the channel blocks.
    takes : Callable
        Whether a direct convolution, or a pair, is packed.
    """
    kernel = kernel_of(call)
    if kernel is None:
        return None
    if (kernel.is_quantized or kernel.sums) and blocks.least % WORDS[kernel.dtype]:
        return None
    return kernel if takes(kernel) else None


def kernel_of(call: relax.Call) -> Conv2DKernel | None:
    """The kernel of a convolution call in NCHW, else None."""
    name = call.op.name if isinstance(call.op, Op) else ""
    if name not in CONVOLUTION_RULES or str(call.attrs["out_layout"]) != "NCHW":
        return None
    if name in _OPS:
        return read_kernel(call, _OPS[name])
    return read_quantized(call) if name == QUANTIZED_CONV2D.name else read_fused_quantized(call)


def is_cut(layer: ConvLayer, block: int) -> bool:
    """Return whether the layer is neither dense nor depthwise, and its groups cross blocks."""
    own = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    return layer.groups > 1 and not layer.is_depthwise and any(count % block for count in own)


def pack_convolution(scope: Scope, binding: relax.VarBinding) -> Result:
    """Rewrite one call; its weights become packed parameters.

    A first layer of fewer channels than lanes reads NCHW data, because its blocks would be mostly
    padding; unless they are packed already, or tensor cores copy them in chunks of a block.
    """
    call = binding.value
    kernel = read_convolution(call, scope.blocks, scope.takes)
    if kernel is None:
        return None
    op, layers = _OPS[call.op.name], kernel.layers
    if kernel.sums is not None:
        return pack_words(scope, binding, layers[0])
    data, ends = call.args[0], op.operands + kernel.has_scale
    scale, residual = call.args[op.operands : ends], call.args[ends:]
    chunks = scope.chunks(kernel)
    few = _is_less(scope, layers[0].in_channels) and layers[0].groups == 1 and not chunks
    plain_data = few and scope.lookup(data) is None
    operands = [scope.visit(data) if plain_data else scope.pack(data).expr]
    for index, layer in enumerate(layers):
        block = scope.blocks.of(layer.out_channels)
        form = str(weight_form(layer, block, plain_data and index == 0))
        if chunks and layer.groups == 1 and ITEM_BYTES[kernel.dtype] != WORD_BYTES // 2:
            form = "chunks"
        operands.append(scope.parameter(call.args[1 + 2 * index], form))
        operands.append(scope.parameter(call.args[2 + 2 * index], "bias"))
    operands += [scope.parameter(each, "bias") for each in scale]
    packed_residual = [scope.pack(tensor) for tensor in residual]
    operands += [tensor.expr for tensor in packed_residual]
    attrs = dict(call.attrs.items()) | _layout_attrs(scope, op, layers, plain_data)
    bound = sum(tensor.bound for tensor in packed_residual)
    return Packed(
        relax.Call(call.op, operands, attrs),
        layers[-1].out_channels,
        BYTE if "out_dtype" in attrs else _bound_after(layers[-1].activation, bound),
    )


def pack_words(scope: Scope, binding: relax.VarBinding, layer: ConvLayer) -> Result:
    """Rewrite one call of bfloat16 with sums of float32; dense weights get words of two channels.

    So do those with groups that tile registers compute.

    Images of few channels are packed in blocks of four.
    """
    call = binding.value
    attrs = dict(call.attrs.items()) | _layout_attrs(scope, CONV2D, (layer,), False)
    dense, suffix = layer.groups == 1, ""
    groups = 0 if dense else scope.tile_groups(read_kernel(call, CONV2D))
    if groups:
        suffix, attrs["groups"] = _group_suffix(layer, groups), groups
    if dense and _is_less(scope, layer.in_channels) and scope.lookup(call.args[0]) is None:
        suffix = "_first"
        attrs["data_layout"] = f"NCHW{WORD_BYTES}c"
        data = scope.emit(pack(scope.visit(call.args[0]), WORD_BYTES))
    else:
        data = _in_blocks(scope, call.args[0])
    block = scope.blocks.of(layer.out_channels)
    suffix = "_mmla" if scope.mmla(read_kernel(call, CONV2D)) else suffix
    form = f"words{suffix}" if dense or groups else str(weight_form(layer, block, False))
    operands = [data, scope.parameter(call.args[1], form), scope.parameter(call.args[2], "bias")]
    found = [scope.lookup(residual) for residual in call.args[3:]]
    operands += [_in_blocks(scope, residual) for residual in call.args[3:]]
    bound = _bound_after(layer.activation, sum(each.bound for each in found if each is not None))
    return _unblocked(scope, binding, relax.Call(call.op, operands, attrs), layer, bound)


def _group_suffix(layer: ConvLayer, groups: int) -> str:
    """The end of the form of a weight in words that is packed in so many groups; 0 if dense."""
    if not groups:
        return ""
    return "_grouped" if groups == layer.groups else "_diagonal"


def _in_blocks(scope: Scope, data: relax.Expr) -> relax.Expr:
    """A tensor in blocks; those of a single pixel lie where its channels do."""
    channels = int(data.ty.shape.values[1])
    block = scope.blocks.of(channels)
    if scope.lookup(data) is not None or not is_single_pixel(data) or channels % block:
        return scope.pack(data).expr
    shape = [data.ty.shape.values[0], channels // block, 1, 1, block]
    return scope.reshape(data, shape)


def _unblocked(
    scope: Scope, binding: relax.VarBinding, packed: relax.Call, layer: ConvLayer, bound: float
) -> Result:
    """The result of a packed convolution; of a single pixel at once in NCHW, if that is enough."""
    channels = layer.out_channels
    is_row = is_single_pixel(binding.var) and scope.fills_blocks(channels)
    if is_row and binding.var not in scope.uses.wanted:
        return relax.op.reshape(scope.emit(packed), binding.var.ty.shape)
    return Packed(packed, channels, bound)


def _is_less(scope: Scope, channels: int) -> bool:
    """Return whether channels do not fill a block."""
    return channels < scope.blocks.of(channels)


def _layout_attrs(
    scope: Scope, op: ConvOp, layers: tuple[ConvLayer, ...], plain_data: bool
) -> dict[str, str | int]:
    channels = [layers[0].in_channels, *(layer.out_channels for layer in layers)]
    return {
        "data_layout": "NCHW" if plain_data else scope.layout(channels[0]),
        "out_layout": scope.layout(channels[-1]),
        **dict(zip(op.channels, channels, strict=True)),
    }


def _bound_after(activation: Activation, bound: float) -> float:
    """Bound of the magnitude after ``activation`` for numbers within ``bound``."""
    if activation.kind == "sigmoid":
        return 1.0
    if activation.kind in BOUNDED:
        return max(bound, activation.low, -activation.high)
    return bound


def pack_quantized(scope: Scope, binding: relax.VarBinding) -> Result:
    """Rewrite one call of bytes; images of few channels are packed in words of four, or rounded.

    Where products are added in pairs of 16 bits, weights stay bytes if no pair can saturate. Where
    bytes are signed in products, constant weights contain what sums of data less 128 lack.
    """
    call = binding.value
    kernel = read_convolution(call, scope.blocks, scope.takes)
    if kernel is None:
        return None
    data, layer = call.args[0], kernel.layers[-1]
    attrs = dict(call.attrs.items())
    attrs |= _layout_attrs(scope, _OPS_OF_BYTES[call.op.name], kernel.layers, plain_data=False)
    if scope.chunks(kernel):
        return _pack_chunks(scope, binding, kernel, attrs)
    suffix = ""
    if "rounding" in attrs:
        attrs["data_layout"], suffix = "NCHW", "_first"
        operands = [scope.visit(data)]
    elif layer.groups == 1 and _is_less(scope, layer.in_channels) and scope.lookup(data) is None:
        attrs["data_layout"] = f"NCHW{WORD_BYTES}c"
        suffix = "_first"
        operands = [scope.emit(pack(scope.visit(data), WORD_BYTES))]
    else:
        groups = 0 if layer.groups == 1 else scope.tile_groups(read_quantized(call)) or layer.groups
        suffix = _group_suffix(layer, groups)
        attrs |= {"groups": groups} if groups else {}
        operands = [_in_blocks(scope, data)]
    suffix = "_mmla" if scope.mmla(kernel) else suffix
    weight = scope.parameter(call.args[1], "quantized" + suffix)
    is_constant = isinstance(weight, GenericConst)
    if scope.shifts and is_constant:
        attrs["shifted"] = True
        weight = scope.parameter(call.args[1], "shifted" + suffix)
    elif scope.pairs and is_constant and fits_pairs(weight.value.numpy()):
        attrs["limited"] = True
    elif scope.pairs:
        weight = scope.parameter(call.args[1], "pairs" + suffix)
    operands += [weight, *(scope.parameter(each, "bias") for each in call.args[2:4])]
    operands += [scope.pack(residual).expr for residual in call.args[4:]]
    packed = relax.Call(call.op, operands, attrs)
    return _unblocked(scope, binding, packed, layer, _bound_of_bytes(kernel))


def _pack_chunks(
    scope: Scope, binding: relax.VarBinding, kernel: Conv2DKernel, attrs: dict[str, Any]
) -> Result:
    """Rewrite a call of bytes, with one layer or two, for tensor cores."""
    call = binding.value
    data, *parameters = call.args[: 1 + 3 * len(kernel.layers)]
    forms = ("chunks", "bias", "bias") * len(kernel.layers)
    operands = [scope.pack(data).expr, *map(scope.parameter, parameters, forms)]
    operands += [scope.pack(residual).expr for residual in call.args[len(operands) :]]
    packed = relax.Call(call.op, operands, attrs)
    return _unblocked(scope, binding, packed, kernel.layers[-1], _bound_of_bytes(kernel))


def _bound_of_bytes(kernel: Conv2DKernel) -> float:
    """Bound of the magnitude of results past the last channel."""
    in_bytes = kernel.out_dtype == "uint8"
    return BYTE if in_bytes else _bound_after(kernel.layers[-1].activation, 0.0)


CONVOLUTION_RULES: dict[str, Rule] = {
    **dict.fromkeys(_OPS, pack_convolution),
    **dict.fromkeys(_OPS_OF_BYTES, pack_quantized),
}
