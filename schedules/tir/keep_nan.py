# SPDX-License-Identifier: Apache-2.0
"""Minima and maxima that keep NaN, as ONNX and numpy have them.

TVM's ``max(x, y)`` is ``x > y ? x : y``, which is ``y`` where ``x`` is NaN: a ReLU would make zero
of it, and a model that has diverged would look healthy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import tvm_ffi
from tvm import ir, tirx

from .expression_walk import loads


def keep_nan(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make float minima and maxima of a constant and anything, or of two loads, propagate NaN.

    Reductions and larger expressions on both sides are left alone: there it would be too slow.

    Parameters
    ----------
    func : PrimFunc
        A function, scheduled or not.

    Returns
    -------
    PrimFunc
        The same function when there is nothing to do.
    """

    def rewrite(store: tirx.BufferStore) -> tirx.BufferStore:
        if not _is_float(store.value) or _accumulates(store):
            return store
        value = tvm_ffi.structural_map(store.value, ((tirx.Max, _maximum), (tirx.Min, _minimum)))
        same = value.same_as(store.value)
        return store if same else tirx.BufferStore(store.buffer, value, store.indices)

    return tvm_ffi.structural_map(func, (tirx.BufferStore, rewrite))


def _is_float(expr: ir.Expr) -> bool:
    return "float" in str(expr.ty.dtype)


def _accumulates(store: tirx.BufferStore) -> bool:
    return any(load.source.same_as(store.buffer) for load in loads(store.value))


def _maximum(expr: tirx.Max) -> ir.Expr:
    return _choose(expr, operator.gt)


def _minimum(expr: tirx.Min) -> ir.Expr:
    return _choose(expr, operator.lt)


def _choose(expr: tirx.Max | tirx.Min, wins: Callable[[ir.Expr, ir.Expr], ir.Expr]) -> ir.Expr:
    """Put the operand that may be NaN into the branch of a false comparison, as with NaN."""
    if not _is_float(expr):
        return expr
    if _is_constant(expr.a):
        return tirx.Select(wins(expr.a, expr.b), expr.a, expr.b)
    if _is_constant(expr.b):
        return tirx.Select(wins(expr.b, expr.a), expr.b, expr.a)
    if isinstance(expr.a, ir.TensorLoad) and isinstance(expr.b, ir.TensorLoad):
        other = tirx.Select(tirx.isnan(expr.a), expr.a, expr.b)
        return tirx.Select(wins(expr.a, expr.b), expr.a, other)
    return expr


def _is_constant(expr: ir.Expr) -> bool:
    return isinstance(expr.value if isinstance(expr, tirx.Broadcast) else expr, tirx.FloatImm)
