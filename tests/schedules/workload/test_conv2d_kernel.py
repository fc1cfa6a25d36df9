# SPDX-License-Identifier: Apache-2.0
"""The JSON text in which a generated function carries its workload."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.errors import OpError
from schedules.workload.conv2d import (
    ACTIVATIONS,
    Activation,
    Conv2DKernel,
    ConvLayer,
    from_json,
    to_json,
)

COUNT = st.integers(0, 9)
LAYERS = st.builds(
    ConvLayer,
    in_channels=COUNT,
    out_channels=COUNT,
    kernel=st.tuples(COUNT, COUNT),
    strides=st.tuples(COUNT, COUNT),
    padding=st.tuples(COUNT, COUNT, COUNT, COUNT),
    dilation=st.tuples(COUNT, COUNT),
    groups=COUNT,
    activation=st.builds(
        Activation, st.sampled_from(ACTIVATIONS), st.floats(-9, 0), st.just(float("inf"))
    ),
)
KERNELS = st.builds(
    Conv2DKernel,
    layers=st.lists(LAYERS, min_size=1, max_size=2).map(tuple),
    batch=COUNT | st.none(),
    height=COUNT | st.none(),
    width=COUNT | st.none(),
    residual=st.booleans(),
    dtype=st.sampled_from(["float32", "float64"]),
    data_layout=st.sampled_from(["NCHW", "NCHW8c"]),
    out_layout=st.sampled_from(["NCHW", "NCHW8c"]),
    winograd=st.sampled_from([0, 2, 4]),
)


@given(KERNELS)
def test_reads_back_what_was_written(kernel):
    assert from_json(to_json(kernel)) == kernel
    assert kernel.is_static == (None not in (kernel.batch, kernel.height, kernel.width))


@given(KERNELS, KERNELS)
def test_equal_texts_for_equal_kernels_only(one, other):
    assert (to_json(one) == to_json(other)) == (one == other)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": [{}]}', '{"layers": 1}', "null"])
def test_refuses_other_texts(text):
    with pytest.raises(OpError, match="kernel description .* cannot be read .*to_json writes"):
        from_json(text)


def test_operations_of_a_pair_and_by_winograd():
    first, second = ConvLayer(3, 8, (3, 3), (2, 2)), ConvLayer(8, 5, (1, 1))
    pair = Conv2DKernel((first, second), 2, 9, 9)
    assert pair.flops() == 2 * 2 * 16 * (8 * 27 + 5 * 8)
    same = Conv2DKernel((ConvLayer(3, 8, (3, 3), padding=(1, 1, 1, 1)),), 2, 9, 7)
    assert same.flops() == 2 * 2 * 63 * 8 * 27
    assert replace(same, winograd=4).flops() == 2 * 2 * 6 * 36 * 8 * 3
    assert replace(same, winograd=2).flops() == 2 * 2 * 20 * 16 * 8 * 3
