# SPDX-License-Identifier: Apache-2.0
"""The rule for chains over rows: numbers, one parallel loop, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from cpu.rule_cases import (
    AVX2,
    AVX512,
    EXTENTS,
    FOREIGN,
    HOST,
    NEON,
    Array,
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

from schedules.cpu.loops.softmax import Softmax


def softmax(shape: tuple, axis: int, log: bool = False) -> tirx.PrimFunc:
    x = te.placeholder(shape, name="x")
    if not log:
        return function([x], topi.nn.softmax(x, axis))
    return function([x], topi.nn.log_softmax(x, axis))


def reference(x: Array, axis: int, log: bool) -> Array:
    shifted = x.astype("float64") - x.max(axis, keepdims=True)
    total = np.exp(shifted).sum(axis, keepdims=True)
    return shifted - np.log(total) if log else np.exp(shifted) / total


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("axis", [1, 2])
def test_all_steps_of_a_row_are_in_one_parallel_loop(axis):
    func = schedule(Softmax(), softmax((4, 130, 136), axis), AVX2)
    assert len(parallel(func)) == 1 and 8 in vectors(func) and guards(func) == 0
    calls = assembly(func, AVX2)
    assert "expf" not in calls


def test_a_single_small_row_is_serial_and_in_vectors():
    func = schedule(Softmax(), softmax((1, 1000), 1), AVX2)
    assert parallel(func) == [] and 8 in vectors(func)


def test_only_the_last_steps_of_a_reduction_are_scalar():
    func = schedule(Softmax(), softmax((4, 5, 136), 1), AVX2)
    assert stores_outside_vectors(func) == 0


@settings(max_examples=settings.default.max_examples // 6)
@given(st.data(), st.booleans())
def test_numbers_of_float64_along_any_axis(data, log):
    shape = tuple(data.draw(st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=4)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    found = Softmax().apply(softmax(shape, axis, log), HOST, False)
    if found is None:
        assert shape[axis] == 1
        return
    x = draw(shape) * 10
    close(run(found.mod["main"], x)[0], reference(x, axis, log))


def test_large_inputs_do_not_overflow():
    x = np.array([[1e4, -1e4, 0, 1e4]], "float32")
    (found,) = run(schedule(Softmax(), softmax((1, 4), 1)), x)
    close(found, [[0.5, 0, 0, 0.5]])


@settings(max_examples=10)
@given(st.sampled_from([(5, 33), (3, 7, 40), (2, 9, 5, 5)]), st.data())
def test_variance_and_normalisation(shape, data):
    axes = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    x = tensor("x", *shape)
    count = float(np.prod([shape[axis] for axis in axes]))
    mean = topi.divide(topi.sum(x, axes, keepdims=True), count)
    centred = topi.subtract(x, mean)
    square = topi.sum(topi.multiply(centred, centred), axes, keepdims=True)
    scale = topi.rsqrt(topi.add(topi.divide(square, count), 1e-3))
    func = function([x], topi.multiply(centred, scale))
    found = Softmax().apply(func, HOST, False)
    array = draw(shape)
    exact = array.astype("float64")
    middle = exact.mean(tuple(axes), keepdims=True)
    expected = (exact - middle) / np.sqrt(exact.var(tuple(axes), keepdims=True) + 1e-3)
    assert found is not None
    close(run(found.mod["main"], array)[0], expected)


def test_layer_norm_with_scale_and_shift():
    x, gamma, beta = tensor("x", 6, 50), tensor("gamma", 50), tensor("beta", 50)
    func = schedule(
        Softmax(), function([x, gamma, beta], topi.nn.layer_norm(x, gamma, beta, [1], 1e-5))
    )
    array, g, b = draw([6, 50]), draw([50], 1), draw([50], 2)
    exact = array.astype("float64")
    normal = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    close(run(func, array, g, b)[0], normal * g + b, 5)


def test_symbolic_rows():
    n = tirx.Var("n", "int64")
    func = softmax((n, tirx.IntImm("int64", 21)), 1)
    executable = compiled(schedule(Softmax(), func))
    x = draw([7, 21])
    out = tvm.runtime.tensor(np.full((7, 21), np.nan, "float32"))
    executable["main"](tvm.runtime.tensor(x), out)
    close(out.numpy(), reference(x, 1, False))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [AVX512, NEON], ids=["avx512", "neon"])
@pytest.mark.parametrize("axis", [0, 1])
def test_compiles_for_other_vector_units(target, axis):
    assert assembly(schedule(Softmax(), softmax((129, 131), axis), target), target)


def test_blocks_that_depend_on_other_rows_are_left_alone():
    x = tensor("x", 8, 8)
    rows = topi.sum(x, 1)
    mixed = te.compute((8,), lambda i: rows[7 - i] + 1.0, name="mixed")
    k = te.reduce_axis((0, 8), name="k")
    total = te.compute((8,), lambda i: te.sum(mixed[i] * x[i, k], axis=k), name="total")
    assert Softmax().apply(function([x], total), HOST, False) is None


def test_other_functions_and_targets_are_left_alone():
    x = tensor("x", 6, 10)
    assert Softmax().apply(function([x], topi.nn.relu(x)), HOST, False) is None
    assert Softmax().apply(softmax((6, 10), 1), FOREIGN, False) is None
    columns = tensor("x", 10, 16)
    assert Softmax().apply(function([columns], topi.sum(columns, 0)), HOST, False) is None


def argmax(choice) -> tirx.PrimFunc:
    x, k = tensor("x", 6, 370), te.reduce_axis((0, 370), "k")
    kind = te.comm_reducer(choice, lambda at, y: (tirx.const(-1, at), te.min_value(y)), "argmax")
    pair = te.compute((6,), lambda i: kind((k.astype("int64"), x[i, k]), axis=k), name="C")
    return te.create_prim_func([x, *pair])


def test_order_of_equal_values_is_kept():
    """Lanes take them in another order, which positions have to undo by comparisons."""

    def by_order(a, b):
        return [tirx.Select(a[1] >= b[1], *pair) for pair in zip(a, b, strict=True)]

    def by_position(a, b):
        holds = tirx.any(a[1] > b[1], tirx.all(a[1] == b[1], a[0] <= b[0]))
        return [tirx.Select(holds, *pair) for pair in zip(a, b, strict=True)]

    assert Softmax().apply(argmax(by_order), HOST, False) is None
    assert Softmax().apply(argmax(by_position), HOST, False) is None  # unknown to TVM
    x = tensor("x", 6, 370)
    assert Softmax().apply(function([x], topi.argmax(x, 1)), HOST, False) is not None
