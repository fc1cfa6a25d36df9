# SPDX-License-Identifier: Apache-2.0
"""Integers and scales of quantised weights, from their products in float32."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay_passes.core.integer_weights import integer_weights, rescaled_weights


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 200),
    largest=st.integers(1, 127),
    alike=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_of_integers_and_scales_are_found(rows, columns, largest, alike, seed):
    random = np.random.default_rng(seed)
    integers = random.integers(-largest - (largest == 127), largest + 1, (rows, columns))
    scales = np.exp(random.uniform(-12, 4, 1 if alike else rows)).astype("float32")
    factors = np.exp(random.uniform(-3, 3, 2)).astype("float32")  # of inputs and outputs, later
    weight = integers * scales[:, None] * factors[0] / factors[1]
    found = integer_weights(weight.astype("float64"))
    assert found is not None and found.integers.dtype == np.int8
    again = found.integers * found.scales[:, None]
    limit = 2e-5 * np.abs(weight).max(axis=1, keepdims=True)
    assert (np.abs(again - weight) <= limit).all()


def test_rows_of_zeros_and_of_no_elements():
    found = integer_weights(np.zeros((2, 3, 1, 1)))
    assert not found.integers.any() and (found.scales == 1).all()
    assert integer_weights(np.zeros((2, 0))).integers.shape == (2, 0)


@pytest.mark.parametrize(
    "row",
    [
        np.random.default_rng(0).standard_normal(40),
        np.arange(-200, 201),
        np.append(np.arange(-127, 128), 0.5),
        [1.0, np.nan],
        [1.0, np.inf],
    ],
    ids=["random", "more than 8 bits", "a half", "NaN", "infinity"],
)
def test_other_weights_are_refused(row):
    row = np.asarray(row, "float64")
    assert integer_weights(np.stack([row, np.ones_like(row)])) is None


def test_integers_are_as_small_as_they_can_be():
    """Of 7 bits, whose least is as far from the largest scale as one of 8 bits."""
    integers = np.array([[-64, 63, 1, 0], [64, -63, 5, 7], [0, 0, 0, 0], [4, -8, 12, 0]])
    found = integer_weights(integers * 0.25)
    assert found is not None
    np.testing.assert_array_equal(found.integers[:2], integers[:2])
    np.testing.assert_array_equal(found.integers[2:], [[0, 0, 0, 0], [1, -2, 3, 0]])
    np.testing.assert_array_equal(found.scales[:, None] * found.integers, integers * 0.25)


@given(seed=st.integers(0, 2**32 - 1), alike=st.booleans())
def test_factors_multiply_scales_in_float32(seed, alike):
    """As ONNX Runtime multiplies them, whatever rounding the weights had."""
    random = np.random.default_rng(seed)
    integers = random.integers(-127, 128, (5, 40))
    integers[:, 0], integers[:, 1] = 127, 1
    scales, factors = np.exp(random.uniform(-6, 2, (2, 5))).astype("float32")
    given = (integers * scales[:, None]).astype("float32").astype("float64")
    by = factors[:1] if alike else factors
    weight = rescaled_weights(given, by.astype("float64")).astype("float32")
    found = integer_weights(weight.astype("float64"))
    assert found is not None
    np.testing.assert_array_equal(found.integers, integers)
    np.testing.assert_array_equal(found.scales.astype("float32"), scales * by)


def test_other_weights_are_multiplied_by_themselves():
    """Also those that are nearly multiples of a scale."""
    random = np.random.default_rng(1)
    nearly = np.full((2, 3), 0.7) * [1, 1 + 1e-6, -1]
    for weight in (random.standard_normal((2, 30)), nearly):
        weight = weight.astype("float32").astype("float64")
        found = rescaled_weights(weight, np.array([0.3, 3.0]))
        np.testing.assert_array_equal(found, weight * [[0.3], [3.0]])
