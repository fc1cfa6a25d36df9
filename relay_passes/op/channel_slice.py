# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.channel_slice``: some channels of an NCHW[x]c tensor, packed again.

::

    channel_slice(data, begin, channels)   [N, B, H, W, x] -> [N, ceil(channels / x), H, W, x]

    out[n, b, h, w, l] = channel begin + b * x + l of data, or 0 past the last of ``channels``

``begin`` may lie within a block.
"""

from __future__ import annotations

from tvm import relax, te, tirx

from schedules.compute.pack import channel_blocks, packed_channels
from schedules.errors import OpError

from .register import is_typed, register_op


def channel_slice(data: relax.Expr, begin: int, channels: int) -> relax.Call:
    """Take channels from ``begin`` on.

    Parameters
    ----------
    data : relax.Expr
        An NCHW[x]c tensor.
    begin : int
        The first channel.
    channels : int
        Number of channels.

    Returns
    -------
    relax.Call
        An NCHW[x]c tensor, lanes past the last channel being zero.

    Raises
    ------
    OpError
        If ``data`` is no such tensor, or has too few channels.
    """
    call = relax.Call(_SLICE, [data], {"begin": int(begin), "channels": int(channels)})
    if is_typed(data):
        _infer_type(call, None)
    return call


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
    ty = call.args[0].ty
    if not isinstance(ty, relax.TensorType) or ty.ndim != 5 or ty.shape is None:
        raise OpError(
            f"relax.tvm_fusion.channel_slice: data is {ty}; expected an NCHW[x]c tensor with known "
            "extents: pack it first"
        )
    begin, channels = int(call.attrs["begin"]), int(call.attrs["channels"])
    batch, blocks, height, width, lanes = ty.shape
    known = isinstance(blocks, tirx.IntImm) and isinstance(lanes, tirx.IntImm)
    if not known or begin < 0 or channels < 1 or begin + channels > int(blocks) * int(lanes):
        raise OpError(
            f"relax.tvm_fusion.channel_slice: channels {begin} to {begin + channels} of data, "
            f"which is {ty}; expected a range within constant extents"
        )
    shape = [batch, channel_blocks(channels, int(lanes)), height, width, lanes]
    return relax.TensorType(shape, ty.dtype, ty.vdevice)


def _slice(data: te.Tensor, begin: int, channels: int) -> te.Tensor:
    return packed_channels(data, channels, lambda channel: channel + begin, "channel_slice")


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(
        _slice,
        call.args[0],
        int(call.attrs["begin"]),
        int(call.attrs["channels"]),
        primfunc_name_hint="channel_slice",
    )


_SLICE = register_op(
    "relax.tvm_fusion.channel_slice", "Some channels of a packed tensor.", _infer_type, _legalize
)
