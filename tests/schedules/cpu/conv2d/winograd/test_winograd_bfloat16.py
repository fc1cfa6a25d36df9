# SPDX-License-Identifier: Apache-2.0
"""Winograd's algorithm in bfloat16 with sums of float32: its numbers, error and machine code."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from cpu.conv2d.test_conv2d_bfloat16 import emulate_dots, operands
from cpu.conv2d.winograd.test_winograd_conv2d import SAME, SEED
from cpu.conv2d.winograd.test_winograd_conv2d import cases as float_cases
from cpu.conv_cases import (
    Array,
    Case,
    assembly,
    compile_function,
    convolve,
    loop_bodies,
    up,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx
from tvm.target import Target

from schedules.compute.winograd_conv2d import winograd_conv2d
from schedules.cpu.conv2d.winograd.winograd_conv2d import (
    WinogradConv2D,
    WinogradKnobs,
    winograd_template,
)
from schedules.cpu.core.micro_kernel import UNROLLED_STEPS
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, to_json
from schedules.workload.winograd_matrices import TILE_SIZES, transform_words, transforms

TYPES = st.sampled_from(["bfloat16", "float32"])
DTYPES = ("bfloat16", "bfloat16", "float32", "bfloat16")


def workload(case: Case, size: int, out_dtype: str) -> Conv2DKernel:
    kernel = replace(case.kernel, dtype="bfloat16", sums="float32", word=2, winograd=size)
    return replace(kernel, out_dtype=out_dtype)


def packed_operands(case: Case, size: int, seed: int) -> tuple[list[Array], list[Array]]:
    """Packed arguments with transformed weights, and plain ones in float64."""
    packed, exact = operands(case, seed)
    packed[1] = transform_words(packed[1].astype(ml_dtypes.bfloat16), 2, size)
    return packed, exact


def function(case: Case, size: int, out_dtype: str) -> tirx.PrimFunc:
    packed, _ = packed_operands(case, size, 0)
    inputs = [te.placeholder(a.shape, dtype) for a, dtype in zip(packed, DTYPES, strict=False)]
    residual = inputs[3] if case.residual else None
    output = winograd_conv2d(*inputs[:3], residual, case.layers[0], size, out_dtype)
    func = te.create_prim_func([*inputs, output])
    return func.with_attr("tvm_fusion.workload", to_json(workload(case, size, out_dtype)))


def run(case: Case, func: tirx.PrimFunc, packed: list[Array], out_dtype: str) -> Array:
    """Run into a poisoned output; return its true channels in NCHW."""
    tensors = [tvm.runtime.tensor(a.astype(d)) for a, d in zip(packed, DTYPES, strict=False)]
    batch, channels, *size = case.out_shape
    shape = batch, up(channels, case.lanes), *size, case.lanes
    output = tvm.runtime.tensor(np.full(shape, np.nan, out_dtype))
    compile_function(func)["main"](*tensors, output)
    blocks = output.numpy().astype("float64")
    return np.moveaxis(blocks, -1, 2).reshape(batch, -1, *size)[:, :channels]


def rounded(values: Array) -> Array:
    return values.astype("float32").astype(ml_dtypes.bfloat16).astype("float64")


def expected_of(case: Case, size: int, exact: list[Array]) -> Array:
    """The algorithm in float64, with the two roundings to bfloat16 of its definition."""
    layer, matrices = case.layers[0], transforms(size)
    top, left, bottom, right = layer.padding
    height, width = case.out_shape[2:]
    rows, columns = up(height, size), up(width, size)
    more = rows * size - height, columns * size - width
    image = np.pad(exact[0], ((0, 0), (0, 0), (top, bottom + more[0]), (left, right + more[1])))
    windows = np.lib.stride_tricks.sliding_window_view(image, (size + 2,) * 2, axis=(2, 3))
    tiles = windows[:, :, ::size, ::size]
    values = rounded(np.einsum("ij,ncrsjk,lk->ncrsil", matrices.data, tiles, matrices.data))
    points = np.einsum("ij,ocjk,lk->ocil", matrices.weight, exact[1], matrices.weight)
    products = np.einsum("ncrsil,ocil->norsil", values, rounded(points))
    sums = np.einsum("ij,norsjk,lk->norisl", matrices.inverse, products, matrices.inverse)
    sums = sums.reshape(*sums.shape[:2], rows * size, columns * size)[:, :, :height, :width]
    one = ConvLayer(layer.out_channels, layer.out_channels, (1, 1), activation=layer.activation)
    unit = np.eye(layer.out_channels)[:, :, None, None]
    return convolve(sums, unit, exact[2], one, exact[3] if case.residual else None)


def check(case: Case, func: tirx.PrimFunc, size: int, out_dtype: str, seed: int) -> None:
    """Compare with the definition: numbers beside a tie may be rounded the other way."""
    packed, exact = packed_operands(case, size, seed)
    expected, found = expected_of(case, size, exact), run(case, func, packed, out_dtype)
    scale = max(1.0, float(np.abs(expected).max()))
    half = 2**-8 if out_dtype == "bfloat16" else 0
    limit = 2e-3 * scale + half * np.abs(expected)
    error = np.abs(found - expected)
    assert (error <= limit).all(), case
    assert np.median(error - half * np.abs(expected)) <= 2e-5 * scale, case


@st.composite
def cases(draw, lanes=(4, 8)) -> Case:
    return replace(draw(float_cases()), lanes=draw(st.sampled_from(lanes)))


def some_knobs(data: st.DataObject, case: Case) -> WinogradKnobs:
    blocks = up(case.layers[0].out_channels, case.lanes)
    divisors = [count for count in range(1, blocks + 1) if blocks % count == 0]
    return WinogradKnobs(
        group=data.draw(st.integers(1, 9)),
        block_chunks=data.draw(st.sampled_from(divisors)),
        pixels=data.draw(st.integers(1, 6)),
        blocks=data.draw(st.integers(1, 3)),
    )


@given(cases(), st.sampled_from(TILE_SIZES), TYPES, st.data(), SEED)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_with_any_knobs(case, size, out_dtype, data, seed):
    kernel, knobs = workload(case, size, out_dtype), some_knobs(data, case)
    func = winograd_template(function(case, size, out_dtype), kernel, knobs).mod["main"]
    check(case, func, size, out_dtype, seed)


@given(cases(), st.sampled_from(TILE_SIZES), TYPES, SEED)
@settings(max_examples=settings.default.max_examples // 8)
def test_numbers_of_the_definition(case, size, out_dtype, seed):
    func = function(case, size, out_dtype).without_attr("tvm_fusion.workload")
    check(case, func, size, out_dtype, seed)


@given(cases(lanes=(16,)), TYPES, st.data(), SEED)
@settings(max_examples=settings.default.max_examples // 8)
def test_numbers_of_products_in_pairs(case, out_dtype, data, seed):
    kernel, knobs = workload(case, 2, out_dtype), some_knobs(data, case)
    with pytest.MonkeyPatch.context() as patch:
        emulate_dots(patch)
        func = winograd_template(function(case, 2, out_dtype), kernel, knobs, dots=True)
    check(case, func.mod["main"], 2, out_dtype, seed)


@pytest.mark.parametrize("size", TILE_SIZES)
def test_error_is_as_stated(size):
    """The stated error, root mean square, is that of the numbers before their rounding."""
    layer, random = ConvLayer(64, 64, (3, 3), padding=SAME), np.random.default_rng(4)
    case = Case((layer,), height=28, width=28)
    data, weight = random.standard_normal((1, 64, 28, 28)), random.standard_normal((64, 64, 3, 3))
    exact = [rounded(data), rounded(weight), np.zeros(64)]
    expected = convolve(data, weight, exact[2], layer, None)
    errors = [
        np.std(found - expected)
        for found in (convolve(*exact, layer, None), expected_of(case, size, exact))
    ]
    low, high = {2: (1.7, 2.1), 4: (4.5, 5.5)}[size]
    assert low < errors[1] / errors[0] < high


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["znver4", "znver5"])
@pytest.mark.parametrize(("channels", "extent"), [(64, 56), (512, 7)])
def test_pairs_are_multiplied_by_an_instruction(name, channels, extent):
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": name, "num-cores": 2})
    layer = ConvLayer(channels, channels, (3, 3), padding=SAME, activation=Activation("relu"))
    case = Case((layer,), height=extent, width=extent, lanes=16, residual=True)
    found = WinogradConv2D().apply(function(case, 2, "bfloat16"), target, False)
    text = assembly(found.mod["main"], target)
    assert len(re.findall(r"\tvcvtneps2bf16\t%zmm", text)) >= 16  # all points of a tile
    bodies = [body for body in loop_bodies(text) if any("vdpbf16ps" in line for line in body)]
    dots = [sum("vdpbf16ps" in line for line in body) for body in bodies]
    assert max(dots) >= 12 * UNROLLED_STEPS
    for body in bodies:
        assert not any(re.match("vfmadd|call", line) for line in body), body
        assert not any("zmm" in line and "(%rsp)" in line for line in body), body
