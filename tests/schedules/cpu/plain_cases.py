# SPDX-License-Identifier: Apache-2.0
"""Fused pairs that read NCHW data or write an NCHW output, for tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tvm
from cpu.conv_cases import TARGET, Array, Case, arguments, pack
from tvm import te, tirx

from schedules.compute.conv2d import fused_conv2d
from schedules.compute.pack import pack as pack_tensor
from schedules.compute.pack import unpack
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, to_json
from tests.targets import compile_unchecked

RELU6 = Activation("relu6")


def depthwise(channels: int, kernel: int, stride: int, activation: Activation = RELU6) -> ConvLayer:
    margin = (kernel // 2,) * 4
    square, strides = (kernel, kernel), (stride, stride)
    return ConvLayer(
        channels, channels, square, strides, margin, groups=channels, activation=activation
    )


def kernel_of(case: Case, data: bool, out: bool) -> Conv2DKernel:
    return replace(case.kernel, plain_data=data, plain_out=out)


def arrays_of(case: Case, data: bool, seed: int) -> tuple[list[Array], Array]:
    """Arguments, of which only the data may be NCHW, and the NCHW result."""
    return arguments(replace(case, nchw=data), seed)


def build(case: Case, data: bool, out: bool) -> tirx.PrimFunc:
    """The pair with its layout changes, as ``FusePack`` makes it."""
    kernel = kernel_of(case, data, out)
    inputs = [te.placeholder(array.shape, "float32") for array in arrays_of(case, data, 0)[0]]
    packed = pack_tensor(inputs[0], case.lanes) if data else inputs[0]
    residual = inputs[5] if case.residual else None
    layouts = (kernel.data_layout, kernel.out_layout)
    result = fused_conv2d(packed, *inputs[1:5], residual, *case.layers, *layouts)
    result = unpack(result, case.layers[1].out_channels) if out else result
    func = te.create_prim_func([*inputs, result])
    return func.with_attr("tvm_fusion.workload", to_json(kernel))


def check(case: Case, data: bool, out: bool, functions: list[tirx.PrimFunc], seed: int) -> None:
    """Run all schedules of a case, compiled together, into poisoned outputs."""
    named = {f"f{n}": func.with_attr("global_symbol", f"f{n}") for n, func in enumerate(functions)}
    library = compile_unchecked(tvm.IRModule(named), target=TARGET)
    arrays, expected = arrays_of(case, data, seed)
    tensors = [tvm.runtime.tensor(array.astype("float32")) for array in arrays]
    shape = case.out_shape if out else pack(expected, case.lanes).shape
    for name in named:
        output = tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
        library[name](*tensors, output)
        found = output.numpy()
        assert np.isfinite(found).all(), (case, name)
        if not out:
            found = np.moveaxis(found, -1, 2).reshape(case.batch, -1, *shape[2:4])
            found = found[:, : expected.shape[1]]
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(
            found, expected, rtol=0, atol=2e-5 * scale, err_msg=f"{name} of {case}"
        )
