# SPDX-License-Identifier: Apache-2.0
"""The algebra of each reduction: identity, lift, combine and finish of its state.

A state is a tuple of fields: one value, for ``argmin`` and ``argmax`` a value and its position, for
``max_sum_exp`` the largest value ``m`` and the sum of ``exp(x - m)`` (Milakov and Gimelshein,
Online normalizer calculation for softmax, 2018). Combining is associative and commutative up to
rounding, NaN wins over every number, and of equal extremes the first position wins, all as in
numpy. Sums begin with -0.0, the only exact identity.

The sum of ``max_sum_exp`` is undefined where ``m`` is NaN or infinite at the end: its users handle
that. It is finite as long as ``m`` is -inf.
"""

from __future__ import annotations

from tvm import tirx

from ..tir.extents import Extent
from .reduce import FLOATS, MAX_SUM_EXP, ReduceWorkload

State = tuple[tirx.Expr, ...]

SUMS = ("sum", "mean", "sum_squares")


def field_dtypes(workload: ReduceWorkload) -> tuple[str, ...]:
    """The type of each field of a state."""
    if workload.is_arg:
        return (workload.acc_dtype, "int64")
    return (workload.acc_dtype,) * (2 if workload.operator == MAX_SUM_EXP else 1)


def identity(workload: ReduceWorkload) -> State:
    """The identity of :func:`combine`."""
    operator, dtype = workload.operator, workload.acc_dtype
    if workload.is_arg:
        return (_extreme(dtype, largest=operator == "argmin"), tirx.max_value("int64"))
    if operator == MAX_SUM_EXP:
        return (_extreme(dtype, largest=False), tirx.const(0, dtype))
    if operator in SUMS:
        return (tirx.const(-0.0 if "float" in dtype else 0, dtype),)
    if operator in ("prod", "and"):
        return (tirx.const(1, dtype),)
    if operator == "or":
        return (tirx.const(0, dtype),)
    return (_extreme(dtype, largest=operator == "min"),)


def lift(workload: ReduceWorkload, element: tirx.Expr) -> tirx.Expr:
    """The first field of the state of one element of the data."""
    if workload.operator in ("and", "or"):
        return tirx.Cast(workload.acc_dtype, _truth(workload.dtype, element))
    value = element.astype(workload.acc_dtype)
    return value * value if workload.operator == "sum_squares" else value


def state_of_one(workload: ReduceWorkload, value: tirx.Expr, position: tirx.Expr) -> State:
    """The state of one element: ``value`` is its first field, ``position`` its position."""
    if workload.is_arg:
        return (value, position)
    if workload.operator == MAX_SUM_EXP:
        return (value, tirx.const(1, workload.acc_dtype))
    return (value,)


def combine(workload: ReduceWorkload, left: State, right: State) -> State:
    """The state of the elements of both states."""
    operator = workload.operator
    if workload.is_arg:
        keep_right = replaces(workload, left, right)
        return tuple(tirx.Select(keep_right, b, a) for a, b in zip(left, right, strict=True))
    if operator == MAX_SUM_EXP:
        return _combine_sums_of_exp(left, right)
    a, b = left[0], right[0]
    if operator in SUMS:
        return (a + b,)
    if operator == "prod":
        return (a * b,)
    if operator == "and":
        return (a & b,)
    if operator == "or":
        return (a | b,)
    return (tirx.Select(_beats(operator, b, a), b, a),)


def finish(workload: ReduceWorkload, state: State, reduced: Extent) -> State:
    """The elements of the outputs for a state of all ``reduced`` elements.

    One element, except for ``max_sum_exp``: the largest value, and the sum in the accumulators'
    type.
    """
    if workload.is_arg:
        return (state[1].astype(workload.out_dtype),)
    value = state[0]
    if workload.operator == MAX_SUM_EXP:
        return (value.astype(workload.out_dtype), state[1])
    if workload.operator == "mean":
        value = value / _as_number(reduced, workload.acc_dtype)
    if workload.out_dtype == "bool":
        return (value != tirx.const(0, workload.acc_dtype),)
    return (value.astype(workload.out_dtype),)


def empty_result(workload: ReduceWorkload) -> float | int | bool | None:
    """The result of no elements as in numpy; None where there is none."""
    return {
        "sum": 0,
        "sum_squares": 0,
        "prod": 1,
        "mean": float("nan"),
        "and": True,
        "or": False,
    }.get(workload.operator)


def _truth(dtype: str, element: tirx.Expr) -> tirx.Expr:
    if dtype == "bool":
        return element
    if dtype in FLOATS:  # LLVM compares so that NaN would equal 0
        number = element if dtype == "float64" else element.astype("float32")
        return tirx.any(number != tirx.const(0, number.ty.dtype), tirx.isnan(number))
    return element != tirx.const(0, dtype)


def _beats(operator: str, challenger: tirx.Expr, holder: tirx.Expr) -> tirx.Expr:
    """Return whether ``challenger`` is more extreme, or NaN."""
    is_max = operator in ("max", "argmax")
    beats = challenger > holder if is_max else challenger < holder
    if "float" in challenger.ty.dtype:
        beats = tirx.any(beats, tirx.isnan(challenger))
    return beats


def _combine_sums_of_exp(left: State, right: State) -> State:
    """Rescale the sum of the smaller value and add; one exponential serves both."""
    (a, sum_a), (b, sum_b) = left, right
    keep_right = _beats("max", b, a)
    # The difference of -inf and -inf is NaN.
    difference = tirx.Select(tirx.EQ(a, b), tirx.const(0, a.ty.dtype), a - b)
    factor = tirx.exp(-tirx.abs(difference))
    smaller, larger = (tirx.Select(keep_right, *pair) for pair in ((sum_a, sum_b), (sum_b, sum_a)))
    return (tirx.Select(keep_right, b, a), smaller * factor + larger)


def replaces(workload: ReduceWorkload, left: State, right: State) -> tirx.Expr:
    """Return whether the right one of two states of ``argmin`` or ``argmax`` wins."""
    (a, at_a), (b, at_b) = left, right
    tie = tirx.EQ(a, b)
    better = b > a if workload.operator == "argmax" else b < a
    if "float" in a.ty.dtype:
        tie = tirx.any(tie, tirx.all(tirx.isnan(a), tirx.isnan(b)))
        better = tirx.any(better, tirx.all(tirx.isnan(b), tirx.Not(tirx.isnan(a))))
    return tirx.any(better, tirx.all(tie, at_b < at_a))


def improves(workload: ReduceWorkload, left: State, right: State) -> tirx.Expr:
    """Return whether a later element wins over the ones before, of which ``left`` is the best.

    A position below zero stands for none. All comparisons are made, so that a GPU needs no branch.
    """
    (a, at_a), (b, _) = left, right
    wins = _flag(b > a if workload.operator == "argmax" else b < a) | _flag(at_a < 0)
    if "float" in a.ty.dtype:
        wins = wins | (_flag(tirx.isnan(b)) & _flag(tirx.Not(tirx.isnan(a))))
    return wins != 0


def _flag(condition: tirx.Expr) -> tirx.Expr:
    return condition.astype("int32")


def _extreme(dtype: str, largest: bool) -> tirx.Expr:
    if "float" in dtype:
        infinity = tirx.infinity(dtype)
        return infinity if largest else -infinity
    return tirx.max_value(dtype) if largest else tirx.min_value(dtype)


def _as_number(extent: Extent, dtype: str) -> tirx.Expr:
    if isinstance(extent, int | tirx.IntImm):
        return tirx.const(int(extent), dtype)
    return extent.astype(dtype)
