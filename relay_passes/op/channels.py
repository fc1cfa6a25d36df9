# SPDX-License-Identifier: Apache-2.0
"""Ops on the channels of images: packing, shuffles, slices and norms."""

from __future__ import annotations

from tvm import relax, te, tirx

from schedules import attributes
from schedules.compute import pack as packing
from schedules.compute.norms import channel_norm as compute_norm
from schedules.compute.pack import channel_blocks, packed_channels
from schedules.errors import OpError

from .conv_call import OPAQUE_PATTERN
from .register import is_typed, register_op


def pack(data: relax.Expr, block: int) -> relax.Call:
    """Ops ``relax.tvm_fusion.pack`` and ``relax.tvm_fusion.unpack``: NCHW to NCHW[x]c and back.

    ::

        pack(data, block)       [N, C, H, W]               -> [N, ceil(C / block), H, W, block]
        unpack(data, channels)  [N, ceil(C / x), H, W, x]  -> [N, C, H, W]

        pack:   out[n, b, h, w, l] = data[n, b * block + l, h, w], or 0 past the last channel
        unpack: out[n, c, h, w]    = data[n, c // x, h, w, c % x]

    Batch, height and width may be symbolic; channels and lanes are constants.
    """
    call = relax.Call(_PACK, [data], {"block": _positive("pack", "block", block)})
    if is_typed(data):
        _infer_pack(call, None)
    return call


def unpack(data: relax.Expr, channels: int) -> relax.Call:
    """Undo :func:`pack`.

    Parameters
    ----------
    data : relax.Expr
        An NCHW[x]c tensor.
    channels : int
        True number of channels; it must need exactly as many blocks as ``data`` has.

    Returns
    -------
    relax.Call
        The NCHW tensor.
    """
    call = relax.Call(_UNPACK, [data], {"channels": _positive("unpack", "channels", channels)})
    if is_typed(data):
        _infer_unpack(call, None)
    return call


def _positive(op: str, name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | tirx.IntImm) or int(value) < 1:
        raise OpError(f"relax.tvm_fusion.{op}: {name} is {value!r}; expected a positive integer")
    return int(value)


def _tensor_type(op: str, call: relax.Call, ndim: int, layout: str) -> relax.TensorType:
    """The type of the only argument, which must be a tensor of ``ndim`` known extents."""
    ty = call.args[0].ty
    if not isinstance(ty, relax.TensorType) or ty.ndim != ndim or ty.shape is None:
        raise OpError(
            f"relax.tvm_fusion.{op}: data is {ty}; expected an {layout} tensor with {ndim} known "
            "extents: normalize its producer, or bind its shape with relax.match_cast"
        )
    return ty


def _constant_extent(op: str, name: str, extent: tirx.Expr) -> int:
    if not isinstance(extent, tirx.IntImm):
        raise OpError(
            f"relax.tvm_fusion.{op}: the {name} extent of data is {extent}; expected a constant: "
            "leave tensors with symbolic channels in NCHW"
        )
    return int(extent)


