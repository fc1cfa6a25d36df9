# SPDX-License-Identifier: Apache-2.0
"""TE computes of the two layout changes between NCHW and NCHW[x]c, and of changes of channels.

Block names are fixed, because schedule rules find their stages by them: ``pack`` and ``unpack``.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx


def channel_blocks(channels: int, block: int) -> int:
    """Number of blocks of ``block`` lanes for ``channels`` channels, the last one padded."""
    return -(-channels // block)


def pack(data: te.Tensor, block: int) -> te.Tensor:
    """NCHW to NCHW[block]c: ``[N, C, H, W] -> [N, ceil(C / block), H, W, block]``.

    Lanes past the last channel are zero.

    Parameters
    ----------
    data : te.Tensor
        Four axes; the channel count is a constant, the other extents may be symbolic.
    block : int
        Lanes of one channel block.

    Returns
    -------
    te.Tensor
        ``out[n, b, h, w, l] = data[n, b * block + l, h, w]``.
    """
    batch, channels, height, width = data.shape
    true_channels = int(channels)
    zero = tirx.const(0, data.dtype)

    def element(n: tirx.Var, b: tirx.Var, h: tirx.Var, w: tirx.Var, lane: tirx.Var) -> tirx.Expr:
        channel = b * block + lane
        value = data[n, channel, h, w]
        if true_channels % block == 0:
            return value
        return tirx.if_then_else(channel < true_channels, value, zero)

    shape = (batch, channel_blocks(true_channels, block), height, width, block)
    return te.compute(shape, element, name="pack")


def unpack(data: te.Tensor, channels: int) -> te.Tensor:
    """NCHW[x]c to NCHW: ``[N, ceil(channels / x), H, W, x] -> [N, channels, H, W]``.

    Parameters
    ----------
    data : te.Tensor
        Five axes, the last one being the lanes of a block.
    channels : int
        True channel count; lanes past it are dropped.

    Returns
    -------
    te.Tensor
        ``out[n, c, h, w] = data[n, c // x, h, w, c % x]``.
    """
    batch, _, height, width, lanes = data.shape
    block = int(lanes)
    return te.compute(
        (batch, channels, height, width),
        lambda n, c, h, w: data[n, c // block, h, w, c % block],
        name="unpack",
    )


def packed_channels(
    data: te.Tensor, channels: int, source: Callable[[tirx.Expr], tirx.Expr], name: str
) -> te.Tensor:
    """Channels of an NCHW[x]c tensor in another order or number, in NCHW[x]c again.

    Parameters
    ----------
    data : te.Tensor
        Five axes, the last one being the lanes of a block.
    channels : int
        True channel count of the result; lanes past it are zero.
    source : Callable
        The channel of ``data`` that becomes a given channel of the result.
    name : str
        Name of the block.

    Returns
    -------
    te.Tensor
        ``out[n, c // x, h, w, c % x] = data[n, source(c) // x, h, w, source(c) % x]``.
    """
    batch, _, height, width, lanes = data.shape
    block = int(lanes)

    def element(n: tirx.Var, b: tirx.Var, h: tirx.Var, w: tirx.Var, lane: tirx.Var) -> tirx.Expr:
        channel = b * block + lane
        found = source(channel)
        value = data[n, found // block, h, w, found % block]
        if channels % block == 0:
            return value
        return tirx.if_then_else(channel < channels, value, tirx.const(0, data.dtype))

    return te.compute((batch, channel_blocks(channels, block), height, width, block), element, name)
