# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.quantized_conv2d``: types, errors, TVMScript; bytes of the other ops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion.pipeline  # noqa: F401  registers it
from relay_passes.op import conv2d, quantized_conv2d, round_clip
from relay_passes.op.quantized_conv2d import read_quantized
from schedules.errors import OpError
from schedules.workload.conv2d import ByteAddition, ByteRounding
from tests.targets import compile_unchecked


@I.ir_module
class Module:
    @R.function
    def main(
        x: R.Tensor((1, 3, 6, 6), "uint8"),
        w: R.Tensor((8, 3, 3, 3), "int8"),
        b: R.Tensor((8,), "float32"),
        s: R.Tensor((8,), "float32"),
    ) -> R.Tensor((1, 8, 4, 4), "uint8"):
        with R.dataflow():
            gv = R.tvm_fusion.quantized_conv2d(
                x, w, b, s, activation="round_clip", low=-3.0, high=252.0, out_dtype="uint8"
            )
            R.output(gv)
        return gv


def var(name: str, shape: tuple[object, ...], dtype: str) -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, dtype))


def operands(**others: relax.Var) -> list[relax.Var]:
    given = {
        "data": var("x", (1, 3, 6, 6), "uint8"),
        "weight": var("w", (8, 3, 3, 3), "int8"),
        "bias": var("b", (8,), "float32"),
        "scale": var("s", (8,), "float32"),
    }
    return list((given | others).values())


DEEP = {
    "data": var("x", (1, 9000, 6, 6), "uint8"),
    "weight": var("w", (8, 9000, 3, 3), "int8"),
}


WIDE = {"data": var("x", (1, 8, 6, 6), "float32"), "weight": var("w", (8, 8, 3, 3), "int8")}


def type_of(call: relax.Call) -> relax.Type:
    return relax.BlockBuilder().normalize(call).ty


def test_script_reads_what_it_prints():
    tvm.ir.assert_structural_equal(tvm.script.from_source(Module.script()), Module)


def test_types_in_blocks_and_with_an_open_batch():
    batch = tvm.tirx.Var("n", "int64")
    data = var("x", (batch, 1, 7, 7, 4), "uint8")
    weight = var("w", (2, 1, 3, 3, 1, 8, 4), "int8")
    numbers = [var(name, (2, 8), "float32") for name in "bs"]
    call = quantized_conv2d(
        *(data, weight, *numbers), data_layout="NCHW4c", out_layout="NCHW8c",
        in_channels=3, out_channels=12, strides=(2, 2),
    )  # fmt: skip
    expected = relax.TensorType((batch, 2, 3, 3, 8), "float32")
    tvm.ir.assert_structural_equal(type_of(call), expected)
    pairs = var("w", (2, 1, 3, 3, 2, 8, 2), "int16")
    packed = relax.Call(call.op, [data, pairs, *numbers], call.attrs)
    tvm.ir.assert_structural_equal(type_of(packed), expected)


def test_words_of_eight_bytes():
    """Those of two blocks of data; not with groups, and of plain bytes alone."""
    data = var("x", (1, 3, 7, 7, 4), "uint8")
    numbers = [var(name, (2, 4), "float32") for name in "bs"]
    weight = var("w", (2, 2, 3, 3, 1, 4, 8), "int8")
    given = {"data_layout": "NCHW4c", "in_channels": 12, "out_channels": 6}
    call = quantized_conv2d(data, weight, *numbers, **given)
    tvm.ir.assert_structural_equal(type_of(call), relax.TensorType((1, 2, 5, 5, 4), "float32"))
    assert read_quantized(call).has_mmla
    for wrong, attrs, text in (
        (weight, {"shifted": True}, r"weight has shape .*; expected \(2, 4, 3, 3, 1, 4, 4\)"),
        (weight, {"groups": 3}, r"weight has shape .*; expected \(2, 1, 3, 3, 1, 4, 4\)"),
        (var("w", (2, 3, 3, 3, 1, 4, 8), "int8"), {}, r"expected \(2, 2, 3, 3, 1, 4, 8\)"),
        (var("w", (2, 2, 3, 3, 1, 4, 8), "int16"), {}, r"expected \(2, 3, 3, 3, 2, 4, 2\)"),
    ):
        with pytest.raises(OpError, match=text):
            quantized_conv2d(data, wrong, *numbers, **given | attrs)


