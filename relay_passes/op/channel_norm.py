# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.channel_norm``: layer normalisation over channels in blocks.

::

    out = (data - mean) / sqrt(variance + epsilon) * gamma + beta

    data, out [N, B, H, W, x]   gamma, beta [B, x]   with B = ceil(channels / x)

Mean and variance are taken over the channels of each pixel; lanes past the last channel are
excluded, and have to be zero in gamma and beta. Batch, height and width may be symbolic.
"""

from __future__ import annotations

from tvm import relax, tirx

from schedules.compute import channel_norm as compute
from schedules.compute.pack import channel_blocks
from schedules.errors import OpError

from .conv_call import OPAQUE_PATTERN
from .register import is_typed, register_op


def channel_norm(
    data: relax.Expr, gamma: relax.Expr, beta: relax.Expr, channels: int, epsilon: float
) -> relax.Call:
    """Normalise every pixel over its channels.

    Parameters
    ----------
    data : relax.Expr
        An NCHW[x]c tensor.
    gamma, beta : relax.Expr
        Scale and offset of each channel, in blocks.
    channels : int
        True number of channels.
    epsilon : float
        Added to the variance.

    Returns
    -------
    relax.Call
        A tensor of the type of ``data``.

    Raises
    ------
    OpError
        If the extents do not fit together.
    """
    attrs = {"channels": int(channels), "epsilon": float(epsilon)}
    call = relax.Call(_NORM, [data, gamma, beta], attrs)
    # A nested call is checked when it is emitted.
    if is_typed(*call.args):
        _infer_type(call, None)
    return call


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
    ty, channels = call.args[0].ty, int(call.attrs["channels"])
    shape = _extents(ty)
    if len(shape) != 5 or not all(isinstance(shape[axis], tirx.IntImm) for axis in (1, 4)):
        raise OpError(
            f"relax.tvm_fusion.channel_norm: data is {ty}; expected an NCHW[x]c tensor with known "
            "extents: pack it first"
        )
    blocks, lanes = int(shape[1]), int(shape[4])
    if channels < 1 or channel_blocks(channels, lanes) != blocks:
        raise OpError(
            f"relax.tvm_fusion.channel_norm: {channels} channels in {blocks} blocks of {lanes} "
            "lanes; expected as many as fill all blocks but the last"
        )
    for name, operand in zip(("gamma", "beta"), call.args[1:], strict=True):
        found = _extents(operand.ty)
        if [int(e) if isinstance(e, tirx.IntImm) else e for e in found] != [blocks, lanes]:
            raise OpError(
                f"relax.tvm_fusion.channel_norm: {name} is {operand.ty}; expected the extents "
                f"({blocks}, {lanes})"
            )
    return ty


def _extents(ty: relax.Type) -> list[tirx.Expr]:
    """The extents of a tensor; nothing where they are unknown."""
    shape = ty.shape if isinstance(ty, relax.TensorType) else None
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else []


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    channels, epsilon = int(call.attrs["channels"]), float(call.attrs["epsilon"])
    return builder.call_te(
        compute.channel_norm,
        *call.args,
        channels,
        epsilon,
        primfunc_name_hint="channel_norm",
        primfunc_attrs={
            "tvm_fusion.op": "channel_norm",
            "tvm_fusion.channels": channels,
            "tvm_fusion.epsilon": epsilon,
            "op_pattern": OPAQUE_PATTERN,
        },
    )


_NORM = register_op(
    "relax.tvm_fusion.channel_norm",
    "Layer normalisation over the channels of a packed tensor.",
    _infer_type,
    _legalize,
)
