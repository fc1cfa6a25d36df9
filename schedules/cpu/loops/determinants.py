# SPDX-License-Identifier: Apache-2.0
"""Kernel of determinants: Gaussian elimination with partial pivoting.

::

    for b in T.parallel(batch):
        for k in range(size):
            swap row k with the row i >= k whose element [i, k] is the largest; change the sign
            det[b] *= work[b, k, k]
            for i in range(k + 1, size):
                work[b, i, k + 1:] -= work[b, i, k] / work[b, k, k] * work[b, k, k + 1:]
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent

from .selections import Shapes, cpu_kernel, long, own_extents


def determinants(
    batch: Extent,  # Number of matrices; it may be symbolic.
    size: int,  # Rows and columns of a matrix, at least 1.
    dtype: str,  # ``"float32"`` or ``"float64"``.
) -> tirx.PrimFunc:
    """Build the kernel of the determinants of square matrices.

    Returns ``main(x, det, work, pivot)``: ``x`` [batch, size, size]; ``det`` [batch]; ``work`` as
    ``x`` and ``pivot`` int64 [batch] are for the kernel's own use.
    """
    (batch,) = own_extents((batch,))
    shape = (batch, size, size)
    buffers: Shapes = {
        "x": (shape, dtype),
        "det": ((batch,), dtype),
        "work": (shape, dtype),
        "pivot": ((batch,), "int64"),
    }
    rows, zero, one = long(size), tirx.const(0, dtype), tirx.const(1, dtype)

    def write(x: tirx.Buffer, det: tirx.Buffer, work: tirx.Buffer, pivot: tirx.Buffer) -> None:
        with T.parallel(long(0), batch) as b:
            with T.grid(rows, rows) as (i, j):
                T.buffer_store(work, x[b, i, j], [b, i, j])
            T.buffer_store(det, one, [b])
            with T.serial(long(0), rows) as k:
                _find_pivot(work, pivot, b, k, rows)
                with T.If(pivot[b] != k), T.Then():
                    _swap(work, b, (k, pivot[b]), k, rows)
                    T.buffer_store(det, -det[b], [b])
                T.buffer_store(det, det[b] * work[b, k, k], [b])
                # Below a pivot of 0 all is 0; the determinant is 0 then, and stays so.
                divisor = tirx.Select(work[b, k, k] == zero, one, work[b, k, k])
                with T.serial(k + long(1), rows) as i:
                    T.buffer_store(work, work[b, i, k] / divisor, [b, i, k])
                    with T.serial(k + long(1), rows) as j:
                        left = work[b, i, j] - work[b, i, k] * work[b, k, j]
                        T.buffer_store(work, left, [b, i, j])

    return cpu_kernel("Det", buffers, write)


def _find_pivot(
    work: tirx.Buffer, pivot: tirx.Buffer, b: tirx.Var, k: tirx.Var, rows: tirx.Expr
) -> None:
    """Find the row from ``k`` on with the largest element of column ``k``."""
    T.buffer_store(pivot, k, [b])
    with T.serial(k + long(1), rows) as i:
        with T.If(tirx.abs(work[b, i, k]) > tirx.abs(work[b, pivot[b], k])), T.Then():
            T.buffer_store(pivot, i, [b])


def _swap(
    work: tirx.Buffer,
    b: tirx.Var,
    rows: tuple[tirx.Expr, tirx.Expr],
    first: tirx.Var,
    end: tirx.Expr,
) -> None:
    """Exchange the columns from ``first`` on of two rows."""
    upper, lower = rows
    with T.serial(first, end) as j:
        kept = T.bind(work[b, upper, j])
        T.buffer_store(work, work[b, lower, j], [b, upper, j])
        T.buffer_store(work, kept, [b, lower, j])
