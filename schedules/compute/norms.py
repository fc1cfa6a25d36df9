# SPDX-License-Identifier: Apache-2.0
"""TE computes of layer normalisation: over the channels of each pixel, and moments of rows.

A kernel that computes a tile of ``x`` has whole segments, but no whole row. It stores the sum of
each segment and the sum of squared differences from the segment's mean; whoever needs mean and
variance of a row combines those of its segments, as Chan, Golub and LeVeque do (*Algorithms for
Computing the Sample Variance*, 1983). Unlike the sum of squares, that loses no digits where the
mean is large.
"""

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


SEGMENT = 32
"""Columns of a segment."""


def segment_sums(x: te.Tensor) -> te.Tensor:
    """Sum of each segment of each row, ``[segments, *rows]``.

    Parameters
    ----------
    x : te.Tensor
        ``[*rows, columns]``, float32, columns a multiple of :data:`SEGMENT`.
    """
    column = te.reduce_axis((0, SEGMENT), "column")

    def element(segment: tirx.Expr, *row: tirx.Expr) -> tirx.Expr:
        return te.sum(x(*row, segment * SEGMENT + column), axis=column)

    return te.compute(_segments_of(x), element, name="segment_sums")


def segment_squares(x: te.Tensor, sums: te.Tensor) -> te.Tensor:
    """Sum of squared differences from the mean of each segment, ``[segments, *rows]``."""
    column = te.reduce_axis((0, SEGMENT), "column")

    def element(segment: tirx.Expr, *row: tirx.Expr) -> tirx.Expr:
        mean = sums(segment, *row) * tirx.const(1 / SEGMENT, x.dtype)
        difference = x(*row, segment * SEGMENT + column) - mean
        return te.sum(difference * difference, axis=column)

    return te.compute(_segments_of(x), element, name="segment_squares")


def row_mean(sums: te.Tensor) -> te.Tensor:
    """Mean of each row, ``[*rows, 1]``, from the sums of its segments."""
    segments, *rows = sums.shape
    segment = te.reduce_axis((0, segments), "segment")
    total = te.compute(
        (*rows, 1), lambda *at: te.sum(sums(segment, *at[:-1]), axis=segment), name="row_total"
    )
    count = tirx.const(int(segments) * SEGMENT, sums.dtype)
    return te.compute((*rows, 1), lambda *at: total(*at) / count, name="row_mean")


def row_scale(sums: te.Tensor, squares: te.Tensor, mean: te.Tensor, epsilon: float) -> te.Tensor:
    """``1 / sqrt(variance + epsilon)`` of each row, ``[*rows, 1]``."""
    segments, *rows = sums.shape
    segment = te.reduce_axis((0, segments), "segment")
    each, width = tirx.const(1 / SEGMENT, sums.dtype), tirx.const(SEGMENT, sums.dtype)

    def element(*at: tirx.Expr) -> tirx.Expr:
        between = sums(segment, *at[:-1]) * each - mean(*at)
        return te.sum(squares(segment, *at[:-1]) + between * between * width, axis=segment)

    total = te.compute((*rows, 1), element, name="row_squares")
    count = tirx.const(int(segments) * SEGMENT, sums.dtype)
    added = tirx.const(epsilon, sums.dtype)
    return te.compute(
        (*rows, 1), lambda *at: tirx.rsqrt(total(*at) / count + added), name="row_scale"
    )


def _segments_of(x: te.Tensor) -> tuple[tirx.Expr, ...]:
    *rows, columns = x.shape
    return (columns // SEGMENT, *rows)
