# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.fused_quantized_conv2d``: two convolutions of bytes as one kernel.

::

    mid = activation1(conv1(data, weight1) * scale1 + bias1)       uint8, rounded
    out = activation2(conv2(mid, weight2) * scale2 + bias2)        float32, or rounded to uint8

Data, weights, biases and scales are those of ``relax.tvm_fusion.quantized_conv2d`` in NCHW, and so
are sums, padding and the bytes of a layer. Batch, height and width may be symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, te

from schedules.compute.quantized_conv2d import fused_quantized_conv2d as compute
from schedules.errors import OpError
from schedules.workload.conv2d import Conv2DKernel, ConvLayer
from schedules.workload.reduce import constant

from .conv_call import Known, checked_attrs, legalize_kernel
from .conv_checks import check_layer, check_sizes
from .conv_types import ConvOp, check_channels, constant_shape, kernel_output_type
from .quantized_conv2d import check_operands, check_products
from .register import is_typed, register_op
from .round_clip import check_bytes

FUSED_QUANTIZED_CONV2D = ConvOp("relax.tvm_fusion.fused_quantized_conv2d", ("1", "2"), ())
_NAME = FUSED_QUANTIZED_CONV2D.name
_FIXED = {"groups1": 1, "groups2": 1, "data_layout": "NCHW", "out_layout": "NCHW"}
_PARAMETERS = {"weight": "int8", "bias": "float32", "scale": "float32"}


def fused_quantized_conv2d(
    data: relax.Expr,
    weight1: relax.Expr,
    bias1: relax.Expr,
    scale1: relax.Expr,
    weight2: relax.Expr,
    bias2: relax.Expr,
    scale2: relax.Expr,
    *,
    strides1: Sequence[int] = (1, 1),
    padding1: Sequence[int] = (0, 0, 0, 0),
    dilation1: Sequence[int] = (1, 1),
    activation1: str = "round_clip",
    low1: float = 0.0,
    high1: float = 255.0,
    strides2: Sequence[int] = (1, 1),
    padding2: Sequence[int] = (0, 0, 0, 0),
    dilation2: Sequence[int] = (1, 1),
    activation2: str = "none",
    low2: float = 0.0,
    high2: float = 0.0,
    out_dtype: str = "float32",
) -> relax.Call:
    """Convolve bytes twice, rounding to bytes in between.

    Parameters
    ----------
    data, weight1, bias1, scale1, weight2, bias2, scale2 : relax.Expr
        Image, and filters and two numbers a channel of both layers.
    strides1, padding1, dilation1, activation1, low1, high1
        The first layer, as :meth:`schedules.workload.conv2d.ConvLayer.to_attrs` writes it; its
        activation is ``round_clip``.
    strides2, padding2, dilation2, activation2, low2, high2
        The second layer.
    out_dtype : str
        ``float32``, or ``uint8`` where the second activation is ``round_clip``.

    Returns
    -------
    relax.Call
        The call; its type is inferred when it is emitted.

    Raises
    ------
    OpError
        If operands and attributes do not fit together, or a sum may not fit in an int32.
    """
    given = _FIXED | {
        "strides1": strides1,
        "padding1": padding1,
        "dilation1": dilation1,
        "activation1": activation1,
        "low1": low1,
        "high1": high1,
        "strides2": strides2,
        "padding2": padding2,
        "dilation2": dilation2,
        "activation2": activation2,
        "low2": low2,
        "high2": high2,
        "out_dtype": out_dtype,
    }
    operands = [data, weight1, bias1, scale1, weight2, bias2, scale2]
    checked = checked_attrs(FUSED_QUANTIZED_CONV2D, given)
    attrs = {name: value for name, value in checked.items() if name not in _FIXED}
    call = relax.Call(FUSED_QUANTIZED_CONV2D.get(), operands, attrs)
    if is_typed(*operands):
        _infer_type(call)
    return call


def read_fused_quantized(call: relax.Call) -> Conv2DKernel:
    """The kernel of a call; raises OpError where its operands do not fit together."""
    names = {"data": "uint8"}
    names |= {f"{name}{i}": dtype for i in (1, 2) for name, dtype in _PARAMETERS.items()}
    check_operands(call, names, _NAME)
    extents = call.args[0].ty.shape.values
    if len(extents) != 4:
        raise OpError(f"{_NAME}: data has rank {len(extents)}; expected 4 (NCHW)")
    layers = _read_layer(call, "1", 1), _read_layer(call, "2", 4)
    check_channels(extents, layers, 0, _NAME)
    batch, height, width = (constant(extents[axis]) for axis in (0, 2, 3))
    if height is not None and width is not None:
        check_sizes(layers, height, width, _NAME)
    out_dtype = str(call.attrs["out_dtype"])
    check_bytes(layers[0].activation, "uint8", _NAME)
    if out_dtype != "float32":
        check_bytes(layers[1].activation, out_dtype, _NAME)
    return Conv2DKernel(layers, batch, height, width, dtype="uint8", out_dtype=out_dtype)


def _read_layer(call: relax.Call, suffix: str, place: int) -> ConvLayer:
    """The layer whose weight is an operand."""
    weight = constant_shape(call.args[place], "weight" + suffix, _NAME)
    if len(weight) != 4:
        raise OpError(f"{_NAME}: weight{suffix} has rank {len(weight)}; expected 4 (OIHW)")
    attrs = dict(call.attrs.items()) | _FIXED
    layer = ConvLayer.from_attrs(attrs, weight[1], weight[0], (weight[2], weight[3]), suffix)
    check_layer(layer, suffix, _NAME)
    for argument, name in zip(call.args[place + 1 : place + 3], ("bias", "scale"), strict=True):
        found = constant_shape(argument, name + suffix, _NAME)
        if found != weight[:1]:
            raise OpError(f"{_NAME}: {name}{suffix} has shape {found}; expected {weight[:1]}")
    check_products(layer, _NAME)
    return layer


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    return kernel_output_type(call, read_fused_quantized(call), _NAME)


def _compute(kernel: Conv2DKernel, operands: Sequence[te.Tensor], _: None) -> te.Tensor:
    data, weight1, bias1, scale1, weight2, bias2, scale2 = operands
    first, second = (weight1, bias1, scale1), (weight2, bias2, scale2)
    layer1, layer2 = kernel.layers
    return compute(data, *first, *second, layer1, layer2, str(kernel.out_dtype))


def legalize(
    builder: relax.BlockBuilder, call: relax.Call, known: Known | None = None
) -> relax.Expr:
    """Replace a call, as :func:`.conv_call.legalize_kernel` does."""
    return legalize_kernel(builder, call, _NAME, read_fused_quantized(call), _compute, known)


register_op(_NAME, "Two convolutions of bytes in one.", _infer_type, legalize)
