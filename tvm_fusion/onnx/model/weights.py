# SPDX-License-Identifier: Apache-2.0
"""Separate storage of the weights of an ONNX model while it is rewritten.

onnx processes a model as a message of at most 2 GB, copied each time. Without its weights a model
always fits, and the weights are not copied.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tvm_fusion.errors import InvalidModelError

from .graph_edits import used_names
from .loader import load_all_external_data, load_external_data
from .narrow_weight import NarrowWeight
from .shapes import check_size

Weights = dict[str, np.ndarray | NarrowWeight]

SMALL_ELEMENTS = 256
"""Initialisers up to this size, including all axes and shapes, stay in the model."""


def detach_weights(model: onnx.ModelProto) -> Weights:
    """Remove the large initialisers from the model; inputs of their shapes replace them.

    Parameters
    ----------
    model : onnx.ModelProto
        Changed in place; afterwards it has no external data either.

    Returns
    -------
    Weights
    """
    graph = model.graph
    weights: Weights = {}
    kept = []
    for tensor in graph.initializer:
        check_size(tensor.name, tensor.dims)
        if math.prod(tensor.dims) > SMALL_ELEMENTS:
            add_weight(graph, weights, tensor.name, to_array(load_external_data(tensor)))
        else:
            kept.append(tensor.name)
    keep_tensors(graph, set(kept))
    load_all_external_data(model)
    return weights


def add_weight(
    graph: onnx.GraphProto, weights: Weights, name: str, value: np.ndarray | NarrowWeight
) -> None:
    """Store one more tensor outside the graph."""
    weights[name] = value
    dtype = helper.np_dtype_to_tensor_dtype(value.dtype)
    graph.input.append(helper.make_tensor_value_info(name, dtype, value.shape))


def floats_of(value: np.ndarray | NarrowWeight) -> np.ndarray:
    """The elements of a weight."""
    return value.floats() if isinstance(value, NarrowWeight) else value


def keep_tensors(graph: onnx.GraphProto, names: set[str]) -> None:
    """Remove all initialisers but the named ones."""
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in names:
            del graph.initializer[index]


def drop_stand_ins(model: onnx.ModelProto, weights: Weights) -> None:
    """Remove the inputs that replaced weights, and the weights that nothing reads any more."""
    graph = model.graph
    for index in reversed(range(len(graph.input))):
        if graph.input[index].name in weights:
            del graph.input[index]
    for name in weights.keys() - used_names(model):
        del weights[name]


def to_array(tensor: onnx.TensorProto) -> np.ndarray:
    """Return the value of a tensor, refusing one whose data do not fit its type and shape."""
    try:
        return numpy_helper.to_array(tensor)
    except Exception as error:  # numpy_helper passes on errors of numpy and struct
        raise InvalidModelError(
            f"tensor {tensor.name!r} of shape {tuple(tensor.dims)} holds other data: {error}"
        ) from error
