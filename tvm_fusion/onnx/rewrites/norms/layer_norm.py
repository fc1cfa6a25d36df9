# SPDX-License-Identifier: Apache-2.0
"""Write a LayerNormalization whose mean or deviation is asked for, or of a type that TVM lacks.

::

    c = x - ReduceMean(x);    i = 1 / Sqrt(ReduceMean(c * c) + epsilon);    y = c * i * scale + bias

Of bfloat16, ``Cast(LayerNormalization(Cast(x), Cast(scale), Cast(bias)))`` in float32.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...model.graph_edits import attribute
from ..arithmetic.wider_types import HALVES, widen
from ..expansion import AXES_ARE_INPUTS, Expansion


class LayerNormRule:
    """Replaces a LayerNormalization of several outputs, or of bfloat16 or float64.

    It is computed in float32 where ONNX asks for that, but with one output float64 stays so.

    Parameters
    ----------
    opset : int
        Version of ONNX's operators.
    """

    def __init__(self, opset: int) -> None:
        self._opset = opset

    def __call__(self, node: onnx.NodeProto, expansion: Expansion) -> None:
        """Emit the nodes of the formula."""
        facts = expansion.facts
        dims = facts.dims(node.input[0])
        own, kind = facts.dtype(node.input[0]), attribute(node, "stash_type", TensorProto.FLOAT)
        if len(node.output) < 2:
            if own == TensorProto.BFLOAT16:
                widen(node, expansion, TensorProto.FLOAT, HALVES)
            if own != TensorProto.DOUBLE:
                return
            kind = own
        if dims is None:
            return
        axes = list(range(attribute(node, "axis", -1) % len(dims), len(dims)))
        x, scale, bias = [*node.input, ""][:3]
        x = x if own == kind else expansion.emit("Cast", x, to=kind)
        mean = self._mean(expansion, x, axes)
        centred = expansion.emit("Sub", x, mean)
        variance = self._mean(expansion, expansion.emit("Mul", centred, centred), axes)
        epsilon = expansion.number(attribute(node, "epsilon", 1e-5), kind)
        deviation = expansion.emit("Sqrt", expansion.emit("Add", variance, epsilon))
        inverse = expansion.emit("Reciprocal", deviation)
        result = expansion.emit("Mul", centred, inverse)
        wide = kind if own in HALVES else own
        result, scale, bias = (
            expansion.emit("Cast", name, to=wide) if name and kind != own else name
            for name in (result, scale, bias)
        )
        result = expansion.emit("Mul", result, scale)
        result = expansion.emit("Add", result, bias) if bias else result
        result = result if own == wide else expansion.emit("Cast", result, to=own)
        for found, output in zip((result, mean, inverse), node.output, strict=False):
            if output:
                expansion.nodes.append(helper.make_node("Identity", [found], [output]))

    def _mean(self, expansion: Expansion, x: str, axes: list[int]) -> str:
        if self._opset < AXES_ARE_INPUTS:
            return expansion.emit("ReduceMean", x, axes=axes)
        return expansion.emit("ReduceMean", x, expansion.constant("axes", np.array(axes)))
