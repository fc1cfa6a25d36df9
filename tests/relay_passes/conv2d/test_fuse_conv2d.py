# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseConv2D``: pairs found, pairs left alone, choices, the report, and the same numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layer_strategies import Parameters, layers
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.target import Target

from relay_passes import Decision, FuseConv2D, FuseEpilogue
from schedules.errors import OpError
from schedules.workload.conv2d import ByteAddition, ConvLayer, FusedConv2DWorkload

TARGET = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
RNG = np.random.default_rng(4)
DEPTHWISE = RNG.standard_normal((32, 1, 3, 3)).astype("float32")
POINTWISE = RNG.standard_normal((32, 32, 1, 1)).astype("float32")
DENSE = RNG.standard_normal((32, 32, 3, 3)).astype("float32")
BIAS = RNG.standard_normal(32).astype("float32")
BIAS4 = BIAS.reshape(1, 32, 1, 1)


@I.ir_module
class Block:
    @R.function
    def main(x: R.Tensor((1, 32, 28, 28), "float32")) -> R.Tensor((1, 32, 28, 28), "float32"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            lv0 = R.nn.conv2d(x, relax.const(DEPTHWISE), padding=[1, 1, 1, 1], groups=32)
            lv1 = R.add(lv0, relax.const(BIAS4))
            lv2 = R.nn.relu(lv1)
            lv3 = R.nn.conv2d(lv2, relax.const(POINTWISE))
            lv4 = R.add(lv3, relax.const(BIAS4))
            lv5 = R.add(lv4, x)
            R.output(lv5)
        return lv5


@I.ir_module
class BlockFused:
    @R.function
    def main(x: R.Tensor((1, 32, 28, 28), "float32")) -> R.Tensor((1, 32, 28, 28), "float32"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            lv5 = R.tvm_fusion.fused_conv2d(
                x,
                relax.const(DEPTHWISE),
                relax.const(BIAS),
                relax.const(POINTWISE),
                relax.const(BIAS),
                x,
                padding1=[1, 1, 1, 1],
                groups1=32,
                activation1="relu",
            )
            R.output(lv5)
        return lv5


HALVES = [each.astype("float16") for each in (DENSE, BIAS4, POINTWISE)]


@I.ir_module
class Half:
    @R.function
    def main(x: R.Tensor((8, 32, 28, 28), "float16")) -> R.Tensor((8, 32, 28, 28), "float16"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            lv0 = R.nn.conv2d(x, relax.const(HALVES[0]), padding=[1] * 4, out_dtype="float32")
            lv1 = R.astype(lv0, "float16")
            lv2 = R.add(lv1, relax.const(HALVES[1]))
            lv3 = R.maximum(lv2, relax.const(np.float16(0)))
            lv4 = R.minimum(lv3, relax.const(np.float16(6)))
            lv5 = R.nn.conv2d(lv4, relax.const(HALVES[2]), out_dtype="float32")
            lv6 = R.astype(lv5, "float16")
            lv7 = R.add(x, lv6)
            lv8 = R.nn.relu(lv7)
            R.output(lv8)
        return lv8


@I.ir_module
class HalfFused:
    @R.function
    def main(x: R.Tensor((8, 32, 28, 28), "float16")) -> R.Tensor((8, 32, 28, 28), "float16"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            lv8 = R.tvm_fusion.fused_conv2d(
                x,
                relax.const(HALVES[0]),
                relax.const(BIAS.astype("float16")),
                relax.const(HALVES[2]),
                relax.const(np.zeros(32, "float16")),
                x,
                padding1=[1, 1, 1, 1],
                activation1="relu6",
                activation2="relu",
            )
            R.output(lv8)
        return lv8


def test_float16_of_sums_in_float32_is_fused_for_tensor_cores():
    tensor_cores = Target({"kind": "cuda", "arch": "sm_80"})
    assert_functions_equal(FuseConv2D("all", tensor_cores)(Half), HalfFused)
    for target in (TARGET, Target({"kind": "cuda", "arch": "sm_75"}), Target("opencl")):
        result = FuseConv2D("all", target)(Half)
        assert_functions_equal(result, Half)
        assert not any(entry["fused"] for entry in report_of(result))


def test_bytes_are_fused_for_tensor_cores():
    rng = np.random.default_rng(6)
    w1, w2 = (
        rng.integers(-9, 9, shape).astype("int8") for shape in ((32, 32, 3, 3), (24, 32, 1, 1))
    )
    b1, b2 = (rng.standard_normal(count, np.float32) for count in (32, 24))

    @I.ir_module
    class Bytes:
        @R.function
        def main(x: R.Tensor((8, 32, 28, 28), "uint8")) -> R.Tensor((8, 24, 28, 28), "float32"):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                lv0 = R.tvm_fusion.quantized_conv2d(
                    x, relax.const(w1), relax.const(b1), relax.const(b1), padding=[1] * 4,
                    activation="round_clip", low=0.0, high=255.0, out_dtype="uint8",
                )  # fmt: skip
                lv1 = R.tvm_fusion.quantized_conv2d(
                    lv0, relax.const(w2), relax.const(b2), relax.const(b2), activation="relu"
                )
                R.output(lv1)
            return lv1

    @I.ir_module
    class BytesFused:
        @R.function
        def main(x: R.Tensor((8, 32, 28, 28), "uint8")) -> R.Tensor((8, 24, 28, 28), "float32"):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                lv1 = R.tvm_fusion.fused_quantized_conv2d(
                    x, relax.const(w1), relax.const(b1), relax.const(b1),
                    relax.const(w2), relax.const(b2), relax.const(b2),
                    padding1=[1] * 4, activation2="relu",
                )  # fmt: skip
                R.output(lv1)
            return lv1

    assert_functions_equal(
        FuseConv2D("all", Target({"kind": "cuda", "arch": "sm_80"}))(Bytes), BytesFused
    )
    for target in (TARGET, Target({"kind": "cuda", "arch": "sm_75"})):
        assert_functions_equal(FuseConv2D("all", target)(Bytes), Bytes)


def test_bytes_that_the_second_layer_also_adds_are_left_alone():
    """They stay bound: a fused call would read what it has replaced."""
    w1, w2 = np.ones((32, 32, 3, 3), "int8"), np.ones((32, 32, 1, 1), "int8")
    how = ByteAddition(0.5, 0.25, 0.0, 0.75, 0.0, 255.0)

    @I.ir_module
    class Bytes:
        @R.function
        def main(x: R.Tensor((8, 32, 28, 28), "uint8")) -> R.Tensor((8, 32, 28, 28), "uint8"):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                lv0 = R.tvm_fusion.quantized_conv2d(
                    x, relax.const(w1), relax.const(BIAS), relax.const(BIAS), padding=[1] * 4,
                    activation="round_clip", low=0.0, high=255.0, out_dtype="uint8",
                )  # fmt: skip
                lv1 = R.tvm_fusion.quantized_conv2d(
                    lv0, relax.const(w2), relax.const(BIAS), relax.const(BIAS), lv0,
                    activation="round_clip", low=0.0, high=255.0, out_dtype="uint8",
                    addition=how,
                )  # fmt: skip
                R.output(lv1)
            return lv1

    found = FuseConv2D("all", Target({"kind": "cuda", "arch": "sm_80"}))(Bytes)
    assert_functions_equal(found, Bytes)
    assert report_of(found) == []


def test_float32_of_float16_factors_is_left_alone():
    """Sums that are not rounded before they are read."""

    @I.ir_module
    class Wide:
        @R.function
        def main(x: R.Tensor((8, 32, 28, 28), "float16")) -> R.Tensor((8, 32, 28, 28), "float16"):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(HALVES[2]), out_dtype="float32")
                lv1 = R.nn.relu(lv0)
                lv2 = R.astype(lv1, "float16")
                lv3 = R.nn.conv2d(lv2, relax.const(HALVES[2]), out_dtype="float16")
                R.output(lv3)
            return lv3

    assert_functions_equal(FuseConv2D("all", Target({"kind": "cuda", "arch": "sm_80"}))(Wide), Wide)


def report_of(mod):
    return json.loads(mod.attrs["tvm_fusion.fusion_report"])


def ops_of(mod):
    """The names of the ops that ``main`` calls, in order."""
    return [
        binding.value.op.name.removeprefix("relax.")
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    ]


def assert_functions_equal(left, right):
    """Compare two modules without their attributes, which hold the report."""
    assert [gv.name_hint for gv in left.get_global_vars()] == [
        gv.name_hint for gv in right.get_global_vars()
    ]
    for variable, function in left.functions_items():
        tvm.ir.assert_structural_equal(function, right[variable.name_hint])


def row(*layers, size=28, batch=1, relu=False):
    """A module of convolutions in a row, named ``c0``, ``c1`` and so on, and their parameters."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((batch, layers[0].in_channels, size, size), "float32"))
    rng = np.random.default_rng(5)
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for index, layer in enumerate(layers):
                weight = relax.const(Parameters.of(layer, rng).weight)
                value = builder.emit(
                    relax.op.nn.conv2d(
                        value, weight, layer.strides, layer.padding, layer.dilation, layer.groups
                    ),
                    f"c{index}",
                )
                value = builder.emit(relax.op.nn.relu(value), f"r{index}") if relu else value
            result = builder.emit_output(builder.emit(relax.op.tanh(value)))
        builder.emit_func_output(result)
    return builder.get()


def depthwise(channels=32, kernel=3, stride=1):
    margin = (kernel // 2,) * 4
    return ConvLayer(
        channels, channels, (kernel, kernel), (stride, stride), margin, groups=channels
    )


def dense(inputs=32, outputs=32, kernel=3, stride=1):
    margin = (kernel // 2,) * 4
    return ConvLayer(inputs, outputs, (kernel, kernel), (stride, stride), margin)


def test_an_inverted_residual_block():
    before = Block.script(show_meta=True)
    assert_functions_equal(FuseConv2D("auto", TARGET)(Block), BlockFused)
    assert Block.script(show_meta=True) == before
    assert not Block.attrs


@pytest.mark.parametrize("fuse", ["auto", "all", "none"])
def test_twice_equals_once(fuse):
    layers = depthwise(), dense(kernel=1), dense(), dense(), depthwise(), dense(kernel=1)
    once = FuseConv2D(fuse, TARGET)(row(*layers))
    assert len(report_of(once)) == 5
    tvm.ir.assert_structural_equal(FuseConv2D(fuse, TARGET)(once), once)


def test_numbers_do_not_change(run_module):
    x = RNG.standard_normal((1, 32, 28, 28)).astype("float32")
    fused = FuseConv2D("all", TARGET)(Block)
    np.testing.assert_allclose(run_module(fused, x), run_module(Block, x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(layers(), st.data(), st.booleans(), st.integers(0, 99))
def test_numbers_of_any_pair(reference, run_module, first, data, residual, seed):
    second = data.draw(layers(first.out_channels).filter(lambda layer: layer.groups == 1))
    assume(min(first.output_size(7, 7)) >= 1)
    assume(min(second.output_size(*first.output_size(7, 7))) >= 1)
    rng = np.random.default_rng(seed)
    one, two = Parameters.of(first, rng), Parameters.of(second, rng)
    out_shape = (2, second.out_channels, *second.output_size(*first.output_size(7, 7)))
    x = relax.Var("x", relax.TensorType((2, first.in_channels, 7, 7), "float32"))
    skip = relax.Var("skip", relax.TensorType(out_shape, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, skip]):
        with builder.dataflow():
            between = emit_layer(builder, x, first, one)
            last = emit_layer(builder, between, second, two, skip if residual else None)
            result = builder.emit_output(last)
        builder.emit_func_output(result)
    mod = relax.transform.CanonicalizeBindings()(builder.get())
    fused = FuseConv2D("all", TARGET)(mod)
    entry = report_of(fused)[0]
    assert entry["fused"], entry["reason"]
    shapes = ((2, first.in_channels, 7, 7), out_shape)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    middle = reference.layer(arrays[0], one.weight, one.bias, first)
    expected = reference.layer(
        middle, two.weight, two.bias, second, arrays[1] if residual else None
    )
    np.testing.assert_allclose(run_module(fused, *arrays), expected, rtol=1e-4, atol=1e-4)


def emit_layer(builder, value, layer, parameters, residual=None):
    """One chain in the normal form."""
    value = builder.emit(
        relax.op.nn.conv2d(
            value,
            relax.const(parameters.weight),
            layer.strides,
            layer.padding,
            layer.dilation,
            layer.groups,
        )
    )
    value = builder.emit(relax.op.add(value, relax.const(parameters.bias.reshape(1, -1, 1, 1))))
    value = value if residual is None else builder.emit(relax.op.add(residual, value))
    activation = layer.activation
    steps = {
        "none": lambda: value,
        "relu": lambda: relax.op.nn.relu(value),
        "relu6": lambda: relax.op.nn.relu6(value),
        "clip": lambda: relax.op.clip(value, activation.low, activation.high),
        "sigmoid": lambda: relax.op.sigmoid(value),
        "hardswish": lambda: R.tvm_fusion.hardswish(value),
        "gelu": lambda: R.nn.gelu(value),
        "silu": lambda: relax.op.nn.silu(value),
    }
    return builder.emit(steps[activation.kind]())


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_then_pointwise(kernel, stride):
    mod = FuseConv2D("auto", TARGET)(row(depthwise(32, kernel, stride), dense(kernel=1)))
    assert ops_of(mod) == ["tvm_fusion.fused_conv2d", "tanh"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (dense(), dense(kernel=1)),
        (dense(), dense()),
        (dense(kernel=1), dense(kernel=1)),
        (ConvLayer(32, 16, (3, 1), (1, 2), (2, 0, 1, 3), (2, 1)), ConvLayer(16, 8, (2, 2))),
        (ConvLayer(32, 64, (3, 3), groups=2), dense(64, 8, 1)),
    ],
    ids=["kxk, 1x1", "kxk, kxk", "1x1, 1x1", "uneven", "grouped"],
)
def test_all_fuses_any_kernels(first, second):
    mod = FuseConv2D("all", TARGET)(row(first, second, batch=3))
    assert ops_of(mod) == ["tvm_fusion.fused_conv2d", "tanh"]
    call = mod["main"].body.blocks[0].bindings[0].value
    assert [int(extent) for extent in call.ty.shape.values][0] == 3


def test_none_only_reports():
    mod = FuseConv2D("none", TARGET)(Block)
    assert_functions_equal(mod, Block)
    assert [entry["reason"] for entry in report_of(mod)] == ["fusion is switched off"]


def test_auto_leaves_what_does_not_gain():
    mod = FuseConv2D("auto", TARGET, winograd="never")(row(dense(64, 64), dense(64, 64)))
    assert ops_of(mod) == ["nn.conv2d", "nn.conv2d", "tanh"]
    assert "of the first layer would be recomputed" in report_of(mod)[0]["reason"]


@pytest.mark.parametrize(("winograd", "fused"), [("auto", 0), ("always", 0), ("never", 1)])
def test_a_pair_must_be_faster_than_its_layers_by_winograd(winograd, fused):
    chain = row(dense(64, 64), dense(64, 256, 1), size=56)
    mod = FuseConv2D("auto", TARGET, winograd)(chain)
    assert ops_of(mod).count("tvm_fusion.fused_conv2d") == fused
    assert ("Winograd" in report_of(mod)[0]["reason"]) == (not fused)


def test_weights_that_are_no_constants_cannot_be_transformed():
    first, second = dense(64, 64), dense(64, 256, 1)
    builder = relax.BlockBuilder()
    x, w1, w2 = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in (
            ("x", (1, 64, 56, 56)),
            ("w1", (64, 64, 3, 3)),
            ("w2", (256, 64, 1, 1)),
        )
    )
    with builder.function("main", [x, w1, w2]):
        with builder.dataflow():
            mid = builder.emit(relax.op.nn.conv2d(x, w1, padding=first.padding))
            out = builder.emit_output(relax.op.nn.conv2d(mid, w2, padding=second.padding))
        builder.emit_func_output(out)
    (entry,) = report_of(FuseConv2D("auto", TARGET)(builder.get()))
    assert "Winograd" not in entry["reason"]
    assert entry == report_of(FuseConv2D("auto", TARGET, "never")(builder.get()))[0]


def test_an_unknown_choice_of_winograd_is_refused():
    with pytest.raises(OpError, match="FuseConv2D: winograd is 'some'; expected one of auto"):
        FuseConv2D(target=TARGET, winograd="some")


def test_a_callable_decides():
    seen = []

    def decide(workload, target):
        seen.append((workload, target))
        return workload.layer1.is_depthwise

    mod = FuseConv2D(decide, TARGET)(row(depthwise(), dense(kernel=1), dense()))
    assert ops_of(mod) == ["tvm_fusion.fused_conv2d", "nn.conv2d", "tanh"]
    assert [entry["fused"] for entry in report_of(mod)] == [True, False]
    workload = FusedConv2DWorkload(1, 28, 28, depthwise(), dense(kernel=1), plain_data=True)
    assert seen[0] == (workload, TARGET)


def test_a_callable_learns_where_tensors_come_from_and_go():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 32, 28, 28), "float32"))
    seen = []
    with builder.function("main", [x]):
        with builder.dataflow():
            value: relax.Expr = x
            for layer in (depthwise(), dense(kernel=1), depthwise(), dense(kernel=1)):
                shape = (32, 1 if layer.is_depthwise else 32, *layer.kernel)
                weight = relax.const(np.ones(shape, "float32"))
                call = relax.op.nn.conv2d(value, weight, padding=layer.padding, groups=layer.groups)
                value = builder.emit(call)
            value = builder.emit_output(value)
        builder.emit_func_output(value)

    def decide(workload, target):
        seen.append((workload.plain_data, workload.plain_out))
        return workload.layer1.is_depthwise

    FuseConv2D(decide, TARGET)(builder.get())
    assert seen == [(True, False), (False, True)]


def test_a_callable_gives_its_reason():
    mod = FuseConv2D(lambda *_: Decision(False, "measured: slower"), TARGET)(Block)
    assert [entry["reason"] for entry in report_of(mod)] == ["measured: slower"]


def test_the_greater_gain_is_fused_first():
    gains = {8: 0.1, 16: 0.3, 24: 0.2}

    def decide(workload, _):
        return Decision(True, "wanted", gains[workload.layer1.in_channels])

    mod = FuseConv2D(decide, TARGET)(row(dense(8, 16), dense(16, 24), dense(24, 32), dense()))
    decided = [(entry["fused"], entry["reason"]) for entry in report_of(mod)]
    assert ops_of(mod) == ["nn.conv2d", "tvm_fusion.fused_conv2d", "nn.conv2d", "tanh"]
    assert decided[:2] == [(False, "c1 and c2 are fused with each other"), (True, "wanted")]


def test_depthwise_then_pointwise_goes_before_greater_gains():
    def decide(workload, _):
        return Decision(True, "wanted", 0.1 if workload.layer1.is_depthwise else 0.9)

    mod = FuseConv2D(decide, TARGET)(row(depthwise(), dense(kernel=1), dense()))
    assert [entry["fused"] for entry in report_of(mod)] == [True, False]


def test_a_row_of_four_makes_two_pairs():
    mod = FuseConv2D("all", TARGET)(row(*[dense(8, 8)] * 4))
    assert ops_of(mod) == ["tvm_fusion.fused_conv2d"] * 2 + ["tanh"]
    assert [entry["fused"] for entry in report_of(mod)] == [True, False, True]


def test_report():
    entry, other = report_of(FuseConv2D("auto", TARGET)(row(depthwise(), dense(kernel=1), dense())))
    assert entry == {
        "function": "main",
        "first": "c0",
        "second": "c1",
        "input_shape": [1, 32, 28, 28],
        "layer1": "dw-conv 3x3 32->32",
        "layer2": "conv 1x1 32->32",
        "fused": True,
        "reason": entry["reason"],
        "flops": 2 * 28 * 28 * 32 * (9 + 32),
        "bytes_unfused": 4 * (28 * 28 * 32 * 4 + 32 * (9 + 1) + 32 * 33),
        "bytes_fused": 4 * (28 * 28 * 32 * 2 + 32 * (9 + 1) + 32 * 33),
        "intensity_unfused": entry["flops"] / entry["bytes_unfused"],
        "intensity_fused": entry["flops"] / entry["bytes_fused"],
    }
    assert entry["reason"].startswith("predicted +")
    assert (other["first"], other["second"], other["fused"]) == ("c1", "c2", False)


def test_report_of_a_module_without_pairs():
    assert report_of(FuseConv2D("all", TARGET)(row(dense()))) == []


def test_a_later_run_replaces_decisions_of_what_is_still_there():
    mod = FuseConv2D("none", TARGET)(Block)
    assert [entry["fused"] for entry in report_of(mod)] == [False]
    fused = FuseConv2D("all", TARGET)(mod)
    assert [entry["fused"] for entry in report_of(fused)] == [True]
    assert report_of(FuseConv2D("none", TARGET)(fused)) == report_of(fused)


def test_the_current_target_is_taken():
    with TARGET:
        assert_functions_equal(FuseConv2D()(Block), BlockFused)


def test_no_target_is_an_error():
    with pytest.raises(OpError, match="FuseConv2D: no target; pass target=, or run it inside"):
        FuseConv2D()(Block)


def test_an_unknown_mode_is_an_error():
    with pytest.raises(OpError, match="fuse is 'some'; expected one of auto, all, none or a call"):
        FuseConv2D("some")


def test_another_answer_is_an_error():
    with pytest.raises(OpError, match="the callable returned 'yes'; expected bool or Decision"):
        FuseConv2D(lambda *_: "yes", TARGET)(Block)


def test_other_targets_are_left_alone():
    mod = FuseConv2D("all", Target("metal"))(Block)
    assert_functions_equal(mod, Block)
    assert report_of(mod)[0]["reason"] == "no fused convolution kernel for target kind 'metal'"


@pytest.mark.parametrize("target", [{"kind": "cuda", "arch": "sm_90"}, {"kind": "opencl"}])
def test_gpu_targets(target):
    mod = FuseConv2D("all", Target(target))(Block)
    assert_functions_equal(mod, FuseConv2D("all", TARGET)(Block))
    entry = report_of(mod)[0]
    assert entry["fused"] and "estimated" in entry["reason"]


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ((dense(kernel=1), depthwise()), "the second layer has groups"),
        ((ConvLayer(16, 16, (3, 3), groups=2), dense(16, 8, 1)), "the first layer has groups"),
        ((dense(), dense(kernel=25)), "no tile of the pair fits the shared memory"),
    ],
    ids=["grouped second", "grouped first", "large kernel"],
)
def test_leaves_what_the_schedule_for_gpus_does_not_support(layers, reason):
    mod = row(*layers)
    fused = FuseConv2D("all", Target({"kind": "cuda", "arch": "sm_90"}))(mod)
    assert_functions_equal(fused, mod)
    assert reason in report_of(fused)[0]["reason"]


def test_alone_in_a_sequential():
    passes = tvm.transform.Sequential([FuseConv2D("auto", TARGET), FuseEpilogue()])
    assert ops_of(passes(row(depthwise(), dense(kernel=1), dense(), relu=True))) == [
        "tvm_fusion.fused_conv2d",
        "tvm_fusion.conv2d",
        "tanh",
    ]


def test_leaves_an_intermediate_with_two_consumers():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 32, 28, 28), "float32")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(POINTWISE))
                lv1 = R.nn.conv2d(lv0, relax.const(POINTWISE))
                lv2 = R.add(lv1, lv0)
                R.output(lv2)
            return lv2

    mod = FuseConv2D("all", TARGET)(Module)
    assert_functions_equal(mod, Module)
    assert report_of(mod) == []


def test_leaves_an_intermediate_that_is_returned():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 32, 28, 28), "float32")):
            with R.dataflow():
                gv0 = R.nn.conv2d(x, relax.const(POINTWISE))
                gv1 = R.nn.conv2d(gv0, relax.const(POINTWISE))
                R.output(gv0, gv1)
            return (gv0, gv1)

    assert_functions_equal(FuseConv2D("all", TARGET)(Module), Module)


def test_leaves_another_op_in_between():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 32, 28, 28), "float32")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(POINTWISE))
                lv1 = R.tanh(lv0)
                lv2 = R.nn.conv2d(lv1, relax.const(POINTWISE))
                R.output(lv2)
            return lv2

    assert_functions_equal(FuseConv2D("all", TARGET)(Module), Module)


def test_leaves_a_first_layer_with_a_residual():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 32, 28, 28), "float32")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(POINTWISE))
                lv1 = R.add(lv0, x)
                lv2 = R.nn.conv2d(lv1, relax.const(POINTWISE))
                R.output(lv2)
            return lv2

    mod = FuseConv2D("all", TARGET)(Module)
    assert_functions_equal(mod, Module)
    assert report_of(mod)[0]["reason"] == "the first convolution ends with a residual addition"


def test_leaves_symbolic_space_and_takes_a_symbolic_batch():
    @I.ir_module
    class Space:
        @R.function
        def main(x: R.Tensor((1, 32, "h", "w"), "float32")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(POINTWISE))
                lv1 = R.nn.conv2d(lv0, relax.const(POINTWISE))
                R.output(lv1)
            return lv1

    @I.ir_module
    class Batch:
        @R.function
        def main(x: R.Tensor(("n", 32, 28, 28), "float32")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(POINTWISE))
                lv1 = R.nn.conv2d(lv0, relax.const(POINTWISE))
                R.output(lv1)
            return lv1

    mod = FuseConv2D("all", TARGET)(Space)
    assert_functions_equal(mod, Space)
    entry = report_of(mod)[0]
    assert (entry["reason"], entry["flops"]) == ("height or width is symbolic", None)
    assert entry["input_shape"] == [1, 32, "h", "w"]
    mod = FuseConv2D("all", TARGET)(Batch)
    assert ops_of(mod) == ["tvm_fusion.fused_conv2d"]
    assert report_of(mod)[0]["flops"] == 2 * 2 * 28 * 28 * 32 * 32


def test_leaves_what_the_schedule_does_not_support():
    mod = row(dense(kernel=1), depthwise())
    fused = FuseConv2D("all", TARGET)(mod)
    assert_functions_equal(fused, mod)
    assert "the second layer has groups" in report_of(fused)[0]["reason"]


def test_leaves_what_the_op_refuses():
    mod = row(dense(), ConvLayer(32, 32, (1, 1), (1, 1)), size=0)
    fused = FuseConv2D("all", TARGET)(mod)
    assert_functions_equal(fused, mod)
    entry = report_of(fused)[0]
    assert "expected the padded input to hold the kernel at least once" in entry["reason"]
    assert entry["bytes_fused"] is None


def test_the_name_of_the_pass_is_the_name_of_the_class():
    assert FuseConv2D("none").info.name == FuseConv2D.__name__ == "FuseConv2D"
    assert FuseEpilogue().info.name == FuseEpilogue.__name__ == "FuseEpilogue"
