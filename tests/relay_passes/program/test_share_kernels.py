# SPDX-License-Identifier: Apache-2.0
"""Pass ``ShareKernels``: convolutions of other depths become calls of one kernel, bit for bit."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tvm
from cpu.rule_cases import HOST
from op_calls import function_names
from tvm import relax, te, tirx

import relay_passes
from relay_passes import ShareKernels
from relay_passes.program.share_kernels import _line
from schedules.compute.conv2d import conv2d
from schedules.cpu.conv2d.conv2d import conv2d_template
from schedules.cpu.cost.conv2d_knobs import Conv2DKnobs
from schedules.workload.conv2d import Conv2DKernel, ConvLayer, to_json

SIZE, LANES = 5, 16


def scheduled(blocks: int, out_blocks: int = 2, pixels: int = 5, parts: int = 1) -> tirx.PrimFunc:
    """A 3x3 convolution of so many input blocks, in tiles of ``pixels``; the sums in ``parts``."""
    layer = ConvLayer(blocks * LANES, out_blocks * LANES, (3, 3), padding=(1, 1, 1, 1))
    shapes = (
        (1, blocks, SIZE, SIZE, LANES),
        (out_blocks, blocks, 3, 3, LANES, LANES),
        (out_blocks, LANES),
    )
    inputs = [te.placeholder(shape, name=name) for name, shape in zip("xwb", shapes, strict=True)]
    layout = f"NCHW{LANES}c"
    kernel = Conv2DKernel((layer,), 1, SIZE, SIZE, data_layout=layout, out_layout=layout)
    func = te.create_prim_func([*inputs, conv2d(*inputs, None, layer, layout, layout)])
    knobs = Conv2DKnobs(pixels, 1, 1, 1, SIZE, blocks_inside=False, ic_o=parts)
    func = func.with_attr("tvm_fusion.workload", to_json(kernel))
    found = conv2d_template(func, kernel, knobs).mod["main"]
    return found.with_attr("tirx.is_scheduled", True).without_attr("global_symbol")


def program(*kernels: tirx.PrimFunc) -> tvm.IRModule:
    """A program that calls each kernel with inputs of its own, after ``CallTIRRewrite``."""
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"{name}{number}", relax.TensorType([int(e) for e in given.shape], "float32"))
        for number, kernel in enumerate(kernels)
        for name, given in zip("xwb", kernel.params, strict=False)
    ]
    with builder.function("main", params, pure=False):
        found = []
        for number, kernel in enumerate(kernels):
            var = builder.add_func(kernel, f"conv2d_{number}")
            shape = [int(extent) for extent in kernel.params[-1].shape]
            output = relax.TensorType(shape, "float32")
            given = relax.Tuple(params[3 * number : 3 * number + 3])
            found.append(builder.emit(relax.call_tir(var, given, output)))
        builder.emit_func_output(relax.Tuple(found))
    return relax.transform.CallTIRRewrite()(builder.get())


@functools.cache
def alike() -> tvm.IRModule:
    """Kernels that sum 2, 3 and 5 blocks."""
    return program(*(scheduled(blocks) for blocks in (2, 3, 5)))


def run(mod: tvm.IRModule) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = [[int(e) for e in param.ty.shape] for param in mod["main"].params]
    arrays = [generator.standard_normal(shape, dtype="float32") for shape in shapes]
    with HOST:
        executable = tvm.compile(mod, HOST)
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    return [part.numpy() for part in main(*map(tvm.runtime.tensor, arrays))]


def test_pass_has_the_name_of_its_file_and_is_exported() -> None:
    assert ShareKernels().info.name == "ShareKernels"
    assert relay_passes.ShareKernels is ShareKernels
    assert ShareKernels.__module__ == "relay_passes.program.share_kernels"


@pytest.mark.slow
def test_kernels_of_other_depths_are_one_and_give_the_same_bits() -> None:
    mod = alike()
    shared = ShareKernels()(mod)
    assert len(function_names(mod)) == 3 and function_names(shared) == ["conv2d_0"]
    tvm.ir.assert_structural_equal(ShareKernels()(shared), shared)
    data, weight = shared["conv2d_0"].params[:2]
    blocks = data.shape[1]
    assert isinstance(blocks, tirx.Var) and weight.shape[1].same_as(blocks)
    for found, wanted in zip(run(shared), run(mod), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_sums_in_parts_of_the_blocks() -> None:
    """Half of 4, 6 and 10 blocks: the number of blocks has steps of 2, and its half of 1."""
    mod = program(*(scheduled(blocks, parts=2) for blocks in (4, 6, 10)))
    shared = ShareKernels()(mod)
    assert function_names(shared) == ["conv2d_0"]
    for found, wanted in zip(run(shared), run(mod), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("blocks", "values", "other", "expected"),
    [
        ((4, 6), (9, 13), 11, 23),
        ((4, 6), (6, 9), 8, 12),
        ((4, 6), (6, 9), 7, None),
        ((6, 4), (58, 68), 10, 38),
    ],
)
def test_values_on_a_line(
    blocks: tuple[int, int], values: tuple[int, int], other: int, expected: int | None
) -> None:
    line = _line(blocks, values)
    assert line is not None
    assert tuple(map(line.value_for, blocks)) == values and line.value_for(other) == expected


def test_values_on_no_line() -> None:
    assert _line((4, 8), (68, 58)) is None and _line((4, 6), (0, 1)) is None


def test_other_kernels_stay() -> None:
    mod = program(scheduled(2), scheduled(3, out_blocks=3), scheduled(5, pixels=3), scheduled(2))
    assert ShareKernels()(mod).same_as(mod)
    unmarked = program(*(scheduled(n).without_attr("tvm_fusion.workload") for n in (2, 3)))
    assert ShareKernels()(unmarked).same_as(unmarked)
