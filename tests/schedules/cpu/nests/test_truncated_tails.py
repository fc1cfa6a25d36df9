# SPDX-License-Identifier: Apache-2.0
"""Tails and cuts as loops of their own."""

from __future__ import annotations

import numpy as np
import tvm
from cpu.rule_cases import compiled, draw, extents, function, guards, run, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from schedules import attributes
from schedules.cpu.nests.tails import truncate_tails
from tests.targets import compile_unchecked


@T.prim_func(private=True, s_tir=True)
def before(a: T.Buffer((20,), "float32"), b: T.Buffer((20,), "float32")):
    for o in T.serial(3, annotations={"tvm_fusion.tail": [2, 20]}):
        for i in T.vectorized(8):
            with T.sblock("b"):
                v = T.axis.spatial(20, o * 8 + i)
                T.where(o * 8 + i < 20)
                b[v] = a[v] * T.float32(2)


@T.prim_func(private=True, s_tir=True)
def after(a: T.Buffer((20,), "float32"), b: T.Buffer((20,), "float32")):
    for o in range(2):
        for i in T.vectorized(8):
            with T.sblock("b"):
                v = T.axis.spatial(20, o * 8 + i)
                b[v] = a[v] * T.float32(2)
    for i in T.vectorized(4):
        with T.sblock("b"):
            v = T.axis.spatial(20, i + 16)
            b[v] = a[v] * T.float32(2)


def test_the_rest_becomes_a_loop_of_its_own():
    tvm.ir.assert_structural_equal(truncate_tails(before), after)


def test_twice_equals_once():
    once = truncate_tails(before)
    tvm.ir.assert_structural_equal(truncate_tails(once), once)


def test_functions_without_the_annotation_stay():
    tvm.ir.assert_structural_equal(truncate_tails(after), after)


def split_copy(extent: int, cuts: list[int], factors: list[int]) -> tirx.PrimFunc:
    x = tensor("x", extent)
    func = function([x], te.compute((extent,), lambda i: x[i] * 2.0, name="y"))
    sch = s_tir.Schedule(func)
    block = sch.get_sblock("y")
    parts = sch.split(sch.get_loops(block)[0], [None, *factors])
    sch.vectorize(parts[-1])
    sch.annotate(parts[0], attributes.TAIL, [len(parts), *cuts, extent])
    return truncate_tails(sch.mod["main"])


@settings(max_examples=10)
@given(st.data(), st.integers(1, 70), st.lists(st.integers(1, 9), min_size=1, max_size=2))
def test_every_element_is_computed_once_between_any_cuts(data, extent, factors):
    cuts = data.draw(st.sets(st.integers(1, max(1, extent - 1)), max_size=3)) - {extent}
    func = split_copy(extent, sorted(cuts), factors)
    assert guards(func) == 0
    x = draw([extent])
    np.testing.assert_array_equal(run(func, x)[0], x * 2)


def test_symbolic_lengths_come_from_the_guard():
    n = tirx.Var("n", "int64")
    x = te.placeholder((n,), name="x")
    sch = s_tir.Schedule(function([x], te.compute((n,), lambda i: x[i] * 2.0, name="y")))
    outer, inner = sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, 8])
    sch.vectorize(inner)
    sch.annotate(outer, attributes.TAIL, [2, -1])
    func = truncate_tails(sch.mod["main"])
    assert extents(func, tirx.ForKind.VECTORIZED) == [8]
    executable = compile_unchecked(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))
    for length in (1, 7, 8, 9, 24):
        data, out = draw([length]), tvm.runtime.tensor(np.full(length, np.nan, "float32"))
        executable["main"](tvm.runtime.tensor(data), out)
        np.testing.assert_array_equal(out.numpy(), data * 2)


def test_symbolic_multiples_of_the_tile_need_no_guard():
    n = tirx.Var("n", "int64")
    eight = tirx.IntImm("int64", 8)
    x = te.placeholder((n, eight), name="x")
    flat = te.compute((n * eight,), lambda i: x[i // eight, i % eight] * 2.0, name="y")
    sch = s_tir.Schedule(function([x], flat))
    outer, _ = sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, 8])
    assert guards(sch.mod["main"]) == 0
    sch.annotate(outer, attributes.TAIL, [2, -1])
    executable = compiled(truncate_tails(sch.mod["main"]))
    data, out = draw([3, 8]), tvm.runtime.tensor(np.full(24, np.nan, "float32"))
    executable["main"](tvm.runtime.tensor(data), out)
    np.testing.assert_array_equal(out.numpy(), data.ravel() * 2)


def test_the_bound_is_that_of_the_annotated_loop():
    n = tirx.Var("n", "int64")
    x = te.placeholder((tirx.IntImm("int64", 3), n), name="x")
    sch = s_tir.Schedule(function([x], te.compute(x.shape, lambda i, j: x[i, j] * 2.0, name="y")))
    i, j = sch.get_loops(sch.get_sblock("y"))
    sch.split(i, [2, 2])
    outer, _ = sch.split(j, [None, 8])
    sch.annotate(outer, attributes.TAIL, [2, -1])
    executable = compiled(truncate_tails(sch.mod["main"]))
    data, out = draw([3, 13]), tvm.runtime.tensor(np.full((3, 13), np.nan, "float32"))
    executable["main"](tvm.runtime.tensor(data), out)
    np.testing.assert_array_equal(out.numpy(), data * 2)


@T.prim_func(private=True, s_tir=True)
def with_temporary(a: T.Buffer((24, 4), "float32"), b: T.Buffer((24, 4), "float32")):
    t = T.sblock_alloc_buffer((24, 4))
    for o in T.serial(6, annotations={"tvm_fusion.tail": [1, 1, 6]}):
        for i, j in T.grid(4, 4):
            with T.sblock("t"):
                vi = T.axis.spatial(24, o * 4 + i)
                vj = T.axis.spatial(4, j)
                t[vi, vj] = a[vi, vj] * T.float32(2)
        for i, j in T.grid(4, 4):
            with T.sblock("b"):
                vi = T.axis.spatial(24, o * 4 + i)
                vj = T.axis.spatial(4, j)
                b[vi, vj] = t[vi, vj] + T.float32(1)


def test_each_part_gets_its_own_temporaries():
    func = truncate_tails(with_temporary)
    assert len(func.body.block.alloc_buffers) == 2
    x = draw([24, 4])
    np.testing.assert_array_equal(run(func, x)[0], x * 2 + 1)
