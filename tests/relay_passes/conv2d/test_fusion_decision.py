# SPDX-License-Identifier: Apache-2.0
"""Decision to fuse: known cases, and properties of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layer_strategies import layers
from tvm.target import Target

from relay_passes import decide
from relay_passes.conv2d.winograd_decision import decide_winograd
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.cost_model import default_conv2d_knobs, default_fused_knobs, estimate
from schedules.workload.conv2d import Conv2DKernel, ConvLayer, FusedConv2DWorkload


def cpu(cores=2, mcpu="x86-64-v4"):
    return Target({"kind": "llvm", "mcpu": mcpu, "num-cores": cores})


DIRECT = (False, False)


def separable(size, channels, outputs, kernel=3, stride=1, batch=1):
    margin = (kernel // 2,) * 4
    first = ConvLayer(
        channels, channels, (kernel, kernel), (stride, stride), margin, groups=channels
    )
    return FusedConv2DWorkload(batch, size, size, first, ConvLayer(channels, outputs, (1, 1)))


def dense(size, channels, middle, outputs, kernel=1, batch=1):
    first = ConvLayer(channels, middle, (3, 3), padding=(1, 1, 1, 1))
    second = ConvLayer(middle, outputs, (kernel, kernel), padding=(kernel // 2,) * 4)
    return FusedConv2DWorkload(batch, size, size, first, second)


@pytest.mark.parametrize("mcpu", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize(
    "workload",
    [
        separable(112, 32, 64),
        separable(112, 64, 128, stride=2),
        separable(56, 128, 128),
        separable(56, 144, 24),
        separable(28, 192, 64, stride=2),
        separable(28, 120, 40, kernel=5),
        separable(14, 384, 96),
        separable(14, 480, 80, kernel=5),
        separable(14, 512, 512),
    ],
    ids=lambda pair: f"{pair.height} {pair.layer1}, {pair.layer2}",
)
def test_depthwise_then_pointwise_gains_on_large_images(workload, mcpu):
    decision = decide(workload, cpu(mcpu=mcpu))
    assert decision.fuse
    assert -0.01 < decision.gain < 0.5


@pytest.mark.parametrize(
    "workload", [separable(7, 960, 320), separable(7, 960, 160), dense(7, 512, 512, 2048)]
)
def test_images_of_seven_pixels_do_not_gain(workload):
    assert not decide(workload, cpu()).fuse


def test_what_comes_and_goes_in_nchw_gains_more():
    inner = separable(14, 576, 160, stride=2)
    gains = [
        decide(replace(inner, plain_data=data, plain_out=out), cpu()).gain
        for data, out in [(False, False), (False, True), (True, False), (True, True)]
    ]
    assert gains == sorted(set(gains))
    dense_first = dense(14, 64, 64, 64, kernel=3)
    plain = replace(dense_first, plain_data=True, plain_out=True)
    assert decide(plain, cpu()).gain == decide(dense_first, cpu()).gain


@pytest.mark.parametrize(
    "workload", [dense(56, 64, 64, 256), dense(28, 128, 128, 512), dense(14, 256, 256, 1024)]
)
def test_dense_then_pointwise_gains_little(workload):
    assert abs(decide(workload, cpu(), DIRECT).gain) < 0.1


@pytest.mark.parametrize("size", [14, 28, 56, 112])
def test_two_dense_layers_compute_the_first_again(size):
    decision = decide(dense(size, 64, 64, 64, kernel=3), cpu(), DIRECT)
    assert not decision.fuse
    assert "of the first layer would be recomputed" in decision.reason


def test_two_dense_layers_gain_where_the_intermediate_leaves_the_last_cache():
    assert decide(dense(1024, 8, 8, 8, kernel=3), cpu()).fuse


def test_too_little_space_for_many_cores():
    decision = decide(separable(14, 512, 512), cpu(cores=64))
    assert not decision.fuse
    assert decision.reason.endswith("of the first layer would be recomputed")
    enough = decide(separable(14, 512, 512, batch=64), cpu(cores=64))
    assert enough.gain > decision.gain
    assert "recomputed" not in enough.reason


def test_rows_that_do_not_divide_evenly():
    decision = decide(dense(7, 512, 512, 2048), cpu(), DIRECT)
    assert decision.reason.endswith("output of 7x7 does not divide evenly among 2 cores")


def test_one_core_needs_no_even_parts():
    assert decide(separable(7, 960, 320), cpu(cores=1)).fuse


def test_of_equals_one_kernel():
    first = ConvLayer(2048, 1, (3, 3), padding=(1, 1, 1, 1))
    workload = FusedConv2DWorkload(1, 256, 256, first, ConvLayer(1, 2048, (1, 1)))
    decision = decide(workload, cpu(), DIRECT)
    assert decision.fuse
    assert abs(decision.gain) < 0.01


@pytest.mark.parametrize(("kernel", "apart"), [(1, "layer 1 can"), (3, "layer 1 and layer 2 can")])
def test_a_pair_loses_where_its_layers_apart_need_fewer_multiplications(kernel, apart):
    workload = dense(56, 64, 64, 256, kernel)
    decision, direct = decide(workload, cpu()), decide(workload, cpu(), DIRECT)
    assert decision.gain < direct.gain
    assert not decision.fuse
    assert decision.reason.endswith(f"separate, {apart} use Winograd's algorithm")


def test_each_layer_is_asked_for():
    workload = dense(28, 128, 128, 128, kernel=3)
    gains = {
        allowed: decide(workload, cpu(), allowed).gain
        for allowed in [(False, False), (True, False), (False, True), (True, True)]
    }
    assert gains[True, True] < gains[True, False] < gains[False, False]
    assert gains[True, False] == pytest.approx(gains[False, True])


def test_an_algorithm_that_does_not_pay_changes_nothing():
    workload = dense(7, 512, 512, 2048)
    many = cpu(cores=64)  # which wait for the larger weights
    assert not decide_winograd(workload.layer1, 1, 7, 7, "float32", many).pays
    assert decide(workload, many) == decide(workload, many, DIRECT)


@pytest.mark.parametrize("size", [56, 14])
def test_without_a_machine_the_cost_models_decide(size):
    pair, info = separable(size, 128, 128), CPUInfo.from_target(cpu())
    kernel = Conv2DKernel(
        (pair.layer1, pair.layer2), 1, size, size, data_layout="NCHW16c", out_layout="NCHW16c"
    )
    apart = 0.0
    for layer in kernel.layers:
        alone = replace(kernel, layers=(layer,))
        apart += estimate(alone, default_conv2d_knobs(alone, info), info).cycles
    fused = estimate(kernel, default_fused_knobs(kernel, info), info).cycles
    assert decide(pair, cpu()).gain == apart / fused - 1  # Equal to the last bit.


def test_other_kinds_of_targets():
    decision = decide(separable(56, 64, 64), Target("metal"))
    assert not decision.fuse
    assert decision.reason == "no fused convolution kernel for target kind 'metal'"


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    layers(),
    st.data(),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([1, 2, 8, 64]),
    st.booleans(),
)
def test_every_pair_is_decided_the_same_way_twice(
    first, data, batch, height, width, cores, residual
):
    second = data.draw(layers(first.out_channels))
    assume(min(first.output_size(height, width)) >= 1)
    assume(min(second.output_size(*first.output_size(height, width))) >= 1)
    workload = FusedConv2DWorkload(batch, height, width, first, second, residual)
    decision = decide(workload, cpu(cores))
    assert decision == decide(workload, cpu(cores))
    assert decision.gain > -1
    assert decision.reason.startswith(f"predicted {decision.gain:+.1%}: ")
