# SPDX-License-Identifier: Apache-2.0
"""Builder of the convolutional networks of the benchmarks as ONNX models.

Each network keeps its Conv, BatchNormalization and Relu or Clip nodes separate, as an exporter
writes them, so that a compiler has something to simplify. Weights are drawn from a seeded generator
and scaled so that activations keep their range from the first layer to the last; the same arguments
always give the same model.

    python examples/models.py mobilenet_v2 -o mobilenet_v2.onnx

VGG, MobileNet-V3, ConvNeXt, Inception, transformers and recommenders have separate files beside
this one; ``examples/zoo.py`` lists all by name.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.onnx_builder import ModelBuilder  # noqa: E402  (the checkout holds it)

CLASSES = 1000

ACTIVATIONS: dict[str, tuple[str, dict[str, float]]] = {
    "relu": ("Relu", {}),
    "sigmoid": ("Sigmoid", {}),
    "hardsigmoid": ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}),
    "hardswish": ("HardSwish", {}),
}
"""Activations that are one node: operator and attributes."""


class GraphBuilder(ModelBuilder):
    """Collects nodes and initialisers of an image network with one input and one output.

    Parameters
    ----------
    name : str
        Name of the graph.
    input_shape : tuple
        (batch, channels, height, width) of the input; the batch may be a name for a symbolic size.
    seed : int
        Seed of every random parameter.
    weights : bool
        Whether weights of convolutions and fully connected layers are stored; else they are inputs.
    """

    def __init__(
        self,
        name: str,
        input_shape: tuple[int | str, int, int, int],
        seed: int,
        weights: bool = True,
    ) -> None:
        super().__init__(name, seed, weights)
        self.input = self.add_input("input", input_shape)
        self._channels = {self.input: input_shape[1]}

    def channels(self, tensor: str) -> int:
        """Return the number of channels of ``tensor``."""
        return self._channels[tensor]

    def node(self, op_type: str, inputs: list[str], channels: int, **attributes: Any) -> str:
        """Append a node with one output of ``channels`` channels and return the output's name."""
        name = self.op(op_type, *inputs, **attributes)
        self._channels[name] = channels
        return name

    def conv(
        self,
        x: str,
        channels: int,
        kernel: int | tuple[int, int] = 1,
        stride: int = 1,
        *,
        groups: int = 1,
        gain: float = 1.0,
        bias: bool = False,
        padding: int | None = None,
    ) -> str:
        """Append a convolution, padded by ``(kernel - 1) // 2`` on every side by default.

        ``gain`` is the ratio of the output's mean square to the input's.
        """
        sizes = list(kernel) if isinstance(kernel, tuple) else [kernel] * 2
        pads = [(size - 1) // 2 if padding is None else padding for size in sizes]
        fan_in = self.channels(x) // groups * math.prod(sizes)
        weight = self.normal((channels, fan_in), math.sqrt(gain / fan_in))
        if groups == 1:
            # Filters that sum to zero ignore the mean of their inputs; without this the outputs of
            # a deep random network hardly depend on its input.
            weight = weight - weight.mean(axis=1, keepdims=True)
        prefix = f"conv_{len(self._nodes)}"
        shape = (channels, self.channels(x) // groups, *sizes)
        inputs = [x, self.weight(f"{prefix}.weight", weight.reshape(shape))]
        if bias:
            inputs.append(self.weight(f"{prefix}.bias", self.normal((channels,), 0.1)))
        return self.node(
            "Conv",
            inputs,
            channels,
            kernel_shape=sizes,
            strides=[stride] * 2,
            pads=pads * 2,
            group=groups,
        )

    def batch_norm(self, x: str, scale: float = 1.0) -> str:
        """Append a batch normalisation with the statistics of a trained-looking layer."""
        channels = self.channels(x)
        prefix = f"batchnormalization_{len(self._nodes)}"
        parameters = {
            "gamma": self.uniform(channels, 0.8 * scale, 1.2 * scale),
            "beta": self.normal((channels,), 0.1),
            "mean": self.normal((channels,), 0.1),
            "variance": self.uniform(channels, 0.7, 1.4),
        }
        names = [self.constant(f"{prefix}.{key}", value) for key, value in parameters.items()]
        return self.node("BatchNormalization", [x, *names], channels, epsilon=1e-5)

    def activation(self, x: str, kind: str) -> str:
        """Append an activation: a key of ``ACTIVATIONS``, ``relu6`` (a Clip), or ``none``."""
        if kind == "none":
            return x
        if kind == "relu6":
            low = self.constant("relu6.low", np.array(0, np.float32))
            high = self.constant("relu6.high", np.array(6, np.float32))
            return self.node("Clip", [x, low, high], self.channels(x))
        op_type, attributes = ACTIVATIONS[kind]
        return self.node(op_type, [x], self.channels(x), **attributes)

    def conv_bn(
        self,
        x: str,
        channels: int,
        kernel: int | tuple[int, int] = 1,
        stride: int = 1,
        *,
        groups: int = 1,
        activation: str = "none",
        scale: float = 1.0,
        padding: int | None = None,
    ) -> str:
        """Append convolution, batch normalisation and activation."""
        gain = 1.0 if activation == "none" else 2.0  # a rectifier halves the mean square
        x = self.conv(x, channels, kernel, stride, groups=groups, gain=gain, padding=padding)
        return self.activation(self.batch_norm(x, scale), activation)

    def add(self, x: str, y: str) -> str:
        """Append the sum of two tensors of one shape."""
        return self.node("Add", [x, y], self.channels(x))

    def classifier(self, x: str) -> str:
        """Append global average pooling and a fully connected layer to 1000 classes."""
        channels = self.channels(x)
        x = self.node("GlobalAveragePool", [x], channels)
        x = self.node("Flatten", [x], channels, axis=1)
        return self.linear(x, "fc", channels, CLASSES)

    def linear(self, x: str, name: str, features: int, outputs: int, gain: float = 1.0) -> str:
        """Append a fully connected layer from ``features`` to ``outputs``."""
        deviation = math.sqrt(gain / features)
        weight = self.weight(f"{name}.weight", self.normal((outputs, features), deviation))
        bias = self.weight(f"{name}.bias", self.normal((outputs,), 0.1))
        return self.node("Gemm", [x, weight, bias], outputs, transB=1)

    def finish(self, output: str, output_shape: list[int | str]) -> onnx.ModelProto:
        """Return the model whose result is the tensor ``output``, renamed to "output"."""
        if self._nodes[-1].name != output:
            raise ValueError(f"{output!r} is not the last node's output, {self._nodes[-1].name!r}")
        return self.model({"output": (output, output_shape)})


def mobilenet_v1(batch: int | str = 1, image_size: int = 224, seed: int = 0) -> onnx.ModelProto:
    """MobileNet-V1 with width 1.0: depthwise 3x3 and pointwise layers with ReLU."""
    net = GraphBuilder("mobilenet_v1", (batch, 3, image_size, image_size), seed)
    x = net.conv_bn(net.input, 32, 3, 2, activation="relu")
    blocks = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)]
    blocks += [(512, 1)] * 5 + [(1024, 2), (1024, 1)]
    for channels, stride in blocks:
        x = _depthwise(net, x, 3, stride, "relu")
        x = net.conv_bn(x, channels, activation="relu")
    return net.finish(net.classifier(x), [batch, CLASSES])


