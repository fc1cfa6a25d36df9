# SPDX-License-Identifier: Apache-2.0
"""Decision to use Winograd's algorithm: known cases, refusals, and properties of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.target import Target

from relay_passes.conv2d.winograd_decision import MODES, check_mode, decide_winograd
from schedules.errors import OpError
from schedules.workload.conv2d import ConvLayer


def cpu(cores=2, mcpu="x86-64-v3"):
    return Target({"kind": "llvm", "mcpu": mcpu, "num-cores": cores})


def same(channels, outputs=None):
    return ConvLayer(channels, outputs or channels, (3, 3), padding=(1, 1, 1, 1))


@pytest.mark.parametrize(
    ("channels", "size", "tile", "least", "most"),
    [(64, 56, 4, 1.3, 2.0), (128, 28, 4, 1.6, 2.3), (256, 14, 4, 0.9, 1.6), (512, 7, 2, 0.1, 0.6)],
)
@pytest.mark.parametrize("cores", [1, 2])
def test_layers_of_residual_networks_gain(channels, size, tile, least, most, cores):
    decision = decide_winograd(same(channels), 1, size, size, "float32", cpu(cores))
    assert decision.tile == tile
    assert least < decision.gain < most
    assert decision.pays


def test_more_images_read_the_weights_once():
    one, many = (decide_winograd(same(512), n, 7, 7, "float32", cpu()) for n in (1, 8))
    assert many.gain > one.gain
    assert many.tile == 4


@pytest.mark.parametrize(
    ("layer", "size", "cores"), [(same(256), 4, 2), (same(512), 7, 64), (same(64), 1, 1)]
)
def test_few_pixels_do_not_gain(layer, size, cores):
    assert not decide_winograd(layer, 1, size, size, "float32", cpu(cores)).pays


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": (5, 5)},
        {"kernel": (3, 1)},
        {"strides": (2, 1)},
        {"dilation": (1, 2)},
        {"groups": 64},
        {"groups": 2},
        {"in_channels": 3},
    ],
    ids=str,
)
def test_other_layers_are_not_taken(change):
    layer = replace(same(64), **change)
    assert decide_winograd(layer, 1, 56, 56, "float32", cpu()) is None


def test_other_types_and_targets_are_not_taken():
    assert decide_winograd(same(64), 1, 56, 56, "float64", cpu()) is None
    assert decide_winograd(same(64), 1, 56, 56, "float32", Target("cuda")) is None


@pytest.mark.parametrize("name", ["znver4", "znver5"])
@pytest.mark.parametrize(("channels", "size"), [(64, 56), (128, 28), (256, 14), (512, 7)])
def test_pairs_of_bfloat16_gain_by_small_tiles(name, channels, size):
    decision = decide_winograd(same(channels), 1, size, size, "bfloat16", cpu(2, name))
    assert decision.tile == 2 and decision.pays
    assert 0.2 < decision.gain < 1


@pytest.mark.parametrize("name", ["x86-64-v3", "cooperlake", "sapphirerapids", "icelake-server"])
def test_bfloat16_stays_direct_where_pairs_are_not_multiplied_faster(name):
    assert decide_winograd(same(64), 1, 56, 56, "bfloat16", cpu(2, name)) is None


@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(
    st.integers(8, 300),
    st.integers(1, 300),
    st.integers(1, 3),
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([1, 2, 8, 64]),
    st.sampled_from(["x86-64-v3", "x86-64-v4"]),
)
def test_every_layer_is_decided_the_same_way_twice(
    inputs, outputs, batch, height, width, cores, mcpu
):
    arguments = same(inputs, outputs), batch, height, width, "float32", cpu(cores, mcpu)
    decision = decide_winograd(*arguments)
    assert decision == decide_winograd(*arguments)
    if decision is None:
        assert inputs < 16 and mcpu == "x86-64-v4"
    else:
        assert decision.gain > -1 and decision.cycles > 0


def test_modes():
    for mode in MODES:
        check_mode(mode, "it")
    with pytest.raises(OpError, match="it: winograd is None; expected one of auto, always, never"):
        check_mode(None, "it")