def test_an_image_of_floats_stays_in_nchw():
    data, weight = var("x", (1, 3, 6, 6), "float32"), var("w", (2, 1, 3, 3, 1, 8, 4), "int8")
    numbers = [var(name, (2, 8), "float32") for name in "bs"]
    channels = {"out_layout": "NCHW8c", "in_channels": 3, "out_channels": 12}
    rounding = ByteRounding(0.5, -3.0, 252.0)
    call = quantized_conv2d(data, weight, *numbers, **channels, rounding=rounding)
    expected = relax.TensorType((1, 2, 4, 4, 8), "float32")
    tvm.ir.assert_structural_equal(type_of(call), expected)
    assert read_quantized(call).rounding == rounding


@pytest.mark.parametrize("given", [(0.0, 0.0, 1.0), (np.nan, 0.0, 1.0), (1.0, 1.0, 2.0)])
def test_roundings_that_are_none(given):
    with pytest.raises(OpError, match="expected a finite divisor other than 0, and bounds around"):
        ByteRounding(*given)


@pytest.mark.parametrize(
    ("others", "attrs", "text"),
    [
        ({}, {"rounding": ByteRounding(1.0, 0.0, 255.0)}, "data is of uint8; expected float32"),
        (WIDE, {"rounding": ByteRounding(1.0, 0.0, 255.0)}, "rounds its data; expected at most 4"),
        ({"data": var("x", (1, 3, 6, 6), "int8")}, {}, "data is of int8; expected uint8"),
        ({"weight": var("w", (8, 3, 3, 3), "uint8")}, {}, "weight is of uint8; expected int8"),
        ({"scale": var("s", (7,), "float32")}, {}, r"scale has shape .*; expected \(8,\)"),
        ({"data": var("x", (1, 3, 6), "uint8")}, {}, "data has rank 3"),
        ({}, {"out_dtype": "uint8"}, "out_dtype is 'uint8' after none; expected 'uint8' after a"),
        ({}, {"out_dtype": "int8"}, "out_dtype is 'int8'"),
        (
            {"data": var("x", (1, 6, 6, 6), "uint8")},
            {"groups": 2},
            "conv 3x3 6->8 g2 has 3 input channels a group, .*; expected multiples of 4",
        ),
        ({}, {"padding": (-1, 0, 0, 0)}, "padding is"),
        ({"weight": var("w", (8, 3, 3, 3), "int16")}, {}, "weight is of int16; expected int8$"),
        ({}, {"out_layout": "NCHW8c"}, "NCHW8c output without all of in_channels, out_channels"),
        (
            DEEP,
            {},
            "9000 x 9 products a sum; expected at most 65793",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(others, attrs, text):
    with pytest.raises(OpError, match=text):
        quantized_conv2d(*operands(**others), **attrs)


def test_a_residual_of_bytes():
    how = ByteAddition(0.5, 0.25, -7.0, 0.125, -3.0, 252.0, bytes_first=True)
    residual = var("r", (1, 8, 4, 4), "uint8")
    call = quantized_conv2d(*operands(), residual, addition=how, out_dtype="uint8")
    tvm.ir.assert_structural_equal(type_of(call), relax.TensorType((1, 8, 4, 4), "uint8"))
    assert read_quantized(call).addition == how
    for wrong, given, text in (
        (residual, None, "5 operands; expected data, weight, bias, scale"),
        (None, how, "4 operands; expected data, weight, bias, scale, residual"),
        (var("r", (1, 8, 4, 4), "float32"), how, "residual is of float32; expected uint8"),
        (var("r", (1, 8, 4, 5), "uint8"), how, "residual has shape"),
        (residual, replace(how, high=300.0), "out_dtype is 'uint8' after round_clip"),
    ):
        with pytest.raises(OpError, match=text):
            quantized_conv2d(*operands(), wrong, addition=given, out_dtype="uint8")


def test_limited_weights_are_packed():
    with pytest.raises(OpError, match="limited is True; expected a packed weight of int8"):
        quantized_conv2d(*operands(), limited=True)


def test_weights_of_winograds_algorithm():
    """Their shapes, and what the algorithm does not compute."""
    data = var("x", (1, 2, 6, 6, 8), "uint8")
    numbers = [var(name, (1, 8), "float32") for name in "bs"]
    weight = var("w", (16, 1, 2, 4, 8, 2), "int16")
    given = {"data_layout": "NCHW8c", "in_channels": 16, "out_channels": 5, "winograd": 2}
    call = quantized_conv2d(data, weight, *numbers, **given)
    tvm.ir.assert_structural_equal(type_of(call), relax.TensorType((1, 1, 4, 4, 8), "float32"))
    assert read_quantized(call).winograd == 2
    for wrong, attrs, text in (
        (weight, {"winograd": 4}, "winograd is 4 .*; expected 2, int16"),
        (var("w", (16, 1, 2, 4, 8, 2), "int8"), {}, "with weights of int8; expected 2, int16"),
        (weight, {"strides": (2, 2)}, "expected stride 1 and one group"),
        (var("w", (16, 2, 2, 4, 8, 2), "int16"), {}, r"weight has shape .*; expected \(16, 1, 2"),
    ):
        with pytest.raises(OpError, match=text):
            quantized_conv2d(data, wrong, *numbers, **given | attrs)


def test_numbers_in_nchw_and_by_the_pipeline():
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (1, 3, 6, 6)).astype("uint8")
    w = random.integers(-128, 128, (8, 3, 3, 3)).astype("int8")
    b = random.integers(-9, 9, 8).astype("float32")
    s = np.full(8, 2.0**-6, "float32")
    wanted = np.zeros((1, 8, 4, 4))
    for kh, kw in np.ndindex(3, 3):
        seen = x[:, :, kh : kh + 4, kw : kw + 4].astype("int64")
        wanted += np.einsum("nihw,oi->nohw", seen, w[:, :, kh, kw].astype("int64"))
    wanted = np.clip(np.rint(wanted / 64 + b[:, None, None]), -3, 252) + 3
    pipeline = relax.get_pipeline("tvm_fusion")
    machine = relax.VirtualMachine(compile_unchecked(Module, relax_pipeline=pipeline), tvm.cpu())
    found = machine["main"](*(tvm.runtime.tensor(array) for array in (x, w, b, s))).numpy()
    np.testing.assert_array_equal(found, wanted)


def test_bytes_of_a_depthwise_convolution():
    data, weight = var("x", (1, 4, 6, 6), "uint8"), var("w", (4, 1, 3, 3), "float32")
    attrs = {"groups": 4, "activation": "round_clip", "low": 0, "high": 200, "out_dtype": "uint8"}
    call = conv2d(data, weight, scale=var("s", (4,), "float32"), **attrs)
    tvm.ir.assert_structural_equal(type_of(call), relax.TensorType((1, 4, 4, 4), "uint8"))
    dense = var("w", (4, 4, 3, 3), "float32")
    with pytest.raises(OpError, match="data of uint8 for conv 3x3 4->4; expected one depthwise"):
        conv2d(data, dense)
    with pytest.raises(OpError, match="data of uint8 without a scale; expected one after the bias"):
        conv2d(data, weight, **attrs)


def test_bytes_of_roundings():
    x = var("x", (2, 3), "float32")
    assert str(type_of(round_clip(x, -3, 252, "uint8")).dtype) == "uint8"
    with pytest.raises(OpError, match="expected 'uint8' after a round_clip whose bounds are"):
        round_clip(x, -3, 253, "uint8")
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(round_clip(x, -3, 4, "uint8")))
        builder.emit_func_output(result)
    numbers = np.array([[-9, -2.5, np.nan], [0.5, 3.5, np.inf]], "float32")
    pipeline = relax.get_pipeline("tvm_fusion")
    built = compile_unchecked(builder.get(), relax_pipeline=pipeline)
    found = relax.VirtualMachine(built, tvm.cpu())["main"](tvm.runtime.tensor(numbers)).numpy()
    np.testing.assert_array_equal(found, [[0, 1, 0], [3, 7, 7]])
