# SPDX-License-Identifier: Apache-2.0
"""Facts about the tensors in an ONNX model: types, shapes, constant values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .graph_edits import default_opset, is_default_domain, used_names
from .narrow_weight import NarrowWeight
from .weights import SMALL_ELEMENTS, Weights, add_weight, floats_of, to_array

SIGNED_TYPES = frozenset(
    getattr(onnx.TensorProto, name) for name in ("INT8", "INT16", "INT32", "INT64")
)
INTEGER_TYPES = SIGNED_TYPES | frozenset(
    getattr(onnx.TensorProto, name) for name in ("UINT8", "UINT16", "UINT32", "UINT64")
)


class GraphFacts:
    """A view of a model with inferred shapes, and a way to add constants to it.

    Parameters
    ----------
    model : onnx.ModelProto
        Model with inferred shapes.
    weights : Weights
        The weights stored outside the model.
    """

    def __init__(self, model: onnx.ModelProto, weights: Weights) -> None:
        graph = model.graph
        infos = (*graph.input, *graph.value_info, *graph.output)
        self.opset = default_opset(model) or 1
        self._graph = graph
        self._from_data: set[str] | None = None
        self._weights = weights
        self._infos = {info.name: info for info in infos}
        self._small = {tensor.name: tensor for tensor in graph.initializer}
        self._names = {name for node in graph.node for name in node.output}
        self._names |= self._infos.keys() | self._small.keys() | used_names(model)

    def dims(self, name: str) -> tuple[int | None, ...] | None:
        """Sizes of a tensor, None for each symbolic one; None if not even the rank is known."""
        if name in self._weights:
            return self._weights[name].shape
        if name in self._small:
            return tuple(self._small[name].dims)
        if name not in self._infos:
            return None
        tensor = self._infos[name].type.tensor_type
        if not tensor.HasField("shape"):
            return None
        return tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor if all its sizes are known."""
        dims = self.dims(name)
        return None if dims is None or None in dims else dims  # type: ignore[return-value]

    def dtype(self, name: str) -> int:
        """ONNX element type of a tensor; UNDEFINED if unknown."""
        if name in self._small:
            return self._small[name].data_type
        if name in self._infos:
            return self._infos[name].type.tensor_type.elem_type
        return onnx.TensorProto.UNDEFINED

    def constant(self, name: str) -> np.ndarray | None:
        """Value of a tensor if it is constant."""
        if name in self._weights:
            return floats_of(self._weights[name])
        return to_array(self._small[name]) if name in self._small else None

    def depends_on_data(self, name: str) -> bool:
        """Return whether a tensor depends on more than shapes and constants.

        The answer is of the graph as it was when this was first asked.
        """
        if self._from_data is None:
            known = self._small.keys() | self._weights.keys()
            found = {value.name for value in self._graph.input} - known
            for node in self._graph.node:
                is_size = node.op_type in ("Shape", "Size") and is_default_domain(node)
                if not is_size and not found.isdisjoint(node.input):
                    found.update(name for name in node.output if name)
            self._from_data = found
        return name in self._from_data

    def add_constant(self, hint: str, value: np.ndarray) -> str:
        """Add a constant and return its name: large ones are weights, as those of the model."""
        if value.size > SMALL_ELEMENTS:
            return self.add_weight(hint, value)
        name = self.fresh(hint)
        tensor = numpy_helper.from_array(value, name)
        self._graph.initializer.append(tensor)
        self._small[name] = tensor
        return name

    def add_weight(self, hint: str, value: np.ndarray | NarrowWeight) -> str:
        """Add a constant outside of the graph, where it stays though no node reads it yet."""
        name = self.fresh(hint)
        add_weight(self._graph, self._weights, name, value)
        return name

    def add_tensor(self, hint: str, dtype: int, shape: Sequence[int]) -> str:
        """Declare a tensor that a new node computes, and return its name."""
        name = self.fresh(hint)
        self.declare(name, dtype, shape)
        return name

    def declare(self, name: str, dtype: int, shape: Sequence[int | None]) -> None:
        """State the type and the shape of a tensor that a new node computes."""
        self._infos[name] = helper.make_tensor_value_info(name, dtype, shape)

    def fresh(self, hint: str) -> str:
        """A name that no tensor has."""
        name, number = hint, 0
        while name in self._names:
            number += 1
            name = f"{hint}_{number}"
        self._names.add(name)
        return name
