# SPDX-License-Identifier: Apache-2.0
"""Gathers become injective; what stores elsewhere, reduces or has several blocks stays opaque."""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.script import tirx as T

from relay_passes import AnnotateGathers

OPAQUE, INJECTIVE = 8, 2


@T.prim_func(private=True, s_tir=True)
def take(
    table: T.Buffer((50, 5), "float32"),
    rows: T.Buffer((3,), "int64"),
    out: T.Buffer((3, 5), "float32"),
):
    T.func_attr({"op_pattern": 8})
    for i, j in T.grid(3, 5):
        with T.sblock("take"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = table[rows[vi], vj]


@T.prim_func(private=True, s_tir=True)
def scatter(
    data: T.Buffer((3, 5), "float32"),
    rows: T.Buffer((3,), "int64"),
    out: T.Buffer((50, 5), "float32"),
):
    T.func_attr({"op_pattern": 8})
    for i, j in T.grid(3, 5):
        with T.sblock("scatter"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[rows[vi], vj] = data[vi, vj]


@T.prim_func(private=True, s_tir=True)
def sum_of_rows(
    table: T.Buffer((50, 5), "float32"),
    rows: T.Buffer((3,), "int64"),
    out: T.Buffer((5,), "float32"),
):
    T.func_attr({"op_pattern": 8})
    for j, i in T.grid(5, 3):
        with T.sblock("sum"):
            vj, vi = T.axis.remap("SR", [j, i])
            with T.init():
                out[vj] = T.float32(0)
            out[vj] = out[vj] + table[rows[vi], vj]


@T.prim_func(private=True, s_tir=True)
def two_steps(
    table: T.Buffer((50,), "float32"), rows: T.Buffer((3,), "int64"), out: T.Buffer((3,), "float32")
):
    T.func_attr({"op_pattern": 8})
    step = T.alloc_buffer((3,), "float32")
    for i in range(3):
        with T.sblock("take"):
            vi = T.axis.spatial(3, i)
            step[vi] = table[rows[vi]]
    for i in range(3):
        with T.sblock("double"):
            vi = T.axis.spatial(3, i)
            out[vi] = step[2 - vi] * T.float32(2)


@T.prim_func(private=True, s_tir=True)
def extern(table: T.Buffer((50,), "float32"), out: T.Buffer((3,), "float32")):
    T.func_attr({"op_pattern": 8})
    for i in range(3):
        with T.sblock("call"):
            vi = T.axis.spatial(3, i)
            T.reads(table[0:50])
            T.writes(out[vi])
            T.evaluate(T.call_extern("int32", "copy", table.data, out.data, vi))


def pattern(func: tirx.PrimFunc) -> int:
    (changed,) = AnnotateGathers()(tvm.IRModule({"f": func})).functions.values()
    return int(changed.attrs["op_pattern"])


def test_a_gather_becomes_injective() -> None:
    mod = tvm.IRModule({"take": take})
    after = AnnotateGathers()(mod)
    expected = tvm.IRModule({"take": take.with_attr("op_pattern", INJECTIVE)})
    tvm.ir.assert_structural_equal(after, expected)
    tvm.ir.assert_structural_equal(mod["take"], take)
    tvm.ir.assert_structural_equal(AnnotateGathers()(after), after)


def test_what_is_no_gather_stays_opaque() -> None:
    for func in (scatter, sum_of_rows, two_steps, extern):
        assert pattern(func) == OPAQUE, func


def test_other_patterns_stay() -> None:
    assert pattern(take.with_attr("op_pattern", 4)) == 4
    plain = tvm.IRModule({"take": take.without_attr("op_pattern")})
    tvm.ir.assert_structural_equal(AnnotateGathers()(plain), plain)


def test_subscripts_and_readers_join_the_gather() -> None:
    table = relax.Var("table", relax.TensorType((50, 5), "float32"))
    rows = relax.Var("rows", relax.TensorType((3,), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [table, rows]):
        with builder.dataflow():
            last = builder.emit(relax.op.subtract(relax.const(49, "int64"), rows))
            found = builder.emit(relax.op.take(table, last, axis=0))
            result = builder.emit_output(relax.op.exp(found))
        builder.emit_func_output(result)
    transform = relax.transform
    before = [transform.LegalizeOps(), transform.AnnotateTIROpPattern()]
    after = [transform.FuseOps(), transform.FuseTIR(), transform.DeadCodeElimination()]
    counts = []
    for own in ([], [AnnotateGathers()]):
        mod = tvm.transform.Sequential([*before, *own, *after])(builder.get())
        counts.append(sum(isinstance(func, tirx.PrimFunc) for func in mod.functions.values()))
    assert counts == [3, 1]
