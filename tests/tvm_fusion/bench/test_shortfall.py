# SPDX-License-Identifier: Apache-2.0
"""The reasons why kernels stay behind the limit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.workload.conv2d import Conv2DKernel, ConvLayer
from tvm_fusion.bench.kernel_work import reason, useful_share
from tvm_fusion.bench.machine_limits import CacheLevel, MachineLimits

CPU = CPUInfo.from_target(Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}))
LIMITS = MachineLimits(
    2, 1e11, (CacheLevel("L2", 1 << 20, 1e11), CacheLevel("memory", math.inf, 1e10))
)


def kernel(layer: ConvLayer, size: int) -> Conv2DKernel:
    return Conv2DKernel((layer,), 1, size, size, data_layout="NCHW8c", out_layout="NCHW8c")


def dense(inputs: int, outputs: int, kernel_size: int = 3) -> ConvLayer:
    margin = (kernel_size // 2,) * 4
    return ConvLayer(inputs, outputs, (kernel_size, kernel_size), padding=margin)


FULL = kernel(dense(64, 64), 48)


@pytest.mark.parametrize(
    ("made_of", "moved", "seconds", "fraction", "text"),
    [
        (FULL, 1000, 1e-3, 0.9, ""),
        (FULL, 9_000_000, 1e-3, 0.5, "data moves at 90% of memory bandwidth"),
        (FULL, 1000, 1e-5, 0.5, "short: threads"),
        (None, 1000, 1e-3, 0.5, "unknown"),
        (kernel(dense(64, 60), 7), 1000, 1e-3, 0.5, "of the multiply-adds are useful"),
        (kernel(ConvLayer(64, 64, (3, 3), groups=64), 50), 1000, 1e-3, 0.5, "depthwise"),
        (kernel(dense(16, 96, 1), 48), 1000, 1e-3, 0.5, "sums of 16 steps"),
        (kernel(dense(512, 512), 48), 1000, 1e-3, 0.5, "weights"),
        (replace(FULL, winograd=4), 1000, 1e-3, 0.5, "transforms before and after the products"),
    ],
)
def test_reasons(made_of, moved, seconds, fraction, text) -> None:
    found = reason(made_of, moved, seconds, fraction, LIMITS, CPU)
    assert (text in found) and bool(text) == bool(found)


def test_the_useful_share_counts_lanes_tiles_and_cores() -> None:
    assert useful_share(FULL, CPU) == 1
    assert useful_share(kernel(dense(64, 60), 48), CPU) == pytest.approx(60 / 64)
    assert useful_share(kernel(dense(64, 8), 7), CPU) < 7 / 8  # four rows for one core, three left
    pair = Conv2DKernel(
        (dense(64, 64), dense(64, 60, 1)), 1, 48, 48, data_layout="NCHW8c", out_layout="NCHW8c"
    )
    assert 60 / 64 < useful_share(pair, CPU) < 1
