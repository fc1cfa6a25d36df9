# SPDX-License-Identifier: Apache-2.0
"""A small network with all that is split over ranks, and worlds that poison what is not sent."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import tvm_fusion
from examples.models import CLASSES, GraphBuilder
from examples.onnx_builder import random_inputs
from schedules.distribute.exchange import Exchange, LocalBuffer
from tvm_fusion import distributed
from tvm_fusion.distributed.world.local_world import LocalWorld

HEIGHT, WIDTH = 42, 13


def network(height: int = HEIGHT) -> onnx.ModelProto:
    """A stem, a residual block, a depthwise pair, a level down and up again, and a classifier."""
    net = GraphBuilder("network", (1, 3, height, WIDTH), 1)
    scales = net.constant("scales", np.array([1, 1, 2, 2], np.float32))
    x = net.conv_bn(net.input, 16, 5, activation="relu")
    x = net.node("MaxPool", [x], 16, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    y = net.conv_bn(net.conv_bn(x, 16, 3, activation="relu"), 16, 3)
    x = net.activation(net.add(x, y), "relu")
    x = net.conv_bn(net.conv_bn(x, 16, 3, groups=16, activation="relu6"), 32)
    y = net.conv_bn(x, 32, 3, stride=2, activation="relu")
    y = net.node("Resize", [y, "", scales], 32, mode="linear")
    y = net.conv(y, 32, (2, 1), padding=0)
    x = net.node("Concat", [x, y], 64, axis=1)
    x = net.node("AveragePool", [x], 64, kernel_shape=[3, 3], pads=[1] * 4)
    return net.finish(net.classifier(x), [1, CLASSES])


def two_results() -> onnx.ModelProto:
    """Two results, the first of which is read again."""
    net = GraphBuilder("two_results", (1, 3, 9, 8), 2)
    first = net.conv(net.input, 16, 3)
    second = net.conv(net.activation(first, "relu"), 16, 3)
    shape = [1, 16, 9, 8]
    return net.model({"first": (first, shape), "second": (second, shape)})


@functools.cache
def network_case() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs of the network, and what one rank makes of them."""
    feed = random_inputs(network(), 3)
    return feed, tvm_fusion.compile(network(), threads=1)(**feed)


def saved_network(ranks: int, folder: Path) -> tuple[str, str]:
    """Files of the network for some ranks, and of its inputs and outputs."""
    feed, expected = network_case()
    model, arrays = folder / "model.so", folder / "arrays.npz"
    distributed.compile_network(network(), ranks, threads=1, exchange="always").save(model)
    np.savez(arrays, expected=expected, **feed)
    return str(model), str(arrays)


class Poisoned:
    """A world whose ranks find NaN wherever no message arrives."""

    def __init__(self, world: LocalWorld) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def start(self, exchange: Exchange, buffers: Mapping[str, LocalBuffer]) -> None:
        """Start an exchange into an array of NaN, or what is received of one into NaN."""
        for message in exchange.received_by(self._world.rank):
            held, is_in_place = buffers["held"], buffers["held"] is buffers.get("own")
            view = held.view(message.region) if is_in_place else held.array
            view[...] = np.nan
        self._world.start(exchange, buffers)
