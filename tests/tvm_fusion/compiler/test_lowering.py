# SPDX-License-Identifier: Apache-2.0
"""Lowering of CPU kernels: which check their arguments, and what some passes leave alone."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from tvm_fusion.compiler.build_kernels import HoistConditions, LowerKernels, PlaceBuffers
from tvm_fusion.compiler.targets import resolve

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


def staged() -> tirx.PrimFunc:
    """A schedule that computes a row of an intermediate result where it is read."""
    data = te.placeholder((8, 4), name="data")
    held = te.compute(data.shape, lambda i, j: data[i, j] + 1.0, name="held")
    out = te.compute(data.shape, lambda i, j: held[i, 3 - j], name="out")
    sch = s_tir.Schedule(te.create_prim_func([data, out]))
    sch.compute_at("held", sch.get_loops("out")[0])
    return sch.mod["main"]


@T.prim_func(s_tir=True)
def written(data: T.Buffer((8, 4), "float32"), out: T.Buffer((8, 4), "float32")):
    T.func_attr({"tirx.noalias": True})
    for i in range(8):
        with T.sblock("row"):
            T.reads(data[i, 0:4])
            T.writes(out[i, 0:4])
            held = T.sblock_alloc_buffer((8,), "float32")
            for j in range(4):
                held[j] = data[i, j]
            for j in range(4):
                out[i, j] = held[3 - j]


def sizes(mod: tvm.IRModule, name: str) -> list[list[int]]:
    """Shapes of the buffers that a function allocates."""
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(mod[name].body, (s_tir.SBlock, found.append))
    return [[int(size) for size in own.shape] for block in found for own in block.alloc_buffers]


def test_buffers_of_schedules_shrink_and_written_ones_stay() -> None:
    mod = tvm.IRModule({"staged": staged(), "written": written})
    assert (sizes(mod, "staged"), sizes(mod, "written")) == ([[8, 4]], [[8]])
    placed = PlaceBuffers()(mod)
    assert (sizes(placed, "staged"), sizes(placed, "written")) == ([[1, 4]], [[8]])
    tvm.ir.assert_structural_equal(
        PlaceBuffers()(tvm.IRModule({"staged": staged()}))["staged"], placed["staged"]
    )
