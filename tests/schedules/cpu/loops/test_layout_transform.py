# SPDX-License-Identifier: Apache-2.0
"""The rule for transposes and packed channels: numbers, tiles, refusals."""

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

from schedules.compute.pack import pack, unpack
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.layout_transform import LayoutTransform

LANES = CPUInfo.from_target(HOST).lanes("float32")


def transpose(shape: list[int], axes: list[int]) -> tirx.PrimFunc:
    x = tensor("x", *shape)
    return function([x], topi.transpose(x, axes))


def packed(array: np.ndarray, block: int) -> np.ndarray:
    images, channels, height, width = array.shape
    blocks = -(-channels // block)
    full = np.zeros((images, blocks * block, height, width), array.dtype)
    full[:, :channels] = array
    return full.reshape(images, blocks, block, height, width).transpose(0, 1, 3, 4, 2)


def test_tiles_of_both_axes_inside_of_the_parallel_loop():
    func = schedule(LayoutTransform(), transpose([1, 64, 28, 28], [0, 2, 3, 1]))
    assert len(parallel(func)) == 1 and vectors(func) == {LANES}
    assert stores_outside_vectors(func) == 0 and guards(func) == 0


@settings(max_examples=settings.default.max_examples // 7)
@given(st.data())
def test_transposes(data):
    shape = data.draw(st.lists(st.sampled_from(EXTENTS[:12]), min_size=2, max_size=4))
    axes = data.draw(st.permutations(range(len(shape))))
    func = transpose(shape, list(axes))
    found = LayoutTransform().apply(func, HOST, False)
    x = draw(shape)
    scheduled = func if found is None else found.mod["main"]
    np.testing.assert_array_equal(run(scheduled, x)[0], x.transpose(axes))
    order = [axis for axis in axes if shape[axis] > 1]
    assert (found is not None) == (order != [] and order[-1] != max(order))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("turned_first", [True, False])
def test_a_sum_of_a_transposed_tensor_and_one_as_large(turned_first):
    x, y = tensor("x", 33, 40), tensor("y", 40, 33)
    turned = topi.transpose(x, [1, 0])
    total = topi.add(turned, y) if turned_first else topi.add(y, turned)
    func = schedule(LayoutTransform(), function([x, y], total))
    assert stores_outside_vectors(func) == 0
    a, b = draw([33, 40]), draw([40, 33], 1)
    np.testing.assert_allclose(run(func, a, b)[0], a.T + b, rtol=1e-6)


@settings(max_examples=8)
@given(
    st.sampled_from([1, 3, 8, 13, 24, 40]),
    st.sampled_from([2, 7, 9, 16, 31]),
    st.sampled_from([4, 8, 16]),
)
def test_pack_and_unpack_in_any_function(channels, width, block):
    data = draw([2, channels, 3, width])
    x = tensor("x", 2, channels, 3, width)
    func = function([x], topi.nn.relu(pack(x, block)))
    if (found := LayoutTransform().apply(func, HOST, False)) is not None:
        np.testing.assert_array_equal(
            run(found.mod["main"], data)[0], packed(np.maximum(data, 0), block)
        )
    y = tensor("y", 2, -(-channels // block), 3, width, block)
    func = function([y], topi.nn.relu(unpack(y, channels)))
    if (found := LayoutTransform().apply(func, HOST, False)) is not None:
        np.testing.assert_array_equal(
            run(found.mod["main"], packed(data, block))[0], np.maximum(data, 0)
        )


def test_packing_whole_blocks_is_taken():
    x = tensor("x", 1, 16, 6, 6)
    assert LayoutTransform().apply(function([x], pack(x, 8)), HOST, False) is not None
    y = tensor("y", 1, 2, 6, 6, 8)
    assert LayoutTransform().apply(function([y], unpack(y, 16)), HOST, False) is not None


def test_symbolic_batch():
    n = tirx.Var("n", "int64")
    x = te.placeholder((n, tirx.IntImm("int64", 12), tirx.IntImm("int64", 20)), name="x")
    executable = compiled(schedule(LayoutTransform(), function([x], topi.transpose(x, [0, 2, 1]))))
    data = draw([5, 12, 20])
    out = tvm.runtime.tensor(np.full((5, 20, 12), np.nan, "float32"))
    executable["main"](tvm.runtime.tensor(data), out)
    np.testing.assert_array_equal(out.numpy(), data.transpose(0, 2, 1))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [AVX512, NEON], ids=["avx512", "neon"])
def test_compiles_for_other_vector_units(target):
    func = schedule(LayoutTransform(), transpose([37, 41], [1, 0]), target)
    assert assembly(func, target)


def test_what_is_not_transposed_is_left_alone():
    x = tensor("x", 4, 6, 10)
    refused = [
        function([x], topi.nn.relu(x)),
        function([x], topi.transpose(x, [1, 0, 2])),
        function([x], topi.sum(topi.transpose(x, [2, 1, 0]), 0)),
        # No axis is contiguous in x: one of the short ones is squared.
        function([x], te.compute((2, 5), lambda i, j: x[0, i * i, j * 2] + 1.0)),
    ]
    for func in refused:
        assert LayoutTransform().apply(func, HOST, False) is None
    assert LayoutTransform().apply(transpose([4, 6], [1, 0]), FOREIGN, False) is None
