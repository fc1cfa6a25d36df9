# SPDX-License-Identifier: Apache-2.0
"""Folding of nodes that do not depend on a model's inputs: weights, and shape arithmetic."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tvm_fusion.errors import InvalidModelError
from tvm_fusion.warning_filters import warnings_ignored

from ..model.graph_edits import (
    attribute,
    is_default_domain,
    node_label,
    replace_nodes,
    set_attributes,
    used_names,
)
from ..model.narrow_weight import NarrowWeight, is_divisor, narrow_weight
from ..model.shapes import MAX_ELEMENTS, infer_shapes, static_shape
from ..model.weights import SMALL_ELEMENTS, Weights, add_weight, floats_of, keep_tensors, to_array

FOLDABLE = frozenset(
    """Abs Add And ArgMax ArgMin Cast CastLike Ceil Clip Concat Constant ConstantOfShape Cos CumSum
    DequantizeLinear Div Equal Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND
    Greater GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Log Max MelWeightMatrix Min Mod Mul
    Neg NonZero Not Or Pad Pow QuantizeLinear Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape
    Round ScatterElements ScatterND Shape Sigmoid Sign Sin Size Slice Split Sqrt Squeeze Sub Sum
    Tanh Tile Transpose Trilu Unique Unsqueeze Where Xor""".split()
)

BROADCASTING = frozenset(
    """Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Or Pow Sub Sum
    Where Xor""".split()
)

FIRST_EVALUATED = {"DequantizeLinear": 19}
"""Opset before which ONNX's reference lacks an operator, whose older nodes mean the same there."""

SIZES = {"ConstantOfShape": 0, "Tile": 1}
"""Input that determines the size of the result, and must not be negative."""

MAX_FOLDED_BYTES = 4 << 30
"""Most bytes of computed constants; larger models are refused, as they could exhaust the memory."""


