# SPDX-License-Identifier: Apache-2.0
"""Small ONNX models with what GPUs meet in networks: convolutions, pools, attention, norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

EXTENTS = {"batch": 2, "tokens": 5, "width": 12, "heads": 3}


class _Net:
    """Nodes one behind the other, with seeded weights."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, *shape: int) -> str:
        values = self._generator.standard_normal(shape, dtype=np.float32)
        return self.constant(values / np.float32(np.prod(shape[1:]) ** 0.5))

    def constant(self, values: Any) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def finish(self, shape: Sequence[int | str], output: str, rank: int) -> onnx.ModelProto:
        graph = helper.make_graph(
            [*self.nodes, helper.make_node("Identity", [output], ["y"])],
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)],
            self.weights,
        )
        opsets = [helper.make_operatorsetid("", 17)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        return model


def convolutions(batch: int | str = 2, size: int = 9, channels: int = 6) -> onnx.ModelProto:
    """Conv 3x3, norm, ReLU, depthwise, a residual, pools, a dense layer and Softmax."""
    net = _Net(3)
    padded = {"kernel_shape": [3, 3], "pads": [1] * 4}
    x = net.node("Conv", "x", net.weight(channels, 3, 3, 3), net.weight(channels), **padded)
    norm = [np.linspace(low, 2, channels, dtype=np.float32) for low in (0.5, -1, -0.5, 0.5)]
    x = net.node("BatchNormalization", x, *map(net.constant, norm))
    x = net.node("Relu", x)
    inner = net.node("Conv", x, net.weight(channels, 1, 3, 3), group=channels, **padded)
    x = net.node("Add", net.node("HardSwish", inner), x)
    x = net.node("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = net.node("Conv", x, net.weight(2 * channels, channels, 1, 1), kernel_shape=[1, 1])
    x = net.node("Flatten", net.node("GlobalAveragePool", x))
    x = net.node("Gemm", x, net.weight(7, 2 * channels), net.weight(7), transB=1)
    return net.finish([batch, 3, size, size], net.node("Softmax", x, axis=1), 2)


def grouped(width: int = 32) -> onnx.ModelProto:
    """Convolutions of 3x3 with groups of one, four and 16 channels among pointwise ones."""
    net = _Net(7)
    x = net.node("Relu", net.node("Conv", "x", net.weight(width, 9, 1, 1), net.weight(width)))
    for own, stride in ((1, 1), (4, 2), (16, 1)):
        kernel = {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [stride] * 2}
        weights = net.weight(width, own, 3, 3), net.weight(width)
        inner = net.node("Relu", net.node("Conv", x, *weights, group=width // own, **kernel))
        x = net.node("Conv", inner, net.weight(width, width, 1, 1), net.weight(width))
    return net.finish([2, 9, 7, 6], x, 4)


def bottlenecks(batch: int = 1, size: int = 8, width: int = 16) -> onnx.ModelProto:
    """A block of ResNet-50, and one of MobileNet-V2 without its first convolution."""
    net = _Net(5)
    padded = {"kernel_shape": [3, 3], "pads": [1] * 4}

    def pointwise(x: str, inputs: int, outputs: int) -> str:
        return net.node("Conv", x, net.weight(outputs, inputs, 1, 1), net.weight(outputs))

    x = net.node("Relu", pointwise("x", 4 * width, width))
    x = net.node("Conv", x, net.weight(width, width, 3, 3), net.weight(width), **padded)
    x = net.node("Add", pointwise(net.node("Relu", x), width, 4 * width), "x")
    x = net.node("Relu", x)
    x = net.node("Conv", x, net.weight(4 * width, 1, 3, 3), group=4 * width, **padded)
    low, high = (net.constant(np.float32(bound)) for bound in (0, 6))
    x = pointwise(net.node("Clip", x, low, high), 4 * width, width)
    return net.finish([batch, 4 * width, size, size], x, 4)


def attention(batch: int | str = EXTENTS["batch"]) -> onnx.ModelProto:
    """A layer norm, self-attention with a computed shape, GELU, and a residual."""
    tokens, width, heads = (EXTENTS[name] for name in ("tokens", "width", "heads"))
    net = _Net(4)
    gain, bias = net.weight(width), net.weight(width)
    x = net.node("LayerNormalization", "x", gain, bias, axis=-1, epsilon=1e-5)
    size = net.node("Gather", net.node("Shape", "x"), net.constant(np.int64(0)), axis=0)
    first = net.node("Unsqueeze", size, net.constant(np.array([0])))
    inner = net.constant(np.array([tokens, heads, width // heads]))
    split = net.node("Concat", first, inner, axis=0)
    parts = []
    for _ in range(3):
        part = net.node("Reshape", net.node("MatMul", x, net.weight(width, width)), split)
        parts.append(net.node("Transpose", part, perm=[0, 2, 1, 3]))
    query, key, value = parts
    scores = net.node("MatMul", query, net.node("Transpose", key, perm=[0, 1, 3, 2]))
    scores = net.node("Mul", scores, net.constant(np.float32((width // heads) ** -0.5)))
    context = net.node("MatMul", net.node("Softmax", scores, axis=-1), value)
    context = net.node("Transpose", context, perm=[0, 2, 1, 3])
    whole = net.node("Concat", first, net.constant(np.array([tokens, width])), axis=0)
    y = net.node("MatMul", net.node("Reshape", context, whole), net.weight(width, 2 * width))
    erf = net.node("Erf", net.node("Mul", y, net.constant(np.float32(0.5**0.5))))
    y = net.node("Mul", y, net.node("Add", erf, net.constant(np.float32(1))))
    y = net.node("Add", net.node("MatMul", y, net.weight(2 * width, width)), "x")
    return net.finish([batch, tokens, width], y, 3)


def sorting() -> onnx.ModelProto:
    """TopK and ScatterND, whose functions come with launches or loops of their own."""
    net = _Net(5)
    net.nodes.append(
        helper.make_node("TopK", ["x", net.constant(np.array([3]))], ["best", "places"], axis=-1)
    )
    rows = net.constant(np.array([[2], [0]]))
    update = net.constant(np.ones((2, 3), np.float32))
    return net.finish([4, 9], net.node("ScatterND", "best", rows, update), 2)


def long_softmax() -> onnx.ModelProto:
    """A softmax and a sum of few rows that are too long for one block, and short for many."""
    net = _Net(6)
    energy = net.node("ReduceSumSquare", "x", axes=[1], keepdims=1)
    soft = net.node("Softmax", "x", axis=1)
    return net.finish([3, 60_000], net.node("Mul", soft, energy), 2)


def long_sums() -> onnx.ModelProto:
    """Reductions of such rows, and what is computed of their results."""
    net = _Net(7)
    energy = net.node("ReduceL2", "x", axes=[1], keepdims=0)
    return net.finish(
        [3, 60_000], net.node("Div", net.node("ReduceMax", "x", axes=[1], keepdims=0), energy), 1
    )
