# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.conv2d``: types, refusals, generated function and numbers."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
import tvm
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layer_strategies import ACTIVATIONS, Parameters, layers
from op_calls import module_of, tensor
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes import op
from relay_passes.layout.packed.weight_packing import pack_array, weight_form
from relay_passes.op.conv2d import CONV2D
from relay_passes.op.conv_types import packed_weight_shape, read_kernel
from schedules.errors import OpError
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, from_json

LAYER = ConvLayer(4, 6, (3, 3), (2, 1), (1, 0, 1, 2), activation=Activation("relu"))


def extents(expr):
    return [int(value) for value in expr.ty.shape.values]


def infer(call):
    return relax.BlockBuilder().normalize(call)


def plain_operands(layer, batch=1, height=8, width=9, dtype="float32"):
    weight = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel)
    return [
        tensor("data", batch, layer.in_channels, height, width, dtype=dtype),
        tensor("weight", *weight, dtype=dtype),
        tensor("bias", layer.out_channels, dtype=dtype),
    ]


@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(layers(), st.integers(0, 2), st.integers(1, 9), st.integers(1, 9))
def test_type_is_that_of_relax_conv2d(layer, batch, height, width):
    assume(min(layer.output_size(height, width)) >= 1)
    data, weight, bias = plain_operands(layer, batch, height, width)
    call = infer(op.conv2d(data, weight, bias, **layer.to_attrs()))
    stock = infer(
        relax.op.nn.conv2d(data, weight, layer.strides, layer.padding, layer.dilation, layer.groups)
    )
    tvm.ir.assert_structural_equal(call.ty, stock.ty)
    assert read_kernel(call, CONV2D) == Conv2DKernel((layer,), batch, height, width)


