# SPDX-License-Identifier: Apache-2.0
"""Base of the builders of ONNX models: nodes, named inputs, seeded weights, the finished model.

Random weights are optional: a full-size model without them is a few kilobytes, and is enough for
the checker, shape inference, and TVM's importer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8

Shape = Sequence[int | str]


class ModelBuilder:
    """Collects inputs, nodes and initialisers.

    Parameters
    ----------
    name : str
        Name of the graph.
    seed : int
        Seed of every random weight; the same calls always give the same model.
    weights : bool
        Whether random weights are drawn. Otherwise they are inputs of the model, after its own.
    """

    def __init__(self, name: str, seed: int, weights: bool = True) -> None:
        self.name = name
        self._has_weights = weights
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: dict[str, onnx.ValueInfoProto] = {}
        self._limits: dict[str, tuple[int, ...]] = {}
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._absent: dict[str, onnx.ValueInfoProto] = {}

    def add_input(self, name: str, shape: Shape, *limits: int) -> str:
        """Declare an input and return its name.

        Without limits it is float32, else int64 from 0 to below the limit; there may be one limit
        for each place of the last axis.
        """
        dtype = TensorProto.INT64 if limits else TensorProto.FLOAT
        self._inputs[name] = helper.make_tensor_value_info(name, dtype, shape)
        if limits:
            self._limits[name] = limits
        return name

    def constant(self, name: str, values: np.ndarray) -> str:
        """Store an initialiser unless one of this name exists, and return its name."""
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(values, name)
        return name

    def weight(self, name: str, values: np.ndarray) -> str:
        """Store random weights, unless they exist or are left out; return their name."""
        if self._has_weights:
            return self.constant(name, values)
        dtype = helper.np_dtype_to_tensor_dtype(values.dtype)
        self._absent[name] = helper.make_tensor_value_info(name, dtype, values.shape)
        return name

    def normal(self, shape: tuple[int, ...], deviation: float) -> np.ndarray:
        """Normally distributed float32; zeros that take no memory if weights are left out."""
        if not self._has_weights:
            return np.broadcast_to(np.float32(0), shape)
        return self._rng.standard_normal(shape, dtype=np.float32) * np.float32(deviation)

    def uniform(self, count: int, low: float, high: float) -> np.ndarray:
        """Evenly distributed float32."""
        return self._rng.uniform(low, high, count).astype(np.float32)

    def append(
        self, op_type: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any
    ) -> list[str]:
        """Append a node and return the names of its outputs, the first of which names it."""
        name = f"{op_type.lower()}_{len(self._nodes)}"
        names = [name, *(f"{name}.{index}" for index in range(1, outputs))]
        self._nodes.append(helper.make_node(op_type, inputs, names, name=name, **attributes))
        return names

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append a node with one output and return the output's name."""
        return self.append(op_type, inputs, **attributes)[0]

    def model(self, outputs: Mapping[str, tuple[str, Shape]]) -> onnx.ModelProto:
        """Return the model whose outputs are float32 tensors: name, then (tensor, shape)."""
        renamed = {tensor: name for name, (tensor, _) in outputs.items()}
        for node in self._nodes:
            node.input[:] = [renamed.get(name, name) for name in node.input]
            node.output[:] = [renamed.get(name, name) for name in node.output]
        graph = helper.make_graph(
            self._nodes,
            self.name,
            [*self._inputs.values(), *self._absent.values()],
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                for name, (_, shape) in outputs.items()
            ],
            list(self._initializers.values()),
        )
        opset = helper.make_operatorsetid("", OPSET)
        model = helper.make_model(
            graph, producer_name="tvm-fusion", opset_imports=[opset], ir_version=IR_VERSION
        )
        limits = {name: " ".join(map(str, values)) for name, values in self._limits.items()}
        helper.set_model_props(model, limits)
        return model


def random_inputs(model: onnx.ModelProto, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    """Inputs of a model that a :class:`ModelBuilder` made: normal floats, integers in range.

    Parameters
    ----------
    model : onnx.ModelProto
        The model.
    seed : int
        Seed of the numbers.
    **sizes : int
        Sizes of symbolic dimensions by name.

    Returns
    -------
    dict of str to numpy.ndarray
    """
    rng = np.random.default_rng(seed)
    limits = {entry.key: [*map(int, entry.value.split())] for entry in model.metadata_props}
    feed: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in dims]
        if value.name in limits:
            feed[value.name] = rng.integers(0, limits[value.name], shape)
        else:
            feed[value.name] = rng.standard_normal(shape, dtype=np.float32)
    return feed
