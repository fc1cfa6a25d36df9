# SPDX-License-Identifier: Apache-2.0
"""The op of checked indices: its type, and its legalization on CPUs and GPUs."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from relay_passes.op.elementwise import checked_indices
from schedules.errors import OpError
from tests.targets import PLAIN


def _indices(shape: tuple[int, ...] | None, dtype: str = "int64") -> relax.Var:
    ty = (
        relax.TensorType(shape, dtype)
        if shape is not None
        else relax.TensorType(dtype=dtype, ndim=2)
    )
    return relax.Var("i", ty)


def _module(indices: relax.Var, extents: list[tirx.Expr | int], message: str) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    data = relax.Var("x", relax.TensorType(extents, "float32"))
    with builder.function("main", [indices, data]):
        result = builder.emit(checked_indices(indices, extents, message))
        builder.emit_func_output(result)
    return builder.get()


def _run(mod: tvm.IRModule, indices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    machine = relax.VirtualMachine(tvm.compile(mod, PLAIN), tvm.cpu())
    arguments = [indices, np.zeros(shape, np.float32)]
    return machine["main"](*map(tvm.runtime.tensor, arguments)).numpy()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_negative_indices_count_from_the_end(dtype: str) -> None:
    mod = _module(_indices((2, 2), dtype), [5, 3], "wrong")
    indices = np.array([[-5, 2], [4, -3]], dtype)
    np.testing.assert_array_equal(_run(mod, indices, (5, 3)), [[0, 2], [4, 0]])
    for wrong in ([[-6, 0], [0, 0]], [[0, 3], [0, 0]], [[0, 0], [5, 0]], [[0, 0], [0, -4]]):
        with pytest.raises(ValueError, match="wrong"):
            _run(mod, np.array(wrong, dtype), (5, 3))


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_a_condition_says_whether_there_is_an_error(shape: tuple[int, ...]) -> None:
    builder = relax.BlockBuilder()
    indices = _indices((4,))
    taken = relax.Var("taken", relax.TensorType(shape, "bool"))
    with builder.function("main", [indices, taken]):
        result = builder.emit(checked_indices(indices, [5], "wrong", taken=taken))
        builder.emit_func_output(result)
    compiled = tvm.compile(builder.get(), PLAIN)
    main = relax.VirtualMachine(compiled, tvm.cpu())["main"]
    values = tvm.runtime.tensor(np.array([-7, -5, 4, 9]))
    yes, no = (tvm.runtime.tensor(np.full(shape, value)) for value in (True, False))
    np.testing.assert_array_equal(main(values, no).numpy(), [0, 0, 4, 4])
    with pytest.raises(ValueError, match="wrong"):
        main(values, yes)


@pytest.mark.parametrize(("shape", "dtype"), [((2,), "bool"), ((), "int64"), (None, "bool")])
def test_conditions_that_are_refused(shape: tuple[int, ...] | None, dtype: str) -> None:
    ty = relax.TensorType(shape, dtype) if shape is not None else relax.TensorType(dtype=dtype)
    with pytest.raises(OpError, match="expected a bool of one element"):
        checked_indices(_indices((2,)), [5], "wrong", taken=relax.Var("taken", ty))


def test_without_a_message_the_nearest_takes_its_place() -> None:
    mod = _module(_indices((4,)), [5], "")
    result = _run(mod, np.array([-7, -5, 4, 9]), (5,))
    np.testing.assert_array_equal(result, [0, 0, 4, 4])


@pytest.mark.parametrize(
    ("indices", "extents", "message"),
    [
        (_indices((2,), "float32"), [4], "expected int32 or int64"),
        (_indices(None), [4], "expected a known rank"),
        (_indices((2, 3)), [4, 5], "expected 2 coordinates in the last axis"),
        (_indices(()), [4, 5], "expected 2 coordinates in the last axis"),
    ],
)
def test_bad_arguments(indices: relax.Var, extents: list[int], message: str) -> None:
    with pytest.raises(OpError, match=message):
        checked_indices(indices, extents, "wrong")


def test_a_gpu_takes_the_nearest() -> None:
    target = tvm.target.Target("cuda", host="llvm")
    with target:
        mod = relax.transform.LegalizeOps()(_module(_indices((2,)), [5], "wrong"))
    [kernel] = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    text = kernel.script()
    assert "assert" not in text and "max" in text and "min" in text
    with target, pytest.raises(OpError, match="'cuda' has no error to raise"):
        relax.transform.LegalizeOps()(_module(_indices((2,)), [tirx.Var("n", "int64")], "wrong"))
