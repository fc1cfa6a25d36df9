# SPDX-License-Identifier: Apache-2.0
"""Builder of RegNet-Y as an ONNX model (Radosavovic et al., 2020, table 4)."""

from __future__ import annotations

import onnx

from examples.models import CLASSES, RESIDUAL_SCALE, GraphBuilder, projection, squeeze_excite

# channels and stride of each block
BLOCKS = tuple(
    (channels, 1 if index else 2)
    for channels, blocks in ((48, 1), (104, 3), (208, 6), (440, 6))
    for index in range(blocks)
)
GROUP_WIDTH = 8


def regnet_y_400mf(
    batch: int | str = 1,
    image_size: int = 224,
    seed: int = 0,
    *,
    layers: int = len(BLOCKS),
    weights: bool = True,
) -> onnx.ModelProto:
    """RegNet-Y of 400 million multiply-adds: bottlenecks with groups of 8 and gated channels.

    Parameters
    ----------
    batch : int or str
        Images at a time, or the name of a symbolic size.
    image_size : int
        Height and width in pixels.
    seed : int
        Seed of the weights.
    layers : int
        Number of the 16 residual blocks; larger numbers stand for all.
    weights : bool
        Whether weights are stored; else they are inputs.
    """
    net = GraphBuilder("regnet_y_400mf", (batch, 3, image_size, image_size), seed, weights)
    x = net.conv_bn(net.input, 32, 3, 2, activation="relu")
    for width, stride in BLOCKS[:layers]:
        x = _block(net, x, width, stride)
    return net.finish(net.classifier(x), [batch, CLASSES])


def _block(net: GraphBuilder, x: str, width: int, stride: int) -> str:
    """1x1, 3x3 in groups, gated channels, 1x1; the input is added."""
    shortcut = projection(net, x, width, stride)
    squeezed = round(net.channels(x) / 4)
    x = net.conv_bn(x, width, activation="relu")
    x = net.conv_bn(x, width, 3, stride, groups=width // GROUP_WIDTH, activation="relu")
    x = squeeze_excite(net, x, squeezed)
    x = net.conv_bn(x, width, scale=RESIDUAL_SCALE)
    return net.activation(net.add(x, shortcut), "relu")
