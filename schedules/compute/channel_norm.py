# SPDX-License-Identifier: Apache-2.0
"""TE compute of the layer normalisation over the channels of each pixel, in NCHW[x]c."""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx


def channel_norm(
    data: te.Tensor, gamma: te.Tensor, beta: te.Tensor, channels: int, epsilon: float
) -> te.Tensor:
    """``(data - mean) / sqrt(variance + epsilon) * gamma + beta``, moments over the channels.

    Parameters
    ----------
    data : te.Tensor
        ``[N, B, H, W, x]``.
    gamma, beta : te.Tensor
        ``[B, x]``, zero in the lanes past the last channel.
    channels : int
        True channel count; lanes past it take no part.
    epsilon : float
        Added to the variance.

    Returns
    -------
    te.Tensor
        A tensor like ``data``; lanes past the last channel are zero where those of ``data`` are
        finite.
    """
    batch, blocks, height, width, lanes = data.shape
    dtype = data.dtype

    def mean_of(value: Callable[..., tirx.Expr], name: str) -> te.Tensor:
        block, lane = te.reduce_axis((0, blocks), "b"), te.reduce_axis((0, lanes), "l")

        def total(n: tirx.Var, h: tirx.Var, w: tirx.Var) -> tirx.Expr:
            element = value(n, block, h, w, lane)
            if channels < int(blocks) * int(lanes):
                inside = block * lanes + lane < channels
                element = tirx.if_then_else(inside, element, tirx.const(0, dtype))
            return te.sum(element, axis=[block, lane])

        share = tirx.const(1 / channels, dtype)
        sums = te.compute((batch, height, width), total, name=f"{name}_sum")
        return te.compute(sums.shape, lambda *pixel: sums(*pixel) * share, name=name)

    mean = mean_of(data, "mean")

    def square(n: tirx.Var, b: tirx.Var, h: tirx.Var, w: tirx.Var, lane: tirx.Var) -> tirx.Expr:
        difference = data(n, b, h, w, lane) - mean(n, h, w)
        return difference * difference

    variance = mean_of(square, "variance")

    def normalized(n: tirx.Var, b: tirx.Var, h: tirx.Var, w: tirx.Var, lane: tirx.Var) -> tirx.Expr:
        scale = tirx.rsqrt(variance(n, h, w) + tirx.const(epsilon, dtype))
        return (data(n, b, h, w, lane) - mean(n, h, w)) * scale * gamma(b, lane) + beta(b, lane)

    return te.compute(data.shape, normalized, name="channel_norm")
