# SPDX-License-Identifier: Apache-2.0
"""Shared values: where they are stored, when they are computed, what code is left of them."""

from __future__ import annotations

import re

import numpy as np
import tvm
import tvm_ffi
from cpu.rule_cases import AVX2, HOST, assembly, draw, function, run, schedule, tensor
from tvm import ir, s_tir, te, tirx
from tvm.script import tirx as T

from schedules.cpu.loops.fallback import Elementwise
from schedules.tir.let_bindings import share_values


@T.prim_func(s_tir=True)
def before(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    for o in range(8):
        for i in T.vectorized(8):
            with T.sblock("y"):
                v = T.axis.spatial(64, o * 8 + i)
                y[v] = x[v]


@T.prim_func(s_tir=True)
def expected(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    for o in range(8):
        b = T.alloc_buffer((8,))
        for i in T.vectorized(8):
            with T.sblock("y"):
                v = T.axis.spatial(64, o * 8 + i)
                lane = T.axis.spatial(8, i)
                T.reads(x[v])
                T.writes(y[v])
                b[lane] = x[v] + T.float32(1)
                y[v] = b[lane] * b[lane]


def one() -> ir.Expr:
    return tirx.FloatImm("float32", 1)


def square(value: ir.Expr) -> ir.Expr:
    var = tirx.Var("b", "float32")
    return tirx.Let(var, value, var * var)


def square_of_load(value: ir.Expr) -> ir.Expr:
    """Square the successor of a load; values that share something already stay."""
    return square(value + one()) if isinstance(value, ir.TensorLoad) else value


def test_the_value_is_stored_by_lane_before_its_use():
    shared = share_values(before, square_of_load)
    tvm.ir.assert_structural_equal(shared, expected.with_attr("global_symbol", "before"))
    assert s_tir.analysis.verify_well_formed(shared)
    tvm.ir.assert_structural_equal(share_values(shared, square_of_load), shared)
    assert share_values(before, lambda value: value).same_as(before)
    x = draw((64,))
    np.testing.assert_allclose(run(shared, x)[0], (x + 1) ** 2, rtol=1e-6)


def test_a_chain_takes_no_memory_and_grows_by_one_store_a_link():
    # As lets, or as bound variables, forty squares of sums would be 2**40 terms to the analyzer.
    def chain(value: ir.Expr) -> ir.Expr:
        if not isinstance(value, ir.TensorLoad):
            return value
        value = value + one()
        for _ in range(40):
            value = square(value) * tirx.FloatImm("float32", 0.5)
        return value

    func = share_values(before, chain)
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(func.body, (tirx.BufferStore, stores.append))
    assert len(stores) == 41
    code = assembly(func.with_attr("tirx.noalias", True), AVX2)
    products = re.findall(r"vmulps\s.*%ymm", code)
    assert len(products) >= 80 and not any("%rsp" in product for product in products)
    assert run(func, np.ones(64, "float32"))[0].tolist() == [2.0] * 64


def test_a_let_in_a_branch_is_computed_only_there():
    # Only the branch may read: outside of it the index lies far beyond the tensor.
    x = tensor("x", 5)
    far = te.compute(
        (100003,),
        lambda i: te.if_then_else(
            i < 5, x[i], te.if_then_else(i < 7, x[i - 5], tirx.Cast("float32", i))
        ),
        name="y",
    )

    def squares(value: ir.Expr) -> ir.Expr:
        if not isinstance(value, ir.Call):
            return value
        return tvm_ffi.structural_map(value, ((ir.TensorLoad, square), (tirx.Cast, square)))

    for func in (function([x], far), schedule(Elementwise(), function([x], far), HOST)):
        shared = share_values(func, squares)
        assert s_tir.analysis.verify_well_formed(shared)
        values = draw((5,))
        wanted = np.arange(100003, dtype="float32") ** 2
        wanted[:7] = [*values**2, *(values[:2] ** 2)]
        np.testing.assert_allclose(run(shared, values)[0], wanted, rtol=1e-6)


def test_values_outside_of_vectors_have_a_buffer_of_one():
    x = tensor("x", 7)
    func = share_values(function([x], te.compute((7,), lambda i: x[i], name="y")), square_of_load)
    buffers: list[tirx.AllocBuffer] = []
    tvm_ffi.structural_walk(func.body, (tirx.AllocBuffer, buffers.append))
    assert [list(allocation.buffer.shape) for allocation in buffers] == [[1]]
    values = draw((7,))
    np.testing.assert_allclose(run(func, values)[0], (values + 1) ** 2, rtol=1e-6)
