# SPDX-License-Identifier: Apache-2.0
"""Rules ``flatten_conv3d`` and ``sink_image``: convolutions of volumes become those of frames."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from reduction_checks import run
from simplify_checks import (
    calls,
    check,
    check_unchanged,
    const,
    dyadic,
    onnx_model,
    per_channel,
    simplify,
)
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion
from tests.selection import in_turns

W = dyadic(6, 4, 3, 3, 3)
V = dyadic(6, 6, 1, 1, 1, seed=1)
B = dyadic(6, seed=2)
PLAIN = {"kind": "llvm", "opt-level": 0}  # quick to compile; numbers do not depend on it
FLAT_W = W.transpose(0, 2, 1, 3, 4).reshape(6, 12, 3, 3)


def test_two_layers_and_what_is_between():
    @I.ir_module
    class Volumes:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 6, 7), "float32")):
            with R.dataflow():
                lv = R.nn.conv3d(x, const(W), strides=[2, 1, 1], padding=[1, 1, 1])
                lv1 = R.add(lv, const(B.reshape(1, 6, 1, 1, 1)))
                lv2 = R.nn.relu(lv1)
                lv3 = R.nn.conv3d(lv2, const(V))
                lv4 = R.add(lv3, lv2)
                gv = R.nn.relu(lv4)
                R.output(gv)
            return gv

    @I.ir_module
    class Frames:
        @R.function
        def main(x: R.Tensor((1, 4, 5, 6, 7), "float32")):
            with R.dataflow():
                lv = R.permute_dims(x, [2, 0, 1, 3, 4])
                lv1 = R.reshape(lv, R.shape([5, 4, 6, 7]))
                lv2 = R.nn.pad(lv1, [1, 1, 0, 0, 0, 0, 0, 0])
                lv3 = R.strided_slice(lv2, [0], [0], [5], [2])
                lv4 = R.strided_slice(lv2, [0], [1], [6], [2])
                lv5 = R.strided_slice(lv2, [0], [2], [7], [2])
                lv6 = R.concat((lv3, lv4, lv5), axis=1)
                lv7 = R.nn.conv2d(lv6, const(FLAT_W), padding=[1, 1, 1, 1])
                lv8 = R.add(lv7, per_channel(B))
                lv9 = R.nn.relu(lv8)
                lv10 = R.nn.conv2d(lv9, const(V[:, :, 0]))
                lv11 = R.add(lv10, lv9)
                lv12 = R.nn.relu(lv11)
                lv13 = R.reshape(lv12, R.shape([3, 1, 6, 6, 7]))
                gv = R.permute_dims(lv13, [1, 2, 0, 3, 4])
                R.output(gv)
            return gv

    check(Volumes, Frames)


def volumes(*steps, batch: int = 2):
    """``steps`` on what a convolution of volumes computes."""
    x = relax.Var("x", relax.TensorType((batch, 4, 3, 5, 6), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(relax.op.nn.conv3d(x, const(W), padding=1))
            for step in steps:
                value = builder.emit(step(value))
            output = builder.emit_output(value)
        builder.emit_func_output(output)
    return builder.get()


SUNK = {
    "number": lambda x: relax.op.divide(x, const(3.0)),
    "pixels": lambda x: relax.op.add(const(dyadic(5, 6, seed=3)), x),
    "pixels of one frame": lambda x: relax.op.add(x, const(dyadic(1, 5, 6, seed=3))),
    "channels": lambda x: relax.op.maximum(x, const(B.reshape(6, 1, 1, 1))),
    "channels of one clip": lambda x: relax.op.multiply(x, const(B.reshape(1, 6, 1, 1, 1))),
    "clip": lambda x: relax.op.clip(x, -1, 1),
    "itself": lambda x: relax.op.multiply(x, x),
}
KEPT = {
    "frames": lambda x: relax.op.add(x, const(dyadic(3, 1, 1, seed=4))),
    "clips": lambda x: relax.op.add(x, const(dyadic(2, 6, 1, 1, 1, seed=4))),
    "all": lambda x: relax.op.multiply(x, const(dyadic(2, 6, 3, 5, 6, seed=4))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch"), [*in_turns(SUNK, [1, 2]), *product(KEPT, [2]), ("frames", 1)]
)
def test_elementwise_ops_on_volumes(name, batch):
    before = volumes({**SUNK, **KEPT}[name], relax.op.nn.relu, batch=batch)
    after = simplify(before)
    assert "nn.conv3d" not in calls(after)
    assert (calls(after)[-1] == "permute_dims") == (name in SUNK)
    x = np.random.default_rng(0).standard_normal((batch, 4, 3, 5, 6)).astype("float32")
    np.testing.assert_allclose(run(after, x), run(before, x), rtol=1e-5, atol=1e-5)


def test_other_layouts_are_left_alone():
    x = relax.Var("x", relax.TensorType((2, 5, 6, 7, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.nn.conv3d(x, const(W), data_layout="NDHWC"))
        builder.emit_func_output(output)
    check_unchanged(builder.get())


CASES = {
    "stem": ((1, 3, 4, 9, 11), (8, 3, 3, 5, 5), {"strides": [1, 2, 2], "pads": [1, 2, 2] * 2}),
    "strides": ((2, 4, 7, 8, 9), (6, 4, 3, 3, 3), {"strides": [2, 2, 2], "pads": [1] * 6}),
    "uneven padding": ((1, 4, 4, 5, 6), (6, 4, 2, 3, 2), {"pads": [0, 1, 1, 3, 1, 0]}),
    "dilation": (
        (1, 4, 9, 9, 9),
        (6, 4, 3, 2, 2),
        {"dilations": [3, 2, 1], "pads": [1, 0, 1, 2, 1, 0]},
    ),
    "one frame of each": ((2, 4, 5, 6, 6), (6, 4, 1, 3, 3), {"strides": [2, 1, 1]}),
    "depth only": ((1, 17, 6, 5, 4), (20, 17, 3, 1, 1), {"pads": [1, 0, 0] * 2}),
    "points": ((3, 20, 2, 5, 4), (18, 20, 1, 1, 1), {"strides": [2, 2, 2]}),
    "whole depth": ((1, 4, 3, 6, 5), (6, 4, 3, 2, 2), {}),
    "groups": ((2, 8, 4, 5, 6), (12, 4, 3, 3, 3), {"group": 2, "pads": [1] * 6}),
    "depthwise": ((1, 19, 4, 5, 6), (19, 1, 3, 3, 3), {"group": 19, "pads": [1] * 6}),
    "same": ((1, 4, 5, 6, 7), (6, 4, 4, 3, 2), {"auto_pad": "SAME_UPPER", "strides": [2, 2, 3]}),
}


@pytest.mark.quick_cases("dilation-True")
@pytest.mark.parametrize(("name", "is_open"), in_turns(CASES, [False, True]))
def test_numbers_of_onnx_runtime(name, is_open):
    shape, kernel, attributes = CASES[name]
    rng = np.random.default_rng(len(name))
    weights = {
        "w": rng.standard_normal(kernel).astype("float32"),
        "b": rng.standard_normal(kernel[0]).astype("float32"),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["z"], kernel_shape=kernel[2:], **attributes),
        helper.make_node("Relu", ["z"], ["y"]),
    ]
    shapes = {"x": ("batch" if is_open else shape[0], *shape[1:])}
    model = onnx_model(nodes, weights, shapes)
    x = rng.standard_normal(shape).astype("float32")
    session = onnxruntime.InferenceSession(model.SerializeToString())
    found = tvm_fusion.compile(model, PLAIN, shapes=shapes, threads=1)(x)
    np.testing.assert_allclose(found, session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_weights_from_data():
    weight = (5, 3, 2, 3, 3)
    node = helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=weight[2:], pads=[1] * 6)
    model = onnx_model([node], {}, {"x": (1, 3, 4, 5, 6), "w": weight})
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((1, 3, 4, 5, 6), weight))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    found = tvm_fusion.compile(model, PLAIN, threads=1)(x, w)
    np.testing.assert_allclose(found, session.run(None, {"x": x, "w": w})[0], rtol=1e-4, atol=1e-4)
