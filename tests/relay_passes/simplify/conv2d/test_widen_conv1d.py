# SPDX-License-Identifier: Apache-2.0
"""Rules ``widen_conv1d`` and ``sink_image``: convolutions of sequences become those of images."""

from __future__ import annotations

import numpy as np
import pytest
from reduction_checks import run
from simplify_checks import calls, check, check_unchanged, const, dyadic, per_channel, simplify
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

W = dyadic(6, 4, 3)
V = dyadic(6, 1, 5, seed=1)
B = dyadic(6, seed=2)


def test_two_layers_and_what_is_between():
    @I.ir_module
    class Sequences:
        @R.function
        def main(x: R.Tensor((2, 4, 9), "float32")):
            with R.dataflow():
                lv = R.nn.conv1d(x, const(W), strides=[2], padding=[1, 1])
                lv1 = R.add(lv, const(B.reshape(1, 6, 1)))
                lv2 = R.nn.gelu(lv1)
                lv3 = R.nn.conv1d(lv2, const(V), padding=[4, 0], groups=6)
                gv = R.permute_dims(lv3, [0, 2, 1])
                R.output(gv)
            return gv

    @I.ir_module
    class Images:
        @R.function
        def main(x: R.Tensor((2, 4, 9), "float32")):
            with R.dataflow():
                lv = R.reshape(x, R.shape([2, 4, 1, 9]))
                lv1 = R.nn.conv2d(
                    lv, const(W[:, :, None]), strides=[1, 2], padding=[0, 1, 0, 1], groups=1
                )
                lv2 = R.add(lv1, per_channel(B))
                lv3 = R.nn.gelu(lv2)
                lv4 = R.nn.conv2d(lv3, const(V[:, :, None]), padding=[0, 4, 0, 0], groups=6)
                lv5 = R.reshape(lv4, R.shape([2, 6, 5]))
                gv = R.permute_dims(lv5, [0, 2, 1])
                R.output(gv)
            return gv

    check(Sequences, Images)


def sequences(*steps, length: int = 9):
    """``steps`` on what a convolution of a sequence computes."""
    x = relax.Var("x", relax.TensorType((2, 4, length), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(relax.op.nn.conv1d(x, const(W), padding=1, dilation=2))
            for step in steps:
                value = builder.emit(step(value))
            output = builder.emit_output(value)
        builder.emit_func_output(output)
    return builder.get()


STEPS = {
    "number": lambda x: relax.op.divide(x, const(3.0)),
    "positions": lambda x: relax.op.add(const(dyadic(7, seed=3)), x),
    "all": lambda x: relax.op.multiply(x, const(dyadic(2, 6, 7, seed=4))),
    "channels": lambda x: relax.op.maximum(x, const(B.reshape(6, 1))),
    "clip": lambda x: relax.op.clip(x, -1, 1),
    "erf": relax.op.erf,
    "itself": lambda x: relax.op.multiply(x, x),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_elementwise_ops_stay_behind_the_convolution(step):
    before = sequences(step, relax.op.nn.relu)
    after = simplify(before)
    assert calls(after)[-1] == "reshape" and "nn.conv1d" not in calls(after)
    x = np.random.default_rng(0).standard_normal((2, 4, 9)).astype("float32")
    np.testing.assert_allclose(run(after, x), run(before, x), rtol=1e-5, atol=1e-5)


def test_a_tensor_from_elsewhere_keeps_the_sum_a_sequence():
    x = relax.Var("x", relax.TensorType((2, 6, 9), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv1d(x, const(V), padding=2, groups=6))
            output = builder.emit_output(relax.op.add(x, y))
        builder.emit_func_output(output)
    assert calls(simplify(builder.get()))[-2:] == ["reshape", "add"]


def test_other_layouts_are_left_alone():
    x = relax.Var("x", relax.TensorType((2, 9, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.nn.conv1d(x, const(W), data_layout="NWC"))
        builder.emit_func_output(output)
    check_unchanged(builder.get())
