# SPDX-License-Identifier: Apache-2.0
"""Negative log likelihood: gathered predictions, and sums of them.

::

    ignored = R.equal(targets, ignore_index)
    classes = R.where(ignored, 0, targets)
    weight  = R.where(ignored, 0, R.take(weights, classes))
    loss    = R.where(ignored, 0, -R.gather_elements(predictions, classes, axis=1) * weight)

    nll_loss, reduction "none": loss; "sum": R.sum(loss); "mean": R.sum(loss) / R.sum(weight)

    nll_loss_backward: R.where(R.equal(classes, [0, 1, ...]), -gradient * weight, 0)
    where "mean" divides the gradient by R.sum(weight)

Ignored targets read class 0, since they may be no class at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from schedules.workload.reduce import constant

from ..core.constants import tensor_constant
from ..core.expressions import Value
from ..core.graph import Graph
from .precision import extents, narrow, number, widen

NAMES = ("relax.nn.nll_loss",)
GRADIENTS = ("relax.grad.nll_loss_backward",)


@dataclass(frozen=True)
class _Targets:
    """Class and weight of every target, and whether it is ignored; then the weight is 0."""

    classes: relax.Var
    ignored: relax.Var
    weight: relax.Var


def nll_loss(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``nll_loss`` of a batch."""
    predictions, targets, *weights = call.args
    shape = extents(predictions)
    if shape is None or len(shape) < 2:
        return None
    wide = widen(graph, predictions)
    found = _targets(graph, targets, weights, call.attrs.ignore_index, wide)
    loss = _loss(graph, wide, found)
    if str(call.attrs.reduction) != "none":
        loss = relax.op.sum(graph.emit(loss))
    if str(call.attrs.reduction) == "mean":
        loss = relax.op.divide(graph.emit(loss), graph.emit(relax.op.sum(found.weight)))
    return narrow(graph, loss, predictions.ty.dtype)


def nll_loss_backward(graph: Graph, call: relax.Call) -> Value:
    """Rewrite the gradient of ``nll_loss`` of a batch with a known number of classes."""
    gradient, predictions, targets, *weights = call.args
    shape = extents(predictions)
    count = None if shape is None or len(shape) < 2 else constant(shape[1])
    if shape is None or count is None:
        return None
    wide = widen(graph, gradient)
    found = _targets(graph, targets, weights, call.attrs.ignore_index, wide)
    if str(call.attrs.reduction) == "mean":
        wide = graph.emit(relax.op.divide(wide, graph.emit(relax.op.sum(found.weight))))
    values = graph.emit(relax.op.multiply(graph.emit(relax.op.negative(wide)), found.weight))
    positions = np.arange(count).reshape([1, count, *[1] * (len(shape) - 2)])
    index = graph.emit(relax.op.expand_dims(found.classes, 1))
    is_target = graph.emit(relax.op.equal(index, tensor_constant(positions, index.ty.dtype)))
    values = graph.emit(relax.op.expand_dims(values, 1))
    result = relax.op.where(is_target, values, number(0, values))
    return narrow(graph, result, predictions.ty.dtype)


def _targets(
    graph: Graph, targets: relax.Expr, weights: list, ignore_index: int, like: relax.Expr
) -> _Targets:
    """Bind the derived values of ``targets``; ``like`` has the type of the weights."""
    ignored = graph.emit_once(relax.op.equal(targets, _integer(ignore_index, targets)))
    classes = graph.emit_once(relax.op.where(ignored, _integer(0, targets), targets))
    weight: relax.Expr = number(1, like)
    if weights:
        flat = graph.emit_once(relax.op.flatten(classes))
        taken = graph.emit_once(relax.op.take(widen(graph, weights[0]), flat, axis=0))
        weight = graph.emit_once(relax.op.reshape(taken, classes.ty.shape))
    weight = graph.emit_once(relax.op.where(ignored, number(0, like), weight))
    return _Targets(classes, ignored, weight)


def _loss(graph: Graph, wide: relax.Expr, found: _Targets) -> relax.Expr:
    """The loss of every target, not bound yet."""
    index = graph.emit(relax.op.expand_dims(found.classes, 1))
    if str(index.ty.dtype) != "int64":
        index = graph.emit(relax.op.astype(index, "int64"))
    gathered = graph.emit(relax.op.gather_elements(wide, index, axis=1))
    predicted = graph.emit(relax.op.squeeze(gathered, [1]))
    loss = relax.op.multiply(graph.emit(relax.op.negative(predicted)), found.weight)
    return relax.op.where(found.ignored, number(0, wide), graph.emit(loss))


def _integer(value: int, like: relax.Expr) -> relax.Expr:
    return tensor_constant(np.asarray(int(value)), like.ty.dtype)
