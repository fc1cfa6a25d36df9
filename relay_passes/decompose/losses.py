# SPDX-License-Identifier: Apache-2.0
"""Rules of softmax, of sums of exponentials, of losses computed from them, and of quantisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from schedules.tir.extents import constant

from ..core.constants import tensor_constant
from ..core.expressions import Value
from ..core.graph import Graph
from ..op.elementwise import by_reductions
from .norms import extents, narrow, number, widen


def softmax(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``softmax`` or ``log_softmax`` of known extents.

    ::

        m = R.max(x, axis, keepdims=True); d = R.subtract(x, m); e = R.exp(d)
        s = R.sum(e, axis, keepdims=True)

        softmax(x)       ->   R.divide(e, s)
        log_softmax(x)   ->   R.subtract(d, R.log(s))

    A row of -inf gives NaN, because its differences from its maximum are NaN.
    """
    data = call.args[0]
    shape = extents(data)
    if shape is None:
        return None
    axis = int(call.attrs.axis) % len(shape)
    wide = widen(graph, data)
    largest = graph.emit_once(relax.op.max(wide, axis, keepdims=True))
    difference = graph.emit_once(relax.op.subtract(wide, largest))
    exponential = graph.emit_once(relax.op.exp(difference))
    total = graph.emit_once(relax.op.sum(exponential, axis, keepdims=True))
    if call.op.name == "relax.nn.softmax":
        result = relax.op.divide(exponential, total)
    else:
        result = relax.op.subtract(difference, graph.emit_once(relax.op.log(total)))
    return narrow(graph, result, data.ty.dtype)


def log_sum_exp(graph: Graph, add: relax.Call) -> Value:
    """Rewrite the sum as which TVM's ONNX importer emits ReduceLogSumExp.

    ::

        log(sum(exp(x - m))) + m   with   m = max(x)

    where ``m`` becomes 0 if it is infinite: else rows of -inf and rows with inf would give NaN.
    """
    logarithm = graph.definition(add.args[0], "relax.log")
    largest = graph.definition(add.args[1], "relax.max")
    if logarithm is None or largest is None:
        return None
    data, total = largest.args[0], graph.definition(logarithm.args[0], "relax.sum")
    exponential = None if total is None else graph.definition(total.args[0], "relax.exp")
    if exponential is None or extents(data) is None:
        return None
    difference = graph.definition(exponential.args[0], "relax.subtract")
    if difference is None or not difference.args[0].same_as(data):
        return None
    if not difference.args[1].same_as(add.args[1]) or not _same_axes(total, largest):
        return None
    axes = largest.attrs.axis
    wide = widen(graph, data)
    largest = graph.emit(relax.op.max(wide, axes, keepdims=True))
    is_infinite = graph.emit(relax.op.isinf(largest))
    shift = graph.emit(relax.op.where(is_infinite, number(0, wide), largest))
    exponential = graph.emit(relax.op.exp(graph.emit(relax.op.subtract(wide, shift))))
    logarithm = graph.emit(relax.op.log(graph.emit(relax.op.sum(exponential, axes, keepdims=True))))
    return narrow(graph, relax.op.add(logarithm, shift), data.ty.dtype)


def _same_axes(first: relax.Call, second: relax.Call) -> bool:
    """Return whether two reductions keep the same axes."""
    axes = [None if r.attrs.axis is None else list(r.attrs.axis) for r in (first, second)]
    return axes[0] == axes[1] and bool(first.attrs.keepdims) and bool(second.attrs.keepdims)


def cross_entropy(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``cross_entropy_with_logits`` of a known batch: ``-sum(x * y)``, a mean over it."""
    predictions, labels = call.args
    shape = extents(predictions)
    batch = None if shape is None else constant(shape[0])
    if shape is None or extents(labels) is None or batch is None:
        return None
    product = graph.emit(relax.op.multiply(widen(graph, predictions), widen(graph, labels)))
    total = graph.emit(relax.op.sum(product))
    result = relax.op.negative(total)
    if len(shape) > 1:
        result = relax.op.divide(graph.emit(result), number(batch, total))
    return narrow(graph, result, predictions.ty.dtype)


@dataclass(frozen=True)
class _Targets:
    """Class and weight of every target, and whether it is ignored; then the weight is 0."""

    classes: relax.Var
    ignored: relax.Var
    weight: relax.Var


def nll_loss(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``nll_loss`` of a batch.

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
    predictions, targets, *weights = call.args
    shape = extents(predictions)
    if shape is None or len(shape) < 2:
        return None
    wide = widen(graph, predictions)
    derived = _targets(graph, targets, weights, call.attrs.ignore_index, wide)
    loss = _loss(graph, wide, derived)
    if str(call.attrs.reduction) != "none":
        loss = relax.op.sum(graph.emit(loss))
    if str(call.attrs.reduction) == "mean":
        loss = relax.op.divide(graph.emit(loss), graph.emit(relax.op.sum(derived.weight)))
    return narrow(graph, loss, predictions.ty.dtype)


def nll_loss_backward(graph: Graph, call: relax.Call) -> Value:
    """Rewrite the gradient of ``nll_loss`` of a batch with a known number of classes."""
    gradient, predictions, targets, *weights = call.args
    shape = extents(predictions)
    count = None if shape is None or len(shape) < 2 else constant(shape[1])
    if shape is None or count is None:
        return None
    wide = widen(graph, gradient)
    derived = _targets(graph, targets, weights, call.attrs.ignore_index, wide)
    if str(call.attrs.reduction) == "mean":
        wide = graph.emit(relax.op.divide(wide, graph.emit(relax.op.sum(derived.weight))))
    values = graph.emit(relax.op.multiply(graph.emit(relax.op.negative(wide)), derived.weight))
    positions = np.arange(count).reshape([1, count, *[1] * (len(shape) - 2)])
    index = graph.emit(relax.op.expand_dims(derived.classes, 1))
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


def _loss(graph: Graph, wide: relax.Expr, derived: _Targets) -> relax.Expr:
    """The loss of every target, not bound yet."""
    index = graph.emit(relax.op.expand_dims(derived.classes, 1))
    if str(index.ty.dtype) != "int64":
        index = graph.emit(relax.op.astype(index, "int64"))
    gathered = graph.emit(relax.op.gather_elements(wide, index, axis=1))
    predicted = graph.emit(relax.op.squeeze(gathered, [1]))
    loss = relax.op.multiply(graph.emit(relax.op.negative(predicted)), derived.weight)
    return relax.op.where(derived.ignored, number(0, wide), graph.emit(loss))


def _integer(value: int, like: relax.Expr) -> relax.Expr:
    return tensor_constant(np.asarray(int(value)), like.ty.dtype)


def quantized_by_range(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``dynamic_quantize`` by reductions."""
    return by_reductions(call.args[0], graph.emit)
