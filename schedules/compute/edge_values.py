# SPDX-License-Identifier: Apache-2.0
"""Computes that keep NaN and infinities where those of TVM's operator library lose them.

::

    sign(x) = 1 if x > 0, -1 if x < 0, else x
    quantize(x)[i] = min(max(round(x[i] / scale) + zero, low), high)
    max_pool(x)[n, c, h, w] = max over (kh, kw) of x[n, c, h * sh + kh * dh, w * sw + kw * dw]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from tvm import te, tirx, topi
from tvm.target import Target

Parameter: TypeAlias = te.Tensor | tirx.Expr


def sign(x: te.Tensor) -> te.Tensor:
    """The sign of each element; NaN stays NaN.

    Parameters
    ----------
    x : te.Tensor
        Any shape, floats or integers.

    Returns
    -------
    te.Tensor
        The same shape and type.
    """
    dtype = str(x.dtype)
    zero, one = (tirx.const(number, dtype) for number in (0, 1))

    def element(*index: tirx.Var) -> tirx.Expr:
        value = x(*index)
        if dtype.startswith("uint"):
            return tirx.Select(value > zero, one, zero)
        below = tirx.Select(value < zero, tirx.const(-1, dtype), value)
        return tirx.Select(value > zero, one, below)

    return te.compute(x.shape, element, name="sign", tag=topi.tag.ELEMWISE)


def quantize(
    data: te.Tensor, scale: Parameter, zero: Parameter, axis: int, dtype: str
) -> te.Tensor:
    """Whole numbers for floats; NaN becomes the lowest, as by ONNX Runtime.

    Parameters
    ----------
    data : te.Tensor
        Any shape, floats.
    scale, zero : te.Tensor or tirx.Expr
        One number, or a vector along ``axis``.
    axis : int
        An axis of ``data``.
    dtype : str
        An integer type, whose range bounds the results.

    Returns
    -------
    te.Tensor
        The same shape, of type ``dtype``.
    """

    def along(value: Parameter, index: Sequence[tirx.Var]) -> tirx.Expr:
        if not isinstance(value, te.Tensor):
            return value
        is_single = all(isinstance(size, tirx.IntImm) and size.value == 1 for size in value.shape)
        return value(*[0] * len(value.shape)) if is_single else value(index[axis])

    def element(*index: tirx.Var) -> tirx.Expr:
        whole = tirx.round(data(*index) / along(scale, index)) + along(zero, index)
        low, high = tirx.min_value(dtype), tirx.max_value(dtype)
        return tirx.min(tirx.max(whole, low), high).astype(dtype)  # the second where unordered

    return te.compute(data.shape, element, name="quantized")


def max_pool(
    data: te.Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    layout: str,
) -> te.Tensor:
    """The largest element of each window; NaN if there is one, as in numpy and PyTorch.

    Parameters
    ----------
    data : te.Tensor
        An image, floats or integers.
    kernel, strides, dilation : Sequence[int]
        One number for each of the axes D, H and W that the layout has.
    padding : Sequence[int]
        Padding before all of these axes, then after all; never the largest element.
    ceil_mode : bool
        Whether the last window may reach over the end.
    layout : str
        ``NCHW``, ``NHWC``, ``NCHW8c`` and the like.

    Returns
    -------
    te.Tensor
        The same type and layout.
    """
    dtype = str(data.dtype)
    names = [letter for letter in layout if letter.isalpha()]
    axes = [axis for axis, letter in enumerate(names) if letter in "DHW"]
    rank, is_float = len(axes), "float" in dtype
    before, after = [0] * len(names), [0] * len(names)
    for place, axis in enumerate(axes):
        before[axis] = padding[place]
        after[axis] = padding[rank + place] + (strides[place] - 1 if ceil_mode else 0)
    least = _least(dtype) if is_float else tirx.min_value(dtype)
    padded = data
    if any(before) or any(after):
        padded = topi.nn.pad(data, before, after, least, name="pad_temp")
    window = [te.reduce_axis((0, size), f"rv{place}") for place, size in enumerate(kernel)]
    shape = list(data.shape)
    for place, axis in enumerate(axes):
        reach = dilation[place] * (kernel[place] - 1) + 1
        room = data.shape[axis] + before[axis] + after[axis] - reach
        shape[axis] = tirx.indexdiv(room, strides[place]) + 1

    def largest(*index: tirx.Var) -> tirx.Expr:
        at = list(index)
        for place, axis in enumerate(axes):
            at[axis] = index[axis] * strides[place] + window[place] * dilation[place]
        return (_largest if is_float else te.max)(padded(*at), axis=window)

    return te.compute(shape, largest, name="pool_max", tag="pool_max")


def _larger(held: tirx.Expr, other: tirx.Expr) -> tirx.Expr:
    """The larger number; NaN if there is one, by one comparison more than the largest takes.

    TVM's maximum is ``other > held ? other : held`` on CPUs, which is one instruction and keeps a
    ``held`` NaN. That of GPUs drops NaN.
    """
    infinity = tirx.FloatImm(str(held.ty.dtype), math.inf)
    target = Target.current(allow_none=True)
    if target is None or target.kind.name == "llvm":
        return tirx.Select(other <= infinity, tirx.max(other, held), other)
    kept = tirx.all(held <= infinity, tirx.Not(held >= other))
    return tirx.Select(kept, other, held)


def _least(dtype: object) -> tirx.Expr:
    return tirx.FloatImm(str(dtype), -math.inf)


_largest = te.comm_reducer(_larger, _least, name="largest")
