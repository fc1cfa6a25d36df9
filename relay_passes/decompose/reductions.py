# SPDX-License-Identifier: Apache-2.0
"""Rules of pooling of whole images, and of norms of 16-bit data."""

from __future__ import annotations

from tvm import relax
from tvm.ir import GenericConst

from schedules.tir.extents import constant

from ..core.expressions import Value
from ..core.graph import Graph
from .precision import NARROW, extents, narrow, widen

POOLS = tuple(
    f"relax.nn.{kind}_pool{rank}d" for kind in ("adaptive_avg", "avg", "max") for rank in (1, 2, 3)
)


def global_pool(graph: Graph, call: relax.Call) -> Value:
    """Rewrite a pooling with one output a channel.

    ::

        adaptive_avg_pool2d(x, [1, 1])            ->   R.mean(x, axis=[2, 3], keepdims=True)
        avg_pool2d(x, pool_size=[H, W])           ->   R.mean(x, axis=[2, 3], keepdims=True)
        max_pool2d(x, pool_size=[H, W])           ->   R.max(x, axis=[2, 3], keepdims=True)

    likewise in one and three dimensions, in every layout whose spatial axes are not split.
    """
    data, attrs = call.args[0], call.attrs
    shape = extents(data)
    axes = _spatial_axes(str(attrs.layout))
    if shape is None or axes is None or attrs.layout != attrs.out_layout:
        return None
    if any(constant(call.ty.shape.values[axis]) != 1 for axis in axes):
        return None
    if "adaptive" not in call.op.name and not _covers_all(attrs, [shape[axis] for axis in axes]):
        return None
    reduce = relax.op.max if "max_pool" in call.op.name else relax.op.mean
    return reduce(data, axes, keepdims=True)


def _spatial_axes(layout: str) -> list[int] | None:
    """Positions of depth, height and width; None if one of them is split."""
    letters = [letter for letter in layout if letter.isalpha()]
    if any(letter in "dhw" for letter in letters):
        return None
    return [position for position, letter in enumerate(letters) if letter in "DHW"]


def _covers_all(attrs: Value, image: list) -> bool:
    """Return whether one window without padding or holes is as large as the image."""
    window = [int(extent) for extent in attrs.pool_size]
    is_dense = not any(attrs.padding) and all(int(step) == 1 for step in attrs.dilation)
    return is_dense and window == [constant(extent) for extent in image]


_LIFTS = ("relax.abs", "relax.multiply", "relax.square", "relax.power")


def p_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite a root, power or logarithm of a sum.

    ::

        sqrt(sum(x * x))             ReduceL2
        log(sum(x))                  ReduceLogSum
        power(sum(power(abs(x), p)), 1 / p)      GlobalLpPool

    Their sums may overflow although the norms do not: they are computed in float32 and rounded
    once. Wider data stay: their sums are reductions already.
    """
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