@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(layers(), st.sampled_from([4, 8, 16]), st.integers(3, 9), st.booleans())
def test_packed_type(layer, lanes, size, plain_data):
    assume(min(layer.output_size(size, size)) >= 1)
    if plain_data:
        assume(layer.groups == 1)
    blocks = -(-layer.in_channels // lanes), -(-layer.out_channels // lanes)
    data = (2, layer.in_channels, size, size) if plain_data else (2, blocks[0], size, size, lanes)
    call = infer(
        op.conv2d(
            tensor("data", *data),
            tensor("weight", *packed_weight_shape(layer, lanes, plain_data)),
            tensor("bias", blocks[1], lanes),
            **layer.to_attrs(),
            data_layout="NCHW" if plain_data else f"NCHW{lanes}c",
            out_layout=f"NCHW{lanes}c",
            in_channels=layer.in_channels,
            out_channels=layer.out_channels,
        )
    )
    assert extents(call) == [2, blocks[1], *layer.output_size(size, size), lanes]
    assert read_kernel(call, CONV2D).layers == (layer,)


def test_symbolic_batch_and_space():
    @I.ir_module
    class Module:
        @R.function
        def main(
            x: R.Tensor(("n", 4, "h", "w"), "float32"),
            weight: R.Tensor((6, 4, 3, 3), "float32"),
            bias: R.Tensor((6,), "float32"),
            residual: R.Tensor(("n", 6, "h", "w"), "float32"),
        ) -> R.Tensor(("n", 6, "(h - 1) // 2 + 1", "w"), "float32"):
            with R.dataflow():
                same = R.tvm_fusion.conv2d(x, weight, bias, residual, padding=[1, 1, 1, 1])
                half = R.tvm_fusion.conv2d(
                    same, R.zeros((6, 6, 1, 1), "float32"), bias, strides=[2, 1]
                )
                R.output(half)
            return half

    types = [binding.var.ty for binding in Module["main"].body.blocks[0].bindings]
    assert str(types[0]) == 'R.Tensor((n, 6, h, w), dtype="float32")'
    assert str(types[-1]) == 'R.Tensor((n, 6, (h - 1) // 2 + 1, w), dtype="float32")'


def test_printed_script_reads_back():
    operands = plain_operands(LAYER)
    mod = module_of(op.conv2d(*operands, **LAYER.to_attrs()), operands)
    assert "R.tvm_fusion.conv2d(data, weight, bias, activation=" in mod.script()
    tvm.ir.assert_structural_equal(tvm.script.from_source(mod.script()), mod)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_no_bias_is_a_bias_of_zeros(dtype):
    data, weight, _ = plain_operands(LAYER, dtype=dtype)
    call = op.conv2d(data, weight, **LAYER.to_attrs())
    np.testing.assert_array_equal(call.args[2].value.numpy(), np.zeros(6, dtype), strict=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strides": (1,)}, r"strides is \(1,\); expected 2 integers >= 1"),
        ({"strides": (0, 1)}, r"strides is \(0, 1\); expected 2 integers >= 1"),
        ({"padding": (1, 1)}, r"padding is \(1, 1\); expected 4 integers >= 0"),
        ({"padding": (0, 0, 0, -1)}, "expected 4 integers >= 0"),
        ({"padding": 1}, "padding is 1; expected integers"),
        ({"dilation": (1.5, 1)}, r"dilation is \(1.5, 1\); expected integers"),
        ({"dilation": (9, 9)}, "expected the padded input to hold the kernel at least once"),
        ({"groups": 3}, "expected 12 at axis 1 for 12 input channels"),
        ({"groups": 4}, "groups is 4 for 16 input and 6 output channels; expected a divisor"),
        ({"groups": 0}, "groups is 0 for 0 input and 6 output channels"),
        ({"activation": "mish"}, "activation is 'mish'; expected one of none, relu"),
        ({"activation": "clip", "low": 1, "high": 0}, "expected low <= high"),
        ({"data_layout": "NHWC"}, "layout is 'NHWC'; expected 'NCHW' or channel blocks"),
        ({"data_layout": "NCHW0c"}, "layout is 'NCHW0c'"),
        ({"data_layout": "NCHW8c", "out_layout": "NCHW"}, "expected equal layouts"),
        ({"out_layout": "NCHW8c"}, "without all of in_channels, out_channels"),
        ({"in_channels": 4}, "in_channels given for NCHW tensors; leave them out"),
    ],
)
def test_refuses_attributes(change, message):
    attrs = LAYER.to_attrs() | change
    with pytest.raises(OpError, match=message):
        op.conv2d(*plain_operands(LAYER), **attrs)


@pytest.mark.parametrize(
    ("index", "replacement", "message"),
    [
        (0, tensor("data", 1, 4, 8), r"data has rank 3; expected 4 \(NCHW\)"),
        (0, tensor("data", 1, 5, 8, 9), "expected 4 at axis 1 for 4 input channels"),
        (0, tensor("data", 1, 4, 8, 9, dtype="float64"), "element types float64, float32"),
        (0, relax.Var("data", relax.TensorType(dtype="float32", ndim=4)), "known extents"),
        (0, relax.Var("data", relax.ShapeType(ndim=4)), "data is R.Shape.*; expected a tensor"),
        (1, tensor("weight", 6, 4, 3), r"weight has rank 3; expected 4 \(OIHW\)"),
        (1, tensor("weight", 6, 4, 0, 3), "expected every extent to be at least 1"),
        (2, tensor("bias", 1, 6, 1, 1), r"bias has shape \(1, 6, 1, 1\); expected \(6,\)"),
        (2, tensor("bias", 5), r"bias has shape \(5,\); expected \(6,\)"),
    ],
)
def test_refuses_operands(index, replacement, message):
    operands = plain_operands(LAYER)
    operands[index] = replacement
    with pytest.raises(OpError, match=message):
        op.conv2d(*operands, **LAYER.to_attrs())


def halves(bias: str = "float32", residual: str = "bfloat16") -> list[relax.Expr]:
    data, weight, _ = plain_operands(LAYER, dtype="bfloat16")
    kinds = {"bias": ((6,), bias), "residual": ((1, 6, 4, 9), residual)}
    others = [tensor(name, *shape, dtype=dtype) for name, (shape, dtype) in kinds.items()]
    return [data, weight, *others]


