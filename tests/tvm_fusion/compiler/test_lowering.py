# SPDX-License-Identifier: Apache-2.0
"""Lowering of CPU kernels: which of them check their arguments."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from tvm_fusion.compiler.lowering import HoistConditions, LowerKernels
from tvm_fusion.compiler.targets.target import resolve

TARGET = resolve("x86-64-v3")


def doubled(rows: int | tirx.Var) -> tirx.PrimFunc:
    data = te.placeholder((rows, 4), name="data")
    return te.create_prim_func([data, te.compute(data.shape, lambda i, j: 2.0 * data[i, j])])


@T.prim_func(s_tir=True)
def asserting(data: T.Buffer((4,), "float32"), out: T.Buffer((4,), "float32")):
    T.func_attr({"global_symbol": "main", "tirx.noalias": True})
    for i in range(4):
        assert data[i] > T.float32(0), ("ValueError", ["negative"])
        out[i] = data[i]


def checks(func: tirx.PrimFunc) -> int:
    """Number of assertions of a lowered function."""
    mod = tirx.transform.BindTarget(TARGET.with_host(TARGET))(tvm.IRModule({"main": func}))
    found: list[tirx.AssertStmt] = []
    body = LowerKernels()(mod)["main"].body
    tvm_ffi.structural_walk(body, (tirx.AssertStmt, found.append))
    return len(found)


def test_a_kernel_of_constant_shapes_trusts_its_arguments() -> None:
    assert checks(doubled(3)) == 0


@pytest.mark.parametrize("func", [doubled(tirx.Var("n", "int64")), asserting])
def test_a_kernel_of_unknown_shapes_or_with_assertions_checks(func: tirx.PrimFunc) -> None:
    assert checks(func) > 1


@T.prim_func(s_tir=True)
def conditional(data: T.Buffer((4,), "float32"), out: T.Buffer((4,), "float32"), n: T.int32):
    for i in range(4):
        if n > 2:
            out[i] = data[i]


def test_conditions_are_hoisted_where_there_are_any() -> None:
    plain = tvm.IRModule({"doubled": doubled(3)})
    assert HoistConditions()(plain)["doubled"].same_as(plain["doubled"])
    both = HoistConditions()(tvm.IRModule({"doubled": doubled(3), "other": conditional}))
    alone = s_tir.transform.HoistIfThenElse()(tvm.IRModule({"other": conditional}))
    assert isinstance(alone["other"].body, tirx.IfThenElse)
    tvm.ir.assert_structural_equal(both["other"], alone["other"])
    assert len(both.functions) == 2
