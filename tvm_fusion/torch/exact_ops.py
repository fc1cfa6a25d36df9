# SPDX-License-Identifier: Apache-2.0
"""Ops that PyTorch's exporter to ONNX writes by formulas with other numbers, written out exactly.

::

    atan2:        the exporter ignores the sign of a zero, and loses infinities and NaN
    remainder:    the exporter rounds the quotient: 2.1 % 0.7 = -6e-8 instead of 0.7
    a // b:       likewise: 2.1 // 0.7 = 3 instead of 2
    bucketize:    NaN lies behind all boundaries; and searchsorted, which the exporter lacks
    1.0 - i:      the exporter cannot subtract integers from a float
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """Angles of points, from -pi to pi, by the one of the first quadrant."""
    result = torch.result_type(y, x)
    result = result if result.is_floating_point else torch.get_default_dtype()
    work = torch.float32 if result in _HALVES else result
    y, x = torch.broadcast_tensors(y.to(work), x.to(work))
    height, width = y.abs(), x.abs()
    equal = torch.where(height == 0, 0.0, 1.0).to(work)  # of two zeros, or two infinities
    angle = torch.atan(torch.where(height == width, equal, height / width))
    angle = torch.where(_is_negative(x), math.pi - angle, angle)
    return torch.where(_is_negative(y), -angle, angle).to(result)


def _is_negative(x: Tensor) -> Tensor:
    """Whether the sign is set, also that of a zero."""
    return (x < 0) | ((x == 0) & (1 / x < 0))


def _of_floats(
    compute: Callable[[Tensor, Tensor], Tensor], *, rounds_numbers: bool = False
) -> Callable[..., Any]:
    """Decomposition of a division of floats, one of them maybe a number; of integers it is none.

    A number is rounded to 16 bits, as the tensors are, where eager mode does so.
    """

    def decompose(a: Any, b: Any, *, rounding_mode: str | None = "floor") -> Any:
        result = torch.result_type(a, b)
        if not result.is_floating_point or rounding_mode != "floor":
            return NotImplemented
        work = torch.float32 if result in _HALVES else result
        kind = result if rounds_numbers else work
        a, b = (
            (x if isinstance(x, Tensor) else torch.full((), x, dtype=kind)).to(work) for x in (a, b)
        )
        return compute(a, b).to(result)

    return decompose


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    """What an exact division leaves, with the sign of the divisor."""
    rest = torch.fmod(a, b)
    return torch.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    """The whole quotient below the exact one; a zero has the sign of the rounded one."""
    rest = torch.fmod(a, b)
    whole = (a - rest) / b
    whole = torch.where((rest != 0) & ((b < 0) != (rest < 0)), whole - 1, whole)
    low = torch.floor(whole)
    low = torch.where(whole - low > 0.5, low + 1, low)
    quotient = a / b
    return torch.where(b == 0, quotient, torch.where(whole == 0, quotient * 0, low))


def bucketize(
    x: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    """Number of the boundaries before each element: below it or, to the ``right``, not above."""
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


def searchsorted(
    sequence: Tensor,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Number of the elements of each row before the values of that row."""
    if sorter is not None:
        sequence = sequence.gather(-1, sorter)
    if not isinstance(values, Tensor):
        values = torch.full((), values)
    rows = sequence.unsqueeze(-2) if sequence.dim() > 1 else sequence
    columns = values.unsqueeze(-1)
    is_behind = rows > columns if right or side == "right" else rows >= columns
    return (~is_behind).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _subtract_from(x: Tensor, number: Any, alpha: Any = 1) -> Any:
    """A number of a wider kind than the tensor, less the tensor."""
    result = torch.result_type(x, number)
    if result == x.dtype:
        return NotImplemented
    return torch.full((), number, dtype=result) - alpha * x.to(result)


EXACT_OPS: dict[Any, Callable[..., Any]] = {
    _ATEN.atan2.default: atan2,
    _ATEN.rsub.Scalar: _subtract_from,
    **dict.fromkeys((_ATEN.bucketize.Tensor, _ATEN.bucketize.Scalar), bucketize),
    **dict.fromkeys((_ATEN.searchsorted.Tensor, _ATEN.searchsorted.Scalar), searchsorted),
    **dict.fromkeys(
        (_ATEN.floor_divide.default, _ATEN.div.Tensor_mode, _ATEN.div.Scalar_mode),
        _of_floats(_floor_divide),
    ),
    **dict.fromkeys(
        (_ATEN.remainder.Tensor, _ATEN.remainder.Scalar, _ATEN.remainder.Scalar_Tensor),
        _of_floats(_remainder, rounds_numbers=True),
    ),
}
"""Ops, and functions of their arguments that compute the same by others."""
