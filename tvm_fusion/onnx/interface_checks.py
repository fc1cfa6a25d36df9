# SPDX-License-Identifier: Apache-2.0
"""Check that the inputs and outputs of a model are dense tensors of numbers."""

from __future__ import annotations

import onnx

from ..errors import InvalidModelError, UnsupportedOperatorError
from .rewrites.classical.refusals import TEXT_ADVICE

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
