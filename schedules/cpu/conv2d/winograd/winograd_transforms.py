# SPDX-License-Identifier: Apache-2.0
"""Winograd's transforms of vectors of channels, written into a function under construction.

Points come in pairs p and -p, whose rows (or columns) differ in the sign of the odd powers: their
common terms are computed once. F(4, 3) takes 12 instructions for 6 inputs, and 12 for 4 outputs.

The functions here may only be called between the ``with`` statements of an open ``IRBuilder``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.workload.winograd_matrices import transforms

Term = tuple[float, tirx.Expr]


def transform_data(size: int, inputs: Sequence[tirx.Expr]) -> list[tirx.Expr]:
    """``BT d``: ``size + 2`` bound vectors from as many inputs."""
    matrix = transforms(size).data
    results = [_combine(zip(matrix[0], inputs, strict=True))]
    for upper in range(1, size + 1, 2):
        row = matrix[upper]
        odd = np.flatnonzero(row)[-2::-2]  # the last entry is an even power
        factor = float(row[odd[0]])
        even_sum = _combine((row[k], inputs[k]) for k in range(len(row)) if k % 2 != odd[0] % 2)
        odd_sum = _combine((row[k] / factor, inputs[k]) for k in odd)
        results += [_combine([(1.0, even_sum), (sign * factor, odd_sum)]) for sign in (1.0, -1.0)]
    return [*results, _combine(zip(matrix[-1], inputs, strict=True))]


def transform_inverse(size: int, products: Sequence[tirx.Expr]) -> list[tirx.Expr]:
    """Multiply ``AT m``: ``size`` bound vectors from ``size + 2`` products."""
    matrix = transforms(size).inverse
    pairs = range(1, size + 1, 2)
    folded = {
        parity: [_combine([(1.0, products[j]), (sign, products[j + 1])]) for j in pairs]
        for parity, sign in ((0, 1.0), (1, -1.0))
    }
    results = []
    for k, row in enumerate(matrix):
        terms = [(row[0], products[0]), (row[-1], products[-1])]
        terms += [(row[j], value) for j, value in zip(pairs, folded[k % 2], strict=True)]
        results.append(_combine(terms))
    return results


def _combine(terms: Iterable[Term]) -> tirx.Expr:
    """A bound sum of products, those by one first, so that each other is one multiply-add."""
    present = [(float(factor), value) for factor, value in terms if factor]
    present.sort(key=lambda term: (abs(term[0]) != 1, term[0] < 0))
    (factor, value), *rest = present
    total = value if factor == 1 else value * _constant(factor, value)
    for factor, value in rest:
        if factor == 1:
            total = total + value
        elif factor == -1:
            total = total - value
        else:
            total = total + value * _constant(factor, value)
    return T.bind(total)


def _constant(factor: float, like: tirx.Expr) -> tirx.Expr:
    dtype, _, lanes = str(like.ty.dtype).partition("x")
    return T.broadcast(tirx.const(factor, dtype), int(lanes))
