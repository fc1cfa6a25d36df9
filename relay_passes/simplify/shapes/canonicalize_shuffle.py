# SPDX-License-Identifier: Apache-2.0
"""Fusion of a transpose of groups and their channels into one shuffle.

::

    reshape(permute_dims(reshape(x, [N, g, C / g, H, W]), [0, 2, 1, 3, 4]), [N, C, H, W])
        ->   tvm_fusion.channel_shuffle(x, channels=C, groups=g)

The values between must have no other reader. Left alone: other axes, and channels or images of
other extents before than after.
"""

from __future__ import annotations

import tvm_ffi
from tvm import relax, tirx

from ...core.expressions import Value
from ...core.graph import Graph
from ...op.channels import channel_shuffle

_ORDER = [0, 2, 1, 3, 4]


def canonicalize_shuffle(graph: Graph, call: relax.Expr) -> Value:
    """Recognise the reshape ``call`` as the end of a shuffle."""
    transposed = graph.definition(call.args[0], "relax.permute_dims")
    if transposed is None or not graph.has_one_use(call.args[0]):
        return None
    grouped = graph.definition(transposed.args[0], "relax.reshape")
    if grouped is None or not graph.has_one_use(transposed.args[0]):
        return None
    axes = transposed.attrs.axes
    if axes is None or [int(axis) for axis in axes] != _ORDER:
        return None
    data = grouped.args[0]
    shape, inner = _extents(data), _extents(transposed.args[0])
    if shape is None or inner is None or len(shape) != 4 or not data.ty.is_base_of(call.ty):
        return None
    batch, channels, *image = shape
    if not isinstance(channels, tirx.IntImm) or not isinstance(inner[1], tirx.IntImm):
        return None
    groups = int(inner[1])
    expected = [batch, groups, int(channels) // groups, *image]
    if not tvm_ffi.structural_equal(relax.ShapeExpr(inner), relax.ShapeExpr(expected)):
        return None
    return channel_shuffle(data, int(channels), groups)


def _extents(expr: relax.Expr) -> list[tirx.Expr] | None:
    shape = getattr(expr.ty, "shape", None)
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else None
