# SPDX-License-Identifier: Apache-2.0
"""Removal of reshapes around a product of matrices.

::

    reshape(matmul(reshape(x, [B * S, K]), w) + bias, [B, S, N])   ->   matmul(x, w) + bias

Exporters write layers of tensors with three axes in this way, because ONNX's Gemm knows only two.
Without the reshapes, element-wise ops that follow are fused with the product. They stay where ``S``
is small and ``B * S`` is not: a kernel of many rows reads ``w`` far less often than one of ``B``
products of few rows. So it is with the steps of a recurrent layer. GPU kernels take the rows of all
``B`` as those of one product, with or without reshapes.
"""

from __future__ import annotations

import tvm_ffi
from tvm import relax, tirx

from schedules.cpu.loops.matmul.dense import PACKED_ROWS

from ...core.expressions import Value
from ...core.graph import Graph


def unflatten_matmul(graph: Graph, call: relax.Expr) -> Value:
    """Rewrite the last reshape ``call``; product and sum must have no other reader."""
    return None if _has_few_rows(call) else unflatten_any_matmul(graph, call)


def unflatten_any_matmul(graph: Graph, call: relax.Expr) -> Value:
    """Rewrite it for a GPU, also where ``S`` is small."""
    inner, bias = _product_and_bias(graph, call.args[0])
    product = graph.definition(inner, "relax.matmul")
    if product is None or not _are_used_once(graph, call.args[0], inner):
        return None
    flat, weight = product.args
    flattened = graph.definition(flat, "relax.reshape")
    if flattened is None or flat.ty.ndim != 2 or weight.ty.ndim != 2:
        return None
    source, result, rows, columns = map(_extents, (flattened.args[0], call, flat, product))
    if source is None or not result or rows is None or columns is None:
        return None
    if not _same_extents([*source, columns[-1]], [*result[:-1], rows[-1], result[-1]]):
        return None
    value = relax.op.matmul(flattened.args[0], weight, product.attrs.out_dtype or None)
    return value if bias is None else relax.op.add(graph.emit(value), bias)


def _product_and_bias(graph: Graph, value: relax.Expr) -> tuple[relax.Expr, relax.Expr | None]:
    """The product and the vector that ``value`` is the sum of; else ``value`` itself."""
    add = graph.definition(value, "relax.add")
    for product, bias in () if add is None else (add.args, reversed(add.args)):
        if graph.definition(product, "relax.matmul") is not None and bias.ty.ndim <= 1:
            return product, bias
    return value, None


def _are_used_once(graph: Graph, *values: relax.Expr) -> bool:
    return all(graph.has_one_use(value) for value in values)


def _has_few_rows(call: relax.Expr) -> bool:
    """Whether the last reshape makes small groups of many rows."""
    rows, result = _extents(call.args[0]), _extents(call)
    if not rows or not result or len(result) < 2:
        return False
    are_many = isinstance(rows[0], tirx.IntImm) and not _is_small(rows[0])
    return are_many and _is_small(result[-2])


def _extents(tensor: relax.Expr) -> list | None:
    shape = tensor.ty.shape
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else None


def _is_small(extent: tirx.Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) < PACKED_ROWS


def _same_extents(first: list, second: list) -> bool:
    return len(first) == len(second) and all(map(tvm_ffi.structural_equal, first, second))
