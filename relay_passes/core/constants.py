# SPDX-License-Identifier: Apache-2.0
"""Constants in rewriting rules: their numbers, and the shapes that they broadcast to."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  gives numpy the dtype "bfloat16"
import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst

from .expressions import Value, op_name

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Types that rules compute with; all arithmetic is done in float64 and rounded once."""


def array_of(expr: relax.Expr) -> np.ndarray:
    """The elements of a constant tensor; read-only, as they may be the tensor's own."""
    value = expr.value
    shared = value.device.type == "cpu" and str(value.dtype) != "bfloat16"  # numpy refuses that
    return np.from_dlpack(value) if shared else value.numpy()


def tensor_constant(values: np.ndarray, dtype: object) -> relax.Expr:
    """A constant of ``values`` cast to ``dtype``."""
    return relax.const(tvm.runtime.tensor(np.asarray(values, str(dtype), order="C")))


def numbers(expr: relax.Expr) -> np.ndarray | None:
    """The elements of a floating-point constant in float64; None for anything else."""
    if not isinstance(expr, GenericConst) or not isinstance(expr.ty, relax.TensorType):
        return None
    if str(expr.ty.dtype) not in FLOATS:
        return None
    with np.errstate(invalid="ignore"):  # signalling NaN
        return array_of(expr).astype(np.float64)


def constant(values: np.ndarray, dtype: object) -> Value:
    """A constant of ``values`` rounded to ``dtype``; None when one of them is not finite there."""
    with np.errstate(over="ignore"):
        rounded = np.asarray(values, str(dtype), order="C")
    return tensor_constant(rounded, dtype) if np.isfinite(rounded).all() else None


def uniform(values: np.ndarray | None) -> float | None:
    """The number that all elements equal, if there is one."""
    if values is None or values.size == 0:
        return None
    first = float(values.flat[0])
    return first if (values == first).all() else None


def scaled(call: Value) -> tuple[relax.Expr, np.ndarray] | None:
    """``(x, factor)`` when ``call`` is ``x`` times, or divided by, a constant."""
    name = op_name(call)
    if name == "relax.multiply":
        return _with_constant(call.args[0], call.args[1])
    if name == "relax.divide":
        divisor = numbers(call.args[1])
        if divisor is not None and (divisor != 0).all():
            return call.args[0], 1 / divisor
    return None


def shifted(call: Value) -> tuple[relax.Expr, np.ndarray] | None:
    """``(x, offset)`` when ``call`` is ``x`` plus, or minus, a constant."""
    name = op_name(call)
    if name == "relax.add":
        return _with_constant(call.args[0], call.args[1])
    if name == "relax.subtract":
        offset = numbers(call.args[1])
        if offset is not None:
            return call.args[0], -offset
    return None


def _with_constant(lhs: relax.Expr, rhs: relax.Expr) -> tuple[relax.Expr, np.ndarray] | None:
    for data, other in ((lhs, rhs), (rhs, lhs)):
        values = numbers(other)
        if values is not None and not isinstance(data, GenericConst):
            return data, values
    return None


def per_channel(values: np.ndarray, ndim: int, channels: int, axis: int = 1) -> np.ndarray | None:
    """``values`` as one number a channel, if they broadcast like that against ``ndim`` axes."""
    if values.ndim > ndim:
        return None
    shape = (1,) * (ndim - values.ndim) + values.shape
    others = shape[:axis] + shape[axis + 1 :]
    if any(extent != 1 for extent in others) or shape[axis] not in (1, channels):
        return None
    return np.broadcast_to(values.reshape(-1), (channels,))


def channel_constant(values: np.ndarray, ndim: int, dtype: object, axis: int = 1) -> Value:
    """A constant with one number a channel, shaped to broadcast against ``ndim`` axes."""
    shape = [1] * ndim
    shape[axis] = values.size
    return constant(values.reshape(shape), dtype)


def broadcasts_cheaply(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether combining two constants gives no more elements than the larger of them."""
    try:
        shape = np.broadcast_shapes(first.shape, second.shape)
    except ValueError:
        return False
    return int(np.prod(shape)) <= max(first.size, second.size)
