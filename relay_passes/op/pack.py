# SPDX-License-Identifier: Apache-2.0
"""Ops ``relax.tvm_fusion.pack`` and ``relax.tvm_fusion.unpack``: NCHW to NCHW[x]c and back.

::

    pack(data, block)       [N, C, H, W]               -> [N, ceil(C / block), H, W, block]
    unpack(data, channels)  [N, ceil(C / x), H, W, x]  -> [N, C, H, W]

    pack:   out[n, b, h, w, l] = data[n, b * block + l, h, w], or 0 past the last channel
    unpack: out[n, c, h, w]    = data[n, c // x, h, w, c % x]

Batch, height and width may be symbolic; channels and lanes are constants.
"""

from __future__ import annotations

from tvm import relax, tirx

from schedules import attributes
from schedules.compute import pack as compute
from schedules.errors import OpError

from .register import is_typed, register_op


def pack(data: relax.Expr, block: int) -> relax.Call:
    """Block the channels of an NCHW tensor.

    Parameters
    ----------
    data : relax.Expr
        Four axes with a constant number of channels.
    block : int
        Lanes of one channel block.

    Returns
    -------
    relax.Call
        The NCHW[block]c tensor, lanes past the last channel being zero.
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
    blocks = compute.channel_blocks(_constant_extent("pack", "channel", extent), block)
    return relax.TensorType([batch, blocks, height, width, block], ty.dtype, ty.vdevice)


def _infer_unpack(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
    ty = _tensor_type("unpack", call, 5, "NCHW[x]c")
    channels = int(call.attrs["channels"])
    batch, extent, height, width, lanes = ty.shape
    blocks = _constant_extent("unpack", "channel block", extent)
    block = _constant_extent("unpack", "lane", lanes)
    if compute.channel_blocks(channels, block) != blocks:
        raise OpError(
            f"relax.tvm_fusion.unpack: {channels} channels need "
            f"{compute.channel_blocks(channels, block)} blocks of {block} lanes; data has {blocks}"
        )
    return relax.TensorType([batch, channels, height, width], ty.dtype, ty.vdevice)


def _legalize_pack(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(
        compute.pack,
        call.args[0],
        int(call.attrs["block"]),
        primfunc_name_hint="pack",
        primfunc_attrs={attributes.OP: "pack"},
    )


def _legalize_unpack(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(
        compute.unpack,
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
