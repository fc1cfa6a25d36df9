# SPDX-License-Identifier: Apache-2.0
"""Group normalisation: the channel axis becomes two, groups and channels of a group.

::

    g = R.reshape(x, [N, G, C // G, H, W])
    R.reshape((g - mean) * rsqrt(variance + epsilon) * gamma + beta, [N, C, H, W])

with mean and variance over the channels of a group and the axes named.
"""

from __future__ import annotations

from tvm import relax

from schedules.workload.reduce import constant, normal_axes

from ..core.expressions import Value
from ..core.graph import Graph
from .moments import emit_moments, normalized, scale_and_shift
from .precision import extents, narrow, reshape, widen

NAMES = ("relax.nn.group_norm",)


def group_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``group_norm`` with a known number of channels."""
    data, attrs = call.args[0], call.attrs
    shape = extents(data)
    channel, groups = int(attrs.channel_axis), int(attrs.num_groups)
    channels = None if shape is None else constant(shape[channel])
    if shape is None or channels is None or channels % groups:
        return None
    channel %= len(shape)
    split = [*shape[:channel], groups, channels // groups, *shape[channel + 1 :]]
    axes = [axis + (axis > channel) for axis in normal_axes(attrs.axes, len(shape))]
    wide = graph.emit_once(relax.op.reshape(widen(graph, data), split))
    moments = emit_moments(graph, wide, sorted([channel + 1, *axes]))
    result = normalized(
        graph, moments.difference, graph.emit_once(moments.variance), float(attrs.epsilon)
    )
    per_channel = [1] * len(split)
    per_channel[channel : channel + 2] = [groups, channels // groups]
    weights = [
        reshape(graph, widen(graph, weight), per_channel) if is_used else None
        for weight, is_used in ((call.args[1], attrs.scale), (call.args[2], attrs.center))
    ]
    result = relax.op.reshape(graph.emit(scale_and_shift(graph, result, *weights)), shape)
    return narrow(graph, result, data.ty.dtype)
