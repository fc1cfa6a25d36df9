# SPDX-License-Identifier: Apache-2.0
"""Operators of our own in a model whose shapes onnx still has to infer.

A TreeEnsemble of one leaf stands for such an operator, and its metadata say which: onnx knows that
it makes ``[rows, n_targets]`` of ``[rows, features]``, of the same type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ...model.expansion import Expansion
from ..operator import ML_DOMAIN

HAS_TREE_ENSEMBLE = 5
"""Version of ``ai.onnx.ml`` that has the TreeEnsemble."""

_CARRIED = "tvm_fusion.carried"


def carry(
    parts: Expansion,
    operator: str,
    x: str,
    columns: int,
    tables: Mapping[str, np.ndarray] | None = None,
    kind: int = onnx.TensorProto.FLOAT,
    **attributes: Any,
) -> str:
    """Append what stands for an operator of ours.

    Parameters
    ----------
    parts : Expansion
        Where it is appended.
    operator : str
        The operator.
    x : str
        Its first input, [rows, features].
    columns : int
        Columns of its result, [rows, columns].
    tables : mapping, optional
        Constants that are its other inputs.
    kind : int
        ONNX element type of ``x`` and the result.
    attributes : dict
        Attributes of the operator: numbers, texts or lists of one of these.

    Returns
    -------
    str
        Name of the result.
    """
    nothing = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(kind)))
    indices = ("nodes_featureids", "nodes_truenodeids", "nodes_falsenodeids", "leaf_targetids")
    result = parts.emit(
        "TreeEnsemble",
        x,
        domain=ML_DOMAIN,
        n_targets=columns,
        nodes_splits=nothing,
        leaf_weights=nothing,
        nodes_modes=numpy_helper.from_array(np.zeros(1, np.uint8)),
        **dict.fromkeys((*indices, "tree_roots"), [0]),
        **dict.fromkeys(("nodes_trueleafs", "nodes_falseleafs"), [1]),
    )
    given = (tables or {}).items()
    names = [parts.facts.add_weight(f"{result}/{hint}", table) for hint, table in given]
    carried = json.dumps([operator, names, {"columns": columns, **attributes}])
    parts.nodes[-1].metadata_props.add(key=_CARRIED, value=carried)
    return result


def is_carrier(node: onnx.NodeProto) -> bool:
    """Return whether the node stands for an operator of ours."""
    return _carried(node) is not None


def unload_carriers(model: onnx.ModelProto) -> None:
    """Put the operators of ours into the places of what stands for them."""
    for node in model.graph.node:
        carried = _carried(node)
        if carried is not None:
            node.op_type, names, attributes = json.loads(carried)
            node.domain = ""
            node.input.extend(names)
            del node.attribute[:]
            node.attribute.extend(helper.make_attribute(*item) for item in attributes.items())


def _carried(node: onnx.NodeProto) -> str | None:
    return next((entry.value for entry in node.metadata_props if entry.key == _CARRIED), None)
