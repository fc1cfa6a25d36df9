# SPDX-License-Identifier: Apache-2.0
"""Variance and standard deviation: the mean of squared differences from the mean."""

from __future__ import annotations

from tvm import relax

from schedules.workload.reduce import normal_axes

from ..core.expressions import Value
from ..core.graph import Graph
from .moments import emit_moments
from .precision import extents, narrow, widen

NAMES = ("relax.variance", "relax.std")


def variance(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``variance`` or ``std``."""
    data = call.args[0]
    shape = extents(data)
    if shape is None:
        return None
    axes = normal_axes(call.attrs.axis, len(shape))
    keepdims = bool(call.attrs.keepdims)
    result = emit_moments(graph, widen(graph, data), axes, keepdims=keepdims).variance
    if call.op.name == "relax.std":
        result = relax.op.sqrt(graph.emit(result))
    return narrow(graph, result, data.ty.dtype)
