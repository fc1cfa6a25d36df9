# SPDX-License-Identifier: Apache-2.0
"""Regions that a range of the output needs, against an interpreter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_nests import CASES, Interpreter, elements, every_fourth
from tvm import ir, tirx

from schedules.distribute.exchange import intersection
from schedules.distribute.loop_nest import LoopNest, read_loop_nest, shape_of
from schedules.distribute.regions import index_values, regions_computed, regions_needed

NESTS = {name: read_loop_nest(case(), [0]) for name, case in CASES.items()}
INTERPRETERS = {name: Interpreter(case()) for name, case in CASES.items()}


@given(st.sampled_from(sorted(CASES)), st.data())
def test_needed(name: str, data: st.DataObject) -> None:
    nest = NESTS[name]
    ends = [
        sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))
        for n in shape_of(nest.outputs[0])
    ]
    region = tuple((begin, end) for begin, end in ends)
    expected = {
        element for index in elements(region) for element in INTERPRETERS[name].reads(index)
    }
    wanted = {nest.outputs[0]: [region]}
    needed = regions_needed(nest, wanted)
    found = [
        (buffer.name, index)
        for buffer in nest.inputs
        for part in needed.get(buffer, [])
        for index in elements(part)
    ]
    assert sorted(found) == sorted(expected)
    for buffer, computed in regions_computed(nest, wanted).items():
        assert all(intersection(part, computed) == part for part in needed.get(buffer, []))


def test_gaps_are_computed_but_not_needed() -> None:
    nest = read_loop_nest(every_fourth(), [0])
    wanted = nest.output_regions(((1, 3),))
    a = nest.inputs[0]
    assert regions_needed(nest, wanted)[a] == [((2, 3), (0, 3)), ((4, 5), (0, 3))]
    assert regions_computed(nest, wanted)[a] == ((2, 5), (0, 3))


def values(index: tirx.Expr, domain: dict, *conditions: tirx.Expr) -> list[tuple[int, int]] | None:
    ranges = {var: ir.Range(low, high) for var, (low, high) in domain.items()}
    return index_values(index, ranges, list(conditions))


def test_values_of_indices() -> None:
    i, k = tirx.Var("i", "int64"), tirx.Var("k", "int64")
    assert values(2 * i + k, {i: (3, 8), k: (0, 3)}) == [(6, 17)]
    assert values(2 * i, {i: (3, 6)}) == [(6, 7), (8, 9), (10, 11)]
    assert values(i + 4 * k, {i: (0, 2), k: (0, 2)}) == [(0, 2), (4, 6)]
    assert values(i * 3 // 2, {i: (0, 4)}) == [(0, 2), (3, 5)]
    assert values(9 - i, {i: (2, 5)}) == [(5, 8)]
    assert values(2 * i, {i: (0, 9)}, i >= 3, i < 5) == [(6, 7), (8, 9)]
    assert values(i + k, {i: (0, 4), k: (0, 3)}, i + k >= 5) == [(5, 6)]
    assert values(2 * i, {i: (0, 4)}, 2 * i > 7) == []


def test_loops_that_move_a_dimension() -> None:
    nest: LoopNest = read_loop_nest(CASES["matmul"](), [0, 1])
    moved = {buffer.name: loops for buffer, loops in nest.varying.items()}
    assert moved["A"] == ({0}, set())
    assert moved["B"] == (set(), {1})


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_needed_for_nothing(name: str) -> None:
    nest = NESTS[name]
    assert regions_needed(nest, nest.output_regions(((2, 2),))) == {}
