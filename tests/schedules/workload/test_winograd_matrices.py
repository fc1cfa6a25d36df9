# SPDX-License-Identifier: Apache-2.0
"""Winograd's matrices: that they filter, and in which order their points come."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from schedules.workload.winograd_matrices import (
    TAPS,
    TILE_SIZES,
    transform_weight,
    transform_words,
    transforms,
)


@pytest.mark.parametrize("size", TILE_SIZES)
def test_they_compute_all_outputs_of_a_tile(size):
    random, found = np.random.default_rng(size), transforms(size)
    data, taps = random.standard_normal(size + TAPS - 1), random.standard_normal(TAPS)
    outputs = found.inverse @ ((found.weight @ taps) * (found.data @ data))
    np.testing.assert_allclose(outputs, np.correlate(data, taps), atol=1e-13)


@pytest.mark.parametrize("size", TILE_SIZES)
def test_points_come_in_pairs_that_differ_in_sign(size):
    found, signs = transforms(size), (-1.0) ** np.arange(size + TAPS - 1)
    for j in range(1, size + 1, 2):
        np.testing.assert_array_equal(found.inverse[:, j + 1], found.inverse[:, j] * signs[:size])
        np.testing.assert_array_equal(abs(found.data[j + 1]), abs(found.data[j]))
        np.testing.assert_array_equal(found.data[j + 1] * signs, found.data[j] * signs[size])


@pytest.mark.parametrize("size", TILE_SIZES)
def test_data_and_inverse_are_exact_in_float32(size):
    for matrix in (transforms(size).data, transforms(size).inverse):
        np.testing.assert_array_equal(matrix.astype("float32"), matrix)


@pytest.mark.parametrize("size", TILE_SIZES)
def test_the_weight_of_every_pair_of_channels_is_transformed(size):
    weight = np.random.default_rng(3).standard_normal((2, 3, TAPS, TAPS, 4, 5)).astype("float32")
    points = transform_weight(weight, size)
    assert points.dtype == weight.dtype and points.flags.c_contiguous
    assert points.shape == ((size + TAPS - 1) ** 2, 2, 3, 4, 5)
    matrix = transforms(size).weight
    expected = matrix @ weight[1, 2, :, :, 3, 1].astype("float64") @ matrix.T
    np.testing.assert_array_equal(points[:, 1, 2, 3, 1], expected.ravel().astype("float32"))


@pytest.mark.parametrize("size", TILE_SIZES)
def test_words_of_halves_are_those_of_float32_rounded_once(size):
    weight = np.random.default_rng(5).standard_normal((2, 3, TAPS, TAPS, 4, 8, 2))
    weight = weight.astype(ml_dtypes.bfloat16)
    plain = np.moveaxis(weight.astype("float32"), 6, 5).reshape(2, 3, TAPS, TAPS, 8, 8)
    words = transform_words(weight, 2, size)
    assert words.dtype == weight.dtype and words.shape == ((size + 2) ** 2, 2, 3, 4, 8, 2)
    expected = transform_weight(plain, size).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(words[:, :, :, 2, :, 1], expected[:, :, :, 5])
