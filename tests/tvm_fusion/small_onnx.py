# SPDX-License-Identifier: Apache-2.0
"""Small ONNX models for tests of whole commands and races."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def small_model(
    batch: int | str = 1, size: int = 12, channels: int = 8, seed: int = 0
) -> onnx.ModelProto:
    """Conv 3x3 + Relu, depthwise 3x3 + Clip(0, 6), conv 1x1: input "image", output "scores"."""
    generator = np.random.default_rng(seed)
    shapes = {
        "w0": (channels, 3, 3, 3),
        "w1": (channels, 1, 3, 3),
        "b1": (channels,),
        "w2": (6, channels, 1, 1),
        "b2": (6,),
    }
    constants = {
        name: generator.standard_normal(shape, dtype=np.float32) / 3
        for name, shape in shapes.items()
    }
    constants |= {"low": np.array(0, np.float32), "high": np.array(6, np.float32)}
    padded = {"kernel_shape": [3, 3], "pads": [1] * 4}
    nodes = [
        helper.make_node("Conv", ["image", "w0"], ["x0"], "conv0", **padded),
        helper.make_node("Relu", ["x0"], ["x1"], "relu0"),
        helper.make_node("Conv", ["x1", "w1", "b1"], ["x2"], "conv1", group=channels, **padded),
        helper.make_node("Clip", ["x2", "low", "high"], ["x3"], "clip1"),
        helper.make_node("Conv", ["x3", "w2", "b2"], ["scores"], "conv2", kernel_shape=[1, 1]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 3, size, size])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, 6, size, size])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_operatorsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def small_decoder(
    past: str = "past_sequence_length", new: str = "sequence_length", width: int = 64
) -> onnx.ModelProto:
    """Attention of new tokens to themselves and those before."""
    float_ = TensorProto.FLOAT
    total = f"{past} + {new}" if past else new
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["q"]),
        helper.make_node("Concat", ["past", "q"] if past else ["q"], ["k"], axis=1),
        helper.make_node("Transpose", ["k"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "t"], ["s"]),
        helper.make_node("Add", ["s", "mask"], ["m"]),
        helper.make_node("Softmax", ["m"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "k"], ["y"]),
    ]
    shapes = {"x": ["batch", new, width], "mask": ["batch", 1, total]}
    shapes |= {"past": ["batch", past, width]} if past else {}
    inputs = [helper.make_tensor_value_info(n, float_, s) for n, s in shapes.items()]
    outputs = [helper.make_tensor_value_info("y", float_, ["batch", new, width])]
    weight = np.random.default_rng(0).normal(size=(width, width)).astype(np.float32)
    weights = [numpy_helper.from_array(weight, "w")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def dense_model(
    batch: int | str = 1, size: int = 12, channels: int = 16, seed: int = 0
) -> onnx.ModelProto:
    """Conv 3x3 + Relu, conv 1x1, both of ``channels``, and Add: input "x", output "y"."""
    generator = np.random.default_rng(seed)
    shapes = {
        "w0": (channels, channels, 3, 3),
        "b0": (channels,),
        "w1": (channels, channels, 1, 1),
    }
    constants = {
        name: generator.standard_normal(shape, dtype=np.float32) / channels**0.5
        for name, shape in shapes.items()
    }
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["x0"], kernel_shape=[3, 3], pads=[1] * 4),
        helper.make_node("Relu", ["x0"], ["x1"]),
        helper.make_node("Conv", ["x1", "w1"], ["x2"], kernel_shape=[1, 1]),
        helper.make_node("Add", ["x2", "x"], ["y"]),
    ]
    image = [batch, channels, size, size]
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, image)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, image)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_operatorsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def depthwise_model(size: int = 32, channels: int = 32) -> onnx.ModelProto:
    """Depthwise 3x3 + Relu, and conv 1x1, a pair for planes, too: input "x", output "y"."""
    generator = np.random.default_rng(1)
    shapes = {"w0": (channels, 1, 3, 3), "w1": (64, channels, 1, 1)}
    weights = {name: generator.standard_normal(shape, "float32") for name, shape in shapes.items()}
    padded = {"kernel_shape": [3, 3], "pads": [1] * 4, "group": channels}
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["x0"], **padded),
        helper.make_node("Relu", ["x0"], ["x1"]),
        helper.make_node("Conv", ["x1", "w1"], ["y"], kernel_shape=[1, 1]),
    ]
    graph = helper.make_graph(
        nodes,
        "depthwise",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels, size, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64, size, size])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_operatorsetid("", 17)], ir_version=8)


def reductions_model(size: int = 28, channels: int = 16) -> onnx.ModelProto:
    """MaxPool, Softmax and sums of an image: input "x", outputs "mean", "norm" and "soft"."""
    constants = {"space": np.array([2, 3]), "channels": np.array([1])}
    nodes = [
        helper.make_node("MaxPool", ["x"], ["p"], kernel_shape=[3, 3], strides=[2, 2]),
        helper.make_node("Softmax", ["p"], ["soft"], axis=-1),
        helper.make_node("ReduceMean", ["p", "space"], ["mean"], keepdims=0),
        helper.make_node("ReduceL2", ["p", "channels"], ["norm"]),
    ]
    half = (size - 3) // 2 + 1
    shapes = {
        "mean": [1, channels],
        "norm": [1, 1, half, half],
        "soft": [1, channels, half, half],
    }
    graph = helper.make_graph(
        nodes,
        "reductions",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels, size, size])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_operatorsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model
