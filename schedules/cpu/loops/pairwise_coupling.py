# SPDX-License-Identifier: Apache-2.0
"""Kernel that makes probabilities of classes of those of pairs, by the second method of Wu et al.

It solves ``min_p sum_ij (r_ji p_i - r_ij p_j)^2`` with ``sum p = 1`` by coordinate descent
(T.-F. Wu, C.-J. Lin, R. C. Weng: Probability estimates for multi-class classification by pairwise
coupling. JMLR 5, 2004), until the largest error is below 0.005 / classes, at most 100 times.
"""

from __future__ import annotations

from itertools import combinations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent

from .selections import Shapes, cpu_kernel, long, own_extents

_ROUNDS = 100
_ERROR = 0.005
_LEAST = 1e-7
"""Probabilities of pairs are at least this far from 0 and 1."""

_DTYPE = "float32"


def pairwise_coupling(
    rows: Extent,  # Rows of probabilities; it may be symbolic.
    classes: int,  # Number of classes, at least 2.
) -> tirx.PrimFunc:
    """Build the kernel.

    Returns ``main(pairs, p, quadratic, product)``: ``pairs`` float32 [rows, classes * (classes - 1)
    / 2], the probability of the first class of each pair (0, 1), (0, 2), ... (1, 2), ...; ``p``
    float32 [rows, classes]; ``quadratic`` float32 [rows, classes, classes] and ``product`` as ``p``
    are for the kernel's own use.
    """
    (rows,) = own_extents((rows,))
    pairs = list(combinations(range(classes), 2))
    buffers: Shapes = {
        "pairs": ((rows, len(pairs)), _DTYPE),
        "p": ((rows, classes), _DTYPE),
        "quadratic": ((rows, classes, classes), _DTYPE),
        "product": ((rows, classes), _DTYPE),
    }
    size, zero, one = long(classes), _number(0), _number(1)

    def write(
        given: tirx.Buffer, p: tirx.Buffer, quadratic: tirx.Buffer, product: tirx.Buffer
    ) -> None:
        with T.parallel(long(0), rows) as row:
            with T.grid(size, size) as (i, j):
                T.buffer_store(quadratic, zero, [row, i, j])
            with T.serial(long(0), size) as i:
                T.buffer_store(p, _number(1 / classes), [row, i])
            for number, (i, j) in enumerate(pairs):
                _add_pair(quadratic, row, (i, j), given[row, number])
            goes_on = T.sblock_alloc_buffer((1,), "bool")
            T.buffer_store(goes_on, tirx.const(True, "bool"), [0])
            with T.serial(0, _ROUNDS):
                with T.If(goes_on[0]), T.Then():
                    _improve(p, quadratic, product, row, goes_on)

    def _improve(
        p: tirx.Buffer,
        quadratic: tirx.Buffer,
        product: tirx.Buffer,
        row: tirx.Var,
        goes_on: tirx.Buffer,
    ) -> None:
        total = T.sblock_alloc_buffer((1,), _DTYPE)
        error = T.sblock_alloc_buffer((1,), _DTYPE)
        T.buffer_store(total, zero, [0])
        T.buffer_store(error, zero, [0])
        with T.serial(long(0), size) as i:
            T.buffer_store(product, zero, [row, i])
            with T.serial(long(0), size) as j:
                term = quadratic[row, i, j] * p[row, j]
                T.buffer_store(product, product[row, i] + term, [row, i])
            T.buffer_store(total, total[0] + p[row, i] * product[row, i], [0])
        with T.serial(long(0), size) as i:
            T.buffer_store(error, tirx.max(error[0], tirx.abs(product[row, i] - total[0])), [0])
        T.buffer_store(goes_on, error[0] >= _number(_ERROR / classes), [0])
        with T.If(goes_on[0]), T.Then(), T.serial(long(0), size) as i:
            own = T.bind(quadratic[row, i, i])
            step = T.bind((total[0] - product[row, i]) / own)
            scale = T.bind(one + step)
            gain = step * (step * own + _number(2) * product[row, i])
            T.buffer_store(p, p[row, i] + step, [row, i])
            T.buffer_store(total, (total[0] + gain) / scale / scale, [0])
            with T.serial(long(0), size) as j:
                moved = product[row, j] + step * quadratic[row, i, j]
                T.buffer_store(product, moved / scale, [row, j])
                T.buffer_store(p, p[row, j] / scale, [row, j])

    return cpu_kernel("SVMClassifier", buffers, write)


def _number(value: float) -> tirx.Expr:
    return tirx.const(value, _DTYPE)


def _add_pair(
    quadratic: tirx.Buffer, row: tirx.Var, pair: tuple[int, int], given: tirx.Expr
) -> None:
    """Add the terms of a pair to the quadratic form."""
    i, j = pair
    first = T.bind(tirx.min(tirx.max(given, _number(_LEAST)), _number(1 - _LEAST)))
    second = T.bind(_number(1) - first)
    T.buffer_store(quadratic, quadratic[row, i, i] + second * second, [row, i, i])
    T.buffer_store(quadratic, quadratic[row, j, j] + first * first, [row, j, j])
    T.buffer_store(quadratic, -first * second, [row, i, j])
    T.buffer_store(quadratic, -first * second, [row, j, i])
