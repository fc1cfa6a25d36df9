# SPDX-License-Identifier: Apache-2.0
"""Builder of a U-Net as an ONNX model (Ronneberger, Fischer and Brox, 2015).

As is common today, convolutions are padded, and the way up doubles pixels before a 3x3 convolution.
"""

from __future__ import annotations

import numpy as np
import onnx

from examples.models import GraphBuilder

DEPTH = 4


def unet(
    batch: int | str = 1,
    image_size: int = 256,
    seed: int = 0,
    *,
    width: int = 64,
    classes: int = 2,
    weights: bool = True,
) -> onnx.ModelProto:
    """Four halvings of the image and four doublings, each joined with its counterpart.

    Parameters
    ----------
    batch : int or str
        Images at a time, or the name of a symbolic size, for which we cannot import Resize.
    image_size : int
        Height and width in pixels, a multiple of 16.
    seed : int
        Seed of the weights.
    width : int
        Channels of the first level; each next one has twice as many.
    classes : int
        Channels of the result, which has the size of the image.
    weights : bool
        Whether weights are stored; else they are inputs.

    Raises
    ------
    ValueError
        If the image size is no multiple of 16.
    """
    if image_size % (1 << DEPTH):
        raise ValueError(f"image_size is {image_size}; expected a multiple of {1 << DEPTH}")
    net = GraphBuilder("unet", (batch, 3, image_size, image_size), seed, weights)
    scales = net.constant("scales", np.array([1, 1, 2, 2], np.float32))
    x, kept = net.input, []
    for level in range(DEPTH):
        x = _two_convolutions(net, x, width << level)
        kept.append(x)
        x = net.node("MaxPool", [x], net.channels(x), kernel_shape=[2, 2], strides=[2, 2])
    x = _two_convolutions(net, x, width << DEPTH)
    for level in reversed(range(DEPTH)):
        x = _doubled(net, x, scales)
        x = _convolution(net, x, width << level)
        x = net.node("Concat", [kept[level], x], 2 * net.channels(x), axis=1)
        x = _two_convolutions(net, x, width << level)
    x = net.conv(x, classes, 1, bias=True)
    return net.finish(x, [batch, classes, image_size, image_size])


def _two_convolutions(net: GraphBuilder, x: str, channels: int) -> str:
    return _convolution(net, _convolution(net, x, channels), channels)


def _convolution(net: GraphBuilder, x: str, channels: int) -> str:
    return net.activation(net.conv(x, channels, 3, gain=2.0, bias=True), "relu")


def _doubled(net: GraphBuilder, x: str, scales: str) -> str:
    return net.node(
        "Resize",
        [x, "", scales],
        net.channels(x),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
