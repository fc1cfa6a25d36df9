# SPDX-License-Identifier: Apache-2.0
"""Builder of ConvNeXt as an ONNX model (Liu et al., 2022), in the nodes of PyTorch's exporter.

The exporter keeps LayerNormalization whole, writes GELU out, and leaves the transposes between
channels first, which convolutions take, and channels last, which the rest of a block takes.
"""

from __future__ import annotations

import math

import numpy as np
import onnx

from examples.models import CLASSES, GraphBuilder

DEPTHS = (3, 3, 9, 3)
"""Blocks of each stage of ConvNeXt-tiny."""


def convnext_tiny(
    batch: int | str = 1,
    image_size: int = 224,
    seed: int = 0,
    *,
    width: int = 96,
    depths: tuple[int, ...] = DEPTHS,
    weights: bool = True,
) -> onnx.ModelProto:
    """ConvNeXt-tiny: depthwise 7x7, then layer norm and two linear layers on each pixel's channels.

    Parameters
    ----------
    batch : int or str
        Images at a time, or the name of a symbolic size.
    image_size : int
        Height and width in pixels, a multiple of 32 for four stages.
    seed : int
        Seed of the weights.
    width : int
        Channels of the first stage; each further one has twice as many.
    depths : tuple of int
        Blocks of each stage.
    weights : bool
        Whether weights are stored; else they are inputs.

    Raises
    ------
    ValueError
        If the image does not divide into patches.
    """
    patch = 4 << (len(depths) - 1)
    if image_size % patch:
        raise ValueError(f"image_size is {image_size}; expected a multiple of {patch}")
    net = GraphBuilder("convnext_tiny", (batch, 3, image_size, image_size), seed, weights)
    x = _norm_image(net, net.conv(net.input, width, 4, 4, padding=0, bias=True))
    for stage, depth in enumerate(depths):
        if stage:
            x = net.conv(_norm_image(net, x), width << stage, 2, 2, padding=0, bias=True)
        for _ in range(depth):
            x = _block(net, x, 0.5 / sum(depths))
    channels = net.channels(x)
    x = _norm_image(net, net.node("GlobalAveragePool", [x], channels))
    x = net.node("Flatten", [x], channels, axis=1)
    return net.finish(net.linear(x, "fc", channels, CLASSES), [batch, CLASSES])


def _block(net: GraphBuilder, x: str, gain: float) -> str:
    """Filter depthwise, normalise, widen, activate, project; scale and add the input."""
    channels = net.channels(x)
    inside = net.conv(x, channels, 7, groups=channels, bias=True)
    inside = _norm(net, _transpose(net, inside, [0, 2, 3, 1]))
    inside = _gelu(net, _linear(net, inside, 4 * channels, 2.0))
    inside = _transpose(net, _linear(net, inside, channels, 2.0), [0, 3, 1, 2])
    scale = net.uniform(channels, 0.8, 1.2) * np.float32(math.sqrt(gain))
    scale = net.weight(f"scale_{x}.weight", scale.reshape(-1, 1, 1))
    return net.add(net.node("Mul", [scale, inside], channels), x)


def _norm_image(net: GraphBuilder, x: str) -> str:
    """Append the layer norm over the channels of an image."""
    return _transpose(net, _norm(net, _transpose(net, x, [0, 2, 3, 1])), [0, 3, 1, 2])


def _norm(net: GraphBuilder, x: str) -> str:
    channels = net.channels(x)
    gamma = net.weight(f"norm_{x}.weight", net.uniform(channels, 0.8, 1.2))
    beta = net.weight(f"norm_{x}.bias", net.normal((channels,), 0.1))
    return net.node("LayerNormalization", [x, gamma, beta], channels, axis=-1, epsilon=1e-6)


def _transpose(net: GraphBuilder, x: str, order: list[int]) -> str:
    return net.node("Transpose", [x], net.channels(x), perm=order)


def _linear(net: GraphBuilder, x: str, outputs: int, gain: float) -> str:
    """Append a product and a sum on the last axis."""
    inputs = net.channels(x)
    weight = net.normal((inputs, outputs), math.sqrt(gain / inputs))
    product = net.node("MatMul", [x, net.weight(f"linear_{x}.weight", weight)], outputs)
    bias = net.weight(f"linear_{x}.bias", net.normal((outputs,), 0.1))
    return net.node("Add", [bias, product], outputs)


def _gelu(net: GraphBuilder, x: str) -> str:
    """Append ``x (1 + erf(x / sqrt 2)) / 2``."""
    channels = net.channels(x)

    def number(name: str, value: float) -> str:
        return net.constant(name, np.array(value, np.float32))

    root = net.node("Div", [x, number("sqrt_2", math.sqrt(2))], channels)
    root = net.node("Add", [net.node("Erf", [root], channels), number("one", 1)], channels)
    double = net.node("Mul", [x, root], channels)
    return net.node("Mul", [double, number("half", 0.5)], channels)
