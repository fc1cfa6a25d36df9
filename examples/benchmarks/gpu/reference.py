# SPDX-License-Identifier: Apache-2.0
"""Inputs of a case, its result in float64, and the tolerance of an engine.

Sums of ``R`` values ``v`` may be off by ``4 eps sqrt(R) sqrt(result^2 + |v|^2)``, four times the
expected error of one long chain of additions, plus the rounding of the steps before, plus one unit
in the last place of the output. Extremes, logic and integers are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from examples.benchmarks.reduction_cases import Case, Reduction, step_dtypes
from schedules.workload.reduce import ReduceWorkload
from tvm_fusion.errors import EngineError

from .array_steps import sizes
from .engine import module

SLACK = 4


def make_inputs(case: Case, seed: int, device: str) -> list[Any]:
    """One set of random inputs, PyTorch tensors on ``device``."""
    torch = module("torch")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return [_random(case, generator, device) for _ in range(case.inputs)]


def deviation(case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[float, float]:
    """The largest error in units of the tolerance there, and the largest tolerance.

    Raises
    ------
    EngineError
        If an output has another shape or type than expected.
    """
    worst, widest = 0.0, 0.0
    if len(outputs) != len(case.reductions):
        raise EngineError(f"{len(outputs)} outputs; expected {len(case.reductions)}")
    for reduction, output in zip(case.reductions, outputs, strict=True):
        expected, allowed = _expected(case, reduction, inputs)
        found = as_torch(output)
        dtype = case.workload(reduction).out_dtype
        _check_kind(found, expected, dtype)
        ratio = _ratio(found, expected.to(found.dtype) if allowed is None else expected, allowed)
        worst = max(worst, ratio)
        widest = max(widest, 0.0 if allowed is None else float(allowed.max()))
    return worst, widest


def as_torch(array: Any) -> Any:
    """Any engine's array as a PyTorch tensor, without a copy."""
    torch = module("torch")
    return array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)


def _random(case: Case, generator: Any, device: str) -> Any:
    torch = module("torch")
    dtype, operator = getattr(torch, case.dtype), case.reductions[0].operator
    reduced = case.loops(case.reductions[0]).reduced
    options = {"generator": generator, "device": device}
    if case.dtype == "bool":  # About half of the outputs depend on one element.
        rare = torch.rand(case.shape, **options) < math.log(2) / max(1, int(reduced))
        return rare if operator == "or" else ~rare
    if operator in ("and", "or") and not dtype.is_floating_point:
        rare = torch.rand(case.shape, **options) < math.log(2) / max(1, int(reduced))
        return (rare if operator == "or" else ~rare).to(dtype)
    if not dtype.is_floating_point:
        if operator == "prod":  # odd factors; even ones soon make every product zero
            return 2 * torch.randint(-2, 3, case.shape, **options, dtype=dtype) + 1
        return torch.randint(-100, 101, case.shape, **options, dtype=dtype)
    draw_dtype = torch.float64 if case.dtype == "float64" else torch.float32
    if case.dtype in ("float16", "bfloat16"):
        draw_dtype = dtype  # large cases have no room for a wider copy
    values = torch.randn(case.shape, **options, dtype=draw_dtype)
    if operator == "prod":  # products stay within range
        return torch.exp2(values * (2 / math.sqrt(max(1, int(reduced))))).to(dtype)
    return values.to(dtype)


def _expected(case: Case, reduction: Reduction, inputs: Sequence[Any]) -> tuple[Any, Any]:
    """The result, and the tolerance at each place; None where it must be exact."""
    torch = module("torch")
    workload = case.workload(reduction)
    values = _values(reduction, inputs)
    values = _rows(values, reduction.axes)
    operator = workload.operator
    shape = case.output_shape(reduction)
    if operator in ("and", "or"):
        result = (torch.all if operator == "and" else torch.any)(values != 0, dim=1)
        return result.reshape(shape), None
    if operator in ("min", "max"):
        return (torch.amin if operator == "min" else torch.amax)(values, dim=1).reshape(shape), None
    if operator == "sum_squares":
        values = values * values
    reduced = torch.prod if operator == "prod" else torch.sum
    result = reduced(values, dim=1)
    if not values.dtype.is_floating_point:
        return result.reshape(shape), None
    allowed = _allowed(workload, step_dtypes(reduction, case.dtype)[1:], result, values)
    if operator == "mean":
        result, allowed = result / values.shape[1], allowed / values.shape[1]
    return result.reshape(shape), allowed.reshape(shape)


def _values(reduction: Reduction, inputs: Sequence[Any]) -> Any:
    """The reduced values in float64 or int64; casts to narrow types round."""
    torch = module("torch")

    def wide(tensor: Any) -> Any:
        return tensor.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64)

    value = wide(inputs[reduction.source])
    for step in reduction.steps:
        word, _, argument = step.partition(" ")
        if word == "cast":
            value = wide(value.to(getattr(torch, argument)))
        elif word == "reshape":
            value = value.reshape(sizes(argument))
        elif word in ("add", "mul"):
            other = wide(inputs[int(argument)])
            value = value + other if word == "add" else value * other
        else:
            value = getattr(torch, word)(value)
    return value


def _rows(values: Any, axes: Sequence[int]) -> Any:
    kept = [axis for axis in range(values.ndim) if axis not in axes]
    outputs = math.prod(values.shape[axis] for axis in kept)
    return values.permute(*kept, *axes).reshape(outputs, -1)


def _allowed(workload: ReduceWorkload, steps: Sequence[str], result: Any, values: Any) -> Any:
    torch = module("torch")
    accumulator = torch.finfo(getattr(torch, workload.acc_dtype)).eps
    output = torch.finfo(getattr(torch, workload.out_dtype))
    chain = SLACK * accumulator * math.sqrt(values.shape[1])
    rounding = output.eps * result.abs() + output.tiny
    if workload.operator == "prod":
        return chain * result.abs() + rounding
    length = torch.linalg.vector_norm(values, dim=1)
    floats = [torch.finfo(getattr(torch, dtype)).eps for dtype in steps if "float" in dtype]
    before = max(floats, default=0.0) * (SLACK * length + result.abs())
    return chain * torch.hypot(result, length) + before + rounding


def _check_kind(found: Any, expected: Any, dtype: str) -> None:
    shape, kind = tuple(found.shape), str(found.dtype).removeprefix("torch.")
    if shape != tuple(expected.shape) or kind != dtype:
        raise EngineError(
            f"output is {kind} of shape {shape}; expected {dtype} of {tuple(expected.shape)}"
        )


def _ratio(output: Any, expected: Any, allowed: Any) -> float:
    """The largest error over the tolerance; infinite where an exact result differs."""
    torch = module("torch")
    if allowed is None:
        same = (output == expected) | ((output != output) & (expected != expected))
        return 0.0 if bool(same.all()) else math.inf
    ratio = (output.to(torch.float64) - expected).abs() / allowed
    return math.inf if bool(ratio.isnan().any()) else float(ratio.max())
