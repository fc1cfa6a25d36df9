# SPDX-License-Identifier: Apache-2.0
"""Passes ``MarkConstants`` and ``PackWeights``: constants in the layout of their kernels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from reduction_checks import run
from tvm import relax, tirx
from tvm.target import Target

import relay_passes
from relay_passes import ApplyRules, MarkConstants, PackWeights
from schedules import attributes, cpu

TARGET = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
FIRST, SECOND = np.random.default_rng(0).standard_normal((2, 64, 64), dtype="float32")


def products(*weights: np.ndarray | None) -> tvm.IRModule:
    """``x @ w @ w ...``, by one function; None stands for the parameter ``w``."""
    matrix = relax.TensorType((64, 64), "float32")
    x, w = relax.Var("x", matrix), relax.Var("w", matrix)
    constants = {id(weight): relax.const(weight) for weight in weights if weight is not None}
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            value = x
            for weight in weights:
                value = builder.emit(relax.op.matmul(value, constants.get(id(weight), w)))
            output = builder.emit_output(value)
        builder.emit_func_output(output)
    return relax.transform.LegalizeOps()(builder.get())


def lay_out(mod: tvm.IRModule) -> tvm.IRModule:
    with TARGET:
        mod = ApplyRules(*cpu.rules())(MarkConstants()(mod))
        packed = PackWeights()(mod)
        tvm.ir.assert_structural_equal(PackWeights()(packed), packed)
    return packed


def kernels(mod: tvm.IRModule) -> list[tirx.PrimFunc]:
    return [func for _, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)]


@pytest.mark.parametrize("made", [MarkConstants, PackWeights])
def test_passes_are_exported_by_their_names(made: type) -> None:
    assert getattr(relay_passes, made().info.name) is made


def test_one_kernel_with_several_constants() -> None:
    before = products(FIRST, SECOND, FIRST)
    after = lay_out(before)
    (kernel,) = kernels(after)
    assert attributes.LAID_OUT not in kernel.attrs and len(kernel.params[1].shape) == 3
    x, w = np.random.default_rng(1).standard_normal((2, 64, 64), dtype="float32")
    exact = x.astype("float64") @ FIRST @ SECOND @ FIRST
    np.testing.assert_allclose(run(after, x, w), exact, rtol=1e-3, atol=1e-3)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(run(lay_out(products(SECOND)), x, w), x @ FIRST, atol=1e-3)


def test_equal_weights_stay_one() -> None:
    calls = [
        binding.value
        for binding in lay_out(products(FIRST, FIRST))["main"].body.blocks[0].bindings
        if isinstance(binding.value, relax.Call)
    ]
    first, second = (call.args[1].fields[1].value for call in calls)
    assert first.data_ptr() == second.data_ptr()


def test_a_weight_that_is_no_constant_everywhere_is_left_alone() -> None:
    mod = products(FIRST, None)
    tvm.ir.assert_structural_equal(MarkConstants()(mod), mod)
    (kernel,) = kernels(lay_out(mod))
    assert [len(param.shape) for param in kernel.params] == [2, 2, 2]


def test_constants_are_marked_by_position() -> None:
    (kernel,) = kernels(MarkConstants()(products(FIRST, SECOND)))
    assert list(map(int, kernel.attrs[attributes.CONSTANTS])) == [1]
