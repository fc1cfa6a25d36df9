# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.fused_conv2d``: types, refusals, generated function and numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layer_strategies import Parameters, layers
from op_calls import module_of, tensor
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes import op
from relay_passes.layout.packed.weight_packing import pack_array, weight_form
from relay_passes.op.conv2d import FUSED_CONV2D
from relay_passes.op.conv_types import read_kernel
from schedules.errors import OpError
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, from_json

FIRST = ConvLayer(4, 4, (3, 3), (2, 1), (1, 1, 1, 1), groups=4, activation=Activation("relu6"))
SECOND = ConvLayer(4, 6, (1, 1), activation=Activation("clip", -1.0, 2.0))


@st.composite
def pairs(draw):
    """Two layers that follow each other, and an input that holds both kernels."""
    first = draw(layers())
    second = draw(layers(first.out_channels))
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    assume(min(first.output_size(height, width)) >= 1)
    assume(min(second.output_size(*first.output_size(height, width))) >= 1)
    return first, second, height, width


def plain_operands(first, second, batch=1, height=8, width=9, dtype="float32"):
    operands = [tensor("data", batch, first.in_channels, height, width, dtype=dtype)]
    for number, layer in ((1, first), (2, second)):
        weight = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel)
        operands.append(tensor(f"weight{number}", *weight, dtype=dtype))
        operands.append(tensor(f"bias{number}", layer.out_channels, dtype=dtype))
    return operands


def attrs_of(first, second):
    return first.to_attrs("1") | second.to_attrs("2")


@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(pairs(), st.integers(0, 2))
def test_type_is_that_of_two_convolutions(pair, batch):
    first, second, height, width = pair
    operands = plain_operands(first, second, batch, height, width)
    data, weight1, bias1, weight2, bias2 = operands
    fused = op.fused_conv2d(*operands, **attrs_of(first, second))
    mod = module_of(fused, operands)
    middle = op.conv2d(data, weight1, bias1, **first.to_attrs())
    builder = relax.BlockBuilder()
    with builder.function("main", operands):
        with builder.dataflow():
            between = builder.emit(middle)
            separate = op.conv2d(between, weight2, bias2, **second.to_attrs())
            result = builder.emit_output(separate)
        builder.emit_func_output(result)
    tvm.ir.assert_structural_equal(mod["main"].ret_ty, result.ty)
    call = mod["main"].body.blocks[0].bindings[0].value
    assert read_kernel(call, FUSED_CONV2D) == Conv2DKernel((first, second), batch, height, width)


def test_symbolic_batch_and_space():
    @I.ir_module
    class Module:
        @R.function
        def main(
            x: R.Tensor(("n", 4, "h", "w"), "float32"),
            weight1: R.Tensor((4, 1, 3, 3), "float32"),
            weight2: R.Tensor((6, 4, 1, 1), "float32"),
            bias1: R.Tensor((4,), "float32"),
            bias2: R.Tensor((6,), "float32"),
        ):
            with R.dataflow():
                y = R.tvm_fusion.fused_conv2d(
                    x,
                    weight1,
                    bias1,
                    weight2,
                    bias2,
                    padding1=[1, 1, 1, 1],
                    groups1=4,
                    strides2=[2, 2],
                )
                R.output(y)
            return y

    expected = 'R.Tensor((n, 6, (h - 1) // 2 + 1, (w - 1) // 2 + 1), dtype="float32")'
    assert str(Module["main"].body.blocks[0].bindings[0].var.ty) == expected
    call = Module["main"].body.blocks[0].bindings[0].value
    kernel = read_kernel(call, FUSED_CONV2D)
    assert (kernel.batch, kernel.height, kernel.width, kernel.is_static) == (
        None,
        None,
        None,
        False,
    )


def test_printed_script_reads_back():
    operands = plain_operands(FIRST, SECOND)
    mod = module_of(op.fused_conv2d(*operands, **attrs_of(FIRST, SECOND)), operands)
    assert "R.tvm_fusion.fused_conv2d(data, weight1, bias1, weight2, bias2, act" in mod.script()
    tvm.ir.assert_structural_equal(tvm.script.from_source(mod.script()), mod)


def test_no_bias_is_a_bias_of_zeros():
    data, weight1, _, weight2, _ = plain_operands(FIRST, SECOND)
    call = op.fused_conv2d(data, weight1, None, weight2, **attrs_of(FIRST, SECOND))
    np.testing.assert_array_equal(call.args[2].value.numpy(), np.zeros(4, "float32"))
    np.testing.assert_array_equal(call.args[4].value.numpy(), np.zeros(6, "float32"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strides2": (2,)}, r"strides2 is \(2,\); expected 2 integers >= 1"),
        ({"padding1": "1111"}, "padding1 is '1111'; expected integers"),
        ({"dilation2": (0, 1)}, r"dilation2 is \(0, 1\)"),
        ({"groups1": 3}, "groups1 is 3 for 3 input and 4 output channels; expected a divisor"),
        ({"activation2": "elu"}, "activation is 'elu'; expected one of"),
        ({"dilation1": (5, 1)}, "expected the padded input to hold the kernel at least once"),
        ({"data_layout": "NHWC8c"}, "layout is 'NHWC8c'"),
        ({"out_layout": "NCHW8c", "mid_channels": 4}, "without all of in_channels, mid_channels"),
    ],
)
def test_refuses_attributes(change, message):
    with pytest.raises(OpError, match=message):
        op.fused_conv2d(*plain_operands(FIRST, SECOND), **(attrs_of(FIRST, SECOND) | change))


