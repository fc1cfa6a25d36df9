# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseEpilogue``: chains found, chains left alone, and the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.target import Target

from relay_passes import FuseEpilogue

RNG = np.random.default_rng(3)
WEIGHT = RNG.standard_normal((4, 4, 3, 3)).astype("float32")
BIAS = RNG.standard_normal(4).astype("float32")
BIAS4 = BIAS.reshape(1, 4, 1, 1)


@I.ir_module
class Chain:
    @R.function
    def main(x: R.Tensor((1, 4, 6, 6), "float32")) -> R.Tensor((1, 4, 6, 6), "float32"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            lv0 = R.nn.conv2d(x, relax.const(WEIGHT), padding=[1, 1, 1, 1])
            lv1 = R.add(lv0, relax.const(BIAS4))
            lv2 = R.add(lv1, x)
            lv3 = R.nn.relu(lv2)
            R.output(lv3)
        return lv3


@I.ir_module
class ChainFused:
    @R.function
    def main(x: R.Tensor((1, 4, 6, 6), "float32")) -> R.Tensor((1, 4, 6, 6), "float32"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            lv3 = R.tvm_fusion.conv2d(
                x,
                relax.const(WEIGHT),
                relax.const(BIAS),
                x,
                padding=[1, 1, 1, 1],
                activation="relu",
            )
            R.output(lv3)
        return lv3


def calls_of(mod):
    """The names of the ops that ``main`` calls, in order."""
    return [
        binding.value.op.name.removeprefix("relax.")
        for block in mod["main"].body.blocks
        for binding in block.bindings
    ]


def chain(*steps, shape=(1, 4, 6, 6), weight=WEIGHT):
    """A module of one convolution and ``steps``, each from an expression to an expression."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, str(weight.dtype)))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(
                relax.op.nn.conv2d(x, relax.const(weight, str(weight.dtype)), padding=1)
            )
            for step in steps:
                value = builder.emit(step(value))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return relax.transform.CanonicalizeBindings()(builder.get())


def test_the_whole_chain():
    before = Chain.script(show_meta=True)
    tvm.ir.assert_structural_equal(FuseEpilogue()(Chain), ChainFused)
    assert Chain.script(show_meta=True) == before


def test_twice_equals_once():
    once = FuseEpilogue()(Chain)
    tvm.ir.assert_structural_equal(FuseEpilogue()(once), once)


def test_numbers_do_not_change(run_module):
    x = RNG.standard_normal((1, 4, 6, 6)).astype("float32")
    np.testing.assert_allclose(
        run_module(FuseEpilogue()(Chain), x), run_module(Chain, x), rtol=1e-5, atol=1e-5
    )


def test_symbolic_batch_and_space():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 4, "h", "w"), "float32")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(WEIGHT), padding=[1, 1, 1, 1])
                lv1 = R.add(x, lv0)
                R.output(lv1)
            return lv1

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor(("n", 4, "h", "w"), "float32")):
            with R.dataflow():
                lv1 = R.tvm_fusion.conv2d(
                    x,
                    relax.const(WEIGHT),
                    relax.const(np.zeros(4, "float32")),
                    x,
                    padding=[1, 1, 1, 1],
                )
                R.output(lv1)
            return lv1

    tvm.ir.assert_structural_equal(FuseEpilogue()(Before), Expected)


@pytest.mark.parametrize(
    ("step", "attrs"),
    [
        (relax.op.nn.relu, {"activation": "relu"}),
        (relax.op.nn.relu6, {"activation": "relu6"}),
        (relax.op.sigmoid, {"activation": "sigmoid"}),
        (relax.op.nn.silu, {"activation": "silu"}),
        (relax.op.nn.gelu, {"activation": "gelu"}),
        (lambda x: R.tvm_fusion.hardswish(x), {"activation": "hardswish"}),
        (lambda x: relax.op.clip(x, 0, 6), {"activation": "relu6"}),
        (lambda x: relax.op.clip(x, -1, 2.5), {"activation": "clip", "low": -1.0, "high": 2.5}),
    ],
    ids=["relu", "relu6", "sigmoid", "silu", "gelu", "hardswish", "clip to relu6", "clip"],
)
def test_activations(step, attrs):
    mod = FuseEpilogue()(chain(step))
    call = mod["main"].body.blocks[0].bindings[0].value
    assert calls_of(mod) == ["tvm_fusion.conv2d"]
    assert {name: call.attrs[name] for name in attrs} == attrs


@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (4, 1, 1), (1, 1, 1, 1), (1, 1), (1,), ()])
def test_bias_shapes(run_module, shape):
    bias = RNG.standard_normal(shape).astype("float32")
    mod = chain(lambda x: relax.op.add(relax.const(bias), x))
    fused = FuseEpilogue()(mod)
    expected = np.broadcast_to(bias.reshape((1,) * (4 - len(shape)) + shape), (1, 4, 1, 1))
    call = fused["main"].body.blocks[0].bindings[0].value
    assert calls_of(fused) == ["tvm_fusion.conv2d"]
    np.testing.assert_array_equal(call.args[2].value.numpy(), expected.ravel())


def test_a_bias_known_at_run_time_is_reshaped():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 4, 6, 6), "float32"),
            weight: R.Tensor((4, 4, 3, 3), "float32"),
            bias: R.Tensor((1, 4, 1, 1), "float32"),
        ):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, weight)
                lv1 = R.add(lv0, bias)
                R.output(lv1)
            return lv1

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((1, 4, 6, 6), "float32"),
            weight: R.Tensor((4, 4, 3, 3), "float32"),
            bias: R.Tensor((1, 4, 1, 1), "float32"),
        ):
            with R.dataflow():
                lv = R.reshape(bias, (4,))
                lv1 = R.tvm_fusion.conv2d(x, weight, lv)
                R.output(lv1)
            return lv1

    tvm.ir.assert_structural_equal(FuseEpilogue()(Before), Expected)


@pytest.mark.parametrize(
    ("step", "left"),
    [
        (lambda x: relax.op.add(x, x), "add"),
        (lambda x: relax.op.add(x, relax.const(np.ones((1, 1, 6, 6), "float32"))), "add"),
        (lambda x: relax.op.add(x, relax.const(np.ones((4,) * 1 + (1, 6), "float32"))), "add"),
        (lambda x: relax.op.add(x, relax.const(np.ones((2, 4, 1, 1), "float32"))), "add"),
        (lambda x: relax.op.subtract(x, relax.const(BIAS4)), "subtract"),
        (lambda x: relax.op.tanh(x), "tanh"),
        (lambda x: relax.op.clip(x, 2, 1), "clip"),
        (lambda x: relax.op.nn.leakyrelu(x), "nn.leakyrelu"),
    ],
    ids=[
        "twice itself",
        "per row",
        "per channel and row",
        "per image",
        "minus",
        "tanh",
        "empty clip",
        "leaky",
    ],
)
def test_other_followers_stay(step, left):
    assert calls_of(FuseEpilogue()(chain(step))) == ["tvm_fusion.conv2d", left]


def test_an_activation_ends_the_chain():
    mod = FuseEpilogue()(chain(relax.op.nn.relu, lambda x: relax.op.add(x, relax.const(BIAS4))))
    assert calls_of(mod) == ["tvm_fusion.conv2d", "add"]


def test_a_second_consumer_ends_the_chain():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 6, 6), "float32")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(WEIGHT), padding=[1, 1, 1, 1])
                lv1 = R.nn.relu(lv0)
                lv2 = R.multiply(lv0, lv1)
                R.output(lv2)
            return lv2

    mod = FuseEpilogue()(Before)
    assert calls_of(mod) == ["tvm_fusion.conv2d", "nn.relu", "multiply"]


def test_a_value_that_leaves_the_block_ends_the_chain():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 6, 6), "float32")):
            with R.dataflow():
                gv0 = R.nn.conv2d(x, relax.const(WEIGHT), padding=[1, 1, 1, 1])
                gv1 = R.nn.relu(gv0)
                R.output(gv0, gv1)
            return (gv0, gv1)

    assert calls_of(FuseEpilogue()(Before)) == ["tvm_fusion.conv2d", "nn.relu"]


def test_an_addition_of_two_convolutions_belongs_to_the_later(run_module):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 6, 6), "float32")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(WEIGHT), padding=[1, 1, 1, 1])
                lv1 = R.nn.conv2d(x, relax.const(WEIGHT), padding=[2, 2, 2, 2], dilation=[2, 2])
                lv2 = R.add(lv0, lv1)
                R.output(lv2)
            return lv2

    mod = FuseEpilogue()(Before)
    first, second = (binding for binding in mod["main"].body.blocks[0].bindings)
    assert len(first.value.args) == 3
    assert second.value.args[3].same_as(first.var)
    assert second.value.attrs["dilation"] == [2, 2]
    x = RNG.standard_normal((1, 4, 6, 6)).astype("float32")
    np.testing.assert_allclose(run_module(mod, x), run_module(Before, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_leaves_other_element_types(dtype):
    mod = chain(relax.op.nn.relu, weight=WEIGHT.astype(dtype))
    tvm.ir.assert_structural_equal(FuseEpilogue()(mod), mod)


@pytest.mark.parametrize(
    ("arch", "groups", "width", "fuses"),
    [("sm_80", 1, 6, 1), ("sm_80", 4, 6, 1), ("sm_80", 1, "w", 0), ("sm_75", 1, 6, 0)],
)
def test_takes_layers_of_float16_for_tensor_cores(arch, groups, width, fuses):
    """Sums are float32, rounded before the bias is added; not those of open sizes."""
    weight = WEIGHT.astype("float16")
    grouped = relax.const(weight[:, : 4 // groups])
    bias = relax.const(BIAS4.astype("float16"))

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 4, 6, width), "float16")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(weight), out_dtype="float32")
                lv1 = R.add(R.astype(lv0, "float16"), bias)
                lv2 = R.nn.relu(lv1)
                lv3 = R.nn.conv2d(lv2, grouped, groups=groups)
                R.output(lv3)
            return lv3

    mod = FuseEpilogue(target=Target({"kind": "cuda", "arch": arch}))(
        relax.transform.Normalize()(Module)
    )
    calls = calls_of(mod)
    assert calls == ["tvm_fusion.conv2d"] * 2 if fuses else "tvm_fusion.conv2d" not in calls


def test_leaves_other_layouts():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 6, 6, 4), "float32"), weight: R.Tensor((3, 3, 4, 4), "float32")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, weight, data_layout="NHWC", kernel_layout="HWIO")
                lv1 = R.nn.relu(lv0)
                R.output(lv1)
            return lv1

    tvm.ir.assert_structural_equal(FuseEpilogue()(Module), Module)


def test_leaves_symbolic_channels_and_kernels():
    @I.ir_module
    class Module:
        @R.function
        def main(
            x: R.Tensor((1, "c", 6, 6), "float32"), weight: R.Tensor(("o", "c", "k", 3), "float32")
        ):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, weight)
                lv1 = R.nn.relu(lv0)
                R.output(lv1)
            return lv1

    tvm.ir.assert_structural_equal(FuseEpilogue()(Module), Module)


def test_leaves_a_kernel_that_does_not_fit():
    mod = chain(relax.op.nn.relu, shape=(1, 4, 0, 6))
    tvm.ir.assert_structural_equal(FuseEpilogue()(mod), mod)


def test_leaves_convolutions_outside_of_dataflow_blocks():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 4, 6, 6), "float32")):
            lv0 = R.nn.conv2d(x, relax.const(WEIGHT))
            lv1 = R.nn.relu(lv0)
            return lv1

    tvm.ir.assert_structural_equal(FuseEpilogue()(Module), Module)
    mod = FuseEpilogue()(relax.transform.ConvertToDataflow()(Module))
    assert calls_of(mod)[0] == "tvm_fusion.conv2d"


def test_all_functions_of_a_module():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 4, 6, 6), "float32")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(WEIGHT))
                R.output(lv0)
            return lv0

        @R.function
        def other(x: R.Tensor((1, 4, 6, 6), "float32")):
            with R.dataflow():
                lv0 = R.nn.conv2d(x, relax.const(WEIGHT))
                R.output(lv0)
            return lv0

    assert FuseEpilogue()(Module).script().count("R.tvm_fusion.conv2d(") == 2