def test_bfloat16_with_sums_of_float32_gives_either():
    for out_dtype in (None, "bfloat16", "float32"):
        call = op.conv2d(*halves(), **LAYER.to_attrs(), out_dtype=out_dtype)
        assert str(infer(call).ty.dtype) == (out_dtype or "bfloat16")
        kernel = read_kernel(call, CONV2D)
        assert (kernel.dtype, kernel.sums, kernel.word) == ("bfloat16", "float32", 1)


@pytest.mark.parametrize(
    ("operands", "attrs", "message"),
    [
        (halves(residual="float16"), {}, "element types bfloat16, bfloat16, float32, float16"),
        (halves(), {"out_dtype": "uint8"}, "out_dtype is 'uint8'; expected 'bfloat16' or 'float32"),
    ],
)
def test_refuses_other_types_with_bfloat16(operands, attrs, message):
    with pytest.raises(OpError, match=message):
        op.conv2d(*operands, **LAYER.to_attrs(), **attrs)


def test_refuses_words_in_other_layouts():
    data = tensor("data", 1, 4, 8, 9, dtype="bfloat16")
    layouts = {"data_layout": "NCHW", "out_layout": "NCHW8c", "in_channels": 4, "out_channels": 6}
    words = tensor("weight", 1, 1, 3, 3, 2, 8, 2, dtype="bfloat16")
    with pytest.raises(OpError, match="even blocks in the data, for a dense layer of bfloat16"):
        op.conv2d(data, words, tensor("bias", 1, 8), **LAYER.to_attrs(), **layouts)


