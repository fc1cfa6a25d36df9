# SPDX-License-Identifier: Apache-2.0
"""Folding of a constant factor or offset in front of a convolution into its weight and bias.

::

    conv2d(x * s, w)   ->   conv2d(x, w * s)             s: one number an input channel
    conv2d(x + t, w)   ->   conv2d(x, w) + sum(w * t)    only without padding

Padding is zero after the offset, not before it, so an offset in front of a padded convolution
stays where it is. The factor or offset must have no other reader, unless it is the scale of
a quantised tensor, and the weight must be constant.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ...core.constants import channel_constant, constant, per_channel, scaled, shifted
from ...core.expressions import Value
from ...core.graph import Graph
from ..elementwise.fold_quantization import is_whole
from .conv2d_operands import padding_of, weight_of, with_weight


def fold_input_affine(graph: Graph, call: relax.Expr) -> Value:
    """Move the factor or offset in front of the convolution ``call`` behind it."""
    producer = graph.definition(call.args[0])
    scale = scaled(producer)
    if not graph.has_one_use(call.args[0]) and (scale is None or not is_whole(graph, scale[0])):
        return None
    match = shifted(producer) if scale is None else scale
    if match is None or (scale is None and any(padding_of(call))):
        return None
    data, values = match
    weight = weight_of(call)
    if weight is None or not data.ty.is_base_of(call.args[0].ty):
        return None
    by_input = _by_input(call, weight, values)
    if by_input is None:
        return None
    if scale is not None:
        folded = constant(weight * by_input, call.ty.dtype)
        return None if folded is None else with_weight(call, data, folded)
    bias = channel_constant((weight * by_input).sum(axis=(1, 2, 3)), 4, call.ty.dtype)
    if bias is None:
        return None
    return relax.op.add(graph.emit(with_weight(call, data, call.args[1])), bias)


def _by_input(call: relax.Call, weight: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """``values``, one number an input channel, shaped to match the weight [O, I / g, kh, kw]."""
    groups = int(call.attrs.groups)
    per_group = weight.shape[1]
    channels = per_channel(values, 4, per_group * groups)
    if channels is None:
        return None
    by_output = np.repeat(channels.reshape(groups, per_group), weight.shape[0] // groups, axis=0)
    return by_output[:, :, None, None]
