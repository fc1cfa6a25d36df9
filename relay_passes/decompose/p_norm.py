# SPDX-License-Identifier: Apache-2.0
"""Norms of 16-bit data: their sums may overflow although the norms do not.

::

    sqrt(sum(x * x))             ReduceL2
    log(sum(x))                  ReduceLogSum
    power(sum(power(abs(x), p)), 1 / p)      GlobalLpPool

are computed in float32 and rounded once. Wider data stay: their sums are reductions already.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import GenericConst

from ..core.expressions import Value
from ..core.graph import Graph
from .precision import NARROW, extents, narrow, widen

NAMES = ("relax.sqrt", "relax.log", "relax.power")
_LIFTS = ("relax.abs", "relax.multiply", "relax.square", "relax.power")


def p_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite a root, power or logarithm of a sum."""
    total = graph.definition(call.args[0], "relax.sum")
    if total is None or not _is_unary(call):
        return None
    if str(call.ty.dtype) not in NARROW or extents(total.args[0]) is None:
        return None
    terms = _widened(graph, total.args[0])
    wide = graph.emit(relax.op.sum(terms, total.attrs.axis, total.attrs.keepdims))
    return narrow(graph, _of(graph, call, wide), call.ty.dtype)


def _widened(graph: Graph, data: relax.Expr) -> relax.Expr:
    """``data`` and the unary ops before it in float32."""
    value = graph.definition(data, *_LIFTS)
    if value is None or not _is_unary(value):
        return widen(graph, data)
    return graph.emit_once(_of(graph, value, _widened(graph, value.args[0])))


def _is_unary(call: relax.Call) -> bool:
    """Return whether ``call`` is a function of the elements of its first operand alone."""
    if call.op.name == "relax.multiply":
        return call.args[0].same_as(call.args[1])
    if call.op.name == "relax.power":
        return isinstance(call.args[1], GenericConst) and call.args[1].ty.ndim == 0
    return True


def _of(graph: Graph, call: relax.Call, data: relax.Expr) -> relax.Expr:
    """The function ``call``, of ``data`` in float32."""
    if call.op.name == "relax.multiply":
        return relax.op.multiply(data, data)
    if call.op.name == "relax.power":
        return relax.op.power(data, widen(graph, call.args[1]))
    return relax.Call(call.op, [data])