def test_words_of_two_channels_or_four():
    data, bias = tensor("data", 1, 2, 8, 9, 4, dtype="bfloat16"), tensor("bias", 2, 4)
    layout = {"data_layout": "NCHW4c", "in_channels": 6, "out_channels": 6}
    for word in (2, 4):
        words = tensor("weight", 2, 2, 3, 3, 4 // word, 4, word, dtype="bfloat16")
        kernel = read_kernel(op.conv2d(data, words, bias, **LAYER.to_attrs(), **layout), CONV2D)
        assert (kernel.word, kernel.has_mmla) == (word, word == 4)
    words = tensor("weight", 2, 2, 3, 3, 1, 4, 8, dtype="bfloat16")
    with pytest.raises(OpError, match=r"weight has shape .*; expected \(2, 2, 3, 3, 2, 4, 2\)"):
        op.conv2d(data, words, bias, **LAYER.to_attrs(), **layout)


def test_refuses_integers():
    with pytest.raises(OpError, match="element types int32.* cast them with relax.astype"):
        op.conv2d(*plain_operands(LAYER, dtype="int32"), **LAYER.to_attrs())


def test_refuses_a_symbolic_weight():
    operands = plain_operands(LAYER)
    operands[1] = tensor("weight", tvm.tirx.Var("o", "int64"), 4, 3, 3)
    with pytest.raises(OpError, match=r"weight has shape \[o, .*expected constant extents"):
        op.conv2d(*operands, **LAYER.to_attrs())


def test_refuses_another_residual():
    with pytest.raises(OpError, match=r"residual has shape .*expected the output's, .*4.*9"):
        op.conv2d(*plain_operands(LAYER), tensor("residual", 1, 6, 4, 8), **LAYER.to_attrs())


def test_refuses_groups_on_plain_data():
    with pytest.raises(OpError, match="groups is 2 on NCHW data, which has no form in blocks"):
        op.conv2d(
            tensor("data", 1, 8, 5, 5),
            tensor("weight", 1, 1, 1, 1, 4, 8),
            tensor("bias", 1, 8),
            groups=2,
            data_layout="NCHW",
            out_layout="NCHW8c",
            in_channels=8,
            out_channels=8,
        )


def test_refuses_a_packed_weight_of_another_rank():
    with pytest.raises(OpError, match=r"weight has rank 5; expected 4 \(depthwise\) or 6"):
        op.conv2d(
            tensor("data", 1, 1, 5, 5, 8),
            tensor("weight", 1, 1, 1, 8, 8),
            tensor("bias", 1, 8),
            data_layout="NCHW8c",
            in_channels=8,
            out_channels=8,
        )


def test_refuses_a_packed_call_without_channels():
    call = op.conv2d(*plain_operands(LAYER), **LAYER.to_attrs())
    attrs = dict(call.attrs.items()) | {"out_layout": "NCHW8c"}
    with pytest.raises(OpError, match="a packed call without in_channels or out_channels"):
        infer(relax.Call(call.op, call.args, attrs))


def test_refuses_a_missing_operand_when_emitted():
    call = op.conv2d(*plain_operands(LAYER), **LAYER.to_attrs())
    with pytest.raises(OpError, match="2 operands; expected 3, and optionally a residual"):
        infer(relax.Call(call.op, call.args[:2], call.attrs))


def test_a_nested_producer_is_checked_when_emitted():
    data, weight, bias = plain_operands(LAYER)
    call = op.conv2d(relax.op.flatten(data), weight, bias, **LAYER.to_attrs())
    with pytest.raises(OpError, match="data has rank 1; expected 4"):
        module_of(call, [data, weight, bias])


def test_no_bias_needs_the_type_of_the_weight():
    data, weight, _ = plain_operands(LAYER)
    with pytest.raises(OpError, match="no bias beside weight, whose type is not known yet"):
        op.conv2d(data, relax.op.negative(weight), **LAYER.to_attrs())


def test_generated_function():
    operands = plain_operands(LAYER)
    mod = relax.transform.LegalizeOps()(
        module_of(op.conv2d(*operands, **LAYER.to_attrs()), operands)
    )
    attrs = mod["conv2d"].attrs
    assert attrs["tvm_fusion.op"] == "conv2d"
    assert from_json(attrs["tvm_fusion.workload"]) == Conv2DKernel((LAYER,), 1, 8, 9)


def test_nothing_is_fused_into_the_generated_function():
    operands = plain_operands(LAYER)
    call = op.conv2d(relax.op.exp(operands[0]), *operands[1:], **LAYER.to_attrs())
    mod = relax.transform.LegalizeOps()(module_of(relax.op.exp(call), operands))
    generated = mod["conv2d"]
    for step in ("AnnotateTIROpPattern", "FuseOps", "FuseTIR"):
        mod = getattr(relax.transform, step)()(mod)
    tvm.ir.assert_structural_equal(mod["conv2d"], generated)
    assert len(mod.get_global_vars()) == 4  # main, two of exp, conv2d


def test_a_reload_registers_nothing_twice():
    names = [f"relax.tvm_fusion.{name}" for name in ("conv2d", "fused_conv2d")]
    before = [tvm.ir.Op.get(name) for name in names]
    importlib.reload(sys.modules["relay_passes.op.conv2d"])
    for name, op_before in zip(names, before, strict=True):
        assert tvm.ir.Op.get(name).same_as(op_before)


@settings(max_examples=8, deadline=None)
@given(layers(), st.booleans(), st.integers(0, 2**32 - 1))
def test_numbers(reference, run_module, layer, with_residual, seed):
    assume(min(layer.output_size(7, 6)) >= 1)
    rng = np.random.default_rng(seed)
    data = rng.standard_normal((2, layer.in_channels, 7, 6))
    parameters = Parameters.of(layer, rng, "float64")
    out_shape = (2, layer.out_channels, *layer.output_size(7, 6))
    residual = rng.standard_normal(out_shape) if with_residual else None
    operands = plain_operands(layer, 2, 7, 6, "float64")
    arrays = [data, parameters.weight, parameters.bias]
    if with_residual:
        operands.append(tensor("residual", *out_shape, dtype="float64"))
        arrays.append(residual)
    mod = module_of(op.conv2d(*operands, **layer.to_attrs()), operands)
    expected = reference.layer(data, parameters.weight, parameters.bias, layer, residual)
    np.testing.assert_allclose(run_module(mod, *arrays), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(reference, run_module, activation):
    layer = ConvLayer(1, 1, (1, 1), activation=activation)
    data = np.linspace(-9, 9, 37).reshape(1, 1, 37, 1)
    operands = plain_operands(layer, 1, 37, 1, "float64")
    mod = module_of(op.conv2d(*operands, **layer.to_attrs()), operands)
    result = run_module(mod, data, np.ones((1, 1, 1, 1)), np.zeros(1))
    np.testing.assert_allclose(result, reference.activate(data, activation), atol=1e-12)


def test_numbers_on_symbolic_shapes(reference, run_module):
    batch, height, width = (tvm.tirx.Var(name, "int64") for name in "nhw")
    operands = plain_operands(LAYER, batch, height, width, "float64")
    mod = module_of(op.conv2d(*operands, **LAYER.to_attrs()), operands)
    rng = np.random.default_rng(0)
    data, parameters = rng.standard_normal((3, 4, 5, 7)), Parameters.of(LAYER, rng, "float64")
    result = run_module(mod, data, parameters.weight, parameters.bias)
    expected = reference.layer(data, parameters.weight, parameters.bias, LAYER)
    np.testing.assert_allclose(result, expected, atol=1e-12)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("layer", "form"),
    [
        (ConvLayer(3, 10, (3, 3), (2, 2), (1, 1, 1, 1), activation=Activation("silu")), "first"),
        (ConvLayer(10, 6, (3, 1), padding=(1, 0, 1, 0)), "dense"),
        (ConvLayer(10, 10, (3, 3), padding=(1, 1, 1, 1), groups=10), "depthwise"),
        (ConvLayer(8, 16, (1, 2), groups=2, activation=Activation("relu6")), "grouped"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_packed_numbers(reference, run_module, layer, form):
    check_packed(reference, run_module, layer, form, lanes=4, seed=1)


@settings(max_examples=settings.default.max_examples // 5, deadline=None)
@given(layers(), st.sampled_from([2, 4, 8, 16]), st.integers(0, 2**32 - 1))
def test_packed_numbers_of_any_layer(reference, run_module, layer, lanes, seed):
    assume(min(layer.output_size(6, 5)) >= 1)
    check_packed(reference, run_module, layer, weight_form(layer, lanes, False), lanes, seed)


def check_packed(reference, run_module, layer, form, lanes, seed):
    """Compare a packed call with a residual, by TVM's own loops, with the reference."""
    rng = np.random.default_rng(seed)
    data = rng.standard_normal((1, layer.in_channels, 6, 5))
    parameters = Parameters.of(layer, rng, "float64")
    residual = rng.standard_normal((1, layer.out_channels, *layer.output_size(6, 5)))
    arrays = [
        data if form == "first" else pack_array(data, "data", lanes),
        pack_array(parameters.weight, form, lanes),
        pack_array(parameters.bias, "bias", lanes),
        pack_array(residual, "data", lanes),
    ]
    operands = [
        tensor(f"operand{index}", *array.shape, dtype="float64")
        for index, array in enumerate(arrays)
    ]
    call = op.conv2d(
        *operands,
        **layer.to_attrs(),
        data_layout="NCHW" if form == "first" else f"NCHW{lanes}c",
        out_layout=f"NCHW{lanes}c",
        in_channels=layer.in_channels,
        out_channels=layer.out_channels,
    )
    blocks = run_module(module_of(call, operands), *arrays)
    result = blocks.transpose(0, 1, 4, 2, 3).reshape(1, -1, *blocks.shape[2:4])
    expected = reference.layer(data, parameters.weight, parameters.bias, layer, residual)
    np.testing.assert_allclose(result[:, : layer.out_channels], expected, atol=1e-11)
