# SPDX-License-Identifier: Apache-2.0
"""Fused pairs of 16-bit floats on tensor cores: numbers by emulation, banks, machine code."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import opencl
import pytest
from conv2d.test_tensor_core_conv2d import OPENCL, convolve
from cuda_text import count, cuda_source, opcodes, ptxas, sass
from gpu_conv_cases import dense, depthwise
from opencl import compile_opencl
from tensor_core_emulation import emulate_tensor_cores
from tvm import te, tirx
from tvm.target import Target

from schedules.compute.conv2d import fused_conv2d
from schedules.gpu import FusedConv2D
from schedules.gpu.conv2d import tensor_core_pair_tile
from schedules.gpu.conv2d.tensor_core_pair import pair_extents
from schedules.gpu.conv2d.tensor_core_pair_tile import PanelTile, PairTile, choose_pair_tile
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.gemm.matmul.tensor_core_tile import ELEMENTS, TILES
from schedules.workload.conv2d import Conv2DKernel, ConvLayer, to_json
from tests.selection import in_turns

Size = tuple[int, int, int]


def kernel_of(
    layers: tuple[ConvLayer, ConvLayer], size: Size, residual: bool = False, dtype: str = "float16"
) -> Conv2DKernel:
    return Conv2DKernel(layers, *size, residual=residual, dtype=dtype)


def function(kernel: Conv2DKernel, batch: tirx.Var | None = None) -> tirx.PrimFunc:
    """The function of a pair as legalization makes it."""
    images = kernel.batch if batch is None else batch
    first, second = kernel.layers
    shapes = [
        (images, first.in_channels, kernel.height, kernel.width),
        (first.out_channels, first.in_channels // first.groups, *first.kernel),
        (first.out_channels,),
        (second.out_channels, second.in_channels, *second.kernel),
        (second.out_channels,),
    ]
    if kernel.residual:
        size = first.output_size(kernel.height, kernel.width)
        shapes.append((images, second.out_channels, *second.output_size(*size)))
    names = ("data", "weight1", "bias1", "weight2", "bias2", "residual")
    tensors = [
        te.placeholder(shape, kernel.dtype, name=name)
        for shape, name in zip(shapes, names, strict=False)
    ]
    residual = tensors[5] if kernel.residual else None
    output = fused_conv2d(*tensors[:5], residual, first, second)
    func = te.create_prim_func([*tensors, output], "int64")
    marked = kernel if batch is None else replace(kernel, batch=None)
    return func.with_attr("tvm_fusion.workload", to_json(marked))


def scheduled(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    schedule = FusedConv2D().apply(func, target, False)
    assert schedule is not None
    return schedule.mod["main"]


def activated(values: np.ndarray, layer: ConvLayer) -> np.ndarray:
    kinds = {"none": (-np.inf, np.inf), "relu": (0, np.inf), "relu6": (0, 6)}
    return np.clip(values, *kinds[layer.activation.kind])


def reference(kernel: Conv2DKernel, arrays: list[np.ndarray]) -> np.ndarray:
    """The pair in float64, with the intermediate rounded as two kernels would round it."""
    data, weight1, bias1, weight2, bias2, *residual = (a.astype("float64") for a in arrays)
    first, second = kernel.layers
    if first.is_depthwise:
        each = [
            convolve(data[:, c : c + 1], weight1[c : c + 1], first)
            for c in range(first.in_channels)
        ]
        mid = np.concatenate(each, 1)
    else:
        mid = convolve(data, weight1, first)
    mid = activated(mid + bias1[:, None, None], first).astype("float16").astype("float64")
    out = convolve(mid, weight2, second) + bias2[:, None, None]
    return activated(out + residual[0] if residual else out, second)


def check(kernel: Conv2DKernel, func: tirx.PrimFunc) -> None:
    """Run a scheduled function in OpenCL into a poisoned output."""
    rng = np.random.default_rng()
    shapes = [[int(extent) for extent in param.shape] for param in function(kernel).params]
    arrays = [rng.standard_normal(shape).astype("float16") for shape in shapes[:-1]]
    for place in (1, 3):
        arrays[place] = arrays[place] / np.float16(np.sqrt(np.prod(shapes[place][1:])))
    expected = reference(kernel, arrays)
    found = np.full(expected.shape, np.nan, "float16")
    compile_opencl(func, OPENCL).run(*arrays, found)
    np.testing.assert_allclose(found.astype("float64"), expected, rtol=0, atol=2e-2)
    assert np.abs(found - expected).mean() < 1e-3


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    emulate_tensor_cores(monkeypatch)
    monkeypatch.setattr(opencl, "refuse_half_arithmetic", lambda kernel: None)
    return monkeypatch


CASES = {
    "3x3": ((dense(13, 40, 3, "relu"), dense(40, 24, activation="relu")), (2, 6, 8), True),
    "1x1": ((dense(16, 33), dense(33, 72, activation="relu6")), (1, 7, 9), False),
    "strided": ((dense(3, 16, 3, "relu6", strides=(2, 2)), dense(16, 70)), (1, 15, 13), False),
    "depthwise": ((depthwise(40, 3, "relu6"), dense(40, 24)), (2, 6, 8), True),
    "depthwise_strided": (
        (depthwise(24, 5, "relu", strides=(2, 1)), dense(24, 65, 1, "relu")),
        (1, 9, 7),
        False,
    ),
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    layers, size, residual = CASES[name]
    kernel = kernel_of(layers, size, residual)
    check(kernel, scheduled(function(kernel), OPENCL))
