# SPDX-License-Identifier: Apache-2.0
"""Convolutions of sequences as convolutions of images of one row.

::

    lv = nn.conv1d(x, w, strides=[2])                # x: [N, C, W], w: [O, I, K]
    gv = nn.gelu(lv + b)                             # b: [1, O, 1]

    lv  = reshape(x, [N, C, 1, W])
    lv1 = nn.conv2d(lv, w', strides=[1, 2])          # w': [O, I, 1, K]
    lv2 = reshape(lv1, [N, O, W'])
    gv  = nn.gelu(lv2 + b)

The rule :mod:`.sink_image` then moves the reshape behind what is done to each element. Left alone:
other layouts than NCW, and sequences of unknown length.
"""

from __future__ import annotations

import tvm_ffi
from tvm import relax, tirx

from ...core.expressions import Value, op_name
from ...core.graph import Graph
from ..remove_broadcast import ELEMENTWISE
from ..shapes.channels_first import UNARY

BINARY = (*ELEMENTWISE, "relax.power")
POINTWISE = (
    *UNARY,
    *("relax.abs", "relax.erf", "relax.exp", "relax.log", "relax.negative", "relax.sqrt"),
    *("relax.rsqrt", "relax.square", "relax.nn.leakyrelu", "relax.nn.softplus"),
)
"""Ops whose first argument is their only tensor."""


def widen_conv1d(graph: Graph, call: relax.Expr) -> Value:
    """Rewrite the convolution ``call``."""
    data, weight = call.args
    attrs = call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout)
    shapes = [extents(tensor) for tensor in (data, weight, call)]
    is_known = all(shape is not None and isinstance(shape[2], tirx.IntImm) for shape in shapes)
    if layouts != ("NCW", "OIW", "NCW") or not is_known:
        return None
    before, after = [int(pad) for pad in attrs.padding]
    image = graph.emit(
        relax.op.nn.conv2d(
            _as_image(graph, data),
            _as_image(graph, weight),
            strides=[1, int(attrs.strides[0])],
            padding=[0, before, 0, after],
            dilation=[1, int(attrs.dilation[0])],
            groups=int(attrs.groups),
            out_dtype=attrs.out_dtype or None,
        )
    )
    return relax.op.reshape(image, call.ty.shape)


def extents(tensor: relax.Expr) -> list | None:
    """Extents of a tensor, known or symbolic; None for a shape without dimensions."""
    shape = tensor.ty.shape
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else None


def _as_image(graph: Graph, sequence: relax.Expr) -> relax.Expr:
    """A tensor of three axes with one row."""
    image = row_image(graph, sequence)
    if image is not None:
        return image
    batch, channels, width = sequence.ty.shape.values
    return graph.emit(relax.op.reshape(sequence, [batch, channels, 1, width]))


def row_image(graph: Graph, sequence: relax.Expr) -> relax.Expr | None:
    """The image of one row that ``sequence`` is a reshape of, if a convolution computed it."""
    found = image_of(graph, sequence)
    if found is None or len(sequence.ty.shape) != 3:
        return None
    batch, channels, rows, columns = found.ty.shape.values
    if not isinstance(rows, tirx.IntImm) or int(rows) != 1:
        return None
    same = map(tvm_ffi.structural_equal, [batch, channels, columns], sequence.ty.shape.values)
    return found if all(same) else None


def image_of(graph: Graph, tensor: relax.Expr) -> relax.Expr | None:
    """The image that ``tensor`` is a reshape of, if a convolution computed it."""
    reshape = graph.definition(tensor, "relax.reshape")
    if reshape is None or len(extents(reshape.args[0]) or ()) != 4 or extents(reshape) is None:
        return None
    return reshape.args[0] if _is_of_convolution(graph, reshape.args[0]) else None


def _is_of_convolution(graph: Graph, image: relax.Expr) -> bool:
    """True if a convolution, or element-wise ops on its result, computed an image."""
    while True:
        call = graph.definition(image)
        if op_name(call) not in (*BINARY, *POINTWISE):
            return op_name(call) == "relax.nn.conv2d"
        image = next((one for one in call.args if isinstance(one, relax.Var)), call)
