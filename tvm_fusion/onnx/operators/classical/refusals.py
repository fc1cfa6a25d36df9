# SPDX-License-Identifier: Apache-2.0
"""Operators and attributes of ``ai.onnx.ml`` that need text or maps, and how to avoid them."""

from __future__ import annotations

import onnx

from ...model.graph_edits import attribute
from ..operator import ML_DOMAIN, Operator

_TEXT = "text cannot be compiled; encode it as integers before the model"

_OPERATORS = {
    "CastMap": "maps cannot be compiled; give the model an array of features",
    "CategoryMapper": _TEXT,
    "DictVectorizer": "maps cannot be compiled; give the model an array of features",
    "ZipMap": (
        "maps cannot be compiled; return the array that it reads, by outputs=[..., {0!r}] "
        "(--outputs), or convert the model with options={{id(model): {{'zipmap': False}}}} "
        "(skl2onnx) or zipmap=False (onnxmltools)"
    ),
}

_LABELS = (
    "its labels are text; leave them out by outputs= (--outputs), convert the model with "
    "options={id(model): {'nocl': True, 'zipmap': False}} (skl2onnx) to get their places among the "
    "classes, or train it with integers as labels"
)

_TEXTS = {
    "cats_strings": _TEXT,
    "classes_strings": _TEXT,
    "classlabels_strings": _LABELS,
    "keys_strings": _TEXT,
    "values_strings": _LABELS,
}
"""Attributes that hold text."""

TEXT_ADVICE = _TEXT


def classical_refusal(node: onnx.NodeProto) -> str | None:
    """Return why a node cannot be imported whatever its inputs are, if so."""
    if node.domain != ML_DOMAIN:
        return None
    if node.op_type in _OPERATORS:
        return _OPERATORS[node.op_type].format(next(iter(node.input), ""))
    for name, reason in _TEXTS.items():
        if attribute(node, name):
            return reason
    for name in ("keys_tensor", "values_tensor"):
        tensor = attribute(node, name)
        if isinstance(tensor, onnx.TensorProto) and tensor.data_type == onnx.TensorProto.STRING:
            return _TEXT if name == "keys_tensor" else _LABELS
    return None


REFUSED = [Operator(name, ML_DOMAIN, refuse=classical_refusal) for name in _OPERATORS]
