# SPDX-License-Identifier: Apache-2.0
"""Operands and types of the rules: 16-bit tensors are computed in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst

from schedules.tir.extents import constant
from schedules.workload.reduce import FLOATS

from ..core.constants import array_of, tensor_constant
from ..core.graph import Graph

NARROW = ("float16", "bfloat16")


def extents(expr: relax.Expr) -> list[tirx.Expr] | None:
    """The extents of a tensor of floats without an empty axis; None for anything else."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    if ty.dtype is None or str(ty.dtype) not in FLOATS:
        return None
    shape = list(ty.shape.values)
    return shape if shape and all(constant(extent) != 0 for extent in shape) else None


def widen(graph: Graph, expr: relax.Expr) -> relax.Expr:
    """``expr``, in float32 if it has 16 bits."""
    if str(expr.ty.dtype) not in NARROW:
        return expr
    if isinstance(expr, GenericConst):
        return tensor_constant(array_of(expr), "float32")
    return graph.emit_once(relax.op.astype(expr, "float32"))


def narrow(graph: Graph, value: relax.Expr, dtype: object) -> relax.Expr:
    """``value``, not yet bound, rounded to ``dtype`` if that has 16 bits."""
    if str(dtype) not in NARROW:
        return value
    return relax.op.astype(graph.emit(value), str(dtype))


def number(value: float, like: relax.Expr) -> relax.Expr:
    """A scalar constant of the type of ``like``."""
    return tensor_constant(np.asarray(value), like.ty.dtype)


def spread(graph: Graph, vector: relax.Expr, shape: Sequence, axes: Sequence[int]) -> relax.Expr:
    """``vector`` of the extents of ``axes``, ascending, shaped to broadcast against ``shape``."""
    ndim = len(shape)
    if list(axes) == list(range(ndim - len(axes), ndim)):
        return vector
    return reshape(graph, vector, [n if axis in axes else 1 for axis, n in enumerate(shape)])


def reshape(graph: Graph, expr: relax.Expr, shape: Sequence) -> relax.Expr:
    """``expr`` in another shape; a constant stays a constant."""
    if isinstance(expr, GenericConst) and all(constant(extent) is not None for extent in shape):
        values = array_of(expr).reshape([int(extent) for extent in shape])
        return tensor_constant(values, expr.ty.dtype)
    return graph.emit_once(relax.op.reshape(expr, shape))
