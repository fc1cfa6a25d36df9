# SPDX-License-Identifier: Apache-2.0
"""The last rule: whatever comes, right numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from cpu.rule_cases import (
    AVX512,
    FOREIGN,
    HOST,
    NEON,
    assembly,
    close,
    compiled,
    draw,
    function,
    parallel,
    run,
    schedule,
    tensor,
    vectors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi
from tvm.script import tirx as T

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.fallback import Fallback


def test_unrelated_reductions_get_a_nest_each():
    x = tensor("x", 300, 130)
    func = schedule(Fallback(), function([x], topi.sum(x, 1), topi.max(x, 0)))
    assert len(parallel(func)) == 2
    assert CPUInfo.from_target(HOST).lanes("float32") in vectors(func)
    array = draw([300, 130])
    rows, columns = run(func, array)
    close(rows, array.astype("float64").sum(1), 30)
    np.testing.assert_array_equal(columns, array.max(0))


@pytest.mark.slow
@settings(max_examples=8)
@given(st.sampled_from([5, 7, 12]), st.sampled_from([1, 3, 4, 5]))
def test_adaptive_pooling_whose_windows_differ(size, outputs):
    x = tensor("x", 2, 3, size, size)
    func = function([x], topi.nn.adaptive_pool(x, (outputs, outputs), "avg"))
    array = draw([2, 3, size, size])
    bounds = [(o * size // outputs, -(-(o + 1) * size // outputs)) for o in range(outputs)]
    means = [
        [
            array[:, :, top:bottom, left:right].astype("float64").mean((2, 3))
            for left, right in bounds
        ]
        for top, bottom in bounds
    ]
    close(run(schedule(Fallback(), func), array)[0], np.transpose(means, (2, 3, 0, 1)))


def test_symbolic_reductions():
    n = tirx.Var("n", "int64")
    x = te.placeholder((tirx.IntImm("int64", 6), n, tirx.IntImm("int64", 16)), name="x")
    executable = compiled(schedule(Fallback(), function([x], topi.sum(x, 1))))
    for extent in (1, 9):
        array = draw([6, extent, 16])
        out = tvm.runtime.tensor(np.full((6, 16), np.nan, "float32"))
        executable["main"](tvm.runtime.tensor(array), out)
        close(out.numpy(), array.astype("float64").sum(1), 5)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0)])
def test_reducing_nothing_gives_the_initial_value(shape):
    x = tensor("x", *shape)
    k = te.reduce_axis((0, shape[1]), name="k")
    total = te.compute((shape[0],), lambda i: te.sum(x[i, k], axis=k), name="total")
    func = schedule(Fallback(), function([x], topi.add(total, 1.0)))
    np.testing.assert_array_equal(run(func, draw(shape))[0], np.ones(shape[0], "float32"))


@T.prim_func(private=True, s_tir=True)
def in_place(x: T.Buffer((21,), "float32")):
    for i in range(21):
        with T.sblock("x"):
            v = T.axis.spatial(21, i)
            x[v] = x[v] + T.float32(1)


def test_an_output_that_is_an_input_is_computed_once():
    data = tvm.runtime.tensor(np.zeros(21, "float32"))
    compiled(schedule(Fallback(), in_place))["main"](data)
    np.testing.assert_array_equal(data.numpy(), np.ones(21))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [AVX512, NEON], ids=["avx512", "neon"])
def test_compiles_for_other_vector_units(target):
    x = tensor("x", 30, 31)
    func = schedule(Fallback(), function([x], topi.sum(x, 1), topi.max(x, 0)), target)
    assert assembly(func, target)


def test_functions_without_blocks_and_other_targets_are_left_alone():
    x = tensor("x", 8)
    func = function([x], topi.nn.relu(x))
    assert Fallback().apply(func, FOREIGN, False) is None
    plain = tirx.PrimFunc([], tirx.Evaluate(0))
    assert Fallback().apply(plain, HOST, False) is None


def test_functions_that_write_their_own_body_are_left_alone():
    func = function([x := tensor("x", 3, 20)], topi.cumsum(x, 1))
    assert Fallback().apply(func, HOST, False) is None
