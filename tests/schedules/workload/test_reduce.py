# SPDX-License-Identifier: Apache-2.0
"""Workloads of reductions: checks, defaults, canonical forms and recovered subscripts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx
from tvm.sym import Analyzer

from schedules.errors import OpError
from schedules.tir.extents import constant, extent_of, size_of, unravel
from schedules.workload.reduce import (
    DTYPES,
    FINISHES,
    OPERATORS,
    CanonicalLoops,
    ReduceWorkload,
    normal_axes,
)


@pytest.mark.parametrize(
    ("operator", "dtype", "accumulator", "output"),
    [
        ("sum", "float16", "float32", "float16"),
        ("mean", "bfloat16", "float32", "bfloat16"),
        ("prod", "float64", "float64", "float64"),
        ("max", "int8", "int32", "int8"),
        ("sum_squares", "uint8", "int32", "uint8"),
        ("sum", "int64", "int64", "int64"),
        ("min", "bool", "int32", "bool"),
        ("and", "float64", "int32", "bool"),
        ("or", "bool", "int32", "bool"),
        ("argmax", "float16", "float32", "int64"),
        ("argmin", "bool", "int32", "int64"),
    ],
)
def test_types_of_accumulators_and_outputs(operator, dtype, accumulator, output):
    workload = ReduceWorkload.create(operator, None, 2, dtype)
    assert (workload.acc_dtype, workload.out_dtype) == (accumulator, output)
    assert workload.is_arg == operator.startswith("arg")


def test_json_round_trip():
    count = 0
    for operator, dtype, finish in itertools.product(OPERATORS, DTYPES, FINISHES):
        try:
            workload = ReduceWorkload.create(operator, (2, 0), 3, dtype, True, None, finish)
        except OpError:
            continue
        assert ReduceWorkload.from_json(workload.to_json()) == workload
        count += 1
    assert count == 4 * (10 * 9 - 5 - 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("xor", None, 2, "int32"), "reduction 'xor' is unknown; expected one of sum, prod"),
        (("sum", None, 2, "uint16"), "data has dtype uint16; expected one of float64"),
        (("mean", None, 2, "int32"), "mean of int32; expected a floating-point type"),
        (("prod", None, 2, "bool"), "prod of bool; expected a number type"),
        (("sum", [2], 2, "int32"), "axis 2 is out of range; data has 2 axes"),
        (("sum", [1, -1], 2, "int32"), r"axes \[1, -1\] name an axis twice"),
        (("sum", [True], 2, "int32"), "axis True is out of range"),
        (("sum", None, 2, "int32", False, "int8"), "acc_dtype is int8; expected one of int32"),
        (("sum", None, 2, "int64", False, "int32"), "expected int64 or a wider type of its kind"),
        (("sum", None, 2, "int8", False, "float32"), "expected int32 or a wider type of its kind"),
        (("and", None, 2, "bool", False, "float32"), "expected int32 or a wider"),
        (("sum", None, 2, "int8", False, None, "never"), "finish 'never' is unknown"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(OpError, match=message):
        ReduceWorkload.create(*arguments)


@given(st.integers(0, 5), st.data())
def test_axes_are_ascending_and_not_negative(ndim, draw):
    axes = sorted(draw.draw(st.sets(st.integers(0, ndim - 1)))) if ndim else []
    given_axes = [axis - ndim if draw.draw(st.booleans()) else axis for axis in axes]
    shuffled = draw.draw(st.permutations(given_axes))
    assert normal_axes(shuffled, ndim) == tuple(axes)
    assert normal_axes(None, ndim) == tuple(range(ndim))


@pytest.mark.parametrize(
    ("shape", "axes", "form", "runs"),
    [
        ((), (), "all", ()),
        ((4, 5), (0, 1), "all", (("R", 20),)),
        ((4, 5), (), "y", (("P", 20),)),
        ((4, 5), (1,), "x", (("P", 4), ("R", 5))),
        ((4, 5), (0,), "y", (("R", 4), ("P", 5))),
        ((4, 1), (0,), "all", (("R", 4),)),
        ((4, 1), (1,), "y", (("P", 4),)),
        ((2, 3, 4, 5), (0, 2, 3), "x", (("R", 2), ("P", 3), ("R", 20))),
        ((2, 3, 4, 5), (1,), "y", (("P", 2), ("R", 3), ("P", 20))),
        ((2, 1, 4), (0, 2), "all", (("R", 8),)),
    ],
)
def test_forms(shape, axes, form, runs):
    loops = CanonicalLoops(shape, axes)
    assert (loops.form, loops.runs) == (form, runs)
    assert loops.outputs == math.prod(e for a, e in enumerate(shape) if a not in axes)
    assert loops.reduced == math.prod(shape[axis] for axis in axes)


def test_symbolic_extents():
    n, k = tirx.Var("n", "int64"), tirx.Var("k", "int64")
    loops = CanonicalLoops((n, 3, k), (1, 2))
    assert loops.form == "x" and loops.outputs.same_as(n)
    assert constant(loops.reduced) is None
    assert Analyzer().can_prove_equal(loops.reduced, 3 * k)
    subscripts = loops.subscripts(tirx.Var("m", "int64"), tirx.const(0, "int64"))
    assert [str(index) for index in subscripts][0] == "m"


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_subscripts_visit_every_element_in_order(shape, draw):
    axes = tuple(sorted(draw.draw(st.sets(st.sampled_from(range(len(shape))))))) if shape else ()
    loops = CanonicalLoops(tuple(shape), axes)
    m = draw.draw(st.integers(0, int(loops.outputs) - 1))
    n = draw.draw(st.integers(0, int(loops.reduced) - 1))
    indices = loops.subscripts(tirx.const(m, "int64"), tirx.const(n, "int64"))
    found = [int(Analyzer().simplify(index)) for index in indices]
    outer = np.unravel_index(m, [shape[axis] for axis in loops.parallel_axes])
    inner = np.unravel_index(n, [shape[axis] for axis in axes])
    assert [found[axis] for axis in loops.parallel_axes] == list(outer)
    assert [found[axis] for axis in axes] == list(inner)


def test_unit_extents_cost_no_division():
    index = tirx.Var("i", "int64")
    assert [str(found) for found in unravel(index, [1, 7, 1])] == ["T.int64(0)", "i", "T.int64(0)"]


def test_an_index_that_is_natural_is_divided_towards_zero_by_unknown_extents():
    index, n = tirx.Var("i", "int64"), tirx.Var("n", "int64")
    kinds = [type(part) for part in unravel(index, [2, n], is_natural=True)]
    assert kinds == [tirx.Div, tirx.Mod]
    kinds = [type(part) for part in unravel(index, [n, 2], is_natural=True)]
    assert kinds == [type(part) for part in unravel(index, [2, n])]
    assert kinds == [tirx.FloorDiv, tirx.FloorMod]


def test_extents_and_sizes_are_integers_where_they_can_be():
    n = tirx.Var("n", "int64")
    assert extent_of(tirx.IntImm("int64", 3)) == 3 and extent_of(n) is n
    assert size_of([2, tirx.IntImm("int64", 3)]) == 6 and size_of([]) == 1
    assert size_of([1, n]).same_as(n)
