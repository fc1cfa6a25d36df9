# SPDX-License-Identifier: Apache-2.0
"""Convolutions of the GPU tests: how they are scheduled and run, in OpenCL and as CUDA text."""

from __future__ import annotations

import numpy as np
from cpu.conv_cases import Array, Case, arguments, build, pack
from opencl import compile_opencl
from tvm import tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target

from schedules.gpu import AnyConv2D, Conv2D, DepthwiseConv2D, FusedConv2D
from schedules.gpu.gemm.implicit_gemm import LANES
from schedules.workload.conv2d import Activation, ConvLayer

CUDA = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
OPENCL = Target({"kind": "opencl"}, host="llvm")
RULES: tuple[ScheduleRule, ...] = (Conv2D(), DepthwiseConv2D(), FusedConv2D(), AnyConv2D())


def case_of(*layers: ConvLayer, **extents) -> Case:
    """A case in the layout of GPUs."""
    return Case(layers, lanes=LANES, **extents)


def depthwise(channels: int, kernel: int = 3, activation: str = "relu6", **attributes) -> ConvLayer:
    """A depthwise layer that keeps the size of the image unless its attributes say otherwise."""
    attributes.setdefault("padding", (kernel // 2,) * 4)
    activate = Activation(activation, -0.4, 0.7)
    square = (kernel, kernel)
    return ConvLayer(channels, channels, square, groups=channels, activation=activate, **attributes)


def dense(inputs: int, outputs: int, kernel: int = 1, activation: str = "none", **attributes):
    """A dense layer that keeps the size of the image unless its attributes say otherwise."""
    attributes.setdefault("padding", (kernel // 2,) * 4)
    activate = Activation(activation, -0.4, 0.7)
    return ConvLayer(inputs, outputs, (kernel, kernel), activation=activate, **attributes)


def rule_of(func: tirx.PrimFunc, target: Target = OPENCL) -> str:
    """The name of the first of our rules that takes a function."""
    for rule in RULES:
        if rule.apply(func, target, False) is not None:
            return type(rule).__name__
    raise AssertionError("no rule takes the function")


def check(case: Case, func: tirx.PrimFunc, rng: np.random.Generator) -> None:
    """Run a scheduled function in OpenCL into a poisoned output, and compare with NumPy."""
    packed, expected = arguments(case, int(rng.integers(1 << 30)))
    inputs = [np.ascontiguousarray(array, "float32") for array in packed]
    output = np.full(pack(np.zeros(case.out_shape), case.lanes).shape, np.nan, "float32")
    compile_opencl(func, OPENCL).run(*inputs, output)
    compare(case, output, expected)


def compare(case: Case, output: Array, expected: Array) -> None:
    """Compare a packed output with an NCHW one."""
    assert np.isfinite(output).all(), case
    channels = np.moveaxis(output, -1, 2).reshape(case.batch, -1, *output.shape[2:4])
    scale = max(1.0, float(np.abs(expected).max()))
    found = channels[:, : expected.shape[1]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * scale, err_msg=str(case))


def scheduled(case: Case, rule: ScheduleRule, target: Target = OPENCL) -> tirx.PrimFunc:
    """Result of a rule on a case."""
    schedule = rule.apply(build(case), target, False)
    assert schedule is not None, case
    return schedule.mod["main"]


def convolve_groups(
    x: np.ndarray,
    w: np.ndarray,
    groups: int,
    strides: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: int = 1,
) -> np.ndarray:
    """A convolution of ``[N, C, H, W]`` in float64, with square filters."""
    top, left, bottom, right = padding
    padded = np.pad(x.astype("float64"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    span = (w.shape[-1] - 1) * dilation + 1
    windows = np.lib.stride_tricks.sliding_window_view(padded, (span, span), (2, 3))
    windows = windows[:, :, :: strides[0], :: strides[1], ::dilation, ::dilation]
    windows = windows.reshape(x.shape[0], groups, -1, *windows.shape[2:])
    taps = w.astype("float64").reshape(groups, -1, *w.shape[1:])
    found = np.einsum("ngchwkl,gfckl->ngfhw", windows, taps)
    return found.reshape(x.shape[0], w.shape[0], *found.shape[3:])
