# SPDX-License-Identifier: Apache-2.0
"""Ops that PyTorch's exporter writes by inexact formulas have the numbers of eager mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

import tvm_fusion  # noqa: E402

NAN, INF = math.nan, math.inf
EDGES = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.7, 2.1, -2.1, 1e-3, 1e4, 7.0]
BOUNDARIES = [-1.0, 0.0, 0.0, 2.1, 7.0]


class _Several(torch.nn.Module):
    """All functions of the same tensors, so that one model is compiled."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *arguments: Any) -> Any:
        return tuple(function(*arguments) for function in self.functions)


def check(functions: list[Callable[..., Any]], *arguments: Any, rtol: float = 0) -> None:
    """Compare with eager mode: also signs of zeros, and where NaN is."""
    module = _Several(functions)
    compiled = tvm_fusion.compile(torch.export.export(module, arguments), threads=1)
    found = compiled(*[value.numpy() for value in arguments])
    found = found if isinstance(found, tuple) else (found,)
    for number, (one, wanted) in enumerate(zip(found, module(*arguments), strict=True)):
        right = wanted.numpy()
        assert one.dtype == right.dtype
        np.testing.assert_allclose(one, right, rtol=rtol, atol=0, err_msg=str(number))
        if right.dtype.kind == "f":
            is_number = ~np.isnan(right)
            assert (np.signbit(one) == np.signbit(right))[is_number].all(), number


def pairs(dtype: Any) -> list[Any]:
    grid = torch.meshgrid(torch.tensor(EDGES), torch.tensor(EDGES), indexing="ij")
    return [part.reshape(-1).contiguous().to(dtype) for part in grid]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_divisions_of_floats(dtype: Any) -> None:
    below = lambda a, b: torch.div(a, b, rounding_mode="floor")  # noqa: E731
    near = 0 if dtype == torch.float32 else 1e-3  # eager mode rounds each step to 16 bits
    check([torch.floor_divide, below, torch.remainder], *pairs(dtype), rtol=near)
    check([lambda a: torch.floor_divide(a, 0.7), lambda a: a % -0.7], pairs(dtype)[0])


@pytest.mark.slow
def test_divisions_of_integers() -> None:
    a, b = torch.tensor([7, -7, 7, -7, 0]), torch.tensor([2, 2, -2, -2, 3])
    check([torch.floor_divide, torch.remainder], a, b)


@pytest.mark.slow
def test_angles() -> None:
    check([torch.atan2], *pairs(torch.float32), rtol=1e-6)
    check([torch.atan2], *pairs(torch.float16), rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("right", [False, True])
def test_places_among_boundaries(right: bool) -> None:
    x, rows = torch.tensor(EDGES), torch.tensor([BOUNDARIES, [0.0, 1.0, 2.0, 3.0, INF]])

    def among(x: Any, rows: Any) -> Any:
        return torch.bucketize(x, rows[0].contiguous(), right=right, out_int32=True)

    def of_rows(x: Any, rows: Any) -> Any:
        return torch.searchsorted(rows, x.expand(2, -1).contiguous(), right=right)

    check([among, of_rows], x, rows)
    order = torch.tensor([3, 0, 4, 1, 2])
    shuffled = torch.empty(5).scatter(0, order, torch.tensor(BOUNDARIES))
    side = "right" if right else "left"
    check([lambda s, x, o: torch.searchsorted(s, x, sorter=o, side=side)], shuffled, x, order)


@pytest.mark.slow
def test_floats_less_integers() -> None:
    x = torch.tensor([[0, 1, -3], [7, 2**40, -(2**40)]])
    check([lambda x: 1.5 - x, lambda x: 2 - x, lambda x: torch.rsub(x, 0.5, alpha=3)], x)
