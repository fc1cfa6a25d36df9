# SPDX-License-Identifier: Apache-2.0
"""Pass ``LiftOutputs``, and programs that are one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as cpu_generic
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.target import Target

from relay_passes import LiftOutputs, LiftWeights
from relay_passes.program.buffers import sole_kernel
from relay_passes.program.weights import LEAST_BYTES
from schedules import attributes
from tvm_fusion.compiler.pipeline import lower_to_vm

op = relax.op
TARGET = Target({"kind": "llvm"})


def lowered(
    build: Callable[..., relax.Expr], *shapes: Sequence[int | tvm.tirx.Var]
) -> tvm.IRModule:
    """``main`` of float32 tensors, as the virtual machine runs it."""
    with TARGET:
        return lower_to_vm(TARGET)(legalized(build, *shapes))


def in_passing_style(
    build: Callable[..., relax.Expr], *shapes: Sequence[int | tvm.tirx.Var]
) -> tvm.IRModule:
    """The same before memory is planned."""
    with TARGET:
        passes = cpu_generic.dataflow_lower_passes(TARGET)
        return tvm.transform.Sequential(passes)(legalized(build, *shapes))


def legalized(
    build: Callable[..., relax.Expr], *shapes: Sequence[int | tvm.tirx.Var]
) -> tvm.IRModule:
    """``main`` as calls of kernels."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(build(*params))
        builder.emit_func_output(result)
    with TARGET:
        return relax.transform.LegalizeOps()(builder.get())


def test_a_program_of_one_kernel() -> None:
    main = lowered(op.add, (3, 4), (3, 4))["main"]
    call = sole_kernel(main)
    assert call is not None
    assert call.op.name_hint == "add"
    assert [arg.name for arg in call.args[:-1]] == ["x0", "x1"]
    assert call.args[-1].same_as(main.body.body)


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((3, 4), "float32")):
        R.func_attr({"relax.force_pure": True})
        alloc = R.builtin.alloc_tensor(R.shape([3, 4]), R.dtype("float32"), 0, R.str("global"))
        _ = R.call_packed("kernel", x, alloc, ty_args=R.Tuple)
        first = alloc
        alloc1 = R.builtin.alloc_tensor(R.shape([2]), R.dtype("int64"), 0, R.str("global"))
        _1 = R.call_packed("kernel", first, alloc1, ty_args=R.Tuple)
        second = alloc1
        return (second, x, first, second)


@I.ir_module
class After:
    @R.function
    def main(
        x: R.Tensor((3, 4), "float32"),
        alloc1: R.Tensor((2,), "int64"),
        alloc: R.Tensor((3, 4), "float32"),
    ):
        R.func_attr(
            {
                "relax.force_pure": True,
                "tvm_fusion.lifted_outputs": [True, False, True, False],
            }
        )
        _ = R.call_packed("kernel", x, alloc, ty_args=R.Tuple)
        first = alloc
        _1 = R.call_packed("kernel", first, alloc1, ty_args=R.Tuple)
        second = alloc1
        return (second, x, first, second)


def test_new_results_become_arguments_once() -> None:
    done = LiftOutputs()(Before)
    tvm.ir.assert_structural_equal(done, After, map_free_vars=True)
    tvm.ir.assert_structural_equal(LiftOutputs()(done), done)


def test_results_of_unknown_sizes_and_inputs_stay() -> None:
    n = tvm.tirx.Var("n", "int64")
    for build, shape in ((op.nn.relu, (n, 4)), (lambda x: x, (3, 4))):
        mod = in_passing_style(build, shape)
        tvm.ir.assert_structural_equal(LiftOutputs()(mod), mod)


def test_a_lifted_program_of_one_kernel() -> None:
    with TARGET:
        mod = lower_to_vm(TARGET, entry=[LiftOutputs()])(legalized(op.add, (3, 4), (3, 4)))
    main = mod["main"]
    call = sole_kernel(main)
    assert call is not None and list(call.args) == list(main.params)
    assert main.body.body.same_as(main.params[2])


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.nn.relu(op.sum(x, 0)),
        lambda x: x,
        lambda x: relax.Tuple([op.nn.relu(x)]),
        lambda x: relax.Tuple([op.nn.relu(x), x]),
        lambda x: op.unique(x),
    ],
)
def test_other_programs(build: Callable[..., relax.Expr]) -> None:
    assert sole_kernel(lowered(build, (3, 4))["main"]) is None


def test_sizes_that_are_computed() -> None:
    n = tvm.tirx.Var("n", "int64")
    assert sole_kernel(lowered(lambda x: op.concat([x, x]), (n, 4))["main"]) is None


def test_a_program_that_is_not_lowered() -> None:
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(op.nn.relu(x)))
    assert sole_kernel(builder.get()["main"]) is None


def test_all_its_constants_become_parameters() -> None:
    """Other programs lift only large constants."""
    weight = relax.const(np.ones((3, 4), "float32"))
    assert weight.value.numpy().nbytes < LEAST_BYTES
    one = LiftWeights()(lowered(lambda x: op.add(x, weight), (3, 4)))
    assert len(one.attrs[attributes.WEIGHTS]) == 1
    assert list(sole_kernel(one["main"]).args[:-1]) == list(one["main"].params)
    two = LiftWeights()(lowered(lambda x: op.sum(op.add(x, weight), 0), (3, 4)))
    assert attributes.WEIGHTS not in (two.attrs or {})
