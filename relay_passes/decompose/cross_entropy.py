# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of logarithms of probabilities: ``-sum(x * y)``, over the batch if there is one."""

from __future__ import annotations

from tvm import relax

from schedules.workload.reduce import constant

from ..core.expressions import Value
from ..core.graph import Graph
from .precision import extents, narrow, number, widen

NAMES = ("relax.nn.cross_entropy_with_logits",)


def cross_entropy(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``cross_entropy_with_logits`` of a known batch."""
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
