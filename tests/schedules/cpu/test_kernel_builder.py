# SPDX-License-Identifier: Apache-2.0
"""Activations inside convolutions are vector code, and right."""

from __future__ import annotations

import pytest
from cpu.conv_cases import Case, build, check, compile_function
from cpu.rule_cases import AVX2, HOST, assembly

from schedules.conv2d_workload import Activation, ConvLayer
from schedules.cpu.conv2d import Conv2D
from schedules.cpu.fused_conv2d import FusedConv2D


@pytest.mark.parametrize("kind", ["sigmoid", "silu"])
@pytest.mark.parametrize("fused", [False, True])
def test_no_activation_calls_the_c_library(kind: str, fused: bool) -> None:
    activation = Activation(kind)
    layers = [ConvLayer(16, 16, (3, 3), padding=(1, 1, 1, 1), activation=activation)]
    if fused:
        layers.append(ConvLayer(16, 24, (1, 1), activation=activation))
    case = Case(tuple(layers), height=9, width=11)
    rule = FusedConv2D() if fused else Conv2D()
    made = {target: rule.apply(build(case), target, False) for target in (AVX2, HOST)}
    code = assembly(made[AVX2].mod["main"], AVX2)
    assert "vroundps" in code and "expf" not in code
    check(case, compile_function(made[HOST].mod["main"]), seed=3)


def test_one_pixel() -> None:
    # Here TVM puts the shared values and the sums of both layers into the same memory.
    layers = (ConvLayer(1, 1, (1, 1)), ConvLayer(1, 1, (1, 1), activation=Activation("silu")))
    case = Case(layers, height=1, width=1)
    func = FusedConv2D().apply(build(case), HOST, False).mod["main"]
    check(case, compile_function(func), seed=1)
