# SPDX-License-Identifier: Apache-2.0
"""Ops ``relax.tvm_fusion.conv2d`` and ``fused_conv2d``: convolutions with their epilogues.

Of one layer::

    out = activation(conv(data, weight) + bias [+ residual])

    data [N, C, H, W]  weight [O, C / groups, kh, kw]  bias [O]  residual, out [N, O, H', W']
    H' = (H + top + bottom - (kh - 1) * dilation - 1) // stride + 1, and W' alike

Packed, with lanes ``x`` from ``out_layout`` ``NCHW{x}c``: ``data``, ``residual`` and ``out`` are
``[N, blocks, H, W, x]`` (``data`` may stay NCHW, as for an input image), ``bias`` is
``[blocks, x]``, the weight is as in ``schedules/compute/conv2d.py``, and ``in_channels`` and
``out_channels`` are given. Batch, height and width may be symbolic.

On CPUs ``data`` and ``weight`` may be of bfloat16 with a ``bias`` of float32, and a ``residual`` of
either. Then products are exact, sums, bias, residual and activation of float32, and ``out_dtype``
is ``bfloat16``, to which the result is rounded (halves to even), or ``float32``. Packed, such a
dense layer has a weight in words of two channels, and data in blocks of its own, such as an input
image in ``NCHW4c``.

On CPUs a packed ``weight`` may be of int8 among operands of float32, with a ``scale`` like ``bias``
for each output channel, by which sums are multiplied before the bias is added. ``data`` of a
depthwise layer may be of uint8 among operands of float32, with a ``scale``, by which sums are
multiplied after that: those of whole numbers are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, te
from tvm.ir import Op

from schedules.compute import conv2d as compute
from schedules.errors import OpError
from schedules.workload.conv2d import Conv2DKernel, from_json, to_json

from ..core.expressions import op_name
from .conv_call import Known, build_call, legalize_call, legalize_kernel
from .conv_types import ConvOp, kernel_output_type, output_type, read_kernel
from .quantized_conv2d import QUANTIZED_CONV2D, read_quantized
from .quantized_conv2d import compute_layer as compute_bytes
from .register import register_op

CONV2D = ConvOp("relax.tvm_fusion.conv2d", ("",), ("in_channels", "out_channels"))


def conv2d(
    data: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr | None = None,
    residual: relax.Expr | None = None,
    scale: relax.Expr | None = None,
    *,
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    activation: str = "none",
    low: float = 0.0,
    high: float = 0.0,
    data_layout: str = "NCHW",
    out_layout: str | None = None,
    in_channels: int | None = None,
    out_channels: int | None = None,
    out_dtype: str | None = None,
) -> relax.Call:
    """Convolve, add bias and residual, and activate.

    Parameters
    ----------
    data, weight : relax.Expr
        Image and filters.
    bias : relax.Expr | None
        One number a channel; None stands for zeros.
    residual : relax.Expr | None
        A tensor of the output's shape, added before the activation.
    scale : relax.Expr | None
        Factors of the sums for a weight of int8, or for data of uint8; either needs a bias.
    strides, padding, dilation, groups, activation, low, high
        The layer, as :meth:`schedules.workload.conv2d.ConvLayer.to_attrs` writes it.
    data_layout : str
        ``NCHW`` or ``NCHW{x}c``.
    out_layout : str | None
        The same choice; None stands for ``data_layout``.
    in_channels, out_channels : int | None
        True channel counts; given exactly where ``out_layout`` is packed.
    out_dtype : str | None
        ``uint8`` where the activation is ``round_clip``, for the distances to its lower bound;
        ``bfloat16`` or ``float32`` for operands of bfloat16 with a bias of float32; the type of
        ``data`` if None.

    Returns
    -------
    relax.Call
        The call; its type is inferred when it is emitted.
    """
    attrs = {
        "strides": strides,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "activation": activation,
        "low": low,
        "high": high,
        "data_layout": data_layout,
        "out_layout": out_layout,
        "in_channels": in_channels,
        "out_channels": out_channels,
        "out_dtype": out_dtype,
    }
    operands = [data, weight, bias, *([] if scale is None else [scale])]
    return build_call(CONV2D, operands, residual, attrs)


def _infer_type(call: relax.Call, _: relax.BlockBuilder) -> relax.TensorType:
    return output_type(call, CONV2D)


def compute_layer(
    kernel: Conv2DKernel, operands: Sequence[te.Tensor], residual: te.Tensor | None
) -> te.Tensor:
    """The computation of a kernel of one layer."""
    data, weight, bias, *scale = operands
    layouts = kernel.data_layout, kernel.out_layout
    others = kernel.layers[0], *layouts, kernel.out_dtype, *scale
    return compute.conv2d(data, weight, bias, residual, *others)


def legalize(
    builder: relax.BlockBuilder, call: relax.Call, known: Known | None = None
) -> relax.Expr:
    """Replace a call, as :func:`.conv_call.legalize_kernel` does."""
    return legalize_call(builder, call, CONV2D, compute_layer, known)


register_op(
    CONV2D.name, "Convolution, bias, residual and activation in one.", _infer_type, legalize
)


FUSED_CONV2D = ConvOp(
    "relax.tvm_fusion.fused_conv2d", ("1", "2"), ("in_channels", "mid_channels", "out_channels")
)


def fused_conv2d(
    data: relax.Expr,
    weight1: relax.Expr,
    bias1: relax.Expr | None,
    weight2: relax.Expr,
    bias2: relax.Expr | None = None,
    residual: relax.Expr | None = None,
    *,
    strides1: Sequence[int] = (1, 1),
    padding1: Sequence[int] = (0, 0, 0, 0),
    dilation1: Sequence[int] = (1, 1),
    groups1: int = 1,
    activation1: str = "none",
    low1: float = 0.0,
    high1: float = 0.0,
    strides2: Sequence[int] = (1, 1),
    padding2: Sequence[int] = (0, 0, 0, 0),
    dilation2: Sequence[int] = (1, 1),
    groups2: int = 1,
    activation2: str = "none",
    low2: float = 0.0,
    high2: float = 0.0,
    data_layout: str = "NCHW",
    out_layout: str | None = None,
    in_channels: int | None = None,
    mid_channels: int | None = None,
    out_channels: int | None = None,
) -> relax.Call:
    """Convolve twice, the second time with an optional residual.

    ::

        mid = activation1(conv1(data, weight1) + bias1)
        out = activation2(conv2(mid, weight2) + bias2 [+ residual])

        data [N, C, H, W]  weight1 [M, C / groups1, kh1, kw1]  bias1 [M]  mid [N, M, H', W']
        weight2 [O, M / groups2, kh2, kw2]  bias2 [O]  residual, out [N, O, H'', W'']

    Each layer has its own strides, four-sided padding, dilation, groups and activation. Packed,
    with lanes ``x`` from ``out_layout`` ``NCHW{x}c``, the operands are those of
    ``relax.tvm_fusion.conv2d`` for each layer, ``mid`` is packed, and ``in_channels``,
    ``mid_channels`` and ``out_channels`` are given. Batch, height and width may be symbolic.

    Parameters
    ----------
    data, weight1, weight2 : relax.Expr
        Image and the filters of both layers.
    bias1, bias2 : relax.Expr | None
        One number a channel; None stands for zeros.
    residual : relax.Expr | None
        A tensor of the output's shape, added before the second activation.
    strides1, padding1, dilation1, groups1, activation1, low1, high1
        The first layer, as :meth:`schedules.workload.conv2d.ConvLayer.to_attrs` writes it.
    strides2, padding2, dilation2, groups2, activation2, low2, high2
        The second layer.
    data_layout : str
        ``NCHW`` or ``NCHW{x}c``.
    out_layout : str | None
        The same choice; None stands for ``data_layout``.
    in_channels, mid_channels, out_channels : int | None
        True channel counts; given exactly where ``out_layout`` is packed.

    Returns
    -------
    relax.Call
        The call; its type is inferred when it is emitted.
    """
    attrs = {
        "strides1": strides1,
        "padding1": padding1,
        "dilation1": dilation1,
        "groups1": groups1,
        "activation1": activation1,
        "low1": low1,
        "high1": high1,
        "strides2": strides2,
        "padding2": padding2,
        "dilation2": dilation2,
        "groups2": groups2,
        "activation2": activation2,
        "low2": low2,
        "high2": high2,
        "data_layout": data_layout,
        "out_layout": out_layout,
        "in_channels": in_channels,
        "mid_channels": mid_channels,
        "out_channels": out_channels,
    }
    return build_call(FUSED_CONV2D, [data, weight1, bias1, weight2, bias2], residual, attrs)


def _infer_fused_type(call: relax.Call, _: relax.BlockBuilder) -> relax.TensorType:
    return output_type(call, FUSED_CONV2D)


def _compute_fused(
    kernel: Conv2DKernel, operands: Sequence[te.Tensor], residual: te.Tensor | None
) -> te.Tensor:
    data, weight1, bias1, weight2, bias2 = operands
    layer1, layer2 = kernel.layers
    return compute.fused_conv2d(
        data,
        weight1,
        bias1,
        weight2,
        bias2,
        residual,
        layer1,
        layer2,
        kernel.data_layout,
        kernel.out_layout,
    )


def legalize_fused(
    builder: relax.BlockBuilder, call: relax.Call, known: Known | None = None
) -> relax.Expr:
    """Replace a call, as :func:`.conv_call.legalize_kernel` does."""
    return legalize_call(builder, call, FUSED_CONV2D, _compute_fused, known)


register_op(
    FUSED_CONV2D.name,
    "Two convolutions with bias and activation.",
    _infer_fused_type,
    legalize_fused,
)


PAIR = "relax.tvm_fusion.conv2d_pair"
LAYERS = CONV2D.name, QUANTIZED_CONV2D.name


def joined_kernel(first: relax.Call, second: relax.Call) -> Conv2DKernel | None:
    """The kernel of a pair of calls of ``LAYERS``; None where they are none for one kernel."""
    kernels = [
        read_quantized(call)
        if op_name(call) == QUANTIZED_CONV2D.name
        else read_kernel(call, CONV2D)
        for call in (first, second)
    ]
    return kernels[0].joined(kernels[1])


def conv2d_pair(first: relax.Call, second: relax.Call) -> relax.Call:
    """Join two calls, the second of which reads the result of the first.

    Parameters
    ----------
    first, second : relax.Call
        Packed convolutions of bytes or of bfloat16, or a depthwise first one.

    Returns
    -------
    relax.Call
        The call; its type is inferred when it is emitted.

    Raises
    ------
    OpError
        If a kernel of both computes something else.
    """
    kernel = joined_kernel(first, second)
    if kernel is None:
        raise OpError(
            f"{PAIR}: the calls are no pair; expected packed convolutions of static sizes and of "
            "one type, the first without a residual"
        )
    attrs = {"workload": to_json(kernel)}
    return relax.Call(Op.get(PAIR), [*first.args, *second.args[1:]], attrs)


def read_pair(call: relax.Call) -> Conv2DKernel:
    """The kernel of a call."""
    return from_json(str(call.attrs["workload"]))


def _infer_pair_type(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    return kernel_output_type(call, read_pair(call), PAIR)


def compute_pair(
    kernel: Conv2DKernel, operands: Sequence[te.Tensor], residual: te.Tensor | None
) -> te.Tensor:
    """The computation of a pair."""
    data, start = operands[0], kernel.second_weight
    parts = (operands[1:start], None), (operands[start:], residual)
    for layer, (parameters, added) in zip(kernel.apart(), parts, strict=True):
        compute = compute_bytes if layer.is_quantized else compute_layer
        data = compute(layer, [data, *parameters], added)
    return data


def legalize_pair(
    builder: relax.BlockBuilder, call: relax.Call, known: Known | None = None
) -> relax.Expr:
    """Replace a call, as :func:`.conv_call.legalize_kernel` does."""
    return legalize_kernel(builder, call, PAIR, read_pair(call), compute_pair, known)


register_op(PAIR, "Two packed convolutions in tile registers.", _infer_pair_type, legalize_pair)
