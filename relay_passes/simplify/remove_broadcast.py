# SPDX-License-Identifier: Apache-2.0
"""Removal of ``broadcast_to`` in front of element-wise ops, which broadcast by themselves.

::

    add(x, broadcast_to(c, shape))   ->   add(x, c)        x having that shape already
"""

from __future__ import annotations

from tvm import relax

from ..core.expressions import Value, op_name
from ..core.graph import Graph

ELEMENTWISE = (
    "relax.add",
    "relax.subtract",
    "relax.multiply",
    "relax.divide",
    "relax.maximum",
    "relax.minimum",
)


def remove_broadcast(graph: Graph, call: relax.Expr) -> Value:
    """Let one operand of the element-wise ``call`` skip its ``broadcast_to``."""
    for index in (1, 0):
        source = graph.definition(call.args[index], "relax.broadcast_to")
        if source is not None and call.ty.is_base_of(call.args[1 - index].ty):
            operands = list(call.args)
            operands[index] = source.args[0]
            return relax.Call(call.op, operands, call.attrs, call.ty_args, call.span)
    return None


def is_broadcast_by_readers(graph: Graph, var: relax.Var) -> bool:
    """Return whether only element-wise ops and stacks of them read ``var``."""
    names = (*ELEMENTWISE, "relax.stack", "relax.broadcast_to")
    return all(op_name(user) in names for user in graph.users(var))
