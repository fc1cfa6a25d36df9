# SPDX-License-Identifier: Apache-2.0
"""Pass ``NameSizes``: quotients of open sizes get names, equal ones the same."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from relay_passes import NameSizes
from relay_passes.op.conv2d import conv2d
from schedules.errors import OpError
from schedules.tir.expression_walk import uses, variables
from tests.targets import compile_unchecked


def tower(residual: bool, size: object = None) -> tvm.IRModule:
    """Two poolings one after the other, and between them a block with a stride on both ways."""
    builder = relax.BlockBuilder()
    size = tirx.Var("h", "int64") if size is None else size
    x = relax.Var("x", relax.TensorType((1, 4, size, size), "float32"))
    weight = relax.const(np.ones((4, 4, 1, 1), np.float32))
    with builder.function("main", [x]):
        with builder.dataflow():
            pooled = builder.emit(relax.op.nn.max_pool2d(x, (3, 3), (2, 2), ceil_mode=True))
            left = builder.emit(conv2d(pooled, weight, strides=(2, 2)))
            left = builder.emit(conv2d(left, weight))
            if residual:  # the last one has the stride, as a shortcut has
                both = builder.emit(conv2d(pooled, weight, residual=left, strides=(2, 2)))
            else:
                right = builder.emit(conv2d(pooled, weight, strides=(2, 2)))
                both = builder.emit(relax.op.add(left, right))
            pooled = builder.emit(relax.op.nn.max_pool2d(both, (3, 3), (2, 2), ceil_mode=True))
            result = builder.emit_output(relax.op.nn.relu(pooled))
        builder.emit_func_output(result)
    return builder.get()


def shapes(mod: tvm.IRModule) -> list[list[tirx.Expr]]:
    """The shapes of all variables."""
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    return [list(binding.var.ty.shape) for binding in bindings]


@pytest.mark.parametrize("residual", [False, True])
def test_each_size_is_computed_from_the_last_one(residual: bool) -> None:
    mod = NameSizes()(tower(residual))
    assert relax.analysis.check_well_formed(mod)
    first, *others = shapes(mod)
    assert variables(first[2]) == {mod["main"].params[0].ty.shape[2]}
    assert not any(uses(size, *variables(first[2])) for shape in others for size in shape)
    names = {size for shape in others for size in shape if isinstance(size, tirx.Var)}
    assert len(names) == 3  # one for each stride; height and width, and both ways, are alike


@pytest.mark.slow
@pytest.mark.parametrize("residual", [False, True])
def test_same_numbers(residual: bool) -> None:
    machines = [
        relax.VirtualMachine(compile_unchecked(relax.transform.LegalizeOps()(mod)), tvm.cpu())
        for mod in (tower(residual), NameSizes()(tower(residual)))
    ]
    for size in (9, 16, 23):
        data = np.random.default_rng(size).standard_normal((1, 4, size, size), np.float32)
        results = [machine["main"](tvm.runtime.tensor(data)).numpy() for machine in machines]
        np.testing.assert_array_equal(*results)


def test_known_sizes_and_functions_with_calls_stay() -> None:
    mod = tower(True, 16)
    tvm.ir.assert_structural_equal(NameSizes()(mod), mod)
    legal = relax.transform.LegalizeOps()(
        tower(False)
    )  # types of call_tir say which form they have
    tvm.ir.assert_structural_equal(NameSizes()(legal), legal)


def test_other_forms_of_a_size_get_its_name() -> None:
    builder = relax.BlockBuilder()
    h = tirx.Var("h", "int64")
    x = relax.Var("x", relax.TensorType((2, 4, h), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            pooled = builder.emit(relax.op.nn.max_pool1d(x, 3, 2, padding=1))
            flat = builder.emit(relax.op.reshape(pooled, (8, (h + 1) // 2)))
            result = builder.emit_output(relax.op.exp(flat))
        builder.emit_func_output(result)
    named = NameSizes()(builder.get())
    (name,) = {
        shape[2] for shape in shapes(named) if len(shape) == 3 and isinstance(shape[2], tirx.Var)
    }
    assert all(tvm_ffi.structural_equal(shape[1], name) for shape in shapes(named)[2:])


def test_a_function_stays_where_a_call_refuses_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OpError("sizes of another form")

    mod = tower(True)
    monkeypatch.setattr(relax.BlockBuilder, "normalize", refuse)
    tvm.ir.assert_structural_equal(NameSizes()(mod), mod)
