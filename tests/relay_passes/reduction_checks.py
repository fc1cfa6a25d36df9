# SPDX-License-Identifier: Apache-2.0
"""Random data for reductions, their results by numpy, and how the tests build and run them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax

from schedules.workload.reduce import FLOATS
from tests.targets import compile_unchecked

Array = NDArray[Any]


def numpy_dtype(dtype: str) -> np.dtype:
    """``dtype`` for numpy, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def random_data(
    rng: np.random.Generator, shape: Sequence[int], dtype: str, special: bool = False
) -> Array:
    """Quarters from -4 to 4, whose sums and sums of squares are exact; any integers and truths.

    With ``special``, an eighth of the floats are NaN, infinities and zeros of both signs.
    """
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype not in FLOATS:
        bounds = np.iinfo(dtype)
        return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
    data = rng.integers(-16, 17, shape) / 4
    if special:
        oddities = rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], shape)
        data = np.where(rng.integers(0, 8, shape) == 0, oddities, data)
    return data.astype(numpy_dtype(dtype))


def rows(data: Array, axes: Sequence[int]) -> Array:
    """The parallel axes, then the reduced ones in row-major order as one axis."""
    parallel = [axis for axis in range(data.ndim) if axis not in axes]
    moved = data.transpose(*parallel, *axes)
    return moved.reshape(*moved.shape[: len(parallel)], math.prod(data.shape[a] for a in axes))


def reference(operator: str, data: Array, axes: Sequence[int], keepdims: bool = False) -> Array:
    """Result of numpy; floats in float64, rounded once, integers modulo their range."""
    result = _reduce(operator, rows(data, axes), data.dtype)
    kept = [1 if axis in axes else size for axis, size in enumerate(data.shape)]
    return result.reshape(kept) if keepdims else result


def _reduce(operator: str, row: Array, dtype: np.dtype) -> Array:
    is_float = dtype.name in FLOATS
    if operator in ("and", "or"):
        return (np.all if operator == "and" else np.any)(row != 0, axis=-1)
    wide = row.astype("float64") if is_float else row
    if operator in ("argmin", "argmax"):
        return (np.argmin if operator == "argmin" else np.argmax)(wide, axis=-1)
    if operator in ("min", "max"):
        return (np.min if operator == "min" else np.max)(wide, axis=-1).astype(dtype)
    if operator == "mean":
        with np.errstate(all="ignore"):
            return (wide.sum(axis=-1) / row.shape[-1]).astype(dtype)
    kind = "float64" if is_float else dtype
    values = wide * wide if operator == "sum_squares" else wide
    with np.errstate(all="ignore"):
        fold = np.prod if operator == "prod" else np.sum
        return fold(values, axis=-1, dtype=kind).astype(dtype)


def assert_close(actual: Array, expected: Array, operator: str) -> None:
    """Check type and values: exactly, but for products and means, which are rounded on the way."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if operator in ("prod", "mean") and expected.dtype.name in FLOATS:
        epsilon = float(ml_dtypes.finfo(expected.dtype).eps)
        tolerance = max(epsilon, 1e-14 if expected.dtype == "float64" else 1e-5)
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(
                actual.astype("float64"), expected.astype("float64"), rtol=tolerance
            )
        return
    if expected.dtype.name in FLOATS:
        actual, expected = actual.astype("float64"), expected.astype("float64")
    np.testing.assert_array_equal(actual, expected)


def module_of(expression: relax.Expr, *params: relax.Var) -> tvm.IRModule:
    """A module whose ``main`` computes ``expression`` of ``params`` in a dataflow block."""
    builder = relax.BlockBuilder()
    with builder.function("main", list(params)):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(expression))
        builder.emit_func_output(result)
    return builder.get()


def run(mod: tvm.IRModule, *inputs: Array) -> Any:
    """Result of ``main`` on the CPU; ``mod`` may be in any state of lowering."""
    executable = compile_unchecked(relax.transform.LegalizeOps()(mod))
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](
        *[tvm.runtime.tensor(array) for array in inputs]
    )
    if isinstance(result, tvm.runtime.Tensor):
        return result.numpy()
    return tuple(tensor.numpy() for tensor in result)
