# SPDX-License-Identifier: Apache-2.0
"""Choice of a model's outputs, and the check that its interface is dense tensors of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ..errors import InvalidInputError, InvalidModelError, UnsupportedOperatorError
from .model.graph_edits import attribute, drop_unread_nodes, sort_nodes, used_names
from .operators.classical.refusals import TEXT_ADVICE
from .operators.operator import ML_DOMAIN

NUMBERS = frozenset(
    getattr(onnx.TensorProto, name)
    for name in (
        *("FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16", "BOOL"),
        *("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
        *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"),
    )
)


def check_interface(model: onnx.ModelProto) -> None:
    """Refuse inputs, outputs and weights that compiled code does not support."""
    graph = model.graph
    values = [("input", value) for value in graph.input]
    # The type of an output that declares none is inferred.
    values += [("output", value) for value in graph.output if value.HasField("type")]
    for role, value in values:
        kind = value.type.WhichOneof("value")
        if kind is None:
            raise InvalidModelError(f"{role} {value.name!r} has no type; expected a tensor")
        if kind != "tensor_type":
            raise UnsupportedOperatorError(
                f"{role} {value.name!r} is {kind.replace('_', ' ')}; expected a tensor: export the "
                "model with one for each tensor in it"
            )
        element = value.type.tensor_type.elem_type
        if element not in NUMBERS:
            names = onnx.TensorProto.DataType.Name
            known = onnx.TensorProto.DataType.values()
            found = names(element) if element in known else f"unknown type {element}"
            advice = f"; {TEXT_ADVICE}" if element == onnx.TensorProto.STRING else ""
            refusal = UnsupportedOperatorError if element in known else InvalidModelError
            raise refusal(
                f"{role} {value.name!r} holds elements of {found}; expected one of "
                f"{', '.join(sorted(names(number) for number in NUMBERS))}{advice}"
            )
    for sparse in graph.sparse_initializer:
        raise UnsupportedOperatorError(
            f"initialiser {sparse.values.name!r} is sparse; store it as a dense tensor"
        )


def choose_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Let a model return the tensors of these names, in this order.

    Raises
    ------
    InvalidInputError
        If there are none, or one comes twice or is no tensor of the main graph.
    """
    graph = model.graph
    known = {value.name: value for value in graph.output}
    computed = {name for node in graph.node for name in node.output if name}
    if isinstance(names, str) or not names or len(set(names)) < len(names):
        raise InvalidInputError(f"outputs is {names!r:.80}; expected a list of different names")
    for name in names:
        if name not in computed:
            raise InvalidInputError(
                f"outputs has {name!r:.80}, which no node computes; expected names of results, as "
                f"{', '.join(map(repr, known))}"
            )
    sort_nodes(graph)
    # The type of an output that declares none is inferred.
    values = [known.get(name) or onnx.ValueInfoProto(name=name) for name in names]
    del graph.output[:]
    graph.output.extend(values)
    drop_unread_nodes(model)
    _number_unread_labels(model)


def _number_unread_labels(model: onnx.ModelProto) -> None:
    """Replace labels that are text by their places in classifiers of which only scores are read."""
    read = used_names(model)
    for node in model.graph.node:
        labels = attribute(node, "classlabels_strings")
        if node.domain == ML_DOMAIN and labels and node.output[0] not in read:
            is_tree = node.op_type == "TreeEnsembleClassifier"
            numbers = "classlabels_int64s" if is_tree else "classlabels_ints"
            kept = [entry for entry in node.attribute if entry.name != "classlabels_strings"]
            del node.attribute[:]
            node.attribute.extend(kept)
            node.attribute.append(onnx.helper.make_attribute(numbers, range(len(labels))))
