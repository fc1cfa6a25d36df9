# SPDX-License-Identifier: Apache-2.0
"""Sums of exponentials together with the maximum of the same row, in one pass over the data.

``sum(exp(x - max(x)))`` needs the maximum first, so the two are stages of a chain, for which one
block must process a whole row. Where it cannot, they become one reduction with the state
:data:`schedules.workload.reduce.MAX_SUM_EXP`, which any number of blocks can share: the largest
value ``m`` and the sum ``s`` of ``exp(x - m)``. For any shift ``h``, one for each row, except -inf
below a finite ``m``::

    sum(exp(x - h)) = s * exp(m - h)                   # exactly s where h is m
                    = exp(m - h)   where m is infinite or NaN

so that a row of -inf, or with inf or NaN, gives the result of the two stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import tvm_ffi
from tvm import DataType, ir, tirx

from schedules.tir.expression_walk import substitute, uses
from schedules.workload.reduce import FLOATS, MAX_SUM_EXP

from .group import Epilogue, ReduceGroup, Reduction, ReductionStage, Result


def in_one_stage(group: ReduceGroup) -> ReduceGroup | None:
    """Turn a chain into a group of one stage.

    Parameters
    ----------
    group : ReduceGroup
        A chain.

    Returns
    -------
    ReduceGroup | None
        With sums of exponentials and the maxima of the same rows made one reduction each; None if
        stored elements use results, if there are more stages, or if the second one has anything
        else.
    """
    if len(group.stages) != 2 or any(element.stage > 0 for element in group.elements):
        return None
    first, second = group.stages
    pairs = [pair for total in second.reductions if (pair := _pair(first, total)) is not None]
    if len(pairs) < len(second.reductions):
        return None
    reductions: list[Reduction] = []
    totals: list[Epilogue] = []
    for reduction in first.reductions:
        own = [pair for pair in pairs if pair.maximum is reduction]
        merged, found = _merge(reduction, own) if own else (reduction, [])
        reductions.append(merged)
        totals += found
    stage = ReductionStage(tuple(reductions), (*first.epilogues, *totals, *second.epilogues))
    return replace(group, stages=(stage,))


@dataclass(frozen=True)
class _MaximumAndSum:
    """A maximum, and the sum of the exponentials of its data minus ``shift``, at ``m``."""

    maximum: Reduction
    total: Reduction
    shift: tirx.Expr
    m: tirx.Var


def _pair(first: ReductionStage, total: Reduction) -> _MaximumAndSum | None:
    """Find the maximum of the rows that belongs to ``total``, a sum of exponentials."""
    m, n = tirx.Var("m", "int64"), tirx.Var("n", "int64")
    exponent = _exponent(total.value(m, n))
    if total.workload.operator != "sum" or not isinstance(exponent, tirx.Sub):
        return None
    if uses(exponent.b, n):
        return None
    for maximum in first.reductions:
        is_float = maximum.workload.operator == "max" and maximum.workload.dtype in FLOATS
        if is_float and _is_same(maximum.value(m, n), exponent.a):
            return _MaximumAndSum(maximum, total, exponent.b, m)
    return None


def _merge(maximum: Reduction, pairs: list[_MaximumAndSum]) -> tuple[Reduction, list[Epilogue]]:
    """One reduction for a maximum and all sums that use it, with the sums as epilogues."""
    workloads = (maximum.workload, *(pair.total.workload for pair in pairs))
    dtype = max((of.acc_dtype for of in workloads), key=lambda name: DataType(name).bits)
    [largest] = maximum.results
    raw = tirx.Var("sum_exp", dtype)
    reduction = Reduction(
        replace(maximum.workload, operator=MAX_SUM_EXP, acc_dtype=dtype),
        maximum.loops,
        lambda m, n: maximum.value(m, n).astype(dtype),
        (largest, Result(raw, None)),
    )
    return reduction, [_total(pair, largest.var, raw) for pair in pairs]


def _total(pair: _MaximumAndSum, largest: tirx.Var, raw: tirx.Var) -> Epilogue:
    """A sum, from the maximum and the sum of exponentials relative to it."""
    dtype = str(raw.ty.dtype)

    def value(at: tirx.Expr) -> tirx.Expr:
        high = largest.astype(dtype)
        infinity = tirx.infinity(dtype)
        is_finite = tirx.abs(high) < infinity
        if _without_widening(pair.shift).same_as(largest):
            # NaN; TVM would simplify a difference of equal expressions to 0.
            terms = tirx.Select(is_finite, raw, infinity - tirx.abs(high))
        else:
            factor = tirx.exp(high - substitute(pair.shift, {pair.m: at}).astype(dtype))
            terms = tirx.Select(is_finite, raw, tirx.const(1, dtype)) * factor
            terms = tirx.Select(tirx.isnan(high), high, terms)
        return terms.astype(pair.total.workload.out_dtype)

    [stored] = pair.total.results
    return Epilogue(value, stored)


def _exponent(value: tirx.Expr) -> tirx.Expr | None:
    """``x`` if ``value`` is the exponential of ``x``, in any float type."""
    while isinstance(value, tirx.Cast) and _is_float(value.value):
        value = value.value
    is_exp = isinstance(value, ir.Call) and getattr(value.op, "name", "") == "tirx.exp"
    return _without_widening(value.args[0]) if is_exp else None


def _is_same(a: tirx.Expr, b: tirx.Expr) -> bool:
    """Return whether two expressions are equal, of whatever float type."""
    return bool(tvm_ffi.structural_equal(_without_widening(a), _without_widening(b)))


def _without_widening(value: tirx.Expr) -> tirx.Expr:
    while isinstance(value, tirx.Cast) and _is_float(value.value):
        if DataType(str(value.value.ty.dtype)).bits >= DataType(str(value.ty.dtype)).bits:
            break
        value = value.value
    return value


def _is_float(value: tirx.Expr) -> bool:
    return str(value.ty.dtype) in FLOATS
