# SPDX-License-Identifier: Apache-2.0
"""Det: determinants of the last two dimensions, by a kernel of our own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx
from tvm import relax

from schedules.cpu.loops.determinants import determinants

from ..model.tensor_facts import GraphFacts


def translate_determinant(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Determinants of [..., size, size]; those of 16-bit numbers are computed in float32."""
    x = inputs[0]
    own = str(x.ty.dtype)
    dtype = own if own == "float64" else "float32"
    *outer, _, size = x.ty.shape
    batch = math.prod(outer) if outer else 1
    x = builder.normalize(relax.op.astype(x, dtype))
    x = builder.normalize(relax.op.reshape(x, (batch, size, size)))
    kernel = builder.add_func(determinants(batch, int(size), dtype), "determinants")
    types = [
        relax.TensorType((batch,), dtype),
        relax.TensorType((batch, size, size), dtype),
        relax.TensorType((batch,), "int64"),
    ]
    all_results = builder.emit(relax.call_tir(kernel, [x], types))
    result = builder.emit(relax.TupleGetItem(all_results, 0))
    return relax.op.astype(builder.normalize(relax.op.reshape(result, outer)), own)


def determinant_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why determinants cannot be computed, if any."""
    dims = facts.dims(node.input[0])
    if dims is None or len(dims) < 2 or None in dims[-2:]:
        return f"the size of its matrices {node.input[0]!r} is only known at run time"
    return "its matrices are empty" if 0 in dims[-2:] else None
