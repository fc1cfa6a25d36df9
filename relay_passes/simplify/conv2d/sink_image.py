# SPDX-License-Identifier: Apache-2.0
"""Element-wise ops on what a convolution of images computed, in front of the way back.

::

    lv = reshape(nn.conv2d(x, w), [N, O, W])        # b: [1, O, 1]
    gv = nn.gelu(lv + b)

    lv = nn.gelu(nn.conv2d(x, w) + b')              # b': [1, O, 1, 1]
    gv = reshape(lv, [N, O, W])

There they stay the convolution's epilogue and meet the next convolution. So do those on volumes,
which are frames and a transpose. Left alone: element-wise ops that read another tensor, which no
such convolution computes, and those that broadcast it.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ...core.constants import numbers, tensor_constant
from ...core.expressions import Value, op_name
from ...core.graph import Graph
from .flatten_conv3d import frame_image, from_frames
from .widen_conv1d import BINARY, extents, row_image


def sink_image(graph: Graph, call: relax.Expr) -> Value:
    """Compute the element-wise ``call`` on the images that its operands came from."""
    shape = extents(call)
    if shape is None or len(shape) not in (3, 5):
        return None
    is_row = len(shape) == 3
    find, constant = (row_image, _as_row) if is_row else (frame_image, _as_frame)
    count = 2 if op_name(call) in BINARY else 1
    images = [find(graph, operand) for operand in call.args[:count]]
    if all(image is None for image in images):
        return None
    for place, image in enumerate(images):
        if image is None:
            values = numbers(call.args[place])
            values = None if values is None else constant(values)
            if values is None:
                return None
            images[place] = tensor_constant(values, call.args[place].ty.dtype)
        elif not call.ty.is_base_of(call.args[place].ty):
            return None  # it broadcasts
    operands = [*images, *call.args[count:]]
    result = graph.emit(relax.Call(call.op, operands, call.attrs, call.ty_args))
    return relax.op.reshape(result, shape) if is_row else from_frames(graph, result, call)


def _as_row(values: np.ndarray) -> np.ndarray:
    """A constant that is broadcast to sequences, for images of one row."""
    if values.ndim < 2:
        return values
    return values.reshape(*values.shape[:-1], 1, values.shape[-1])


def _as_frame(values: np.ndarray) -> np.ndarray | None:
    """A constant that is broadcast to volumes, for frames; None if it differs by clip or frame."""
    if values.ndim < 3:
        return values
    *batch, depth = values.shape[-5:-2]
    if depth != 1 or batch[:-1] not in ([], [1]):
        return None
    return values.reshape(*values.shape[:-3], *values.shape[-2:])
