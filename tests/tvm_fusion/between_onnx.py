# SPDX-License-Identifier: Apache-2.0
"""ONNX models of a convolution, some other nodes, and a convolution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Between:
    """The nodes between two convolutions; tensors are known by name.

    Parameters
    ----------
    channels : int
        Channels of the first convolution.
    seed : int
        Seed of all weights.
    """

    def __init__(self, channels: int, seed: int = 0) -> None:
        self.channels = channels
        self.generator = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}

    def node(self, kind: str, inputs: str, outputs: int = 1, **attributes) -> str:
        """Append a node; inputs, and outputs where there are several, are words of one string."""
        names = [f"t{len(self.nodes)}_{index}" for index in range(outputs)]
        inputs_given = [name.replace("-", "") for name in inputs.split()]
        self.nodes.append(helper.make_node(kind, inputs_given, names, **attributes))
        return " ".join(names)

    def constant(self, value: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def floats(self, *shape: int, scale: float = 1.0) -> str:
        values = self.generator.standard_normal(shape, dtype=np.float32)
        return self.constant((values * scale).astype("float32"))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, "int64"))

    def conv(self, x: str, inputs: int, outputs: int, kernel: int = 1, group: int = 1) -> str:
        fan_in = inputs // group * kernel**2
        weight = self.floats(outputs, inputs // group, kernel, kernel, scale=fan_in**-0.5)
        attributes = {"kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4, "group": group}
        return self.node("Conv", f"{x} {weight} {self.floats(outputs)}", **attributes)


def between(
    middle: Callable[[Between, str], tuple[str, int]],
    channels: int,
    size: int = 9,
    batch: int = 1,
) -> onnx.ModelProto:
    """Conv 3x3 + Relu, what ``middle`` appends, Conv 1x1: input "image", output "scores".

    ``middle`` gets the builder and the tensor after Relu, of ``channels`` channels; it returns its
    result and how many channels that has.
    """
    build = Between(channels)
    first = build.node("Relu", build.conv("image", 3, channels, 3))
    result, found = middle(build, first)
    build.nodes.append(helper.make_node("Identity", [build.conv(result, found, 24)], ["scores"]))
    graph = helper.make_graph(
        build.nodes,
        "between",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 3, size, size])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, 24, None, None])],
        [numpy_helper.from_array(value, name) for name, value in build.constants.items()],
    )
    opsets = [helper.make_operatorsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model
