# SPDX-License-Identifier: Apache-2.0
"""Minima and maxima give NaN where they get one, and stay single instructions."""

from __future__ import annotations

import numpy as np
import pytest
from cpu.rule_cases import AVX2, assembly, function, run, schedule, tensor
from tvm import topi

from schedules.cpu.loops.fallback import Elementwise
from schedules.tir.float_bits import keep_nan

X = np.array([np.nan, -2, -0.0, 0.5, 3, np.inf, -np.inf, np.nan], "float32")
Y = np.array([1, np.nan, 2, np.nan, -4, 1, np.nan, np.nan], "float32")


@pytest.mark.parametrize(
    ("op", "reference"),
    [
        (topi.nn.relu, lambda x: np.maximum(x, 0)),
        (lambda x: topi.clip(x, -1, 1), lambda x: np.clip(x, -1, 1)),
        (lambda x: topi.maximum(x, 0.25), lambda x: np.maximum(x, 0.25)),
        (lambda x: topi.minimum(topi.add(x, 1.0), 2.0), lambda x: np.minimum(x + 1, 2)),
    ],
    ids=["relu", "clip", "maximum", "minimum of a sum"],
)
def test_a_constant_and_anything(op, reference):
    func = schedule(Elementwise(), function([x := tensor("x", 8)], op(x)))
    np.testing.assert_array_equal(run(func, X)[0], reference(X))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("op", "reference"), [(topi.maximum, np.maximum), (topi.minimum, np.minimum)]
)
def test_two_tensors(op, reference):
    x, y = tensor("x", 8), tensor("y", 8)
    func = schedule(Elementwise(), function([x, y], op(x, y)))
    np.testing.assert_array_equal(run(func, X, Y)[0], reference(X, Y))
    np.testing.assert_array_equal(run(func, Y, X)[0], reference(Y, X))


def test_bounds_of_bounds_name_each_value_once():
    def chain(x):
        for _ in range(12):
            x = topi.add(topi.clip(topi.multiply(x, 2.0), -3, 5), 1.0)
        return x

    func = schedule(Elementwise(), function([x := tensor("x", 8)], chain(x)))
    assert func.script().count("Select(") < 40  # 4096 if each value were written twice
    expected = X
    for _ in range(12):
        expected = np.clip(expected * 2, -3, 5) + 1
    np.testing.assert_array_equal(run(func, X)[0], expected)


def test_a_relu_is_one_instruction():
    x = tensor("x", 64)
    text = assembly(schedule(Elementwise(), function([x], topi.nn.relu(x)), AVX2), AVX2)
    assert "vmaxps" in text and "vcmp" not in text and "vblend" not in text


def test_integers_and_reductions_are_left_alone():
    x, n = tensor("x", 4, 8), tensor("n", 8, dtype="int32")
    for func in (function([x], topi.max(x, 1)), function([n], topi.nn.relu(n))):
        assert keep_nan(func).same_as(func)
