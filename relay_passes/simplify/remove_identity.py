# SPDX-License-Identifier: Apache-2.0
"""Removal of ops that return their input.

::

    dropout(x)[0], x + 0, x - 0, x * 1, x / 1, pad(x, 0), concat((x,))   ->   x
    reshape, broadcast_to, astype, permute_dims: the same shape, type, order   ->   x
"""

from __future__ import annotations

from tvm import relax

from ..core.constants import scaled, shifted, uniform
from ..core.expressions import TUPLE_GET_ITEM, Value, op_name
from ..core.graph import Graph
from .conv2d.fold_pad import zero_padding

SAME_TYPE_IS_SAME_VALUE = ("relax.reshape", "relax.broadcast_to", "relax.astype")


def remove_identity(graph: Graph, call: relax.Expr) -> Value:
    """The operand that ``call`` returns unchanged."""
    source = _source(graph, call)
    if source is None or not (call.ty.is_base_of(source.ty) and source.ty.is_base_of(call.ty)):
        return None
    return source


def _source(graph: Graph, call: relax.Expr) -> Value:
    name = op_name(call)
    if name == TUPLE_GET_ITEM:
        dropout = graph.definition(call.tuple_value, "relax.nn.dropout")
        return dropout.args[0] if dropout is not None and call.index == 0 else None
    if name in SAME_TYPE_IS_SAME_VALUE:
        return call.args[0]
    if name == "relax.permute_dims":
        axes = call.attrs.axes
        return call.args[0] if axes is not None and list(axes) == list(range(len(axes))) else None
    if name == "relax.concat":
        parts = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else []
        return parts[0] if len(parts) == 1 else None
    padding = zero_padding(graph, call)
    if padding is not None:
        return padding[0] if not any((*padding[1], *padding[2])) else None
    for match, neutral in ((shifted(call), 0), (scaled(call), 1)):
        if match is not None and uniform(match[1]) == neutral:
            return match[0]
    return None
