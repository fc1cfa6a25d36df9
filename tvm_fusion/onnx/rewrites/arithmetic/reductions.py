# SPDX-License-Identifier: Apache-2.0
"""Reductions of no axes and of integers, and logarithms of sums of infinite exponentials.

::

    of no axes:                          Abs(x), Mul(x, x), Log(x) or x, as of one element
    ReduceMean of integers:              Cast(ReduceSum(Cast(x, int64)) / count)
    L2, LogSum, LogSumExp of integers:   in double, cast back
    ReduceLogSumExp:                     Log(ReduceSum(Exp(x - m))) + m,
                                         where m is ReduceMax(x), or 0 where that is infinite
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...model.graph_edits import attribute
from ...model.tensor_facts import INTEGER_TYPES
from ..expansion import AXES_ARE_INPUTS, Expansion
from .wider_types import widen

REDUCTIONS = tuple(
    f"Reduce{name}" for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()
)

_FRACTIONAL = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
"""Reductions whose results are no integers, even of integers."""


class ReductionRule:
    """Replaces a reduction that the importer would compute otherwise.

    Parameters
    ----------
    opset : int
        Version of ONNX's operators.
    """

    def __init__(self, opset: int) -> None:
        self._opset = opset

    def __call__(self, node: onnx.NodeProto, expansion: Expansion) -> None:
        """Emit what computes the reduction."""
        kind = expansion.facts.dtype(node.input[0])
        if _keeps_all_axes(node, expansion):
            expansion.finish(_of_each(node, expansion, kind))
        elif node.op_type == "ReduceMean" and kind in INTEGER_TYPES:
            self._mean_of_integers(node, expansion, kind)
        elif node.op_type == "ReduceLogSumExp":
            self._log_sum_exp(node, expansion, kind)
        elif node.op_type in _FRACTIONAL and kind in INTEGER_TYPES:
            wide = TensorProto.DOUBLE
            x = expansion.emit("Cast", node.input[0], to=wide)
            self._finish(node, expansion, self._reduced(node, expansion, node.op_type, x), wide)
        elif node.op_type in ("ReduceMax", "ReduceMin") and kind == TensorProto.BOOL:
            # TVM knows no largest and no smallest bool.
            widen(node, expansion, TensorProto.INT32, [TensorProto.BOOL])

    def _reduced(self, node: onnx.NodeProto, expansion: Expansion, op_type: str, x: str) -> str:
        """Reduce a tensor over the axes of the node, which are kept."""
        axes = attribute(node, "axes")
        if self._opset < AXES_ARE_INPUTS and op_type != "ReduceSum":
            given = {} if axes is None else {"axes": axes}
            return expansion.emit(op_type, x, **given)
        name = node.input[1] if len(node.input) > 1 else ""
        if axes is not None:
            name = expansion.constant("axes", np.array(axes, np.int64))
        return expansion.emit(op_type, x, *filter(None, [name]))

    def _finish(self, node: onnx.NodeProto, expansion: Expansion, result: str, kind: int) -> None:
        """Let a result with all axes be the node's, of another type."""
        if kind != expansion.facts.dtype(node.input[0]):
            result = expansion.emit("Cast", result, to=expansion.facts.dtype(node.input[0]))
        if not attribute(node, "keepdims", 1):
            axes = _axes(node, expansion)
            names = [expansion.constant("kept", np.array(axes, np.int64))] if axes else []
            result = expansion.emit("Squeeze", result, *names)
        expansion.finish(result)

    def _mean_of_integers(self, node: onnx.NodeProto, expansion: Expansion, kind: int) -> None:
        wide = kind if kind == TensorProto.UINT64 else TensorProto.INT64
        x = expansion.emit("Cast", node.input[0], to=wide)
        shape = expansion.facts.shape(node.input[0])
        if shape is None:
            one = onnx.numpy_helper.from_array(np.ones(1, helper.tensor_dtype_to_np_dtype(wide)))
            ones = expansion.emit("ConstantOfShape", expansion.emit("Shape", x), value=one)
            count = self._reduced(node, expansion, "ReduceSum", ones)
        else:
            axes = _axes(node, expansion) or range(len(shape))
            count = expansion.number(math.prod(shape[axis] for axis in axes), wide)
        total = self._reduced(node, expansion, "ReduceSum", x)
        self._finish(node, expansion, expansion.emit("Div", total, count), wide)

    def _log_sum_exp(self, node: onnx.NodeProto, expansion: Expansion, kind: int) -> None:
        wide = TensorProto.DOUBLE if kind in INTEGER_TYPES else kind
        x = node.input[0] if wide == kind else expansion.emit("Cast", node.input[0], to=wide)
        largest = self._reduced(node, expansion, "ReduceMax", x)
        is_infinite = expansion.emit("IsInf", largest)
        shift = expansion.emit("Where", is_infinite, expansion.number(0, wide), largest)
        exponentials = expansion.emit("Exp", expansion.emit("Sub", x, shift))
        total = self._reduced(node, expansion, "ReduceSum", exponentials)
        result = expansion.emit("Add", expansion.emit("Log", total), shift)
        self._finish(node, expansion, result, wide)


def _axes(node: onnx.NodeProto, expansion: Expansion) -> list[int]:
    """Axes of a node if they are constant; none stand for all."""
    if len(node.input) > 1 and node.input[1]:
        value = expansion.facts.constant(node.input[1])
        return [] if value is None else value.tolist()
    return list(attribute(node, "axes", []))


def _keeps_all_axes(node: onnx.NodeProto, expansion: Expansion) -> bool:
    """Return whether a node reduces no axis."""
    if not attribute(node, "noop_with_empty_axes", 0):
        return False
    axes = expansion.facts.constant(node.input[1]) if len(node.input) > 1 else None
    return len(node.input) < 2 or not node.input[1] or (axes is not None and not axes.size)


def _of_each(node: onnx.NodeProto, expansion: Expansion, kind: int) -> str:
    """The reduction of each element by itself."""
    x = node.input[0]
    if node.op_type in ("ReduceL1", "ReduceL2"):
        return expansion.emit("Abs", x)
    if node.op_type == "ReduceSumSquare":
        return expansion.emit("Mul", x, x)
    if node.op_type != "ReduceLogSum":
        return expansion.emit("Identity", x)
    if kind not in INTEGER_TYPES:
        return expansion.emit("Log", x)
    wide = expansion.emit("Log", expansion.emit("Cast", x, to=TensorProto.DOUBLE))
    return expansion.emit("Cast", wide, to=kind)
