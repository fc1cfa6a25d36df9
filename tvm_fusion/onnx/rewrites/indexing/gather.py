# SPDX-License-Identifier: Apache-2.0
"""Translation of Gather to one op without out-of-bounds reads.

TVM's own translation computes the extent at run time, and does not check the indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, tirx
from tvm.ir import GenericConst


def translate_gather(inputs: Sequence[Any], axis: int) -> relax.Expr | None:
    """``take`` of a tensor along an axis of known extent; None for anything else.

    Parameters
    ----------
    inputs : sequence
        Data, and int32 or int64 indices from ``-extent`` to ``extent - 1``; constant ones are not
        negative. Other indices are taken modulo the extent.
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
        return None
    mode = "clip" if are_constant[1] else "wrap"
    return relax.op.take(data, indices, axis, mode=mode)
