# SPDX-License-Identifier: Apache-2.0
"""Index expressions: their types, positions of elements, and multiples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from schedules.tir.index_math import (
    as_type,
    ceil_power_of_two,
    ceildiv,
    factor_of,
    floor_power_of_two,
    i64,
    is_multiple,
    ravel,
    volume,
)

N = tirx.Var("n", "int64")


@pytest.mark.parametrize("value", [3, tirx.IntImm("int32", 3), tirx.Var("x", "int32"), N])
def test_expressions_get_the_type(value):
    assert str(i64(value).ty.dtype) == "int64"
    assert str(as_type(value, "int32").ty.dtype) == "int32"


def test_an_expression_of_the_type_stays():
    assert i64(N).same_as(N)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4))
def test_ravel_is_that_of_numpy(axes):
    extents = [more + index + 1 for index, more in axes]
    indices = [index for index, _ in axes]
    position = int(ravel([tirx.IntImm("int32", i) for i in indices], extents))
    assert position == (np.ravel_multi_index(indices, extents) if axes else 0)


def test_ravel_in_another_type():
    assert str(ravel([N, N], [2, 3], "int32").ty.dtype) == "int32"
    assert str(ravel([], [], "int32").ty.dtype) == "int32"


def test_volume_is_a_number_where_all_extents_are():
    assert int(volume([2, tirx.IntImm("int32", 3)])) == 6 and int(volume([])) == 1
    assert Analyzer().can_prove_equal(volume([2, N, 3]), N * 6)


def test_ceildiv_of_numbers_and_expressions():
    assert [int(ceildiv(value, 4)) for value in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert Analyzer().can_prove_equal(ceildiv(N, 4), (N + 3) // 4)


def test_multiples_by_form_and_by_what_the_analyzer_knows():
    assert is_multiple(N * 8, 4) and is_multiple(N * 4 + 8, 4)
    assert not is_multiple(N * 2, 4) and not is_multiple(N * 4 + 1, 4)
    bound = Analyzer()
    bound.bind(N, Range(8, 9))
    assert is_multiple(N, 4, bound) and not is_multiple(N, 4)


@given(st.integers(1, 1 << 40))
def test_powers_of_two_round_down_and_up(value):
    low, high = floor_power_of_two(value), ceil_power_of_two(value)
    assert low <= value <= high and (high == low or high == 2 * low)
    assert low.bit_count() == high.bit_count() == 1


def test_factors_of_linear_expressions():
    other = tirx.Var("m", "int64")
    assert factor_of(N, N * 3 + other) == 3 and factor_of(N, other) == 0
    assert factor_of(N, N * other) is None and factor_of(N, N // 2) is None
