# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.channel_shuffle``: interleaved channels of all groups, as in ShuffleNet.

::

    out[n, c, h, w] = data[n, c % groups * (channels // groups) + c // groups, h, w]

``data`` is [N, C, H, W], or [N, ceil(C / x), H, W, x] with C ``channels`` in blocks of x lanes;
then lanes past the last channel become zero. Source: Zhang et al., ShuffleNet, CVPR 2018.
"""

from __future__ import annotations

from tvm import relax, te, tirx

from schedules.compute.pack import channel_blocks, packed_channels
from schedules.errors import OpError

from .register import is_typed, register_op


def channel_shuffle(data: relax.Expr, channels: int, groups: int) -> relax.Call:
    """Transpose the channels as a matrix of ``groups`` rows.

    Parameters
    ----------
    data : relax.Expr
        An NCHW or an NCHW[x]c tensor.
    channels : int
        True number of channels, a multiple of ``groups``.
    groups : int
        Rows of the matrix.

    Returns
    -------
    relax.Call
        A tensor of the same type and shape.

    Raises
    ------
    OpError
        If ``groups`` does not divide ``channels``, or ``data`` has other channels.
    """
    call = relax.Call(_SHUFFLE, [data], {"channels": int(channels), "groups": int(groups)})
    if is_typed(data):
        _infer_type(call, None)
    return call


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
    ty = call.args[0].ty
    channels, groups = int(call.attrs["channels"]), int(call.attrs["groups"])
    if groups < 1 or channels % groups:
        raise OpError(
            f"relax.tvm_fusion.channel_shuffle: {channels} channels in {groups} groups; expected a "
            "number of groups that divides the channels"
        )
    if not isinstance(ty, relax.TensorType) or ty.ndim not in (4, 5) or ty.shape is None:
        raise OpError(
            f"relax.tvm_fusion.channel_shuffle: data is {ty}; expected an NCHW or NCHW[x]c tensor "
            "with known extents"
        )
    expected = channels if ty.ndim == 4 else channel_blocks(channels, int(ty.shape[4]))
    if not isinstance(ty.shape[1], tirx.IntImm) or int(ty.shape[1]) != expected:
        raise OpError(
            f"relax.tvm_fusion.channel_shuffle: data is {ty}; expected an extent of {expected} in "
            f"axis 1 for {channels} channels"
        )
    return ty


def _shuffle(data: te.Tensor, channels: int, groups: int) -> te.Tensor:
    def source(channel: tirx.Expr) -> tirx.Expr:
        return channel % groups * (channels // groups) + channel // groups

    if len(data.shape) == 5:
        return packed_channels(data, channels, source, "channel_shuffle")
    return te.compute(
        data.shape, lambda n, c, h, w: data[n, source(c), h, w], name="channel_shuffle"
    )


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(
        _shuffle,
        call.args[0],
        int(call.attrs["channels"]),
        int(call.attrs["groups"]),
        primfunc_name_hint="channel_shuffle",
    )


_SHUFFLE = register_op(
    "relax.tvm_fusion.channel_shuffle", "Channels of groups, interleaved.", _infer_type, _legalize
)
