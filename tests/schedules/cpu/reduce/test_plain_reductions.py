# SPDX-License-Identifier: Apache-2.0
"""Reductions of TVM's own operators: numbers over any axes, columns, rows, threads, refusals."""

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
    assembly,
    close,
    compiled,
    draw,
    function,
    guards,
    parallel,
    run,
    schedule,
    schedule_first,
    tensor,
    vectors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi
from tvm.target import Target

from schedules.cpu.loops.matmul.dense import balanced_tile
from schedules.cpu.reduce.coalesced_reduce import CoalescedReduce
from tests.selection import in_turns

RULE = CoalescedReduce()


def reduced(op, shape: tuple, axes, **more) -> tirx.PrimFunc:
    x = te.placeholder(shape, name="x")
    return function([x], op(x, axes, **more))


def test_packed_global_average_keeps_several_blocks_in_registers():
    x = tensor("x", 1, 160, 7, 7, 8)
    mean = topi.divide(topi.sum(x, [2, 3], keepdims=True), 49.0)
    func = schedule(RULE, function([x], mean), AVX2)
    assert parallel(func) == [160] and vectors(func) == {8} and guards(func) == 0
    assert "TVMBackendAllocWorkspace" not in assembly(func, AVX2)


def test_contiguous_axes_are_reduced_in_lanes():
    func = schedule(RULE, reduced(topi.sum, (64, 1000), 1), AVX2)
    assert 8 in vectors(func) and parallel(func) == [64]
    assert "TVMBackendAllocWorkspace" not in assembly(func, AVX2)


def test_few_outputs_are_shared_out_to_the_threads():
    func = schedule(RULE, reduced(topi.sum, (1024, 1000), None), AVX2)
    assert len(parallel(func)) == 1 and parallel(func)[0] % 2 == 0


def test_small_reductions_are_serial():
    assert parallel(schedule(RULE, reduced(topi.sum, (40, 40), 1))) == []


OPS = [(topi.sum, np.sum), (topi.max, np.max), (topi.min, np.min), (topi.prod, np.prod)]


@settings(max_examples=settings.default.max_examples // 4)
@given(st.data())
def test_numbers_of_float64_over_any_axes(data):
    few = EXTENTS if data.draw(st.booleans()) else EXTENTS[:8]
    shape = data.draw(st.lists(st.sampled_from(few), min_size=1, max_size=4))
    axes = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    keep = data.draw(st.booleans())
    op, reference = data.draw(st.sampled_from(OPS))
    x = tensor("x", *shape)
    after = topi.nn.relu(op(x, axes, keepdims=keep))
    found = RULE.apply(function([x], after), HOST, False)
    if found is None:
        assert all(shape[axis] == 1 for axis in axes)
        return
    array = draw(shape)
    exact = reference(array.astype("float64"), axis=tuple(axes), keepdims=keep)
    close(run(found.mod["main"], array)[0], np.maximum(exact, 0), float(np.max(np.abs(exact))))


@pytest.mark.slow
@settings(max_examples=8)
@given(st.sampled_from([(7,), (3, 50), (50, 3), (2, 31, 9)]), st.data())
def test_arguments_of_extrema_take_the_first(shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    op, reference = data.draw(st.sampled_from([(topi.argmax, np.argmax), (topi.argmin, np.argmin)]))
    func = schedule_first(reduced(op, shape, axis))
    array = np.round(draw(shape))
    np.testing.assert_array_equal(run(func, array)[0], reference(array, axis))


def test_what_follows_may_be_wider_than_the_result():
    x = tensor("x", 9, 100)
    centred = topi.subtract(x, topi.divide(topi.sum(x, 1, keepdims=True), 100.0))
    func = schedule_first(function([x], centred))
    array = draw([9, 100])
    close(run(func, array)[0], array - array.astype("float64").mean(1, keepdims=True))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("cores", "shape"), in_turns([1, 2, 3, 8], [(70000,), (3, 40000), (8192, 9)])
)
def test_any_number_of_cores(cores, shape):
    target = Target({**HOST.export(), "num-cores": cores})
    axis = 0 if shape[-1] == 9 else len(shape) - 1
    func = schedule(RULE, reduced(topi.sum, shape, axis), target)
    array = draw(shape)
    close(run(func, array, target=target)[0], array.astype("float64").sum(axis), 300)


@pytest.mark.parametrize(
    ("dtype", "axis"), in_turns(["float64", "float16", "int32", "int8"], [0, 1])
)
def test_other_types(dtype, axis):
    x = tensor("x", 33, 45, dtype=dtype)
    func = schedule(RULE, function([x], topi.max(x, axis)))
    array = draw([33, 45], 0, dtype)
    np.testing.assert_array_equal(run(func, array)[0], array.max(axis))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("axis", [0, 1])
def test_symbolic_extents(axis):
    n = tirx.Var("n", "int64")
    x = te.placeholder((n, tirx.IntImm("int64", 77)), name="x")
    executable = compiled(schedule(RULE, function([x], topi.sum(x, axis))))
    for size in (1, 13, 300):
        array = draw([size, 77])
        out = tvm.runtime.tensor(np.full((77, size)[axis], np.nan, "float32"))
        executable["main"](tvm.runtime.tensor(array), out)
        close(out.numpy(), array.astype("float64").sum(axis), 40)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("axis", [0, 1])
def test_extents_that_a_number_gives(axis):
    n = tirx.Var("n", "int64")
    x = te.placeholder((2 * n, tirx.IntImm("int64", 77)), name="x")
    out = topi.sum(x, axis)
    func = te.create_prim_func([x, n, out]).with_attr("tirx.noalias", True)
    executable = compiled(schedule(RULE, func))
    for size in (1, 13, 150):
        array = draw([2 * size, 77])
        found = tvm.runtime.tensor(np.full((77, 2 * size)[axis], np.nan, "float32"))
        executable["main"](tvm.runtime.tensor(array), size, found)
        close(found.numpy(), array.astype("float64").sum(axis), 40)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("op", "reference"), [(topi.max, np.max), (topi.min, np.min)])
