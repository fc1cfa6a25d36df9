# SPDX-License-Identifier: Apache-2.0
"""The pass ``ChooseWinograd`` before and after, what it leaves alone, and running it twice."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.target import Target

import relay_passes.op as op
from relay_passes import ChooseWinograd
from relay_passes.core.constants import tensor_constant
from relay_passes.layout.packed.weight_packing import pack_array
from schedules.errors import OpError
from schedules.workload.winograd_matrices import transform_weight

TARGET = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
RNG = np.random.default_rng(9)


def const(form: str, *shape: int):
    return relax.const(pack_array(RNG.standard_normal(shape).astype("float32"), form, 8))


def transformed(weight, tile: int):
    return relax.const(transform_weight(weight.value.numpy(), tile))


W, B = const("dense", 64, 64, 3, 3), const("bias", 64)
W1 = const("dense", 64, 64, 1, 1)


def check(before, expected, winograd: str = "auto") -> None:
    """The pass gives ``expected``, leaves its input as it was, and then changes nothing more."""
    original = before.script(show_meta=True)
    once = ChooseWinograd(winograd, TARGET)(before)
    tvm.ir.assert_structural_equal(once, expected, map_free_vars=True)
    again = ChooseWinograd(winograd, TARGET)(once)
    tvm.ir.assert_structural_equal(again, once, map_free_vars=True)
    assert before.script(show_meta=True) == original


def test_example_of_the_docstring():
    points = transformed(W, 4)

    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 8, 56, 56, 8), "float32"), y: R.Tensor((1, 8, 56, 56, 8), "float32")
        ):
            with R.dataflow():
                lv = R.tvm_fusion.conv2d(
                    x, W, B, y, padding=[1, 1, 1, 1], activation="relu",
                    data_layout="NCHW8c", out_layout="NCHW8c", in_channels=64, out_channels=64,
                )  # fmt: skip
                gv = R.tvm_fusion.conv2d(
                    lv, W1, B, data_layout="NCHW8c", in_channels=64, out_channels=64
                )
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((1, 8, 56, 56, 8), "float32"), y: R.Tensor((1, 8, 56, 56, 8), "float32")
        ):
            with R.dataflow():
                lv = R.tvm_fusion.winograd_conv2d(
                    x, points, B, y, tile=4, padding=[1, 1, 1, 1], activation="relu",
                    layout="NCHW8c", in_channels=64, out_channels=64,
                )  # fmt: skip
                gv = R.tvm_fusion.conv2d(
                    lv, W1, B, data_layout="NCHW8c", in_channels=64, out_channels=64
                )
                R.output(gv)
            return gv

    check(Before, Expected)
    check(Before, Expected, "always")
    check(Before, Before, "never")


def single(
    channels=64, size=56, batch=1, lanes=8, kernel=3, dtype="float32", constant=True, **attrs
):
    """A function of one convolution; returns its module."""
    in_channels, out_channels = channels, attrs.pop("out_channels", channels)
    plain = attrs.pop("plain", False)
    extents = (in_channels,) if plain else (-(-in_channels // lanes),)
    shape = [batch, *extents, *([size] * 2 if isinstance(size, int) else size)]
    shape += [] if plain else [lanes]
    groups = attrs.get("groups", 1)
    form = "first" if plain else ("depthwise" if groups > 1 else "dense")
    array = RNG.standard_normal((out_channels, in_channels // groups, kernel, kernel))
    weight = relax.const(pack_array(array.astype(dtype), form, lanes), dtype)
    bias = relax.const(pack_array(np.zeros(out_channels), "bias", lanes), dtype)
    x = relax.Var("x", relax.TensorType(shape, dtype))
    parameters = [x]
    if not constant:
        parameters.append(relax.Var("w", weight.ty))
        weight = parameters[1]
    builder = relax.BlockBuilder()
    with builder.function("main", parameters):
        with builder.dataflow():
            call = op.conv2d(
                x,
                weight,
                bias,
                data_layout="NCHW" if plain else f"NCHW{lanes}c",
                out_layout=f"NCHW{lanes}c",
                in_channels=in_channels,
                out_channels=out_channels,
                **({"padding": [kernel // 2] * 4} | attrs),
            )
            out = builder.emit_output(call)
        builder.emit_func_output(out)
    return builder.get()


def called(mod) -> str:
    return mod["main"].body.blocks[0].bindings[0].value.op.name


@pytest.mark.parametrize("mode", ["auto", "always"])
@pytest.mark.parametrize(
    "case",
    [
        {"constant": False},
        {"kernel": 1},
        {"kernel": 5},
        {"strides": [2, 2]},
        {"dilation": [2, 2]},
        {"groups": 64},
        {"dtype": "float64", "lanes": 4},
        {"lanes": 4},
        {"channels": 3, "plain": True, "out_channels": 64},
        {"channels": 6},
        {"size": (tvm.tirx.Var("h", "int64"), 56)},
    ],
    ids=lambda case: next(iter(case)),
)
def test_leaves_alone(case, mode):
    mod = single(**case)
    tvm.ir.assert_structural_equal(ChooseWinograd(mode, TARGET)(mod), mod)


def test_only_always_takes_what_does_not_gain():
    mod = single(channels=256, size=4)
    assert called(ChooseWinograd("auto", TARGET)(mod)) == "relax.tvm_fusion.conv2d"
    assert called(ChooseWinograd("always", TARGET)(mod)) == "relax.tvm_fusion.winograd_conv2d"


def test_a_symbolic_batch_counts_as_one_image():
    mod = ChooseWinograd(target=TARGET)(single(batch=tvm.tirx.Var("n", "int64")))
    call = mod["main"].body.blocks[0].bindings[0].value
    assert call.op.name == "relax.tvm_fusion.winograd_conv2d"
    assert int(call.attrs["tile"]) == 4


def test_equal_weights_are_transformed_once():
    @I.ir_module
    class Twice:
        @R.function
        def main(x: R.Tensor((1, 8, 56, 56, 8), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.conv2d(
                    x, W, B, data_layout="NCHW8c", in_channels=64, out_channels=64
                )
                gv = R.tvm_fusion.conv2d(
                    lv, W, B, data_layout="NCHW8c", in_channels=64, out_channels=64
                )
                R.output(gv)
            return gv

    mod = ChooseWinograd(target=TARGET)(Twice)
    first, second = (binding.value for binding in mod["main"].body.blocks[0].bindings)
    assert first.args[1].same_as(second.args[1])


def test_the_current_target_is_taken():
    with TARGET:
        found = ChooseWinograd()(single())
    assert called(found) == "relax.tvm_fusion.winograd_conv2d"


def test_refusals():
    with pytest.raises(OpError, match="ChooseWinograd: winograd is 'some'; expected one of auto"):
        ChooseWinograd("some")
    with pytest.raises(OpError, match="ChooseWinograd: no target; pass target=, or run it inside"):
        ChooseWinograd()(single())


def of_bytes(size: int, channels: int, word: int, **attrs) -> tvm.IRModule:
    """A packed 3x3 convolution of bytes by weights in words of two or of four bytes."""
    blocks, kind = channels // 8, "int8" if word == 4 else "int16"
    x = relax.Var("x", relax.TensorType((1, blocks, size, size, 8), "uint8"))
    shape = blocks, blocks, 3, 3, 8 // word, 8, word
    weight = relax.const(RNG.integers(-64, 64, shape).astype(kind))
    numbers = relax.const(np.ones((blocks, 8), "float32"))
    given = {"padding": (1, 1, 1, 1), "limited": word == 4} | attrs
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            call = op.quantized_conv2d(
                *(x, weight, numbers, numbers), data_layout="NCHW8c", in_channels=channels,
                out_channels=channels, **given,
            )  # fmt: skip
            gv = builder.emit_output(call)
        builder.emit_func_output(gv)
    return builder.get()


@pytest.mark.parametrize("word", [2, 4])
def test_convolutions_of_bytes_that_are_multiplied_in_16_bits(word):
    before = of_bytes(14, 256, word)
    once = ChooseWinograd("auto", TARGET)(before)
    [binding] = once["main"].body.blocks[0].bindings[:1]
    attrs, weight = dict(binding.value.attrs.items()), binding.value.args[1]
    assert int(attrs["winograd"]) == 2 and "limited" not in attrs
    assert (str(weight.ty.dtype), weight.value.shape) == ("int16", (16, 32, 32, 4, 8, 2))
    tvm.ir.assert_structural_equal(ChooseWinograd("auto", TARGET)(once), once)


VNNI = Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2})


STAYS = {
    "never": ((14, 64), {}, "never", TARGET),
    "words of four": ((14, 64), {}, "always", VNNI),
    "strides": ((14, 64), {"strides": (2, 2)}, "always", TARGET),
    "small": ((2, 8), {}, "auto", TARGET),
    "sums of more than 32 bits": ((3, 1832), {}, "always", TARGET),
}
"""Size and channels, attributes, choice and target."""


@pytest.mark.parametrize("name", STAYS)
def test_convolutions_of_bytes_that_stay(name):
    sizes, attrs, winograd, target = STAYS[name]
    mod = of_bytes(*sizes, 2, **attrs)
    tvm.ir.assert_structural_equal(ChooseWinograd(winograd, target)(mod), mod)


def of_halves(out_dtype: str, **attrs) -> tvm.IRModule:
    """A packed 3x3 convolution of bfloat16 with sums of float32, and a residual."""
    random = RNG.standard_normal((4, 4, 3, 3, 8, 16, 2)) / 24
    weight = tensor_constant(random, "bfloat16")
    x = relax.Var("x", relax.TensorType((1, 4, 28, 28, 16), "bfloat16"))
    y = relax.Var("y", relax.TensorType((1, 4, 28, 28, 16), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        with builder.dataflow():
            call = op.conv2d(
                *(x, weight, relax.const(np.zeros((4, 16), "float32")), y),
                **{"padding": (1, 1, 1, 1), "activation": "relu", "out_dtype": out_dtype} | attrs,
                **{"data_layout": "NCHW16c", "in_channels": 64, "out_channels": 64},
            )
            gv = builder.emit_output(call)
        builder.emit_func_output(gv)
    return builder.get()


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_convolutions_of_bfloat16_where_pairs_are_multiplied(out_dtype):
    before = of_halves(out_dtype)
    once = ChooseWinograd("auto", VNNI)(before)
    assert called(once) == "relax.tvm_fusion.winograd_conv2d"
    [binding] = once["main"].body.blocks[0].bindings[:1]
    weight, attrs = binding.value.args[1], binding.value.attrs
    assert (str(weight.ty.dtype), int(attrs["tile"])) == ("bfloat16", 2)
    assert weight.value.shape == (16, 4, 4, 8, 16, 2)
    assert binding.var.ty == before["main"].body.blocks[0].bindings[0].var.ty
    tvm.ir.assert_structural_equal(ChooseWinograd("auto", VNNI)(once), once)


@pytest.mark.parametrize("name", ["x86-64-v4", "cooperlake", "emeraldrapids"])
def test_convolutions_of_bfloat16_that_stay(name):
    target, mod = Target({"kind": "llvm", "mcpu": name, "num-cores": 2}), of_halves("bfloat16")
    tvm.ir.assert_structural_equal(ChooseWinograd("always", target)(mod), mod)
