# SPDX-License-Identifier: Apache-2.0
"""Builder of Inception-V3 as an ONNX model (Szegedy et al., 2015), without auxiliary classifier."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from examples.models import CLASSES, GraphBuilder

Kernel = tuple[int, int]
"""Height and width."""

SMALLEST = 75
"""Side in pixels of the smallest image for which the last stage is not empty."""


def inception_v3(
    batch: int | str = 1,
    image_size: int = 299,
    seed: int = 0,
    *,
    unit: int = 16,
    weights: bool = True,
) -> onnx.ModelProto:
    """Inception-V3: branches of 1x1, 3x3, 5x5, 1x7 and 7x1 convolutions, concatenated.

    Parameters
    ----------
    batch : int or str
        Images at a time, or the name of a symbolic size.
    image_size : int
        Height and width in pixels, at least 75.
    seed : int
        Seed of the weights.
    unit : int
        Common divisor of all channel counts.
    weights : bool
        Whether weights are stored; else they are inputs.

    Raises
    ------
    ValueError
        If the image is too small.
    """
    if image_size < SMALLEST:
        raise ValueError(f"image_size is {image_size}; expected at least {SMALLEST}")
    net = _Inception(batch, image_size, seed, unit, weights)
    x = net.layers(net.input, (2, 3, 2, 0), (2, 3, 1, 0), (4, 3))
    x = net.layers(net.max_pool(x), (5, 1), (12, 3, 1, 0))
    x = net.max_pool(x)
    for pooled in (2, 4, 4):
        x = _block_a(net, x, pooled)
    x = _block_b(net, x)
    for inside in (8, 10, 10, 12):
        x = _block_c(net, x, inside)
    x = _block_d(net, x)
    for _ in range(2):
        x = _block_e(net, x)
    return net.finish(net.classifier(x), [batch, CLASSES])


class _Inception(GraphBuilder):
    """Adds the parts of the blocks; channels are counted in units."""

    def __init__(
        self, batch: int | str, image_size: int, seed: int, unit: int, weights: bool
    ) -> None:
        super().__init__("inception_v3", (batch, 3, image_size, image_size), seed, weights)
        self._unit = unit

    def layers(self, x: str, *layers: tuple) -> str:
        """Append convolutions: channels, kernel, and stride and padding unless 1 and "same"."""
        for channels, kernel, *rest in layers:
            stride = rest[0] if rest else 1
            padding = rest[1] if len(rest) > 1 else None
            width = channels * self._unit
            x = self.conv_bn(x, width, kernel, stride, padding=padding, activation="relu")
        return x

    def max_pool(self, x: str) -> str:
        """Append a max pooling that halves the image."""
        return self.node("MaxPool", [x], self.channels(x), kernel_shape=[3, 3], strides=[2, 2])

    def mean_pool(self, x: str) -> str:
        """Append means of 3x3 pixels, zeros around the image included."""
        return self.node(
            "AveragePool",
            [x],
            self.channels(x),
            kernel_shape=[3, 3],
            strides=[1, 1],
            pads=[1, 1, 1, 1],
            count_include_pad=1,
        )

    def concat(self, tensors: Sequence[str]) -> str:
        """Append the concatenation over channels."""
        return self.node("Concat", list(tensors), sum(map(self.channels, tensors)), axis=1)


def _block_a(net: _Inception, x: str, pooled: int) -> str:
    return net.concat(
        [
            net.layers(x, (4, 1)),
            net.layers(x, (3, 1), (4, 5)),
            net.layers(x, (4, 1), (6, 3), (6, 3)),
            net.layers(net.mean_pool(x), (pooled, 1)),
        ]
    )


def _block_b(net: _Inception, x: str) -> str:
    double = net.layers(x, (4, 1), (6, 3), (6, 3, 2, 0))
    return net.concat([net.layers(x, (24, 3, 2, 0)), double, net.max_pool(x)])


def _block_c(net: _Inception, x: str, inside: int) -> str:
    row, column = (1, 7), (7, 1)
    double = [(inside, 1), (inside, column), (inside, row), (inside, column), (12, row)]
    return net.concat(
        [
            net.layers(x, (12, 1)),
            net.layers(x, (inside, 1), (inside, row), (12, column)),
            net.layers(x, *double),
            net.layers(net.mean_pool(x), (12, 1)),
        ]
    )


def _block_d(net: _Inception, x: str) -> str:
    single = net.layers(x, (12, 1), (20, 3, 2, 0))
    double = net.layers(x, (12, 1), (12, (1, 7)), (12, (7, 1)), (12, 3, 2, 0))
    return net.concat([single, double, net.max_pool(x)])


def _block_e(net: _Inception, x: str) -> str:
    def both(tensor: str) -> str:
        return net.concat([net.layers(tensor, (24, kernel)) for kernel in ((1, 3), (3, 1))])

    return net.concat(
        [
            net.layers(x, (20, 1)),
            both(net.layers(x, (24, 1))),
            both(net.layers(x, (28, 1), (24, 3))),
            net.layers(net.mean_pool(x), (12, 1)),
        ]
    )
