# SPDX-License-Identifier: Apache-2.0
"""Cut points: iterations at which conditions on a loop change."""

from __future__ import annotations

import pytest
from cpu.rule_cases import HOST, function, tensor
from hypothesis import given
from hypothesis import strategies as st
from tvm import te, tirx

from schedules.cpu.nests.blocks import open_kernel
from schedules.schedule_rule import KernelFacts
from schedules.tir.index_math import cut_points

i, j = 0, 1


def points(condition, position: int = j, shape: tuple[int, int] = (6, 20)) -> list[int]:
    x = tensor("x", 64, 64)
    out = te.compute(
        shape, lambda i, j: tirx.if_then_else(condition(i, j), x[i, j], 0.0), name="out"
    )
    kernel = open_kernel(KernelFacts(function([x], out), HOST))
    assert kernel is not None
    return cut_points(kernel.sch, kernel.blocks[0].block_rv, position)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (lambda i, j: j >= 3, [3]),
        (lambda i, j: tirx.all(j >= 1, j < 17), [1, 17]),
        (lambda i, j: j * 2 + 1 < 9, [4]),
        (lambda i, j: j.equal(5), [5, 6]),
        (lambda i, j: 4 - j > 0, [4]),
        (lambda i, j: i >= 3, []),
        (lambda i, j: j < 20, []),
        (lambda i, j: j >= 0, []),
        (lambda i, j: tirx.floormod(j, 2) < 1, []),
    ],
)
def test_cuts_are_where_a_comparison_turns(condition, expected):
    assert points(condition) == expected


def test_with_another_variable_the_doubtful_part_is_cut_off():
    # i is 0..5, so that j + i < 12 holds for all i below 7 and for none from 12 on.
    assert points(lambda i, j: j + i < 12) == [7, 12]


@given(st.integers(-30, 30), st.integers(-3, 3).filter(bool), st.integers(2, 25))
def test_between_cuts_nothing_changes(bound, slope, extent):
    cuts = points(lambda i, j: j * slope < bound, shape=(2, extent))
    for start, end in zip([0, *cuts], [*cuts, extent], strict=True):
        assert len({value * slope < bound for value in range(start, end)}) == 1
    for cut in cuts:
        assert ((cut - 1) * slope < bound) != (cut * slope < bound)
