# SPDX-License-Identifier: Apache-2.0
"""Expressions that lose their digits near one keep them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cpu.rule_cases import function, run, tensor
from tvm import ir, te, tirx

from schedules.tir.math_expressions import keep_digits
from schedules.tir.vector_math import vectorize_math


def f32(value: float) -> ir.Expr:
    return tirx.FloatImm("float32", value)


def mish(x: ir.Expr) -> ir.Expr:
    return x * te.tanh(te.log(te.exp(x) + f32(1)))


def on_vector(op: Callable[[ir.Expr], ir.Expr], count: int) -> tirx.PrimFunc:
    x = tensor("x", count)
    return vectorize_math(function([x], te.compute((count,), lambda i: op(x[i]), name="y")))


CASES = {
    "softplus": (lambda x: te.log(f32(1) + te.exp(x)), lambda v: np.log1p(np.exp(v))),
    "softplus_reversed": (lambda x: te.log(te.exp(x) + f32(1)), lambda v: np.log1p(np.exp(v))),
    "minus_one": (lambda x: te.exp(x) - f32(1), np.expm1),
    "plus_minus_one": (lambda x: te.exp(x) + f32(-1), np.expm1),
    "one_minus": (lambda x: f32(1) - te.exp(x), lambda v: -np.expm1(v)),
    "mish": (mish, lambda v: v * np.tanh(np.log1p(np.exp(v)))),
}


@pytest.mark.parametrize("case", CASES)
def test_small_results_keep_their_digits(case):
    op, reference = CASES[case]
    generator = np.random.default_rng()
    tiny = np.exp(generator.uniform(-80, 0, 500)) * generator.choice([-1, 1], 500)
    x = np.concatenate([generator.uniform(-80, 80, 500), tiny, [0.0]]).astype("float32")
    (found,) = run(on_vector(op, len(x)), x)
    np.testing.assert_allclose(found, reference(x.astype("float64")), rtol=1e-6)


def test_mish_where_the_exponential_overflows():
    x = np.array([70.0, 89.0, 1e3, 3e38, np.inf], "float32")
    np.testing.assert_array_equal(run(on_vector(mish, len(x)), x)[0], x)


def test_tanh_of_any_logarithm_is_a_quotient():
    y = np.array([0.0, 0.3, 1.0, 1.5, 2.0, 40.0, 1e30, np.inf, -0.5, np.nan], "float32")
    (found,) = run(on_vector(lambda v: te.tanh(te.log(v)), len(y)), y)
    with np.errstate(all="ignore"):
        exact = np.tanh(np.log(y.astype("float64")))
    np.testing.assert_allclose(found, exact, rtol=1e-6)


@pytest.mark.parametrize(
    "value",
    [
        lambda x: te.log(x + f32(2)),
        lambda x: te.exp(x) - f32(2),
        lambda x: te.exp(x) + f32(1),
        lambda x: x - f32(1),
        lambda x: te.tanh(x),
        lambda x: te.exp(tirx.Cast("float64", x)) - tirx.FloatImm("float64", 1),
    ],
)
def test_other_expressions_stay(value):
    expr = value(tirx.Var("x", "float32"))
    assert keep_digits(expr).same_as(expr)
