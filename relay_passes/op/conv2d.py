# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.conv2d``: one convolution with its epilogue.

::

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
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, te

from schedules.compute import conv2d as compute
from schedules.workload.conv2d import Conv2DKernel

from .conv_call import Known, build_call, legalize_call
from .conv_types import ConvOp, output_type
from .register import register_op

CONV2D = ConvOp("relax.tvm_fusion.conv2d", ("",), ("in_channels", "out_channels"))


def conv2d(
    data: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr | None = None,
    residual: relax.Expr | None = None,
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
    return build_call(CONV2D, [data, weight, bias], residual, attrs)


def _infer_type(call: relax.Call, _: relax.BlockBuilder) -> relax.TensorType:
    return output_type(call, CONV2D)


def _compute(
    kernel: Conv2DKernel, operands: Sequence[te.Tensor], residual: te.Tensor | None
) -> te.Tensor:
    data, weight, bias = operands
    layouts = kernel.data_layout, kernel.out_layout
    return compute.conv2d(
        data, weight, bias, residual, kernel.layers[0], *layouts, kernel.out_dtype
    )


def legalize(
    builder: relax.BlockBuilder, call: relax.Call, known: Known | None = None
) -> relax.Expr:
    """Replace a call, as :func:`.conv_call.legalize_kernel` does."""
    return legalize_call(builder, call, CONV2D, _compute, known)


register_op(
    CONV2D.name, "Convolution, bias, residual and activation in one.", _infer_type, legalize
)
