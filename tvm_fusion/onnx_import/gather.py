# SPDX-License-Identifier: Apache-2.0
"""Translate Gather so that no index leaves its tensor, with few ops.

TVM's own translation computes the extent when the model runs, and reads wherever an index points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, tirx
from tvm.ir import GenericConst


def translate_gather(
    builder: relax.BlockBuilder, inputs: Sequence[Any], axis: int
) -> relax.Expr | None:
    """``take`` of a tensor along an axis of known extent; None for anything else.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Takes what is bound on the way.
    inputs : sequence
        Data, and int32 or int64 indices from ``-extent`` to ``extent - 1``; constant ones are not
        negative. What lies beyond reads the first or the last element.
    axis : int
        The axis.

    Returns
    -------
    relax.Expr or None
    """
    data, indices = inputs
    if not all(isinstance(each.ty, relax.TensorType) for each in inputs):
        return None  # a shape
    if (
        not isinstance(data.ty.shape, relax.ShapeExpr)
        or isinstance(data, GenericConst)
        and (isinstance(indices, GenericConst))
    ):
        return None
    extent = data.ty.shape.values[axis]
    if not isinstance(extent, tirx.IntImm):
        return None
    if not isinstance(indices, GenericConst):
        dtype = str(indices.ty.dtype)
        is_negative = builder.emit(relax.op.less(indices, relax.const(0, dtype)))
        from_end = builder.emit(relax.op.add(indices, relax.const(int(extent), dtype)))
        indices = builder.emit(relax.op.where(is_negative, from_end, indices))
    return builder.normalize(relax.op.take(data, indices, axis, mode="clip"))
