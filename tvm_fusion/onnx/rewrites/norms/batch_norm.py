# SPDX-License-Identifier: Apache-2.0
"""BatchNormalization in training mode, by the statistics of its input, and of mixed types.

::

    c = x - mean(x);    v = mean(c * c);    y = c / sqrt(v + epsilon) * scale + bias
    running_mean = momentum * input_mean + (1 - momentum) * mean(x);    running_var likewise

in float32 if the data has 16 bits. Weights that are standardised so become constants. A node in
inference mode is computed in float32 if it has data of bfloat16 and statistics of another type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from ...model.graph_edits import attribute
from ..arithmetic.wider_types import HALVES
from ..expansion import AXES_ARE_INPUTS, Expansion


@dataclass(frozen=True)
class BatchNormRule:
    """Rule for the nodes of a model of an opset."""

    opset: int

    def __call__(self, node: onnx.NodeProto, expansion: Expansion) -> None:
        """Write a node by others, once its rank and types are known."""
        facts = expansion.facts
        dims, kinds = facts.dims(node.input[0]), [facts.dtype(name) for name in node.input]
        if not attribute(node, "training_mode", 0):
            self._widen(node, expansion, kinds)
            return
        if dims is None or not all(kinds):
            return
        wide = TensorProto.FLOAT if kinds[0] in HALVES else kinds[0]
        x, scale, bias, mean, variance = (
            expansion.emit("Cast", name, to=wide) if kind != wide else name
            for name, kind in zip(node.input, kinds, strict=True)
        )
        own_mean = self._mean(expansion, x, len(dims))
        centred = expansion.emit("Sub", x, own_mean)
        squares = expansion.emit("Mul", centred, centred)
        own_variance = self._mean(expansion, squares, len(dims))
        epsilon = expansion.number(attribute(node, "epsilon", 1e-5), wide)
        deviation = expansion.emit("Sqrt", expansion.emit("Add", own_variance, epsilon))
        axes = expansion.constant("axes", np.arange(1, len(dims) - 1))
        scale, bias = (expansion.emit("Unsqueeze", name, axes) for name in (scale, bias))
        scaled = expansion.emit("Mul", expansion.emit("Div", centred, deviation), scale)
        results = [expansion.emit("Add", scaled, bias)]
        momentum = attribute(node, "momentum", 0.9)
        statistics = (mean, own_mean), (variance, own_variance)
        for old, new in statistics[: len(node.output) - 1]:
            flat = expansion.emit("Reshape", new, expansion.constant("flat", np.array([-1])))
            parts = [
                expansion.emit("Mul", name, expansion.number(factor, wide))
                for name, factor in ((old, momentum), (flat, 1 - momentum))
            ]
            results.append(expansion.emit("Add", *parts))
        typed = [
            expansion.emit("Cast", name, to=kind) if kind != wide else name
            for name, kind in zip(results, [kinds[0], *kinds[3:]], strict=False)
        ]
        expansion.finish(*typed)

    def _widen(self, node: onnx.NodeProto, expansion: Expansion, kinds: Sequence[Any]) -> None:
        """Compute in float32 on data of bfloat16 by statistics of another type."""
        if kinds[0] != TensorProto.BFLOAT16 or len(set(kinds)) == 1:
            return
        wide = (expansion.emit("Cast", name, to=TensorProto.FLOAT) for name in node.input)
        epsilon = attribute(node, "epsilon", 1e-5)
        result = expansion.emit("BatchNormalization", *wide, epsilon=epsilon)
        expansion.finish(expansion.emit("Cast", result, to=kinds[0]))

    def _mean(self, expansion: Expansion, x: str, rank: int) -> str:
        """Mean of each channel, its axes kept."""
        axes = [axis for axis in range(rank) if axis != 1]
        if self.opset < AXES_ARE_INPUTS:
            return expansion.emit("ReduceMean", x, axes=axes)
        return expansion.emit("ReduceMean", x, expansion.constant("axes", np.array(axes)))
