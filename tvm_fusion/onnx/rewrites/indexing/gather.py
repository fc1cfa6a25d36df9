# SPDX-License-Identifier: Apache-2.0
"""Translation of Gather to one op; TVM's own translation computes the extent at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import GenericConst

from relay_passes.op.checked_indices import is_checked


def translate_gather(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr | None:
    """``take`` of a tensor along an axis, or a kernel if its extent is symbolic; None for shapes.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Where the kernel is added.
    inputs : sequence
        Data, and int32 or int64 indices from 0 to ``extent - 1``; where the extent is a number,
        others are taken modulo the extent unless they are constant or were checked.
    attributes : dict
        ``axis``, by default 0.

    Returns
    -------
    relax.Expr or None
    """
    (data, indices), axis = inputs, attributes.get("axis", 0)
    if not all(isinstance(each.ty, relax.TensorType) for each in inputs):
        return None  # a shape
    are_constant = [isinstance(each, GenericConst) for each in inputs]
    if all(are_constant) or not isinstance(data.ty.shape, relax.ShapeExpr):
        return None
    if not isinstance(data.ty.shape.values[axis], tirx.IntImm):
        first = axis % len(data.ty.shape)
        return builder.emit_te(_take, data, indices, first, primfunc_name_hint="take")
    mode = "clip" if are_constant[1] or is_checked(builder, indices) else "wrap"
    return relax.op.take(data, indices, axis, mode=mode)


def _take(data: te.Tensor, indices: te.Tensor, axis: int) -> te.Tensor:
    """Slices of an axis; 0 where it is empty."""
    count = len(indices.shape)

    def element(*i: tirx.Var) -> tirx.Expr:
        value = data(*i[:axis], indices(*i[axis : axis + count]), *i[axis + count :])
        return tirx.if_then_else(data.shape[axis] > 0, value, tirx.const(0, data.dtype))

    shape = [*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]]
    return te.compute(shape, element, name="take")
