# SPDX-License-Identifier: Apache-2.0
"""The nodes that take the place of one of ``com.microsoft``, while types are not known yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from ...model.graph_edits import attribute
from ...model.tensor_facts import GraphFacts
from ..arithmetic.wider_types import HALVES
from ..expansion import AXES_ARE_INPUTS, Expansion

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)

HAS_CAST_LIKE = 15
"""From this opset on there is CastLike."""

HAS_LAYER_NORM = 17
"""From this opset on there is LayerNormalization."""


class ContribExpansion(Expansion):
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
        super().__init__(node, facts)
        self.opset, self.dims = opset, facts.dims
        kinds = [facts.dtype(name) for name in node.input if name]
        known = [kind for kind in kinds if kind in FLOATS]
        self._is_narrow = bool(known) and known[0] in HALVES
        self._kind = helper.tensor_dtype_to_np_dtype((known or [TensorProto.FLOAT])[0])

    def input(self, position: int) -> str:
        """Name of an input; empty if it is not given."""
        return self.node.input[position] if position < len(self.node.input) else ""

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the node."""
        return attribute(self.node, name, default)

    def integers(self, value: Any) -> str:
        """Add a constant of int64."""
        return self.constant("integers", np.array(value, np.int64))

    def number_like(self, value: Any, like: str) -> str:
        """Append numbers of the type of another tensor."""
        if self.opset < HAS_CAST_LIKE:
            return self.constant("number", np.array(value, self._kind))
        return self.emit("CastLike", self.constant("number", np.array(value, np.float32)), like)

    def scaled(self, x: str, factor: float) -> str:
        """Multiply by a number."""
        return x if factor == 1 else self.emit("Mul", x, self.number_like(factor, x))

    def reshape(self, x: str, *shape: int) -> str:
        """Reshape; 0 keeps a size."""
        return self.emit("Reshape", x, self.integers(shape))

    def mean(self, x: str) -> str:
        """Mean over the last axis, which is kept."""
        if self.opset < AXES_ARE_INPUTS:
            return self.emit("ReduceMean", x, axes=[-1])
        return self.emit("ReduceMean", x, self.integers([-1]))

    def largest(self, x: str) -> str:
        """Maximum over the last axis, which is kept."""
        if self.opset < AXES_ARE_INPUTS:
            return self.emit("ReduceMax", x, axes=[-1])
        return self.emit("ReduceMax", x, self.integers([-1]))

    def layer_norm(self, x: str, scale: str, bias: str, epsilon: float) -> str:
        """Normalise the last axis."""
        if self.opset >= HAS_LAYER_NORM:
            inputs = [x, scale, bias] if bias else [x, scale]
            return self.emit("LayerNormalization", *inputs, epsilon=epsilon, axis=-1)
        centred = self.emit("Sub", x, self.mean(x))
        return self.rms_norm(centred, scale, bias, epsilon)

    def rms_norm(self, x: str, scale: str, bias: str, epsilon: float) -> str:
        """Divide the last axis by the root of its mean square, in float32 if it has 16 bits."""
        if self._is_narrow:
            x, scale, bias = (name and self._cast(name, np.float32) for name in (x, scale, bias))
        square = self.emit("Add", self.mean(self.emit("Mul", x, x)), self.number_like(epsilon, x))
        result = self.emit("Mul", self.emit("Div", x, self.emit("Sqrt", square)), scale)
        result = self.emit("Add", result, bias) if bias else result
        return self._cast(result, self._kind) if self._is_narrow else result

    def _cast(self, x: str, kind: npt.DTypeLike) -> str:
        return self.emit("Cast", x, to=helper.np_dtype_to_tensor_dtype(np.dtype(kind)))

    def gelu(self, x: str) -> str:
        """Gaussian error linear unit."""
        inner = self.emit("Erf", self.scaled(x, 1 / math.sqrt(2)))
        return self.emit(
            "Mul", self.scaled(x, 0.5), self.emit("Add", inner, self.number_like(1, x))
        )

    def tanh_gelu(self, x: str) -> str:
        """Gelu by a hyperbolic tangent."""
        cube = self.emit("Mul", x, self.emit("Mul", x, x))
        inner = self.emit("Add", x, self.scaled(cube, 0.044715))
        tanh = self.emit("Tanh", self.scaled(inner, math.sqrt(2 / math.pi)))
        return self.emit("Mul", self.scaled(x, 0.5), self.emit("Add", tanh, self.number_like(1, x)))

    def missing(self, count: int) -> list[str]:
        """Outputs that are asked for beyond the first ``count``."""
        return [name for name in self.node.output[count:] if name]


def sizes(parts: ContribExpansion, name: str, axes: Sequence[int]) -> list[int] | None:
    """Sizes of some axes; None if one is not known."""
    dims = parts.dims(name)
    if dims is None or any(not -len(dims) <= axis < len(dims) for axis in axes):
        return None
    found = [dims[axis] for axis in axes]
    return None if None in found else found  # type: ignore[return-value]