def _infer_pack(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
    ty = _tensor_type("pack", call, 4, "NCHW")
    block = int(call.attrs["block"])
    batch, extent, height, width = ty.shape
    blocks = channel_blocks(_constant_extent("pack", "channel", extent), block)
    return relax.TensorType([batch, blocks, height, width, block], ty.dtype, ty.vdevice)


def _infer_unpack(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
    ty = _tensor_type("unpack", call, 5, "NCHW[x]c")
    channels = int(call.attrs["channels"])
    batch, extent, height, width, lanes = ty.shape
    blocks = _constant_extent("unpack", "channel block", extent)
    block = _constant_extent("unpack", "lane", lanes)
    if channel_blocks(channels, block) != blocks:
        raise OpError(
            f"relax.tvm_fusion.unpack: {channels} channels need "
            f"{channel_blocks(channels, block)} blocks of {block} lanes; data has {blocks}"
        )
    return relax.TensorType([batch, channels, height, width], ty.dtype, ty.vdevice)


def _legalize_pack(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(
        packing.pack,
        call.args[0],
        int(call.attrs["block"]),
        primfunc_name_hint="pack",
        primfunc_attrs={attributes.OP: "pack"},
    )


def _legalize_unpack(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(
        packing.unpack,
        call.args[0],
        int(call.attrs["channels"]),
        primfunc_name_hint="unpack",
        primfunc_attrs={attributes.OP: "unpack"},
    )


_PACK = register_op(
    "relax.tvm_fusion.pack", "Block the channels: NCHW to NCHW[x]c.", _infer_pack, _legalize_pack
)
_UNPACK = register_op(
    "relax.tvm_fusion.unpack",
    "Unblock the channels: NCHW[x]c to NCHW.",
    _infer_unpack,
    _legalize_unpack,
)


def channel_shuffle(data: relax.Expr, channels: int, groups: int) -> relax.Call:
    """Transpose the channels as a matrix of ``groups`` rows, as in ShuffleNet.

    ::

        out[n, c, h, w] = data[n, c % groups * (channels // groups) + c // groups, h, w]

    ``data`` is [N, C, H, W], or [N, ceil(C / x), H, W, x] with C ``channels`` in blocks of x lanes;
    then lanes past the last channel become zero. Source: Zhang et al., ShuffleNet, CVPR 2018.

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
        _infer_shuffle(call, None)
    return call


def _infer_shuffle(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
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


def _legalize_shuffle(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(
        _shuffle,
        call.args[0],
        int(call.attrs["channels"]),
        int(call.attrs["groups"]),
        primfunc_name_hint="channel_shuffle",
    )


_SHUFFLE = register_op(
    "relax.tvm_fusion.channel_shuffle",
    "Channels of groups, interleaved.",
    _infer_shuffle,
    _legalize_shuffle,
)


def channel_slice(data: relax.Expr, begin: int, channels: int) -> relax.Call:
    """Take channels from ``begin`` on.

    ::

        channel_slice(data, begin, channels)   [N, B, H, W, x] -> [N, ceil(channels / x), H, W, x]

        out[n, b, h, w, l] = channel begin + b * x + l of data, or 0 past the last of ``channels``

    ``begin`` may lie within a block.

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
        _infer_slice(call, None)
    return call


def _infer_slice(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
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


def _legalize_slice(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(
        _slice,
        call.args[0],
        int(call.attrs["begin"]),
        int(call.attrs["channels"]),
        primfunc_name_hint="channel_slice",
    )


_SLICE = register_op(
    "relax.tvm_fusion.channel_slice",
    "Some channels of a packed tensor.",
    _infer_slice,
    _legalize_slice,
)


def channel_norm(
    data: relax.Expr, gamma: relax.Expr, beta: relax.Expr, channels: int, epsilon: float
) -> relax.Call:
    """Normalise every pixel over its channels.

    ::

        out = (data - mean) / sqrt(variance + epsilon) * gamma + beta

        data, out [N, B, H, W, x]   gamma, beta [B, x]   with B = ceil(channels / x)

    Mean and variance are taken over the channels of each pixel; lanes past the last channel are
    excluded, and have to be zero in gamma and beta. Batch, height and width may be symbolic.

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
        _infer_norm(call, None)
    return call


def _infer_norm(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
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


def _legalize_norm(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    channels, epsilon = int(call.attrs["channels"]), float(call.attrs["epsilon"])
    return builder.call_te(
        compute_norm,
        *call.args,
        channels,
        epsilon,
        primfunc_name_hint="channel_norm",
        primfunc_attrs={
            attributes.OP: "channel_norm",
            attributes.CHANNELS: channels,
            attributes.EPSILON: epsilon,
            "op_pattern": OPAQUE_PATTERN,
        },
    )


_NORM = register_op(
    "relax.tvm_fusion.channel_norm",
    "Layer normalisation over the channels of a packed tensor.",
    _infer_norm,
    _legalize_norm,
)
