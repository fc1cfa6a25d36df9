# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.winograd_conv2d``: types, refusals, generated function and numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_strategies import ACTIVATIONS, Parameters
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes import op
from relay_passes.layout.packed.weight_packing import pack_array
from relay_passes.op.winograd_conv2d import read_winograd
from schedules.errors import OpError
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, from_json
from schedules.workload.winograd_matrices import TILE_SIZES, transform_weight

LINEAR = Activation()
LAYER = ConvLayer(10, 6, (3, 3), padding=(1, 0, 1, 2), activation=Activation("relu"))
ATTRS = {
    "tile": 4,
    "padding": LAYER.padding,
    "activation": "relu",
    "layout": "NCHW8c",
    "in_channels": 10,
    "out_channels": 6,
}


def tensor(name, *shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def operands(dtype="float32"):
    return [
        tensor("data", 1, 2, 8, 9, 8, dtype=dtype),
        tensor("weight", 36, 1, 2, 8, 8, dtype=dtype),
        tensor("bias", 1, 8, dtype=dtype),
    ]


def infer(call):
    return relax.BlockBuilder().normalize(call)


def module_of(call, parameters):
    """A module whose ``main`` returns one call."""
    builder = relax.BlockBuilder()
    with builder.function("main", parameters):
        with builder.dataflow():
            result = builder.emit_output(call)
        builder.emit_func_output(result)
    return builder.get()


def test_type_and_kernel():
    residual = tensor("residual", 1, 1, 8, 9, 8)
    call = infer(op.winograd_conv2d(*operands(), residual, **ATTRS))
    assert [int(extent) for extent in call.ty.shape.values] == [1, 1, 8, 9, 8]
    assert read_winograd(call) == Conv2DKernel(
        (LAYER,), 1, 8, 9, True, "float32", "NCHW8c", "NCHW8c", winograd=4
    )


def test_symbolic_batch_and_space():
    @I.ir_module
    class Module:
        @R.function
        def main(
            x: R.Tensor(("n", 1, "h", "w", 8), "float32"),
            weight: R.Tensor((16, 2, 1, 8, 8), "float32"),
            bias: R.Tensor((2, 8), "float32"),
        ) -> R.Tensor(("n", 2, "h", "w - 2", 8), "float32"):
            with R.dataflow():
                out = R.tvm_fusion.winograd_conv2d(
                    x, weight, bias, tile=2, padding=[1, 0, 1, 0],
                    layout="NCHW8c", in_channels=8, out_channels=16,
                )  # fmt: skip
                R.output(out)
            return out

    (binding,) = Module["main"].body.blocks[0].bindings
    assert str(binding.var.ty) == 'R.Tensor((n, 2, h, w - 2, 8), dtype="float32")'
    kernel = read_winograd(binding.value)
    assert (kernel.batch, kernel.height, kernel.width) == (None, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": 3}, "tile 3 with layout 'NCHW8c'; expected one of 2, 4 with channel blocks"),
        ({"tile": 2.5}, "tile is .2.5.; expected integers"),
        ({"layout": "NCHW"}, "tile 4 with layout 'NCHW'; expected one of 2, 4"),
        ({"layout": "NHWC"}, "layout is 'NHWC'; expected 'NCHW' or channel blocks"),
        ({"layout": "NCHW4c"}, "data has shape .*expected 3 at axis 1 and 4 at axis 4 for 10"),
        ({"padding": (1, 1)}, r"padding is \(1, 1\); expected 4 integers >= 0"),
        ({"padding": (1, 1, 1, -1)}, r"padding is \(1, 1, 1, -1\); expected 4 integers >= 0"),
        ({"padding": "same"}, "padding is 'same'; expected integers"),
        ({"activation": "tanh"}, "activation is 'tanh'; expected one of none"),
        ({"in_channels": 17}, "expected 3 at axis 1 and 8 at axis 4 for 17 input channels"),
        ({"out_channels": 9}, r"weight has shape \(36, 1, 2, 8, 8\); expected \(36, 2, 2, 8, 8\)"),
        ({"out_channels": 0}, "expected every extent to be at least 1"),
    ],
)
def test_refuses_attributes(change, message):
    with pytest.raises(OpError, match=message):
        op.winograd_conv2d(*operands(), **(ATTRS | change))


@pytest.mark.parametrize(
    ("index", "replacement", "message"),
    [
        (0, tensor("data", 1, 10, 8, 9), r"data has rank 4; expected 5 \(NCHW8c\)"),
        (0, tensor("data", 1, 2, 8, 9, 8, dtype="float64"), "element types float64, float32"),
        (0, tensor("data", 1, 2, 1, 0, 8), "leaves an output of 1x0 for an input of 1x0"),
        (1, tensor("weight", 16, 1, 2, 8, 8), r"weight has shape \(16, .*expected \(36, 1, 2, 8"),
        (1, tensor("weight", 1, 2, 3, 3, 8, 8), r"weight has shape \(1, 2, .*expected \(36, 1"),
        (2, tensor("bias", 8), r"bias has shape \(8,\); expected \(1, 8\)"),
    ],
)
def test_refuses_operands(index, replacement, message):
    chosen = operands()
    chosen[index] = replacement
    with pytest.raises(OpError, match=message):
        op.winograd_conv2d(*chosen, **ATTRS)


