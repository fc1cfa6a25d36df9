# SPDX-License-Identifier: Apache-2.0
"""Pass ``LiftWeights``: large constants become parameters, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relay_passes import LiftWeights
from relay_passes.program.weights import LEAST_BYTES
from schedules import attributes
from schedules.workload.workspace_layout import HEADER_WORDS, MARK


def weight(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> tvm.runtime.Tensor:
    values = np.random.default_rng(seed).uniform(-3, 3, shape)
    return tvm.runtime.tensor(values.astype("float32").astype(dtype))


def add_all(tensors: list[tvm.runtime.Tensor], bound: bool, name: str = "main") -> tvm.IRModule:
    """``x + w0 + w1 ...``, the tensors constants (``bound``) or the parameters ``weight0`` ..."""
    shape, dtype = tensors[0].shape, str(tensors[0].dtype)
    x = relax.Var("x", relax.TensorType(shape, dtype))
    params = [relax.Var(f"weight{i}", relax.const(t).ty) for i, t in enumerate(tensors)]
    builder = relax.BlockBuilder()
    with builder.function(name, [x] if bound else [x, *params]):
        with builder.dataflow():
            value = x
            for tensor, param in zip(tensors, params, strict=True):
                value = builder.emit(relax.op.add(value, relax.const(tensor) if bound else param))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def test_constants_become_parameters_behind_the_inputs() -> None:
    tensors = [weight((32, 32), seed=1), weight((32, 32), seed=2)]
    after = LiftWeights()(add_all(tensors, bound=True))
    expected = add_all(tensors, bound=False).with_attr(attributes.WEIGHTS, tensors)
    tvm.ir.assert_structural_equal(after, expected)
    for found, tensor in zip(after.attrs[attributes.WEIGHTS], tensors, strict=True):
        assert found.data_ptr() == tensor.data_ptr()


def test_the_argument_of_the_pass_is_left_as_it_is() -> None:
    before = add_all([weight((32, 32))], bound=True)
    LiftWeights()(before)
    tvm.ir.assert_structural_equal(before, add_all([weight((32, 32))], bound=True))


def test_tensors_without_elements_become_parameters() -> None:
    """TVM writes them into a program that it then cannot read."""
    tensors = [weight((2, 0, 3)), weight((2, 0, 3), seed=1)]
    after = LiftWeights()(add_all(tensors, bound=True))
    assert len(after["main"].params) > 1


def test_twice_equals_once() -> None:
    once = LiftWeights()(add_all([weight((32, 32))], bound=True))
    tvm.ir.assert_structural_equal(LiftWeights()(once), once)


def test_a_tensor_that_is_used_twice_is_one_parameter() -> None:
    tensor = weight((32, 32))
    after = LiftWeights()(add_all([tensor, tensor], bound=True))
    assert len(after["main"].params) == 2
    assert len(after.attrs[attributes.WEIGHTS]) == 1


@pytest.mark.parametrize(
    ("dtype", "count", "lifted"),
    [
        ("float32", LEAST_BYTES // 4, True),
        ("float32", LEAST_BYTES // 4 - 1, False),
        ("int8", LEAST_BYTES, True),
        ("int8", LEAST_BYTES - 1, False),
        ("float64", LEAST_BYTES // 8, True),
        ("bool", 2 * LEAST_BYTES, False),
    ],
)
def test_small_constants_and_other_types_stay(dtype: str, count: int, lifted: bool) -> None:
    tensor = weight((count,), dtype)
    x = relax.Var("x", relax.TensorType((count,), dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            same = builder.emit_output(relax.op.equal(x, relax.const(tensor)))
        builder.emit_func_output(same)
    before = builder.get()
    after = LiftWeights()(before)
    assert len(after["main"].params) == 1 + lifted
    if not lifted:
        tvm.ir.assert_structural_equal(after, before)


def test_small_workspaces_are_lifted() -> None:
    """The host can then reset them."""
    content = np.zeros(2 * HEADER_WORDS, "int32")
    content[-1] = MARK
    tensors = [tvm.runtime.tensor(content), tvm.runtime.tensor(np.ones_like(content))]
    after = LiftWeights()(add_all(tensors, bound=True))
    [lifted] = after.attrs[attributes.WEIGHTS]
    np.testing.assert_array_equal(lifted.numpy(), content)


def test_other_functions_are_left_alone() -> None:
    mod = add_all([weight((32, 32))], bound=True, name="other")
    mod["main"] = add_all([weight((2, 2))], bound=True)["main"]
    tvm.ir.assert_structural_equal(LiftWeights()(mod), mod)
