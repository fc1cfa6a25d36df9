# SPDX-License-Identifier: Apache-2.0
"""Builder of VGG-16 as an ONNX model (Simonyan and Zisserman, 2015, configuration D)."""

from __future__ import annotations

import onnx

from examples.models import CLASSES, GraphBuilder

STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Width as a multiple of the first, and number of 3x3 convolutions before a pooling."""


def vgg_16(
    batch: int | str = 1,
    image_size: int = 224,
    seed: int = 0,
    *,
    width: int = 64,
    features: int = 4096,
    weights: bool = True,
) -> onnx.ModelProto:
    """Stacks of 3x3 convolutions with ReLU, and three fully connected layers.

    Parameters
    ----------
    batch : int or str
        Images at a time, or the name of a symbolic size.
    image_size : int
        Height and width in pixels, a multiple of 32.
    seed : int
        Seed of the weights.
    width : int
        Channels of the first stage.
    features : int
        Outputs of the first two fully connected layers.
    weights : bool
        Whether weights are stored, 138 million in full size; else they are inputs.

    Raises
    ------
    ValueError
        If the image size is no multiple of 32.
    """
    if image_size % 32:
        raise ValueError(f"image_size is {image_size}; expected a multiple of 32")
    net = GraphBuilder("vgg_16", (batch, 3, image_size, image_size), seed, weights)
    x = net.input
    for factor, count in STAGES:
        for _ in range(count):
            x = net.activation(net.conv(x, factor * width, 3, gain=2.0, bias=True), "relu")
        x = net.node("MaxPool", [x], net.channels(x), kernel_shape=[2, 2], strides=[2, 2])
    flat = net.channels(x) * (image_size // 32) ** 2
    x = net.node("Flatten", [x], flat, axis=1)
    x = net.activation(net.linear(x, "fc1", flat, features, gain=2.0), "relu")
    x = net.activation(net.linear(x, "fc2", features, features, gain=2.0), "relu")
    return net.finish(net.linear(x, "fc3", features, CLASSES), [batch, CLASSES])
