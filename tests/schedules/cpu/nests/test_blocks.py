# SPDX-License-Identifier: Apache-2.0
"""Facts about blocks: strides, guards, kinds, and which functions can be opened at all."""

from __future__ import annotations

import pytest
from cpu.rule_cases import AVX2, HOST, function, tensor
from tvm import te, tirx
from tvm.script import tirx as T

from schedules.cpu.nests.blocks import block_facts, open_kernel
from schedules.schedule_rule import KernelFacts


def facts_of(func: tirx.PrimFunc, index: int = 0):
    kernel = open_kernel(KernelFacts(func, HOST))
    assert kernel is not None
    return block_facts(kernel.sch, kernel.blocks[index].block_rv)


def test_strides_of_a_broadcast_sum():
    x, y = tensor("x", 4, 5, 6), tensor("y", 5, 1)
    out = te.compute((4, 5, 6), lambda i, j, k: x[i, j, k] + y[j, 0], name="out")
    facts = facts_of(function([x, y], out))
    assert facts.kinds == "SSS" and facts.extents == (4, 5, 6)
    assert facts.store.strides == (30, 6, 1)
    assert [load.strides for load in facts.loads] == [(30, 6, 1), (0, 1, 0)]


def test_reshaped_indices_are_seen_through():
    x = tensor("x", 2, 3, 7)
    out = te.compute((42,), lambda i: x[i // 21, i % 21 // 7, i % 7] * 2.0, name="out")
    assert facts_of(function([x], out)).loads[0].strides == (1,)


def test_a_reduction_does_not_count_its_accumulator():
    x = tensor("x", 5, 9)
    k = te.reduce_axis((0, 9), name="k")
    facts = facts_of(function([x], te.compute((5,), lambda i: te.sum(x[i, k], axis=k), name="s")))
    assert facts.kinds == "SR" and [load.strides for load in facts.loads] == [(9, 1)]
    assert facts.positions("R") == [1] and facts.volume([0, 1]) == 45


def test_guards_name_the_variables_of_conditions():
    x = tensor("x", 4, 6)
    out = te.compute(
        (4, 8),
        lambda i, j: tirx.if_then_else(tirx.all(j >= 1, j < 7), x[i, j - 1], 0.0),
        name="pad",
    )
    assert facts_of(function([x], out)).guards == frozenset({1})


def test_a_gathered_index_is_indirect_and_has_no_stride():
    x, where = tensor("x", 9, 4), tensor("where", 5, dtype="int32")
    facts = facts_of(
        function([x, where], te.compute((5, 4), lambda i, j: x[where[i], j], name="take"))
    )
    assert facts.indirect
    assert (None, 1) in [load.strides for load in facts.loads]


def test_symbolic_extents_are_none():
    n = tirx.Var("n", "int64")
    x = te.placeholder((n, 8), name="x")
    facts = facts_of(function([x], te.compute((n, 8), lambda i, j: x[i, j] + 1.0, name="y")))
    assert facts.extents == (None, 8)


def test_empty_functions_cannot_be_opened():
    nothing = tensor("x", 0)
    empty = function([nothing], te.compute((0,), lambda i: nothing[i] + 1.0, name="y"))
    assert open_kernel(KernelFacts(empty, HOST)) is None


@T.prim_func(private=True, s_tir=True)
def strided(a: T.handle, y: T.Buffer((4, 4), "float32")):
    x = T.match_buffer(a, (4, 4), "float32", strides=(8, 1))
    for i, j in T.grid(4, 4):
        with T.sblock("y"):
            vi, vj = T.axis.remap("SS", [i, j])
            y[vi, vj] = x[vi, vj] + T.float32(1)


def test_buffers_with_strides_cannot_be_opened():
    assert open_kernel(KernelFacts(strided, HOST)) is None


@pytest.mark.parametrize(("dtype", "lanes"), [("float32", 8), ("float64", 4), ("int8", 32)])
def test_lanes_of_the_widest_element(dtype, lanes):
    x = tensor("x", 4, dtype=dtype)
    func = function([x], te.compute((4,), lambda i: x[i] + x[i], name="y"))
    kernel = open_kernel(KernelFacts(func, AVX2))
    assert kernel is not None
    assert kernel.lanes(block_facts(kernel.sch, kernel.blocks[0].block_rv)) == lanes
