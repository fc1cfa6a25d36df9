# SPDX-License-Identifier: Apache-2.0
"""Packed form of PReLU: the op itself has slopes along one axis only, not blocks and lanes."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from .packing_state import Packed, Rule, Scope, channels_of


def pack_prelu(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Write ``max(x, 0) + slope * min(x, 0)`` with constant slopes in blocks."""
    call = binding.value
    data = scope.lookup(call.args[0])
    if (
        data is None
        or channels_of(call.args[0]) is None
        or not isinstance(call.args[1], GenericConst)
    ):
        return None
    slopes = call.args[1].value.numpy().reshape(-1)
    # Equal slopes may be along any axis.
    if int(call.attrs.axis) % 4 != 1 and not (slopes == slopes[0]).all():
        return None
    # A product of zero and infinity would be NaN where the op itself gives a number.
    if not np.isfinite(slopes).all() or not scope.is_safe(data.channels, data.bound):
        return None
    if not scope.is_worth_packing(binding):
        return None
    dtype = str(call.args[1].ty.dtype)
    rank4 = np.resize(slopes, (1, data.channels, 1, 1))
    packed = scope.pack(relax.const(rank4, dtype)).expr
    zero = relax.const(0, dtype)
    above = scope.emit(relax.op.nn.relu(data.expr))
    below = scope.emit(relax.op.multiply(scope.emit(relax.op.minimum(data.expr, zero)), packed))
    # The lanes past the last channel have a slope of zero.
    return scope.result(relax.op.add(above, below), data.channels, data.bound)


PRELU_RULES: dict[str, Rule] = {"relax.nn.prelu": pack_prelu}
