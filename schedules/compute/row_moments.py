# SPDX-License-Identifier: Apache-2.0
"""Mean and variance of rows by way of segments of 32 columns.

A kernel that computes a tile of ``x`` has whole segments, but no whole row. It stores the sum of
each segment and the sum of squared differences from the segment's mean; whoever needs mean and
variance of a row combines those of its segments, as Chan, Golub and LeVeque do (*Algorithms for
Computing the Sample Variance*, 1983). Unlike the sum of squares, that loses no digits where the
mean is large.
"""

from __future__ import annotations

from tvm import te, tirx

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
