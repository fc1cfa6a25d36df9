# SPDX-License-Identifier: Apache-2.0
"""The nodes that take the place of one, while types are not known yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ...model.graph_edits import attribute
from ...model.tensor_facts import GraphFacts
from ..expansion import AXES_ARE_INPUTS

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)

HAS_CAST_LIKE = 15
"""From this opset on there is CastLike."""

HAS_LAYER_NORM = 17
"""From this opset on there is LayerNormalization."""


class Parts:
    """Nodes that compute the outputs of ``node``.

    Parameters
    ----------
    node : onnx.NodeProto
        The node that will be replaced.
    opset : int
        Version of ONNX's own operators.
    facts : GraphFacts
        Shapes and types as far as they are known.
    """

    def __init__(self, node: onnx.NodeProto, opset: int, facts: GraphFacts) -> None:
        self.node, self.opset, self.dims = node, opset, facts.dims
        self.nodes: list[onnx.NodeProto] = []
        self._fresh = facts.fresh
        kinds = [facts.dtype(name) for name in node.input if name]
        known = [kind for kind in kinds if kind in FLOATS]
        self._kind = helper.tensor_dtype_to_np_dtype((known or [TensorProto.FLOAT])[0])

    def input(self, position: int) -> str:
        """Name of an input; empty if it is not given."""
        return self.node.input[position] if position < len(self.node.input) else ""

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the node."""
        return attribute(self.node, name, default)

    def emit(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append a node and return the name of its result."""
        return self.emit_many(op_type, 1, *inputs, **attributes)[0]

    def emit_many(self, op_type: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Append a node of several results and return their names."""
        first = next(name for name in self.node.output if name)
        results = [self._fresh(f"{first}/{op_type}") for _ in range(count)]
        name = self.node.name
        self.nodes.append(helper.make_node(op_type, inputs, results, name=name, **attributes))
        return results

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """Append a constant."""
        return self.emit("Constant", value=numpy_helper.from_array(np.array(value, dtype)))

    def number(self, value: Any, like: str) -> str:
        """Append numbers of the type of another tensor."""
        if self.opset < HAS_CAST_LIKE:
            return self.constant(value, self._kind)
        return self.emit("CastLike", self.constant(value, np.float32), like)

    def scaled(self, x: str, factor: float) -> str:
        """Multiply by a number."""
        return x if factor == 1 else self.emit("Mul", x, self.number(factor, x))

    def reshape(self, x: str, *shape: int) -> str:
        """Reshape; 0 keeps a size."""
        return self.emit("Reshape", x, self.constant(shape))

    def mean(self, x: str) -> str:
        """Mean over the last axis, which is kept."""
        if self.opset < AXES_ARE_INPUTS:
            return self.emit("ReduceMean", x, axes=[-1])
        return self.emit("ReduceMean", x, self.constant([-1]))

    def layer_norm(self, x: str, scale: str, bias: str, epsilon: float) -> str:
        """Normalise the last axis."""
        if self.opset >= HAS_LAYER_NORM:
            inputs = [x, scale, bias] if bias else [x, scale]
            return self.emit("LayerNormalization", *inputs, epsilon=epsilon, axis=-1)
        centred = self.emit("Sub", x, self.mean(x))
        return self.rms_norm(centred, scale, bias, epsilon)

    def rms_norm(self, x: str, scale: str, bias: str, epsilon: float) -> str:
        """Divide the last axis by the root of its mean square."""
        square = self.emit("Add", self.mean(self.emit("Mul", x, x)), self.number(epsilon, x))
        result = self.emit("Mul", self.emit("Div", x, self.emit("Sqrt", square)), scale)
        return self.emit("Add", result, bias) if bias else result

    def gelu(self, x: str) -> str:
        """Gaussian error linear unit."""
        inner = self.emit("Erf", self.scaled(x, 1 / math.sqrt(2)))
        return self.emit("Mul", self.scaled(x, 0.5), self.emit("Add", inner, self.number(1, x)))

    def tanh_gelu(self, x: str) -> str:
        """Gelu by a hyperbolic tangent."""
        cube = self.emit("Mul", x, self.emit("Mul", x, x))
        inner = self.emit("Add", x, self.scaled(cube, 0.044715))
        tanh = self.emit("Tanh", self.scaled(inner, math.sqrt(2 / math.pi)))
        return self.emit("Mul", self.scaled(x, 0.5), self.emit("Add", tanh, self.number(1, x)))

    def finish(self, *results: str) -> None:
        """Let the results be the node's outputs; an empty name is an output that nobody reads."""
        for result, output in zip(results, self.node.output, strict=False):
            if output and result:
                self.nodes.append(helper.make_node("Identity", [result], [output]))

    def missing(self, count: int) -> list[str]:
        """Outputs that are asked for beyond the first ``count``."""
        return [name for name in self.node.output[count:] if name]


def sizes(parts: Parts, name: str, axes: Sequence[int]) -> list[int] | None:
    """Sizes of some axes; None if one is not known."""
    dims = parts.dims(name)
    if dims is None or any(not -len(dims) <= axis < len(dims) for axis in axes):
        return None
    found = [dims[axis] for axis in axes]
    return None if None in found else found  # type: ignore[return-value]
