# SPDX-License-Identifier: Apache-2.0
"""Builder of MobileNet-V3 as an ONNX model (Howard et al., 2019, table 1)."""

from __future__ import annotations

import onnx

from examples.models import CLASSES, RESIDUAL_SCALE, GraphBuilder

# kernel, channels inside, channels, squeeze-and-excitation, activation, stride
LARGE = (
    (3, 16, 16, False, "relu", 1),
    (3, 64, 24, False, "relu", 2),
    (3, 72, 24, False, "relu", 1),
    (5, 72, 40, True, "relu", 2),
    (5, 120, 40, True, "relu", 1),
    (5, 120, 40, True, "relu", 1),
    (3, 240, 80, False, "hardswish", 2),
    (3, 200, 80, False, "hardswish", 1),
    (3, 184, 80, False, "hardswish", 1),
    (3, 184, 80, False, "hardswish", 1),
    (3, 480, 112, True, "hardswish", 1),
    (3, 672, 112, True, "hardswish", 1),
    (5, 672, 160, True, "hardswish", 2),
    (5, 960, 160, True, "hardswish", 1),
    (5, 960, 160, True, "hardswish", 1),
)


def mobilenet_v3_large(
    batch: int | str = 1,
    image_size: int = 224,
    seed: int = 0,
    *,
    layers: int = len(LARGE),
    weights: bool = True,
) -> onnx.ModelProto:
    """MobileNet-V3 large: inverted residuals, some with hard swish and with gated channels.

    Parameters
    ----------
    batch : int or str
        Images at a time, or the name of a symbolic size.
    image_size : int
        Height and width in pixels.
    seed : int
        Seed of the weights.
    layers : int
        Number of the 15 residual blocks between the first and the last convolution.
    weights : bool
        Whether weights are stored; else they are inputs.

    Raises
    ------
    ValueError
        If there are fewer blocks.
    """
    if not 1 <= layers <= len(LARGE):
        raise ValueError(f"layers is {layers}; expected 1 to {len(LARGE)} residual blocks")
    net = GraphBuilder("mobilenet_v3_large", (batch, 3, image_size, image_size), seed, weights)
    x = net.conv_bn(net.input, 16, 3, 2, activation="hardswish")
    for block in LARGE[:layers]:
        x = _block(net, x, *block)
    x = net.conv_bn(x, 960, activation="hardswish")
    x = net.node("GlobalAveragePool", [x], 960)
    x = net.node("Flatten", [x], 960, axis=1)
    x = net.activation(net.linear(x, "fc1", 960, 1280, gain=2.0), "hardswish")
    return net.finish(net.linear(x, "fc2", 1280, CLASSES), [batch, CLASSES])


def _block(
    net: GraphBuilder,
    x: str,
    kernel: int,
    inside: int,
    channels: int,
    squeeze: bool,
    activation: str,
    stride: int,
) -> str:
    """Expand, filter depthwise, gate the channels, project; add the input where it fits."""
    shortcut = x
    residual = stride == 1 and net.channels(x) == channels
    if inside != net.channels(x):
        x = net.conv_bn(x, inside, activation=activation)
    x = net.conv_bn(x, inside, kernel, stride, groups=inside, activation=activation)
    if squeeze:
        x = _gate(net, x)
    x = net.conv_bn(x, channels, scale=RESIDUAL_SCALE if residual else 1.0)
    return net.add(x, shortcut) if residual else x


def _gate(net: GraphBuilder, x: str) -> str:
    """Multiply each channel by a gate computed from the means of all channels."""
    channels = net.channels(x)
    gate = net.node("GlobalAveragePool", [x], channels)
    gate = net.activation(net.conv(gate, _squeezed(channels), bias=True, gain=2.0), "relu")
    gate = net.activation(net.conv(gate, channels, bias=True, gain=4.0), "hardsigmoid")
    return net.node("Mul", [x, gate], channels)


def _squeezed(channels: int) -> int:
    """A quarter of the channels, as the nearest multiple of 8 that loses no more than a tenth."""
    nearest = max(8, (channels // 4 + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * (channels // 4) else nearest
