# SPDX-License-Identifier: Apache-2.0
"""Functions of parts: their text, and which parts share one."""

from __future__ import annotations

import pytest
import tvm_ffi
from loop_nests import CASES, blur, chain, function, heat2d, image, upsample
from tvm import te, tirx
from tvm.script import tirx as T

from schedules.distribute.distribute import distribute
from schedules.distribute.exchange import Region
from schedules.distribute.localize import LocalFunction, localize, scalar_arguments
from schedules.distribute.loop_nest import read_loop_nest, shape_of
from schedules.errors import OpError


@T.prim_func(private=True, s_tir=True)
def blur_of_a_part(
    A: T.Buffer((T.int64(6), T.int64(7)), "float32"),
    by: T.Buffer((T.int64(4), T.int64(5)), "float32"),
    lo_i: T.int64,
    first_A_0: T.int64,
    first_by_0: T.int64,
) -> None:
    T.func_attr({"tirx.noalias": True})
    bx = T.sblock_alloc_buffer((T.int64(6), T.int64(5)))
    for i, j in T.grid(T.int64(6), T.int64(5)):
        with T.sblock("bx"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            bx[v_i, v_j] = (
                A[v_i + lo_i - first_A_0, v_j]
                + A[v_i + lo_i - first_A_0, v_j + T.int64(1)]
                + A[v_i + lo_i - first_A_0, v_j + T.int64(2)]
            ) / T.float32(3)
    for i, j in T.grid(T.int64(4), T.int64(5)):
        with T.sblock("by"):
            v_i, v_j = T.axis.remap("SS", [i, j])
            by[v_i + lo_i - first_by_0, v_j] = (
                bx[v_i, v_j] + bx[v_i + T.int64(1), v_j] + bx[v_i + T.int64(2), v_j]
            ) / T.float32(3)


def whole_windows(func: tirx.PrimFunc) -> dict[str, Region]:
    return {buffer.name: tuple((0, n) for n in shape_of(buffer)) for buffer in func.params}


def part_of(func: tirx.PrimFunc, begin: int, end: int) -> LocalFunction:
    nest = read_loop_nest(func, [0])
    return localize(nest, ((begin, end),), whole_windows(func))


def test_text() -> None:
    nest = read_loop_nest(blur(), ["i"])
    windows = {"A": ((4, 10), (0, 7)), "by": ((4, 8), (0, 5))}
    local = localize(nest, ((4, 8),), windows)
    assert tvm_ffi.structural_equal(local.func, blur_of_a_part), local.func.script()
    assert scalar_arguments(nest, ((4, 8),), windows) == (4, 4, 4)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", CASES)
def test_equal_shapes_have_equal_functions(name: str) -> None:
    func = CASES[name]()
    extent = int(func.params[-1].shape[0])
    found: dict = {}
    for begin in range(extent - 1):
        local = part_of(func, begin, begin + 2)
        first = found.setdefault(local.shape, local.func)
        assert tvm_ffi.structural_equal(local.func, first)


@pytest.mark.slow
def test_interior_parts_share_a_function() -> None:
    for case, most in ((blur, 1), (heat2d, 1), (chain, 5), (upsample, 3)):
        parts = [part_of(case(16), begin, begin + 4).shape for begin in range(0, 13)]
        assert len(set(parts)) <= most, case


def test_blocks_are_clipped_at_the_border() -> None:
    first, inner = part_of(chain(16), 0, 4), part_of(chain(16), 8, 12)
    assert first.shape.stages[0] == ((6, 2), (4, 0))
    assert inner.shape.stages[0] == ((8, 0), (4, 0))


def test_types_of_the_whole_function() -> None:
    a = te.placeholder((9, 4), "float32", "A")
    func = te.create_prim_func([a, te.compute((8, 4), lambda i, j: a[i + 1, j], "C")])
    local = part_of(func, 2, 5)
    assert {str(param.ty.dtype) for param in local.func.params[2:]} == {"int32"}
    large = te.placeholder((1 << 16, 1 << 15), "float32", "A")
    copy = te.create_prim_func([large, te.compute(large.shape, lambda i, j: large[i, j], "C")])
    with pytest.raises(OpError, match=r"'A' has 2\*\*31 elements or more.*extents as int64"):
        part_of(copy, 0, 5)
    wide = image(1 << 16, 1 << 15)
    part_of(function(wide, te.compute(wide.shape, lambda i, j: wide[i, j], "C")), 0, 5)


def test_refused() -> None:
    nest = read_loop_nest(blur(), ["i"])
    with pytest.raises(OpError, match=r"range \(\(3, 3\),\) of the loops i is empty"):
        localize(nest, ((3, 3),), whole_windows(nest.func))
    narrow = {"A": ((4, 9), (0, 7)), "by": ((4, 8), (0, 5))}
    with pytest.raises(OpError, match="of buffer 'A' is used, and the window at hand is .*wider"):
        localize(nest, ((4, 8),), narrow)


@pytest.mark.slow
def test_kernels_of_a_distribution() -> None:
    plan = distribute(blur(64), "i", 64)
    shapes = {localize(plan.nest, part.rows, part.windows).shape for part in plan.parts}
    assert len(shapes) == 1
