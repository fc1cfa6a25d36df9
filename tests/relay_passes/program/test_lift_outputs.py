# SPDX-License-Identifier: Apache-2.0
"""Programs that are one kernel, after the lowering to TVM's virtual machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

from relay_passes import LiftWeights
from relay_passes.program.lift_weights import LEAST_BYTES, WEIGHTS
from relay_passes.program.lift_outputs import sole_kernel
from tvm_fusion.compiler.pipeline import lower_to_vm

op = relax.op
TARGET = Target({"kind": "llvm"})


def lowered(
    build: Callable[..., relax.Expr], *shapes: Sequence[int | tvm.tirx.Var]
) -> tvm.IRModule:
    """``main`` of float32 tensors, as the virtual machine runs it."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(build(*params))
        builder.emit_func_output(result)
    with TARGET:
        mod = relax.transform.LegalizeOps()(builder.get())
        return lower_to_vm(TARGET)(mod)


def test_a_program_of_one_kernel() -> None:
    main = lowered(op.add, (3, 4), (3, 4))["main"]
    call = sole_kernel(main)
    assert call is not None
    assert call.op.name_hint == "add"
    assert [arg.name for arg in call.args[:-1]] == ["x0", "x1"]
    assert call.args[-1].same_as(main.body.body)


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
    """Of other programs only large ones do."""
    weight = relax.const(np.ones((3, 4), "float32"))
    assert weight.value.numpy().nbytes < LEAST_BYTES
    one = LiftWeights()(lowered(lambda x: op.add(x, weight), (3, 4)))
    assert len(one.attrs[WEIGHTS]) == 1
    assert list(sole_kernel(one["main"]).args[:-1]) == list(one["main"].params)
    two = LiftWeights()(lowered(lambda x: op.sum(op.add(x, weight), 0), (3, 4)))
    assert WEIGHTS not in (two.attrs or {})