def test_refuses_another_residual():
    with pytest.raises(OpError, match=r"winograd_conv2d: residual has shape .*expected the output"):
        op.winograd_conv2d(*operands(), tensor("residual", 1, 1, 8, 8, 8), **ATTRS)


def test_refuses_a_missing_operand_when_emitted():
    call = op.winograd_conv2d(*operands(), **ATTRS)
    with pytest.raises(OpError, match="2 operands; expected 3, and optionally a residual"):
        infer(relax.Call(call.op, call.args[:2], call.attrs))


def test_generated_function():
    parameters = operands()
    mod = module_of(op.winograd_conv2d(*parameters, **ATTRS), parameters)
    attrs = relax.transform.LegalizeOps()(mod)["winograd_conv2d"].attrs
    assert attrs["tvm_fusion.op"] == "winograd_conv2d"
    expected = Conv2DKernel((LAYER,), 1, 8, 9, False, "float32", "NCHW8c", "NCHW8c", winograd=4)
    assert from_json(attrs["tvm_fusion.workload"]) == expected


def halves(weight=(36, 1, 2, 4, 8, 2), residual="bfloat16"):
    return [
        tensor("data", 1, 2, 8, 9, 8, dtype="bfloat16"),
        tensor("weight", *weight, dtype="bfloat16"),
        tensor("bias", 1, 8),
        tensor("residual", 1, 1, 8, 9, 8, dtype=residual),
    ]


@pytest.mark.parametrize("out_dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("residual", ["bfloat16", "float32"])
def test_type_and_kernel_of_bfloat16(out_dtype, residual):
    call = infer(op.winograd_conv2d(*halves(residual=residual), **ATTRS, out_dtype=out_dtype))
    expected = Conv2DKernel((LAYER,), 1, 8, 9, True, "bfloat16", "NCHW8c", "NCHW8c", winograd=4)
    expected = replace(expected, word=2, sums="float32", out_dtype=out_dtype or "bfloat16")
    if residual == "float32":
        expected = replace(expected, residual_dtype="float32")
    assert read_winograd(call) == expected
    assert str(call.ty.dtype) == (out_dtype or "bfloat16")
    parameters = halves(residual=residual)
    mod = module_of(op.winograd_conv2d(*parameters, **ATTRS, out_dtype=out_dtype), parameters)
    attrs = relax.transform.LegalizeOps()(mod)["winograd_conv2d"].attrs
    assert from_json(attrs["tvm_fusion.workload"]) == expected


def test_refusals_of_bfloat16():
    with pytest.raises(OpError, match=r"expected \(36, 1, 2, 4, 8, 2\)"):
        op.winograd_conv2d(*halves((36, 1, 2, 8, 8)), **ATTRS)
    with pytest.raises(OpError, match="out_dtype is 'float16'; expected 'bfloat16' or 'float32'"):
        op.winograd_conv2d(*halves(), **ATTRS, out_dtype="float16")


@settings(max_examples=settings.default.max_examples // 8, deadline=None)
@given(
    st.sampled_from([1, 5, 8]),
    st.sampled_from([1, 4, 9]),
    st.sampled_from(ACTIVATIONS),
    st.tuples(*[st.integers(0, 2)] * 4),
    st.sampled_from(TILE_SIZES),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_numbers(reference, run_module, inputs, outputs, activation, padding, tile, residual, seed):
    layer = ConvLayer(inputs, outputs, (3, 3), padding=padding, activation=activation)
    rng = np.random.default_rng(seed)
    data = rng.standard_normal((2, inputs, 5, 6)).astype("float32")
    found = Parameters.of(layer, rng)
    shape = (2, outputs, *layer.output_size(5, 6))
    added = rng.standard_normal(shape).astype("float32") if residual else None
    arrays = [
        pack_array(data, "data", 4),
        transform_weight(pack_array(found.weight, "dense", 4), tile),
        pack_array(found.bias, "bias", 4),
        *([] if added is None else [pack_array(added, "data", 4)]),
    ]
    names = ("data", "weight", "bias", "residual")
    variables = [tensor(name, *array.shape) for name, array in zip(names, arrays, strict=False)]
    call = op.winograd_conv2d(
        *variables,
        tile=tile,
        padding=padding,
        activation=activation.kind,
        low=activation.low,
        high=activation.high,
        layout="NCHW4c",
        in_channels=inputs,
        out_channels=outputs,
    )
    packed = run_module(module_of(call, variables), *arrays)
    plain = np.moveaxis(packed, 4, 2).reshape(2, -1, *shape[2:])[:, :outputs]
    expected = reference.layer(data, found.weight, found.bias, layer, added)
    sums = reference.layer(data, found.weight, found.bias, replace(layer, activation=LINEAR), added)
    scale = max(1.0, float(np.abs(sums).max()))  # Scale of the rounding, before a clip.
    np.testing.assert_allclose(plain, expected, rtol=0, atol=1e-5 * scale)
