# SPDX-License-Identifier: Apache-2.0
"""Instance normalisation: every channel of every image by its own mean and variance.

``instance_norm`` itself, and the ops that TVM's ONNX importer emits for InstanceNormalization::

    (x - mean(x)) / sqrt(variance(x) + epsilon)   ->   the same with one mean and one root a row
"""

from __future__ import annotations

from tvm import relax

from schedules.workload.reduce import normal_axes

from ..core.constants import numbers, uniform
from ..core.expressions import Value
from ..core.graph import Graph
from .moments import emit_moments, normalized, scale_and_shift
from .precision import extents, narrow, spread, widen

NAMES = ("relax.nn.instance_norm",)


def instance_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``instance_norm``."""
    data, gamma, beta = call.args
    shape = extents(data)
    if shape is None:
        return None
    channel = int(call.attrs.channel_axis) % len(shape)
    wide = widen(graph, data)
    moments = emit_moments(graph, wide, normal_axes(call.attrs.axes, len(shape)))
    result = normalized(
        graph, moments.difference, graph.emit_once(moments.variance), float(call.attrs.epsilon)
    )
    weights = [
        spread(graph, widen(graph, weight), shape, [channel]) if is_used else None
        for weight, is_used in ((gamma, call.attrs.scale), (beta, call.attrs.center))
    ]
    return narrow(graph, scale_and_shift(graph, result, *weights), data.ty.dtype)


def written_out_norm(graph: Graph, divide: relax.Call) -> Value:
    """Rewrite a difference from the mean divided by the root of the variance over the same axes."""
    difference = graph.definition(divide.args[0], "relax.subtract")
    root = graph.definition(divide.args[1], "relax.sqrt")
    if difference is None or root is None:
        return None
    data = difference.args[0]
    shape = extents(data)
    mean = graph.definition(difference.args[1], "relax.mean")
    shifted = graph.definition(root.args[0], "relax.add")
    if shape is None or mean is None or shifted is None or not mean.args[0].same_as(data):
        return None
    variance = graph.definition(shifted.args[0], "relax.variance")
    epsilon = uniform(numbers(shifted.args[1]))
    if variance is None or epsilon is None or not variance.args[0].same_as(data):
        return None
    axes = _kept_axes(mean, len(shape))
    if axes is None or axes != _kept_axes(variance, len(shape)):
        return None
    if shifted.args[1].ty.ndim > len(shape):
        return None  # the result would have more axes than the data
    moments = emit_moments(graph, widen(graph, data), axes)
    result = normalized(graph, moments.difference, graph.emit_once(moments.variance), epsilon)
    return narrow(graph, result, data.ty.dtype)


def _kept_axes(call: relax.Call, ndim: int) -> tuple[int, ...] | None:
    """Axes of a reduction that keeps them; None if it does not."""
    return normal_axes(call.attrs.axis, ndim) if call.attrs.keepdims else None