@pytest.mark.parametrize(
    ("index", "replacement", "message"),
    [
        (0, tensor("data", 1, 8, 8, 9), "expected 4 at axis 1 for 4 input channels"),
        (1, tensor("weight1", 4, 1, 3, 3, 1), r"weight1 has rank 5; expected 4 \(OIHW\)"),
        (2, relax.Var("bias1", relax.ShapeType(ndim=1)), "bias1 is R.Shape.*; expected a tensor"),
        (3, tensor("weight2", 6, 5, 1, 1), "layer 1 has 4 output channels and layer 2 5 input"),
        (4, tensor("bias2", 4), r"bias2 has shape \(4,\); expected \(6,\)"),
    ],
)
def test_refuses_operands(index, replacement, message):
    operands = plain_operands(FIRST, SECOND)
    operands[index] = replacement
    with pytest.raises(OpError, match=message):
        op.fused_conv2d(*operands, **attrs_of(FIRST, SECOND))


def test_refuses_a_residual_of_the_intermediate():
    operands = plain_operands(FIRST, SECOND)
    with pytest.raises(OpError, match="residual has shape .*expected the output's"):
        op.fused_conv2d(*operands, tensor("residual", 1, 4, 4, 9), **attrs_of(FIRST, SECOND))


def test_refuses_packed_data_of_other_lanes():
    attrs = attrs_of(FIRST, SECOND) | {"in_channels": 4, "mid_channels": 4, "out_channels": 6}
    shapes = [(1, 1, 8, 9, 4), (1, 3, 3, 8), (1, 8), (1, 1, 1, 1, 8, 8), (1, 8)]
    operands = [tensor(f"operand{index}", *shape) for index, shape in enumerate(shapes)]
    with pytest.raises(OpError, match="expected 1 at axis 1 and 8 at axis 4 for 4 input channels"):
        op.fused_conv2d(*operands, **attrs, data_layout="NCHW8c")


def test_generated_function():
    operands = plain_operands(FIRST, SECOND)
    call = op.fused_conv2d(*operands, **attrs_of(FIRST, SECOND))
    mod = relax.transform.LegalizeOps()(module_of(call, operands))
    attrs = mod["fused_conv2d"].attrs
    assert attrs["tvm_fusion.op"] == "fused_conv2d"
    kernel = from_json(attrs["tvm_fusion.workload"])
    assert kernel == Conv2DKernel((FIRST, SECOND), 1, 8, 9)
    assert kernel.is_static


def test_nothing_is_fused_into_the_generated_function():
    operands = plain_operands(FIRST, SECOND)
    call = op.fused_conv2d(*operands, **attrs_of(FIRST, SECOND))
    mod = relax.transform.LegalizeOps()(module_of(relax.op.exp(call), operands))
    generated = mod["fused_conv2d"]
    for step in ("AnnotateTIROpPattern", "FuseOps", "FuseTIR"):
        mod = getattr(relax.transform, step)()(mod)
    tvm.ir.assert_structural_equal(mod["fused_conv2d"], generated)


@settings(max_examples=8, deadline=None)
@given(pairs(), st.booleans(), st.integers(0, 2**32 - 1))
def test_numbers(reference, run_module, pair, with_residual, seed):
    first, second, height, width = pair
    rng = np.random.default_rng(seed)
    data = rng.standard_normal((2, first.in_channels, height, width))
    one, two = (Parameters.of(layer, rng, "float64") for layer in (first, second))
    out_shape = (2, second.out_channels, *second.output_size(*first.output_size(height, width)))
    residual = rng.standard_normal(out_shape) if with_residual else None
    operands = plain_operands(first, second, 2, height, width, "float64")
    arrays = [data, one.weight, one.bias, two.weight, two.bias]
    if with_residual:
        operands.append(tensor("residual", *out_shape, dtype="float64"))
        arrays.append(residual)
    mod = module_of(op.fused_conv2d(*operands, **attrs_of(first, second)), operands)
    middle = reference.layer(data, one.weight, one.bias, first)
    expected = reference.layer(middle, two.weight, two.bias, second, residual)
    np.testing.assert_allclose(run_module(mod, *arrays), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ConvLayer(6, 6, (3, 3), (2, 2), (1, 1, 1, 1), groups=6), ConvLayer(6, 10, (1, 1))),
        (ConvLayer(3, 6, (3, 3), activation=Activation("relu")), ConvLayer(6, 5, (1, 3))),
    ],
    ids=["packed data", "plain data"],
)
def test_packed_numbers(reference, run_module, first, second):
    lanes, rng = 4, np.random.default_rng(2)
    plain_data = first.in_channels < lanes
    data = rng.standard_normal((1, first.in_channels, 7, 6))
    one, two = (Parameters.of(layer, rng, "float64") for layer in (first, second))
    arrays = [
        data if plain_data else pack_array(data, "data", lanes),
        pack_array(one.weight, weight_form(first, lanes, plain_data), lanes),
        pack_array(one.bias, "bias", lanes),
        pack_array(two.weight, weight_form(second, lanes, False), lanes),
        pack_array(two.bias, "bias", lanes),
    ]
    operands = [
        tensor(f"operand{index}", *array.shape, dtype="float64")
        for index, array in enumerate(arrays)
    ]
    call = op.fused_conv2d(
        *operands,
        **attrs_of(first, second),
        data_layout="NCHW" if plain_data else "NCHW4c",
        out_layout="NCHW4c",
        in_channels=first.in_channels,
        mid_channels=first.out_channels,
        out_channels=second.out_channels,
    )
    blocks = run_module(module_of(call, operands), *arrays)
    result = blocks.transpose(0, 1, 4, 2, 3).reshape(1, -1, *blocks.shape[2:4])
    middle = reference.layer(data, one.weight, one.bias, first)
    expected = reference.layer(middle, two.weight, two.bias, second)
    np.testing.assert_allclose(result[:, : second.out_channels], expected, atol=1e-11)