@pytest.mark.parametrize("axis", [0, 1])
def test_extremes_keep_nan_and_infinities(op, reference, axis):
    array = draw([5, 70])
    array[0, 66], array[1, 3], array[2], array[3] = np.nan, np.inf, -np.inf, np.inf
    array = array if axis else np.ascontiguousarray(array.T)
    func = schedule(RULE, reduced(op, array.shape, axis))
    np.testing.assert_array_equal(run(func, array)[0], reference(array, axis))


def test_a_convolution_of_another_type():
    x, w = tensor("x", 1, 4, 9, 21, dtype="float64"), tensor("w", 6, 4, 3, 3, dtype="float64")
    func = schedule(RULE, function([x, w], topi.nn.conv2d_nchw(x, w, 1, 0, 1)))
    data, weight = draw([1, 4, 9, 21], 0, "float64"), draw([6, 4, 3, 3], 1, "float64")
    windows = np.lib.stride_tricks.sliding_window_view(data[0], (3, 3), (1, 2))
    close(run(func, data, weight)[0][0], np.einsum("chwij,ocij->ohw", windows, weight))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("target", [AVX512, NEON], ids=["avx512", "neon"])
@pytest.mark.parametrize("axes", [[0], [1]])
def test_compiles_for_other_vector_units(target, axes):
    assert assembly(schedule(RULE, reduced(topi.sum, (129, 131), axes), target), target)


@pytest.mark.parametrize(
    ("extent", "outer", "cores", "tile"),
    [(125, 1, 2, 7), (63, 1, 8, 8), (8, 1, 2, 4), (1, 9, 2, 1)],
)
def test_tiles_are_balanced(extent, outer, cores, tile):
    assert balanced_tile(extent, 8, outer, cores) == tile


def test_other_functions_and_targets_are_left_alone():
    x = tensor("x", 6, 10)
    padded = topi.nn.pad(x, [0, 1], [0, 1])
    for out in (topi.nn.relu(x), topi.nn.softmax(x, 1), topi.sum(padded, 1), topi.argmax(x, 1)):
        assert RULE.apply(function([x], out), HOST, False) is None
    rows = topi.sum(x, 1)
    for other in (
        te.compute((6,), lambda i: rows[5 - i] + 1.0),
        te.compute((9,), lambda i: rows[tirx.min(i, 5)] + 1.0),
        te.compute((4,), lambda i: rows[i] + 1.0),
    ):
        assert RULE.apply(function([x], other), HOST, False) is None
    assert RULE.apply(reduced(topi.sum, (6, 10), 1), FOREIGN, False) is None
