# SPDX-License-Identifier: Apache-2.0
"""Overlapping last tiles."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from cpu.rule_cases import draw, function, guards, run, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from schedules.cpu.nests.tails import Overlap, Tails, overlap_of, overlap_tails


@T.prim_func(private=True, s_tir=True)
def before(a: T.Buffer((20,), "float32"), b: T.Buffer((20,), "float32")):
    for o in range(3):
        for i in T.vectorized(8):
            with T.sblock("b"):
                v = T.axis.spatial(20, o * 8 + i)
                T.where(o * 8 + i < 20)
                b[v] = a[v] * T.float32(2)


@T.prim_func(private=True, s_tir=True)
def after(a: T.Buffer((20,), "float32"), b: T.Buffer((20,), "float32")):
    for o in range(3):
        for i in T.vectorized(8):
            with T.sblock("b"):
                v = T.axis.spatial(20, T.min(o * 8, 12) + i)
                b[v] = a[v] * T.float32(2)


def test_the_last_tile_starts_earlier():
    tvm.ir.assert_structural_equal(overlap_tails(before, [Overlap("b", (0,), 8)]), after)


def test_twice_equals_once():
    once = overlap_tails(before, [Overlap("b", (0,), 8)])
    assert overlap_tails(once, []).same_as(once)


def test_other_blocks_stay():
    tvm.ir.assert_structural_equal(overlap_tails(before, [Overlap("c", (0,), 8)]), before)


def doubled(*shape: int) -> tirx.PrimFunc:
    x = tensor("x", *shape)
    return function([x], te.compute(shape, lambda *i: x[i] * 2.0, name="y"))


def test_no_overlap_is_found_where_the_tile_fits():
    sch = s_tir.Schedule(doubled(24))
    block = sch.get_sblock("y")
    outer, _ = sch.split(sch.get_loops(block)[0], [None, 8])
    assert overlap_of(sch, block, outer, 8) is None


@pytest.mark.parametrize(
    ("extents", "index"),
    [
        ((20,), lambda j: 19 - j),
        ((17,), lambda j: j + 3),
        ((5, 4), lambda p, q: 4 * p + q),
    ],
    ids=["reversed", "shifted", "reshaped"],
)
def test_no_overlap_is_found_where_an_iteration_is_not_the_next_tile(extents, index):
    x = tensor("x", 20)
    y = te.compute((20,), lambda i: x[i] * 2.0, name="y")
    z = te.compute(extents, lambda *axes: y[index(*axes)] + 1.0, name="z")
    sch = s_tir.Schedule(function([x], z))
    outer, _ = sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, 8])
    sch.reverse_compute_at(sch.get_sblock("z"), outer)
    assert overlap_of(sch, sch.get_sblock("y"), outer, 8) is not None
    assert overlap_of(sch, sch.get_sblock("z"), outer, 8) is None


def test_both_parts_of_a_decomposed_reduction_are_named():
    x = tensor("x", 10, 4)
    k = te.reduce_axis((0, 4), name="k")
    func = function([x], te.compute((10,), lambda i: te.sum(x[i, k], axis=k), name="s"))
    sch = s_tir.Schedule(func)
    block = sch.get_sblock("s")
    i, k_loop = sch.get_loops(block)
    outer, inner = sch.split(i, [None, 8])
    sch.reorder(outer, k_loop, inner)
    tails = Tails(sch)
    tails.add(block, outer, 8)
    tails.decompose(block, k_loop)
    assert {overlap.block for overlap in tails.collect()} == {"s_init", "s_update"}


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=3),
    st.integers(2, 9),
    st.booleans(),
)
def test_every_element_is_computed_whatever_was_fused(shape, tile, split_more):
    total = int(np.prod(shape))
    tile = min(tile, total)
    sch = s_tir.Schedule(doubled(*shape))
    block = sch.get_sblock("y")
    outer, inner = sch.split(sch.fuse(*sch.get_loops(block)), [None, tile])
    tile_fits = total % tile == 0
    if split_more:
        sch.split(outer, [2, None])
    sch.vectorize(inner)
    positions = tuple(range(len(shape)))
    overlaps = [] if tile_fits else [Overlap("y", positions, tile)]
    func = overlap_tails(sch.mod["main"], overlaps)
    assert guards(func) == 0 or split_more
    x = draw(shape)
    np.testing.assert_array_equal(run(func, x)[0], x * 2)