def mobilenet_v2(batch: int | str = 1, image_size: int = 224, seed: int = 0) -> onnx.ModelProto:
    """MobileNet-V2 with width 1.0: inverted residuals with linear bottlenecks and ReLU6."""
    net = GraphBuilder("mobilenet_v2", (batch, 3, image_size, image_size), seed)
    x = net.conv_bn(net.input, 32, 3, 2, activation="relu6")
    # expansion, channels, repeats, stride of the first
    stages = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)]
    stages += [(6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    for expansion, channels, repeats, first_stride in stages:
        for index in range(repeats):
            stride = first_stride if index == 0 else 1
            x = _inverted_residual(net, x, expansion, channels, 3, stride, "relu6")
    x = net.conv_bn(x, 1280, activation="relu6")
    return net.finish(net.classifier(x), [batch, CLASSES])


def mnasnet_a1(batch: int | str = 1, image_size: int = 224, seed: int = 0) -> onnx.ModelProto:
    """MNasNet-A1: inverted residuals, some with 5x5 kernels and squeeze-and-excitation."""
    net = GraphBuilder("mnasnet_a1", (batch, 3, image_size, image_size), seed)
    x = net.conv_bn(net.input, 32, 3, 2, activation="relu")
    # expansion, channels, repeats, stride of the first, kernel, squeeze-and-excitation
    stages = [(1, 16, 1, 1, 3, False), (6, 24, 2, 2, 3, False), (3, 40, 3, 2, 5, True)]
    stages += [(6, 80, 4, 2, 3, False), (6, 112, 2, 1, 3, True), (6, 160, 3, 2, 5, True)]
    stages += [(6, 320, 1, 1, 3, False)]
    for expansion, channels, repeats, first_stride, kernel, squeeze in stages:
        for index in range(repeats):
            stride = first_stride if index == 0 else 1
            x = _inverted_residual(
                net, x, expansion, channels, kernel, stride, "relu", squeeze=squeeze
            )
    x = net.conv_bn(x, 1280, activation="relu")
    return net.finish(net.classifier(x), [batch, CLASSES])


def resnet_18(batch: int | str = 1, image_size: int = 224, seed: int = 0) -> onnx.ModelProto:
    """ResNet-18: basic blocks of two 3x3 convolutions."""
    return _resnet("resnet_18", [2, 2, 2, 2], _basic_block, batch, image_size, seed)


def resnet_50(batch: int | str = 1, image_size: int = 224, seed: int = 0) -> onnx.ModelProto:
    """ResNet-50: bottleneck blocks with the stride in their 3x3 convolution."""
    return _resnet("resnet_50", [3, 4, 6, 3], _bottleneck, batch, image_size, seed)


def resnext_50(
    batch: int | str = 1,
    image_size: int = 224,
    seed: int = 0,
    *,
    groups: int = 32,
    weights: bool = True,
) -> onnx.ModelProto:
    """ResNeXt-50 of ``groups`` x 4d: bottlenecks whose 3x3 convolution has groups."""
    block = functools.partial(_bottleneck, groups=groups)
    return _resnet("resnext_50", [3, 4, 6, 3], block, batch, image_size, seed, weights)


MODELS: dict[str, Callable[..., onnx.ModelProto]] = {
    "mobilenet_v1": mobilenet_v1,
    "mobilenet_v2": mobilenet_v2,
    "mnasnet_a1": mnasnet_a1,
    "resnet_18": resnet_18,
    "resnet_50": resnet_50,
}

RESIDUAL_SCALE = 0.5
"""Scale of the last batch normalisation of a residual branch; it keeps the sums bounded."""


def _depthwise(net: GraphBuilder, x: str, kernel: int, stride: int, activation: str) -> str:
    channels = net.channels(x)
    return net.conv_bn(x, channels, kernel, stride, groups=channels, activation=activation)


def squeeze_excite(net: GraphBuilder, x: str, squeezed: int) -> str:
    """Multiply each channel by a gate computed from the means of all channels."""
    channels = net.channels(x)
    gate = net.node("GlobalAveragePool", [x], channels)
    gate = net.activation(net.conv(gate, squeezed, bias=True, gain=2.0), "relu")
    gate = net.activation(net.conv(gate, channels, bias=True, gain=4.0), "sigmoid")
    return net.node("Mul", [x, gate], channels)


def _inverted_residual(
    net: GraphBuilder,
    x: str,
    expansion: int,
    channels: int,
    kernel: int,
    stride: int,
    activation: str,
    squeeze: bool = False,
) -> str:
    """Expand by a 1x1, filter depthwise, project by a linear 1x1; add the input where it fits."""
    shortcut = x
    inside = net.channels(x)
    residual = stride == 1 and inside == channels
    if expansion > 1:
        x = net.conv_bn(x, inside * expansion, activation=activation)
    x = _depthwise(net, x, kernel, stride, activation)
    if squeeze:
        x = squeeze_excite(net, x, inside // 4)
    x = net.conv_bn(x, channels, scale=RESIDUAL_SCALE if residual else 1.0)
    return net.add(x, shortcut) if residual else x


def _basic_block(net: GraphBuilder, x: str, width: int, stride: int) -> str:
    shortcut = projection(net, x, width, stride)
    x = net.conv_bn(x, width, 3, stride, activation="relu")
    x = net.conv_bn(x, width, 3, scale=RESIDUAL_SCALE)
    return net.activation(net.add(x, shortcut), "relu")


def _bottleneck(net: GraphBuilder, x: str, width: int, stride: int, groups: int = 1) -> str:
    shortcut = projection(net, x, 4 * width, stride)
    inside = width if groups == 1 else width // 16 * groups
    x = net.conv_bn(x, inside, activation="relu")
    x = net.conv_bn(x, inside, 3, stride, groups=groups, activation="relu")
    x = net.conv_bn(x, 4 * width, scale=RESIDUAL_SCALE)
    return net.activation(net.add(x, shortcut), "relu")


def projection(net: GraphBuilder, x: str, channels: int, stride: int) -> str:
    """Return the shortcut of a residual block: the input, or a 1x1 convolution to its new shape."""
    if stride == 1 and net.channels(x) == channels:
        return x
    return net.conv_bn(x, channels, 1, stride)


def _resnet(
    name: str,
    repeats: list[int],
    block: Callable[[GraphBuilder, str, int, int], str],
    batch: int | str,
    image_size: int,
    seed: int,
    weights: bool = True,
) -> onnx.ModelProto:
    net = GraphBuilder(name, (batch, 3, image_size, image_size), seed, weights)
    x = net.conv_bn(net.input, 64, 7, 2, activation="relu")
    x = net.node("MaxPool", [x], 64, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for stage, count in enumerate(repeats):
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            x = block(net, x, 64 << stage, stride)
    return net.finish(net.classifier(x), [batch, CLASSES])


def main() -> None:
    """Write one network to a file."""
    parser = argparse.ArgumentParser(description="Build a network of the benchmarks as ONNX.")
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("-o", "--output", type=Path, help="default: MODEL.onnx")
    parser.add_argument("--batch", default="1", help="images at a time, or a name (default: 1)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels (default: 224)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    arguments = parser.parse_args()
    batch = int(arguments.batch) if arguments.batch.isdigit() else arguments.batch
    model = MODELS[arguments.model](batch, arguments.image_size, arguments.seed)
    output = arguments.output or Path(f"{arguments.model}.onnx")
    onnx.save(model, output)
    print(f"{output}: {len(model.graph.node)} nodes, {output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
