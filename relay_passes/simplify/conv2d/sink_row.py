# SPDX-License-Identifier: Apache-2.0
"""Element-wise ops on what :mod:`.widen_conv1d` computes, in front of the reshape to a sequence.

::

    lv = reshape(nn.conv2d(x, w), [N, O, W])        # b: [1, O, 1]
    gv = nn.gelu(lv + b)

    lv = nn.gelu(nn.conv2d(x, w) + b')              # b': [1, O, 1, 1]
    gv = reshape(lv, [N, O, W])

There they stay the convolution's epilogue and meet the next convolution. Left alone: element-wise
ops that read another tensor, which no such convolution computes, and those that broadcast it.
"""

from __future__ import annotations

from tvm import relax

from ...core.constants import numbers, tensor_constant
from ...core.expressions import Value, op_name
from ...core.graph import Graph
from .widen_conv1d import BINARY, extents, row_image


def sink_row(graph: Graph, call: relax.Expr) -> Value:
    """Compute the element-wise ``call`` on the image of one row that its operands came from."""
    count = 2 if op_name(call) in BINARY else 1
    images = [row_image(graph, operand) for operand in call.args[:count]]
    if all(image is None for image in images) or extents(call) is None:
        return None
    for place, image in enumerate(images):
        if image is None:
            values = numbers(call.args[place])
            if values is None:
                return None
            if values.ndim > 1:
                values = values.reshape(*values.shape[:-1], 1, values.shape[-1])
            images[place] = tensor_constant(values, call.args[place].ty.dtype)
        elif not call.ty.is_base_of(call.args[place].ty):
            return None  # it broadcasts
    operands = [*images, *call.args[count:]]
    result = graph.emit(relax.Call(call.op, operands, call.attrs, call.ty_args))
    return relax.op.reshape(result, call.ty.shape)
