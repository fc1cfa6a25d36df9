# SPDX-License-Identifier: Apache-2.0
"""Limits of pixels that are within them anyway."""

from __future__ import annotations

import numpy as np
import pytest
from cpu.rule_cases import function, run, schedule, tensor
from hypothesis import given
from hypothesis import strategies as st
from tvm import te, tirx

from schedules.cpu.loops.fallback import Elementwise
from schedules.cpu.nests.loop_transforms import Range, drop_limits, range_of
from schedules.tir.expression_walk import nodes


def limited(value, dtype="uint8", least=0.0, most=255.0):
    return te.max(te.min(value, most), least).astype(dtype)


def pixels(formula, dtype="uint8", count=256):
    """A function that applies a formula to each pixel."""
    a = tensor("a", count, dtype=dtype)
    return function([a], te.compute((count,), lambda i: formula(a[i].astype("float32")), "o"))


def limits(func):
    return len(nodes(func.body, tirx.Min, tirx.Max))


@pytest.mark.parametrize(
    ("formula", "left"),
    [
        (lambda x: limited(x * 0.3 + x * 0.7 + 0.5), 0),
        (lambda x: limited(255.0 - te.min(x * 1.5, 255.0) + 0.5), 1),
        (lambda x: limited(x + 0.99), 0),
        (lambda x: limited(x + 1.0), 1),  # 256 is none
        (lambda x: limited(x * 1.5), 1),
        (lambda x: limited(x - 0.5), 0),  # cut off to 0
        (lambda x: limited(x - 1.0), 1),
        (lambda x: limited(te.sqrt(x)), 2),
        (lambda x: limited(x, most=254.0), 1),
        (lambda x: limited(x, least=1.0), 1),
        (lambda x: limited(x, "int8", -128.0, 127.0), 1),
        (lambda x: limited(x - 128.0, "int8", -128.0, 127.0), 0),
        (lambda x: limited(x, "int32"), 2),
    ],
)
def test_limits(formula, left):
    assert limits(drop_limits(pixels(formula))) == left


def test_unknown_values_keep_their_limits():
    a = tensor("a", 8)
    func = function([a], te.compute((8,), lambda i: limited(a[i]), "o"))
    assert drop_limits(func).same_as(func)


def test_ranges():
    a = tensor("a", 4, dtype="uint8")
    x = a[0].astype("float32")
    assert range_of(x - te.const(2.0, "float32") * x) == Range(-510.0, 255.0)
    assert range_of(a[0].astype("int32") + 1) == Range(-np.inf, np.inf)
    assert range_of(te.max(x, te.const(9.0, "float32"))) == Range(9.0, 255.0)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(-2, 2, width=32), st.floats(-300, 300, width=32)), max_size=4),
    st.sampled_from(["uint8", "int8"]),
)
def test_results_stay(steps, dtype):
    """Results over all pixels are those of the formula with its limits, by numpy."""

    def formula(x):
        for factor, summand in steps:
            x = x * te.const(factor, "float32") + te.const(summand, "float32")
        ends = np.iinfo(dtype)
        return limited(x, dtype, float(ends.min), float(ends.max))

    func = pixels(formula)
    scheduled = schedule(Elementwise(), func)
    values = np.arange(256, dtype=np.uint8)
    levels = values.astype(np.float64)
    for factor, summand in steps:
        levels = levels * factor + summand
    ends = np.iinfo(dtype)
    expected = np.trunc(np.clip(levels, ends.min, ends.max))
    near = np.abs(levels - np.round(levels)) < 1e-2  # rounding of floats may cross a whole number
    found = run(scheduled, values)[0].astype(np.float64)
    assert (np.abs(found - expected) <= near).all()
