# SPDX-License-Identifier: Apache-2.0
"""Removal of transposes to channels last and back around ops on the channels of each pixel.

::

    lv  = permute_dims(x, [0, 2, 3, 1])              # NCHW to NHWC
    lv1 = nn.layer_norm(lv, gamma, beta, axes=[-1])
    lv2 = matmul(lv1, w) + b                         # w: [C, O], b: [O]
    lv3 = nn.gelu(lv2)
    gv  = permute_dims(lv3, [0, 3, 1, 2])            # and back

    lv  = nn.layer_norm(x, gamma, beta, axes=[1])
    lv1 = nn.conv2d(lv, w') + b'                     # w': [O, C, 1, 1], b': [1, O, 1, 1]
    gv  = nn.gelu(lv1)

Vision networks that end their blocks like transformers, such as ConvNeXt, are exported in this way.
Left alone: chains with another op, with a value that has another reader, with weights that are no
constants, and those that do not begin with such a transpose.
"""

from __future__ import annotations

from tvm import relax, tirx

from ...core.constants import numbers, per_channel, tensor_constant
from ...core.expressions import Value, op_name
from ...core.graph import Graph
from ..remove_broadcast import ELEMENTWISE

FIRST, LAST = [0, 3, 1, 2], [0, 2, 3, 1]
UNARY = (
    "relax.nn.gelu",
    "relax.nn.gelu_tanh",
    "relax.nn.relu",
    "relax.nn.silu",
    "relax.sigmoid",
    "relax.tanh",
    "relax.tvm_fusion.hardswish",
    "relax.tvm_fusion.round_clip",
    "relax.clip",
)


def channels_first(graph: Graph, call: relax.Expr) -> Value:
    """Rewrite the chain that ends with the transpose ``call``, if it begins with its inverse."""
    return _in_nchw(graph, call.args[0]) if _order(call) == FIRST else None


def _order(call: Value) -> list[int] | None:
    if op_name(call) != "relax.permute_dims" or call.attrs.axes is None:
        return None
    return [int(axis) % 4 for axis in call.attrs.axes]


def _in_nchw(graph: Graph, nhwc: relax.Expr) -> Value:
    """The NHWC tensor in NCHW, computed without a transpose; None if that is impossible."""
    call = graph.definition(nhwc)
    if _order(call) == LAST:
        return call.args[0]
    if op_name(call) is None or not graph.has_one_use(nhwc):
        return None
    return _step(graph, call)


def _step(graph: Graph, call: relax.Expr) -> Value:
    name = op_name(call)
    if name in UNARY:
        data = _emit(graph, call.args[0])
        if data is None:
            return None
        return relax.Call(call.op, [data, *call.args[1:]], call.attrs, call.ty_args)
    if name in ELEMENTWISE:
        return _with_vector(graph, call)
    if name == "relax.nn.layer_norm":
        return _layer_norm(graph, call)
    return _product(graph, call) if name == "relax.matmul" else None


def _emit(graph: Graph, nhwc: relax.Expr) -> Value:
    value = _in_nchw(graph, nhwc)
    return value if value is None or isinstance(value, relax.Var) else graph.emit(value)


def _with_vector(graph: Graph, call: relax.Expr) -> Value:
    """An element-wise op of a tensor and a constant with one number a channel, or one for all."""
    left, right = call.args
    data, values = (left, numbers(right)) if numbers(left) is None else (right, numbers(left))
    channels = call.ty.shape.values[-1] if isinstance(call.ty.shape, relax.ShapeExpr) else None
    if values is None or not isinstance(channels, tirx.IntImm) or data.ty.ndim != 4:
        return None
    vector = per_channel(values, 4, int(channels), axis=3)
    if vector is None or data.ty.shape is None or not data.ty.is_base_of(call.ty):
        return None
    moved = _emit(graph, data)
    if moved is None:
        return None
    other = tensor_constant(vector.reshape(1, -1, 1, 1), call.ty.dtype)
    operands = [moved, other] if data.same_as(left) else [other, moved]
    return relax.Call(call.op, operands, call.attrs, call.ty_args)


def _layer_norm(graph: Graph, call: relax.Expr) -> Value:
    if [int(axis) % 4 for axis in call.attrs.axes] != [3]:
        return None
    data = _emit(graph, call.args[0])
    if data is None:
        return None
    attrs = call.attrs
    return relax.op.nn.layer_norm(
        data, call.args[1], call.args[2], [1], attrs.epsilon, attrs.center, attrs.scale
    )


def _product(graph: Graph, call: relax.Expr) -> Value:
    """A product with a constant matrix as a 1x1 convolution."""
    weight = numbers(call.args[1])
    if weight is None or weight.ndim != 2 or call.ty.dtype != call.args[0].ty.dtype:
        return None
    data = _emit(graph, call.args[0])
    if data is None:
        return None
    filters = tensor_constant(weight.T[:, :, None, None], call.ty.dtype)
    return relax.op.nn.conv2d(data, filters)
