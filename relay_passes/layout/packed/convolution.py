# SPDX-License-Identifier: Apache-2.0
"""Packed forms of the convolution ops."""

from __future__ import annotations

from tvm import relax
from tvm.ir import GenericConst, Op

from relay_passes.op.conv2d import CONV2D
from relay_passes.op.conv_types import ConvOp, read_kernel
from relay_passes.op.fused_conv2d import FUSED_CONV2D
from relay_passes.op.pack import pack
from relay_passes.op.quantized_conv2d import QUANTIZED_CONV2D, read_quantized
from relay_passes.op.round_clip import BYTE
from schedules.workload.conv2d import BOUNDED, WORD_BYTES, Activation, ConvLayer

from .packing_state import Packed, Result, Rule, Scope, Takes, is_single_pixel
from .weight_packing import fits_pairs, weight_form

_OPS = {op.name: op for op in (CONV2D, FUSED_CONV2D)}


def read_convolution(call: relax.Call, block: int, takes: Takes) -> tuple[ConvLayer, ...] | None:
    """The layers of a convolution call in NCHW that has a packed form, else None.

    Parameters
    ----------
    call : relax.Call
        Any call.
    block : int
        Lanes of one channel block.
    takes : Callable
        Whether a direct convolution, or a pair, is packed.

    Returns
    -------
    tuple[ConvLayer, ...] | None
        One layer, or the two of a pair.
    """
    name = call.op.name if isinstance(call.op, Op) else ""
    if name not in CONVOLUTION_RULES or str(call.attrs["out_layout"]) != "NCHW":
        return None
    if name != QUANTIZED_CONV2D.name:
        kernel = read_kernel(call, _OPS[name])
    elif block % WORD_BYTES:
        return None
    else:
        kernel = read_quantized(call)
    return kernel.layers if takes(kernel) else None


def is_cut(layer: ConvLayer, block: int) -> bool:
    """Return whether the layer is neither dense nor depthwise, and its groups cross blocks."""
    own = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    return layer.groups > 1 and not layer.is_depthwise and any(count % block for count in own)


def pack_convolution(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Rewrite one call; its weights become packed parameters.

    A first layer of fewer channels than lanes reads NCHW data, because its blocks would be mostly
    padding; unless they are packed already.
    """
    call = binding.value
    layers = read_convolution(call, scope.block, scope.takes)
    if layers is None:
        return None
    op = _OPS[call.op.name]
    data, residual = call.args[0], call.args[op.operands :]
    few = layers[0].in_channels < scope.block and layers[0].groups == 1
    plain_data = few and scope.lookup(data) is None
    operands = [scope.visit(data) if plain_data else scope.pack(data).expr]
    for index, layer in enumerate(layers):
        form = weight_form(layer, scope.block, plain_data and index == 0)
        operands.append(scope.parameter(call.args[1 + 2 * index], str(form)))
        operands.append(scope.parameter(call.args[2 + 2 * index], "bias"))
    packed_residual = [scope.pack(tensor) for tensor in residual]
    operands += [tensor.expr for tensor in packed_residual]
    attrs = dict(call.attrs.items()) | _layout_attrs(op, layers, scope.layout, plain_data)
    bound = sum(tensor.bound for tensor in packed_residual)
    return Packed(
        relax.Call(call.op, operands, attrs),
        layers[-1].out_channels,
        BYTE if "out_dtype" in attrs else _bound_after(layers[-1].activation, bound),
    )


def _layout_attrs(
    op: ConvOp, layers: tuple[ConvLayer, ...], layout: str, plain_data: bool
) -> dict[str, str | int]:
    channels = [layers[0].in_channels, *(layer.out_channels for layer in layers)]
    return {
        "data_layout": "NCHW" if plain_data else layout,
        "out_layout": layout,
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
    """Rewrite one call of bytes; images of few channels are packed in words of four.

    Where products are added in pairs of 16 bits, weights stay bytes if no pair can saturate.
    """
    call = binding.value
    layers = read_convolution(call, scope.block, scope.takes)
    if layers is None:
        return None
    (layer,), data = layers, call.args[0]
    # Blocks of a single pixel lie where its channels do.
    is_row = is_single_pixel(data) and layer.in_channels % scope.block == 0
    attrs = dict(call.attrs.items())
    attrs |= _layout_attrs(QUANTIZED_CONV2D, layers, scope.layout, plain_data=False)
    suffix = ""
    if layer.in_channels < scope.block and scope.lookup(data) is None:
        attrs["data_layout"] = f"NCHW{WORD_BYTES}c"
        suffix = "_first"
        operands = [scope.emit(pack(scope.visit(data), WORD_BYTES))]
    elif scope.lookup(data) is None and is_row:
        blocks = layer.in_channels // scope.block
        shape = [data.ty.shape.values[0], blocks, 1, 1, scope.block]
        operands = [scope.emit(relax.op.reshape(scope.visit(data), shape))]
    else:
        operands = [scope.pack(data).expr]
    weight = scope.parameter(call.args[1], "quantized" + suffix)
    if scope.pairs and isinstance(weight, GenericConst) and fits_pairs(weight.value.numpy()):
        attrs["limited"] = True
    elif scope.pairs:
        weight = scope.parameter(call.args[1], "pairs" + suffix)
    operands += [weight, *(scope.parameter(each, "bias") for each in call.args[2:4])]
    operands += [scope.pack(residual).expr for residual in call.args[4:]]
    packed = relax.Call(call.op, operands, attrs)
    is_row = is_single_pixel(binding.var) and layer.out_channels % scope.block == 0
    if is_row and binding.var not in scope.uses.wanted:
        return relax.op.reshape(scope.emit(packed), binding.var.ty.shape)
    in_bytes = attrs["out_dtype"] == "uint8"
    bound = BYTE if in_bytes else _bound_after(layer.activation, 0.0)
    return Packed(packed, layer.out_channels, bound)


CONVOLUTION_RULES: dict[str, Rule] = {
    **dict.fromkeys(_OPS, pack_convolution),
    QUANTIZED_CONV2D.name: pack_quantized,
}
