# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a case by eager calls on the array modules torch, cupy and jax.numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from examples.benchmarks.reduction_cases import Case, Reduction
from schedules.workload.reduce import ReduceWorkload

Planned = list[tuple[Reduction, ReduceWorkload]]


def run_case(
    case: Case, inputs: Sequence[Any], xp: Any, reduce: Callable[..., Any]
) -> tuple[Any, ...]:
    """All outputs of a case by the functions of ``xp``; ``reduce`` is one of this module."""
    return run_planned(planned(case), inputs, xp, reduce)


def planned(case: Case) -> Planned:
    """Description of a case for :func:`run_planned`."""
    return [(reduction, case.workload(reduction)) for reduction in case.reductions]


def run_planned(
    work: Planned, inputs: Sequence[Any], xp: Any, reduce: Callable[..., Any]
) -> tuple[Any, ...]:
    """All outputs, as of :func:`run_case`."""
    found = [reduce(workload, steps(reduction, inputs, xp), xp) for reduction, workload in work]
    return tuple(found)


def steps(reduction: Reduction, inputs: Sequence[Any], xp: Any) -> Any:
    """The reduced values."""
    value = inputs[reduction.source]
    for step in reduction.steps:
        word, _, argument = step.partition(" ")
        if word == "cast":
            value = cast(value, argument, xp)
        elif word == "reshape":
            value = value.reshape(sizes(argument))
        elif word in ("add", "mul"):
            other = inputs[int(argument)]
            value = value + other if word == "add" else value * other
        elif word == "neg":
            value = -value
        else:
            value = getattr(xp, word)(value)
    return value


def sizes(argument: str) -> tuple[int, ...]:
    """The shape that a ``reshape`` names."""
    return tuple(int(size) for size in argument.split())


def cast(value: Any, dtype: str, xp: Any) -> Any:
    """The values in another type."""
    to = value.to if hasattr(value, "to") else value.astype
    return to(getattr(xp, dtype))


def reduce_torch(workload: ReduceWorkload, value: Any, torch: Any) -> Any:
    """One reduction in PyTorch; 16-bit sums accumulate in float32, integers wrap in their type."""
    axes, operator = list(workload.axes), workload.operator
    dtype = getattr(torch, workload.dtype)
    if operator in ("and", "or"):
        return (torch.all if operator == "and" else torch.any)(value, dim=axes)
    if operator in ("min", "max"):
        return (torch.amin if operator == "min" else torch.amax)(value, dim=axes)
    if operator == "prod":
        if len(axes) == value.ndim:
            return torch.prod(value, dtype=dtype)
        (axis,) = axes  # torch.prod takes one axis
        return torch.prod(value, dim=axis, dtype=dtype)
    if operator == "mean":
        return torch.mean(value, dim=axes)
    if operator == "sum_squares":
        wide = value.to(getattr(torch, workload.acc_dtype))
        return torch.sum(wide * wide, dim=axes).to(dtype)
    return torch.sum(value, dim=axes, dtype=dtype)


def reduce_numpy(workload: ReduceWorkload, value: Any, xp: Any) -> Any:
    """One reduction in a module like numpy; 16-bit floats accumulate in float32."""
    axes, operator = workload.axes, workload.operator
    if operator in ("and", "or"):
        return (xp.all if operator == "and" else xp.any)(value, axis=axes)
    if operator in ("min", "max"):
        return (xp.min if operator == "min" else xp.max)(value, axis=axes)
    accumulator, result = getattr(xp, workload.acc_dtype), getattr(xp, workload.dtype)
    if operator == "sum_squares":
        wide = value.astype(accumulator)
        return xp.sum(wide * wide, axis=axes).astype(result)
    function = {"sum": xp.sum, "prod": xp.prod, "mean": xp.mean}[operator]
    return function(value, axis=axes, dtype=accumulator).astype(result)
