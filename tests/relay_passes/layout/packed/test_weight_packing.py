# SPDX-License-Identifier: Apache-2.0
"""Packed parameters: convolving packed arrays directly gives the plain convolution."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from relay_passes.layout.packed.weight_packing import (
    FORMS,
    element_type,
    pack_array,
    pack_expr,
    weight_form,
)
from schedules.errors import OpError
from schedules.workload.conv2d import ConvLayer
from tests.targets import compile_unchecked

BLOCKS = st.sampled_from([2, 4, 8, 16])
CHANNELS = st.sampled_from([1, 3, 4, 8, 13, 16, 24, 40])
KERNELS = st.tuples(st.integers(1, 3), st.integers(1, 3))


def convolve(data: np.ndarray, weight: np.ndarray, groups: int) -> np.ndarray:
    """Stride-1 convolution of NCHW with OIHW, tap by tap."""
    out_channels, per_group, kernel_h, kernel_w = weight.shape
    height, width = data.shape[2] - kernel_h + 1, data.shape[3] - kernel_w + 1
    out = np.zeros((data.shape[0], out_channels, height, width))
    for o in range(out_channels):
        first = o // (out_channels // groups) * per_group
        for kh, kw in np.ndindex(kernel_h, kernel_w):
            window = data[:, first : first + per_group, kh : kh + height, kw : kw + width]
            out[:, o] += np.einsum("nihw,i->nhw", window, weight[o, :, kh, kw])
    return out


def convolve_packed(data: np.ndarray, weight: np.ndarray, form: str, groups: int) -> np.ndarray:
    """The same on packed arrays, indexed as the table of ``weight_packing`` says."""
    kernel_h, kernel_w = weight.shape[1:3] if form == "depthwise" else weight.shape[2:4]
    height, width = data.shape[2] - kernel_h + 1, data.shape[3] - kernel_w + 1
    out = np.zeros((data.shape[0], weight.shape[0], height, width, weight.shape[-1]))
    for kh, kw in np.ndindex(kernel_h, kernel_w):
        window = data[:, :, kh : kh + height, kw : kw + width]
        if form == "depthwise":
            out += np.einsum("nbhwl,bl->nbhwl", window, weight[:, kh, kw])
        elif form == "first":
            out += np.einsum("nihw,oil->nohwl", window, weight[:, :, kh, kw, 0])
        else:
            blocks = weight.shape[0] // groups
            for group in range(groups):
                inputs = window[:, group * weight.shape[1] : (group + 1) * weight.shape[1]]
                own = slice(group * blocks, (group + 1) * blocks)
                taps = weight[own, :, kh, kw]
                out[:, own] += np.einsum("nihwk,oikl->nohwl", inputs, taps)
    return out


def pack_data(data: np.ndarray, block: int) -> np.ndarray:
    """NCHW[block]c, element by element."""
    batch, channels, height, width = data.shape
    out = np.zeros((batch, -(-channels // block), height, width, block), data.dtype)
    for channel in range(channels):
        out[:, channel // block, :, :, channel % block] = data[:, channel]
    return out


def check(data: np.ndarray, weight: np.ndarray, form: str, groups: int, block: int) -> None:
    """Convolve both ways and compare, the lanes past the last channel included."""
    source = data if form == "first" else pack_data(data, block)
    packed = convolve_packed(source, pack_array(weight, form, block), form, groups)
    np.testing.assert_allclose(packed, pack_data(convolve(data, weight, groups), block), atol=1e-9)


@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(CHANNELS, CHANNELS, KERNELS, BLOCKS, st.sampled_from(["dense", "first"]))
def test_dense_and_first_weights(inputs, outputs, kernel, block, form):
    rng = np.random.default_rng(inputs * 41 + outputs)
    data = rng.standard_normal((2, inputs, 4, 5))
    check(data, rng.standard_normal((outputs, inputs, *kernel)), form, 1, block)


@settings(max_examples=settings.default.max_examples // 5, deadline=None)
@given(CHANNELS, KERNELS, BLOCKS)
def test_depthwise_weights(channels, kernel, block):
    rng = np.random.default_rng(channels)
    data = rng.standard_normal((2, channels, 4, 5))
    check(data, rng.standard_normal((channels, 1, *kernel)), "depthwise", channels, block)


@pytest.mark.parametrize(("groups", "inputs", "outputs", "block"), [(2, 8, 16, 4), (3, 4, 4, 2)])
def test_grouped_weights(groups, inputs, outputs, block):
    rng = np.random.default_rng(groups)
    data = rng.standard_normal((1, groups * inputs, 4, 5))
    weight = rng.standard_normal((groups * outputs, inputs, 3, 2))
    check(data, weight, "grouped", groups, block)


@pytest.mark.parametrize(("form", "word"), [("quantized", 4), ("words", 2)])
@pytest.mark.parametrize("own", [2, 4, 8])
def test_narrow_groups_are_groups_of_16_with_zeros_between(form, word, own):
    weight = np.arange(1, 80 * own * 2 + 1).reshape(80, own, 1, 2)
    packed = pack_array(weight, f"{form}_diagonal", 32)
    assert packed.shape == (3, 1, 1, 2, 16 // word, 32, word)
    wide = np.moveaxis(packed, 5, 1).reshape(96, 1, 2, 16)
    for output, channel in np.ndindex(80, 16):
        first = output % 16 // own * own
        is_own = first <= channel < first + own
        expected = weight[output, channel - first] if is_own else 0
        np.testing.assert_array_equal(wide[output, ..., channel], expected)
    assert not wide[80:].any()


@given(CHANNELS, BLOCKS)
def test_bias_and_data(channels, block):
    bias = np.arange(1, channels + 1, dtype="float32")
    packed = pack_array(bias, "bias", block)
    assert packed.dtype == bias.dtype and packed.shape == (-(-channels // block), block)
    np.testing.assert_array_equal(packed.reshape(-1)[:channels], bias)
    assert not packed.reshape(-1)[channels:].any()
    data = np.random.default_rng(0).standard_normal((2, channels, 2, 3))
    np.testing.assert_array_equal(pack_array(data, "data", block), pack_data(data, block))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_expressions_pack_as_arrays_do(form):
    shapes = {"bias": (13,), "depthwise": (13, 1, 3, 2), "narrow": (14, 2, 3, 2)}
    shapes |= dict.fromkeys(("quantized_diagonal", "words_diagonal"), (48, 4, 3, 2))
    shapes["quantized_grouped"] = (13, 8, 3, 2)
    shape = shapes.get(form, (13, 6, 3, 2))
    dtype = "int8" if form.startswith(("quantized", "pairs")) else "float32"
    array = (99 * np.random.default_rng(1).standard_normal(shape)).astype(dtype)
    value = relax.Var("value", relax.TensorType(shape, dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [value]):
        builder.emit_func_output(builder.emit(pack_expr(value, form, 4)))
    executable = compile_unchecked(builder.get())
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(array))
    packed = pack_array(array, form, 4)
    assert (packed.dtype, result.dtype) == (element_type(form, dtype),) * 2
    np.testing.assert_array_equal(result.numpy(), packed)


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups", "nchw_data", "expected"),
    [
        (3, 24, 1, True, "first"),
        (3, 24, 1, False, "dense"),
        (13, 40, 1, False, "dense"),
        (13, 13, 13, False, "depthwise"),
        (1, 1, 1, False, "dense"),
        (16, 32, 2, False, "grouped"),
        (24, 24, 2, False, "grouped"),  # 12 input channels a group cut a block of 8
        (16, 24, 2, False, "grouped"),  # 12 output channels a group
        (8, 16, 8, False, "grouped"),  # a depthwise convolution with two outputs a channel
        (12, 12, 3, False, "narrow"),
        (12, 24, 3, False, "grouped"),
        (12, 12, 4, False, "grouped"),  # three channels a group
        (16, 16, 2, True, None),
        (13, 13, 13, True, None),
    ],
)
def test_form_of_a_layer(inputs, outputs, groups, nchw_data, expected):
    layer = ConvLayer(inputs, outputs, (3, 3), groups=groups)
    assert weight_form(layer, 8, nchw_data) == expected


def test_unknown_form_is_refused():
    with pytest.raises(OpError, match="weight form is 'winograd'; expected one of dense, first"):
        pack_array(np.zeros((1, 1, 1, 1)), "winograd", 8)
