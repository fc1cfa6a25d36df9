# SPDX-License-Identifier: Apache-2.0
"""Decision to fuse on a GPU: properties of the estimate, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm.target import Target

from relay_passes.conv2d.fusion_decision import decide
from relay_passes.conv2d.gpu_fusion_decision import decide_gpu
from schedules.workload.conv2d import ConvLayer, FusedConv2DWorkload

CUDA = Target({"kind": "cuda", "arch": "sm_90"})
OPENCL = Target({"kind": "opencl"})


def pair(size: int, first: ConvLayer, second: ConvLayer, batch: int = 1) -> FusedConv2DWorkload:
    return FusedConv2DWorkload(batch, size, size, first, second)


def depthwise(channels: int, kernel: int = 3) -> ConvLayer:
    margin = (kernel // 2,) * 4
    return ConvLayer(channels, channels, (kernel, kernel), padding=margin, groups=channels)


def dense(inputs: int, outputs: int, kernel: int = 1) -> ConvLayer:
    return ConvLayer(inputs, outputs, (kernel, kernel), padding=(kernel // 2,) * 4)


@pytest.mark.parametrize("target", [CUDA, OPENCL], ids=["cuda", "opencl"])
@pytest.mark.parametrize("batch", [1, 32])
def test_depthwise_then_pointwise_with_few_channels_gains(target: Target, batch: int) -> None:
    decision = decide(pair(112, depthwise(32), dense(32, 16), batch), target)
    assert decision.fuse and decision.gain > 0
    assert "KiB between the layers stay in shared memory" in decision.reason


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [CUDA, OPENCL], ids=["cuda", "opencl"])
def test_layers_that_would_be_computed_again_do_not_gain(target: Target) -> None:
    """Every tile of the many output channels would compute the first layer anew."""
    decision = decide(pair(7, dense(512, 512, 3), dense(512, 2048)), target)
    assert not decision.fuse and decision.gain < 0
    assert "recomputed, or by too few blocks" in decision.reason


def test_the_gain_grows_as_the_first_layer_shrinks() -> None:
    large = decide(pair(28, dense(256, 64, 3), dense(64, 64)), CUDA)
    small = decide(pair(28, dense(16, 64, 1), dense(64, 64)), CUDA)
    assert small.gain > large.gain


def test_tensor_cores_for_separate_layers_count() -> None:
    """A pair that only the ordinary cores take loses more against layers of TF32."""
    strided = replace(dense(64, 64, 3), strides=(2, 2))
    gains = [
        decide_gpu(pair(56, dense(64, 64, 3), strided, 8), CUDA, tf32).gain
        for tf32 in (False, True)
    ]
    assert gains[1] < gains[0] < 0


@pytest.mark.parametrize("dtype", ["float16", "float32", "uint8"])
def test_pairs_of_tensor_cores_gain_where_channels_are_few(dtype: str) -> None:
    """Separate layers have channels in blocks, as pairs do; bytes have no depthwise layers."""
    pairs = [pair(56, dense(64, 64, 3), dense(64, 256), 8)]
    pairs += [pair(56, depthwise(96), dense(96, 24), 8)] * (dtype != "uint8")
    pairs.append(pair(14, dense(256, 256, 3), dense(256, 1024), 8))
    decisions = [decide_gpu(replace(each, dtype=dtype), CUDA, tf32=True) for each in pairs]
    assert [decision.fuse for decision in decisions] == [True] * (len(pairs) - 1) + [False]
    assert "too few blocks" in decisions[-1].reason


def test_refusals_have_reasons() -> None:
    fine = pair(14, depthwise(16), dense(16, 24))
    assert "second layer has groups" in decide_gpu(pair(14, dense(8, 8), depthwise(8)), CUDA).reason
    half = decide_gpu(replace(fine, dtype="float16"), OPENCL)
    assert not half.fuse and "without tensor cores it must be float32" in half.reason
    wide = pair(14, depthwise(64), dense(64, 8, 3))
    assert "has to be pointwise" in decide_gpu(replace(wide, dtype="float16"), CUDA).reason
    huge = decide_gpu(pair(64, dense(8, 8), dense(8, 8, 49)), CUDA)
    assert not huge.fuse and "no tile of the pair fits" in huge.reason
