# SPDX-License-Identifier: Apache-2.0
"""The legalization of max and min: infinities, shapes, types that stay TVM's."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from relay_passes.op.extremes import LEGALIZATIONS


def reduction(op: str, data: np.ndarray, axes: list[int] | None, keepdims: bool) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(data.shape, str(data.dtype)))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(getattr(relax.op, op)(x, axes, keepdims)))
    return builder.get()


def run(op: str, data: np.ndarray, axes: list[int] | None, keepdims: bool) -> np.ndarray:
    mod = relax.transform.LegalizeOps(LEGALIZATIONS)(reduction(op, data, axes, keepdims))
    machine = relax.VirtualMachine(tvm.compile(mod, tvm.target.Target("llvm")), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(data)).numpy()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint32"])
@pytest.mark.parametrize("op", ["max", "min"])
@settings(max_examples=8)
@given(data=st.data())
def test_numbers(op: str, dtype: str, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axes = data.draw(st.none() | st.sets(st.integers(0, len(shape) - 1), min_size=1).map(list))
    keepdims = data.draw(st.booleans())
    values = (np.random.default_rng(0).random(shape) * 100).astype(dtype)
    wanted = getattr(np, op)(values, None if axes is None else tuple(axes), keepdims=keepdims)
    np.testing.assert_array_equal(run(op, values, axes, keepdims), wanted)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("op", "infinity"), [("max", -np.inf), ("min", np.inf)])
def test_of_infinities_alone(op: str, infinity: float, dtype: str) -> None:
    values = np.full((3, 40), infinity, dtype)
    values[1, 7] = 2
    np.testing.assert_array_equal(run(op, values, [-1], False), [infinity, 2, infinity])
