# SPDX-License-Identifier: Apache-2.0
"""Translation of Gather to one op without out-of-bounds reads.

TVM's own translation computes the extent at run time, and does not check the indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import GenericConst


def translate_gather(
    builder: relax.BlockBuilder, inputs: Sequence[Any], axis: int
) -> relax.Expr | None:
    """``take`` of a tensor along an axis, or a kernel if its extent is symbolic; None for shapes.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Where the kernel is added.
    inputs : sequence
        Data, and int32 or int64 indices from ``-extent`` to ``extent - 1``; constant ones are not
        negative. Other indices are taken modulo the extent; where that is symbolic, one out of
        range is the nearest.
    axis : int
        The axis.

    Returns
    -------
    relax.Expr or None
    """
    data, indices = inputs
    if not all(isinstance(each.ty, relax.TensorType) for each in inputs):
        return None  # a shape
    are_constant = [isinstance(each, GenericConst) for each in inputs]
    if all(are_constant) or not isinstance(data.ty.shape, relax.ShapeExpr):
        return None
    if not isinstance(data.ty.shape.values[axis], tirx.IntImm):
        first = axis % len(data.ty.shape)
        return builder.emit_te(_take_nearest, data, indices, first, primfunc_name_hint="take")
    mode = "clip" if are_constant[1] else "wrap"
    return relax.op.take(data, indices, axis, mode=mode)


def _take_nearest(data: te.Tensor, indices: te.Tensor, axis: int) -> te.Tensor:
    """Slices of an axis; 0 where it is empty."""
    count = len(indices.shape)

    def element(*i: tirx.Var) -> tirx.Expr:
        extent = tirx.Cast(indices.dtype, data.shape[axis])
        index = indices(*i[axis : axis + count])
        from_start = tirx.if_then_else(index < 0, index + extent, index)
        place = tirx.max(tirx.min(from_start, extent - 1), 0)
        value = data(*i[:axis], place, *i[axis + count :])
        return tirx.if_then_else(extent > 0, value, tirx.const(0, data.dtype))

    shape = [*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]]
    return te.compute(shape, element, name="take")