def fold_constants(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """Replace nodes with constant results by weights, until there are none left.

    Parameters
    ----------
    model : onnx.ModelProto
        Model with inferred shapes; changed in place.
    weights : dict of str to numpy.ndarray
        The weights stored outside the model; computed ones are added.

    Returns
    -------
    onnx.ModelProto
        The model, its shapes inferred again.
    """
    folder = _Folder(model, weights)
    while folder.run(model):
        del model.graph.value_info[:]  # a folded size is better than the name that it had
        model = infer_shapes(model)
    return model


class _Folder:
    """Traverses the nodes of a model's main graph and collects constants."""

    def __init__(self, model: onnx.ModelProto, weights: Weights) -> None:
        self.weights = weights
        self.opsets = list(model.opset_import)
        self.values: dict[str, np.ndarray | NarrowWeight] = {}
        self.shapes: dict[str, tuple[int, ...] | None] = {}
        self.types: dict[str, int] = {}
        self.small: dict[str, onnx.TensorProto] = {}
        self.folded_bytes = 0

    def run(self, model: onnx.ModelProto) -> bool:
        """Fold all nodes that can be folded now; return whether there were any."""
        graph = model.graph
        infos = (*graph.input, *graph.value_info, *graph.output)
        self.shapes = {info.name: static_shape(info) for info in infos}
        self.small = {tensor.name: tensor for tensor in graph.initializer}
        self.types = {info.name: info.type.tensor_type.elem_type for info in infos}
        self.types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
        nodes = list(graph.node)
        kept = [node for node in nodes if not self._fold(node)]
        if len(kept) == len(nodes):
            return False
        replace_nodes(graph, kept)
        self._store(graph, used_names(model))
        return True

    def _fold(self, node: onnx.NodeProto) -> bool:
        """Compute the node's results if they are constant; return whether they were."""
        if not is_default_domain(node) or self._is_empty(node):
            return is_default_domain(node)
        if node.op_type not in FOLDABLE:
            return False
        if node.op_type == "CastLike" and self.types.get(node.input[1]):
            _name_type(node, self.types[node.input[1]])
        shape = self.shapes.get(node.input[0]) if node.input else None
        if node.op_type in ("Shape", "Size") and shape is not None:
            self.values[node.output[0]] = _shape_value(node, shape)
            return True
        narrow = self._narrow(node)
        if narrow is not None:
            self.values[node.output[0]] = narrow
            return True
        feeds = {}
        for name in filter(None, node.input):
            value = self._value(name)
            if value is None:
                return False
            if node.op_type == "ReduceLogSumExp" and not np.isfinite(value).all():
                return False  # what evaluates it subtracts infinities
            feeds[name] = value
        if node.op_type == "QuantizeLinear" and not is_divisor(feeds[node.input[1]]):
            return False  # such a node is refused later
        if not self._reserve(node, feeds) or _is_beyond(node, feeds):
            return False
        results = _evaluate(node, feeds, self.opsets)
        if results is None:
            return False
        self.values.update(results)
        return True

    def _narrow(self, node: onnx.NodeProto) -> NarrowWeight | None:
        """The result of a node that is a matrix of integers with scales."""
        if node.op_type == "Transpose":
            source = self.weights.get(node.input[0], self.values.get(node.input[0]))
            if not isinstance(source, NarrowWeight):
                return None
            return (
                source if list(attribute(node, "perm", [1, 0])) == [0, 1] else source.transposed()
            )
        if node.op_type != "DequantizeLinear":
            return None
        x, scale, zero = [*node.input, ""][:3]
        values = [self._value(name) if name else None for name in (x, scale, zero)]
        if values[0] is None or values[1] is None or (zero and values[2] is None):
            return None
        kind = attribute(node, "output_dtype", 0)
        return narrow_weight(
            values[0],
            values[1],
            values[2],
            attribute(node, "axis", 1),
            attribute(node, "block_size", 0),
            helper.tensor_dtype_to_np_dtype(kind) if kind else None,
        )

    def _is_empty(self, node: onnx.NodeProto) -> bool:
        """Return whether no result has elements; then their values are known."""
        names = [name for name in node.output if name]
        shapes = [self.shapes.get(name) for name in names]
        if not shapes or not all(shape is not None and 0 in shape for shape in shapes):
            return False
        for name, shape in zip(names, shapes, strict=True):
            kind = helper.tensor_dtype_to_np_dtype(self.types[name])
            self.values[name] = np.empty(shape or (), kind)
        return True

    def _value(self, name: str) -> np.ndarray | None:
        """Return the value of a tensor if it is constant."""
        if name in self.weights:
            return floats_of(self.weights[name])
        if name not in self.values and name in self.small:
            self.values[name] = to_array(self.small[name])
        value = self.values.get(name)
        return None if value is None else floats_of(value)

    def _reserve(self, node: onnx.NodeProto, feeds: dict[str, np.ndarray]) -> bool:
        """Account for the results' size before they take any memory; False if it is unknown."""
        values = [feeds[name] for name in node.input if name]
        _refuse_negative_sizes(node, values)
        elements = _result_elements(node, values)
        if elements is None:
            return False
        what = f"{node_label(node)} ({node.op_type})"
        if elements > MAX_ELEMENTS:
            raise InvalidModelError(
                f"{what} makes a constant of {elements} elements; expected at most {MAX_ELEMENTS}"
            )
        self.folded_bytes += 8 * elements
        if self.folded_bytes > MAX_FOLDED_BYTES:
            raise InvalidModelError(
                f"{what}: the constants computed by the model take more than "
                f"{MAX_FOLDED_BYTES >> 30} GiB; store them as initialisers"
            )
        return True

    def _store(self, graph: onnx.GraphProto, used: set[str]) -> None:
        """Keep constants that are still used: large ones as weights, small ones in the graph."""
        keep_tensors(graph, used)
        for name in sorted(used & self.values.keys() - self.small.keys()):
            value = self.values.pop(name)
            if isinstance(value, NarrowWeight) or value.size > SMALL_ELEMENTS:
                add_weight(graph, self.weights, name, value)
            else:
                graph.initializer.append(numpy_helper.from_array(value, name))


def _name_type(node: onnx.NodeProto, dtype: int) -> None:
    """Turn a CastLike into a Cast to a known type."""
    node.op_type = "Cast"
    del node.input[1:]
    set_attributes(node, to=dtype)


def _shape_value(node: onnx.NodeProto, shape: tuple[int, ...]) -> np.ndarray:
    if node.op_type == "Size":
        return np.array(math.prod(shape), np.int64)
    start, end = attribute(node, "start", 0), attribute(node, "end", len(shape))
    return np.array(shape[start:end], np.int64)


def _refuse_negative_sizes(node: onnx.NodeProto, values: list[np.ndarray]) -> None:
    """Refuse negative sizes, two of which would give a positive number of elements."""
    index = SIZES.get(node.op_type)
    if index is not None and index < len(values) and (values[index] < 0).any():
        raise InvalidModelError(
            f"{node_label(node)} ({node.op_type}) makes a constant of the negative size "
            f"{values[index].min()}"
        )


def _result_elements(node: onnx.NodeProto, values: list[np.ndarray]) -> int | None:
    """Upper bound of the number of elements of all results; None if it is unknown."""
    try:
        if node.op_type == "ConstantOfShape":
            return math.prod(values[0].tolist())
        if node.op_type == "Expand":
            return math.prod(np.broadcast_shapes(values[0].shape, tuple(values[1].tolist())))
        if node.op_type == "Tile":
            return values[0].size * math.prod(values[1].tolist())
        if node.op_type == "Range":
            start, limit, delta = (value.item() for value in values)
            return max(0, math.ceil((limit - start) / delta))
        if node.op_type == "Gather":
            rows = max(1, values[0].shape[attribute(node, "axis", 0)])
            return values[0].size // rows * values[1].size
        if node.op_type in BROADCASTING:
            return math.prod(np.broadcast_shapes(*(value.shape for value in values)))
    except (ValueError, TypeError, IndexError, ArithmeticError):
        return None
    return sum(value.size for value in values)


def _is_beyond(node: onnx.NodeProto, feeds: dict[str, np.ndarray]) -> bool:
    """Return whether a GatherElements has an index out of bounds; numpy wraps it by steps."""
    if node.op_type != "GatherElements":
        return False
    data, indices = (feeds[name] for name in node.input)
    axis = attribute(node, "axis", 0)
    if not -data.ndim <= axis < data.ndim:
        return True
    size = data.shape[axis]
    return bool(((indices < -size) | (indices >= size)).any())


def _evaluate(
    node: onnx.NodeProto,
    feeds: dict[str, np.ndarray],
    opsets: list[onnx.OperatorSetIdProto],
) -> dict[str, np.ndarray] | None:
    """Run one node by ONNX's reference; None if the reference cannot."""
    names = [name for name in node.output if name]
    first = FIRST_EVALUATED.get(node.op_type, 0)
    if any(opset.domain in ("", "ai.onnx") and opset.version < first for opset in opsets):
        opsets = [helper.make_opsetid("", first)]
    function = helper.make_function("fold", "fold", list(feeds), names, [node], opsets)
    try:
        with warnings_ignored(), np.errstate(all="ignore"):
            results = ReferenceEvaluator(function).run(None, feeds, attributes={})
    except Exception:  # nodes that the reference fails on stay in the graph
        return None
    if not all(isinstance(result, np.ndarray | np.generic) for result in results):
        return None
    return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}
