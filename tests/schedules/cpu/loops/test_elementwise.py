# SPDX-License-Identifier: Apache-2.0
"""The rule for element-wise functions: numbers, vectors, the parallel loop, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from cpu.rule_cases import (
    AVX512,
    EXTENTS,
    FOREIGN,
    HOST,
    NEON,
    assembly,
    close,
    compiled,
    draw,
    function,
    guards,
    parallel,
    run,
    schedule,
    stores_outside_vectors,
    tensor,
    vectors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.fallback import Elementwise

LANES = CPUInfo.from_target(HOST).lanes("float32")
SHAPES = st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=4)


def add_relu(*shape: int) -> tirx.PrimFunc:
    a, b = tensor("a", *shape), tensor("b", *shape)
    return function([a, b], topi.nn.relu(topi.add(a, b)))


def test_one_parallel_loop_over_vectors_of_everything():
    func = schedule(Elementwise(), add_relu(1, 64, 28, 28))
    assert len(parallel(func)) == 1 and vectors(func) == {LANES}
    assert stores_outside_vectors(func) == 0 and guards(func) == 0


def test_small_functions_are_serial():
    assert parallel(schedule(Elementwise(), add_relu(1, 16, 28, 28))) == []


def test_loops_that_a_broadcast_walks_apart_stay_apart():
    x, bias = tensor("x", 1, 64, 7, 49), tensor("bias", 1, 64, 1, 1)
    func = schedule(Elementwise(), function([x, bias], topi.add(x, bias)))
    assert parallel(func) == [64] and guards(func) == 0


def test_a_gate_of_packed_channels_is_computed_once_a_block():
    x, gate = tensor("x", 1, 12, 49, 49, 8), tensor("gate", 1, 12, 1, 1, 8)
    func = schedule(Elementwise(), function([x, gate], topi.multiply(x, topi.sigmoid(gate))))
    assert parallel(func) == [12]


@settings(max_examples=settings.default.max_examples // 8)
@given(SHAPES, st.data())
def test_broadcast_sums_have_the_numbers_of_float64(shape, data):
    other = [extent if data.draw(st.booleans()) else 1 for extent in shape]
    x, y = tensor("x", *shape), tensor("y", *other)
    func = schedule(Elementwise(), function([x, y], topi.multiply(topi.add(x, y), topi.exp(y))))
    a, b = draw(shape), draw(other, 1)
    close(run(func, a, b)[0], (a + b.astype("float64")) * np.exp(b.astype("float64")), 50)


@settings(max_examples=settings.default.max_examples // 8)
@given(st.data())
def test_concatenation_along_any_axis(data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 5, 9]), min_size=1, max_size=3))
    axis = data.draw(st.integers(0, len(shape) - 1))
    parts = data.draw(st.lists(st.sampled_from([1, 3, 8, 13, 31]), min_size=2, max_size=3))
    shapes = [[*shape[:axis], part, *shape[axis + 1 :]] for part in parts]
    inputs = [tensor(f"x{index}", *one) for index, one in enumerate(shapes)]
    func = schedule(Elementwise(), function(inputs, topi.concatenate(inputs, axis)))
    arrays = [draw(one, seed) for seed, one in enumerate(shapes)]
    np.testing.assert_array_equal(run(func, *arrays)[0], np.concatenate(arrays, axis))
    assert guards(func) == 0


@settings(max_examples=10)
@given(st.sampled_from(EXTENTS), st.sampled_from(EXTENTS), st.tuples(*[st.integers(0, 9)] * 4))
def test_padding(height, width, amounts):
    top, left, bottom, right = amounts
    x = tensor("x", 2, height, width)
    padded = topi.nn.pad(x, [0, top, left], [0, bottom, right], 7.0)
    func = schedule(Elementwise(), function([x], padded))
    data = draw([2, height, width])
    expected = np.pad(data, [(0, 0), (top, bottom), (left, right)], constant_values=7.0)
    np.testing.assert_array_equal(run(func, data)[0], expected)


def test_padding_is_cut_where_it_begins_and_ends():
    x = tensor("x", 2, 30, 30)
    func = schedule(Elementwise(), function([x], topi.nn.pad(x, [0, 0, 3], [0, 0, 4])))
    assert vectors(func) >= {LANES, 3, 4}


def test_several_outputs():
    x = tensor("x", 3, 20, 7)
    first, second = topi.split(x, [8], 1)
    func = schedule(Elementwise(), function([x], first, second))
    data = draw([3, 20, 7])
    found = run(func, data)
    np.testing.assert_array_equal(found[0], data[:, :8])
    np.testing.assert_array_equal(found[1], data[:, 8:])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "int8", "uint8", "int64"])
def test_other_types(dtype):
    x, y = tensor("x", 3, 43, dtype=dtype), tensor("y", 43, dtype=dtype)
    func = schedule(Elementwise(), function([x, y], topi.maximum(topi.add(x, y), y)))
    a, b = draw([3, 43], 0, dtype), draw([43], 1, dtype)
    np.testing.assert_array_equal(run(func, a, b)[0], np.maximum(a + b, b))


def test_comparisons_and_casts():
    x = tensor("x", 5, 43)
    func = schedule(Elementwise(), function([x], topi.greater(x, 0.25)))
    data = draw([5, 43])
    np.testing.assert_array_equal(run(func, data)[0], data > 0.25)
    func = schedule(Elementwise(), function([x], topi.cast(topi.multiply(x, 9.0), "int8")))
    np.testing.assert_array_equal(run(func, data)[0], (data * 9).astype("int8"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("last", [False, True])
def test_symbolic_extents(last):
    n = tirx.Var("n", "int64")
    shape = (6, n) if last else (n, 6)
    x = te.placeholder(shape, name="x")
    func = schedule(Elementwise(), function([x], topi.nn.relu(x)))
    executable = compiled(func)
    for extent in (1, 8, 29):
        data = draw((6, extent) if last else (extent, 6))
        out = tvm.runtime.tensor(np.full(data.shape, np.nan, "float32"))
        executable["main"](tvm.runtime.tensor(data), out)
        np.testing.assert_array_equal(out.numpy(), np.maximum(data, 0))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [AVX512, NEON], ids=["avx512", "neon"])
def test_compiles_for_other_vector_units(target):
    func = schedule(Elementwise(), add_relu(3, 17, 31), target)
    assert vectors(func) == {CPUInfo.from_target(target).lanes("float32")}
    assert assembly(func, target)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("log", [False, True])
def test_sums_of_a_single_element_beside_an_elementary_function(log):
    x = tensor("x", 1, 1, 1)
    y = topi.nn.log_softmax(x, 1) if log else topi.nn.softmax(x, 1)
    value = draw((1, 1, 1))
    close(
        run(schedule(Elementwise(), function([x], y), HOST), value)[0], np.full_like(value, not log)
    )


def test_reductions_and_other_targets_are_left_alone():
    x = tensor("x", 4, 9)
    assert Elementwise().apply(function([x], topi.sum(x, 1)), HOST, False) is None
    assert Elementwise().apply(add_relu(8), FOREIGN, False) is None


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("width", range(1, 10))
def test_a_short_axis_under_a_condition_on_data_is_written_inside_its_buffer(width):
    x = tensor("x", 3, width)
    y = te.compute(
        (3, width),
        lambda i, j: te.if_then_else(x[i, j] > 0, x[i, (j + 1) % width], 0.0),
        name="y",
    )
    func = schedule(Elementwise(), function([x], y))
    assert max(vectors(func), default=1) <= max(3, width)  # one column is three rows long
    array = draw([3, width])
    expected = np.where(array > 0, np.roll(array, -1, 1), 0)
    np.testing.assert_array_equal(run(func, array)[0], expected)
