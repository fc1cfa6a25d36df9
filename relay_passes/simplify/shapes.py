# SPDX-License-Identifier: Apache-2.0
"""Rules for reshapes, transposes and stacks, and for ops that they stand around."""

from __future__ import annotations

import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GenericConst

from schedules.cpu.loops.matmul.dense import PACKED_ROWS

from ..core.constants import numbers, per_channel, tensor_constant
from ..core.expressions import ELEMENTWISE, MOVES, Value, op_name
from ..core.graph import Graph
from ..op.channels import channel_shuffle
from ..op.elementwise import dynamic_quantize

_ORDER = [0, 2, 1, 3, 4]


def canonicalize_shuffle(graph: Graph, call: relax.Expr) -> Value:
    """Fusion of a transpose of groups and their channels into one shuffle.

    ::

        reshape(permute_dims(reshape(x, [N, g, C / g, H, W]), [0, 2, 1, 3, 4]), [N, C, H, W])
            ->   tvm_fusion.channel_shuffle(x, channels=C, groups=g)

    The values between must have no other reader. Left alone: other axes, and channels or images of
    other extents before than after.
    """
    transposed = graph.definition(call.args[0], "relax.permute_dims")
    if transposed is None or not graph.has_one_use(call.args[0]):
        return None
    grouped = graph.definition(transposed.args[0], "relax.reshape")
    if grouped is None or not graph.has_one_use(transposed.args[0]):
        return None
    axes = transposed.attrs.axes
    if axes is None or [int(axis) for axis in axes] != _ORDER:
        return None
    data = grouped.args[0]
    shape, inner = extents(data), extents(transposed.args[0])
    if shape is None or inner is None or len(shape) != 4 or not data.ty.is_base_of(call.ty):
        return None
    batch, channels, *image = shape
    if not isinstance(channels, tirx.IntImm) or not isinstance(inner[1], tirx.IntImm):
        return None
    groups = int(inner[1])
    expected = [batch, groups, int(channels) // groups, *image]
    if not tvm_ffi.structural_equal(relax.ShapeExpr(inner), relax.ShapeExpr(expected)):
        return None
    return channel_shuffle(data, int(channels), groups)


def quantize_unmoved(graph: Graph, call: relax.Call) -> Value:
    """Quantisation by a range of elements before they are moved, so that bytes are moved instead.

    ::

        dynamic_quantize(permute_dims(x))
            ->   q = dynamic_quantize(x); (permute_dims(q[0]), q[1], q[2])
    """
    moved = graph.definition(call.args[0], *MOVES)
    if moved is None or not graph.has_one_use(call.args[0]) or extents(moved.args[0]) is None:
        return None
    whole = graph.emit(dynamic_quantize(moved.args[0]))
    data, scale, zero = (graph.emit(relax.TupleGetItem(whole, field)) for field in range(3))
    data = graph.emit(relax.Call(moved.op, [data, *moved.args[1:]], moved.attrs))
    return relax.Tuple([data, scale, zero])


def extents(expr: relax.Expr) -> list | None:
    """Extents of a tensor, known or symbolic; None for a shape without dimensions."""
    shape = getattr(expr.ty, "shape", None)
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else None


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

    Vision networks that end their blocks like transformers, such as ConvNeXt, are exported in this
    way. Left alone: chains with another op, with a value that has another reader, with weights that
    are no constants, and those that do not begin with such a transpose.
    """
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


def reshape_rms_norm(graph: Graph, call: relax.Call) -> Value:
    """A norm over all axes gets an axis in front that it leaves alone.

    ::

        rms_norm(x, weight, axes=[0, 1])
        ->  reshape(rms_norm(reshape(x, (1, m, n)), weight, [1, 2]))

    TVM's own kernel wants one: it has no expression for a mean that is a single number.
    """
    data, weight = call.args
    shape = data.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or len(call.attrs.axes) != len(shape.values):
        return None
    rows = graph.emit(relax.op.reshape(data, [1, *shape.values]))
    axes = [int(axis) % len(shape.values) + 1 for axis in call.attrs.axes]
    norm = graph.emit(relax.op.nn.rms_norm(rows, weight, axes, float(call.attrs.epsilon)))
    return relax.op.reshape(norm, shape)


def unflatten_matmul(graph: Graph, call: relax.Expr) -> Value:
    """Removal of reshapes around a product of matrices.

    ::

        reshape(matmul(reshape(x, [B * S, K]), w) + bias, [B, S, N])   ->   matmul(x, w) + bias

    Exporters write layers of tensors with three axes in this way, because ONNX's Gemm knows only
    two. Without the reshapes, element-wise ops that follow are fused with the product. They stay
    where ``S`` is small and ``B * S`` is not: a kernel of many rows reads ``w`` far less often than
    one of ``B`` products of few rows. So it is with the steps of a recurrent layer. GPU kernels
    take the rows of all ``B`` as those of one product, with or without reshapes.
    """
    return None if _has_few_rows(call) else unflatten_any_matmul(graph, call)


def unflatten_any_matmul(graph: Graph, call: relax.Expr) -> Value:
    """Rewrite it for a GPU, also where ``S`` is small."""
    inner, bias = _product_and_bias(graph, call.args[0])
    product = graph.definition(inner, "relax.matmul")
    if product is None or not _are_used_once(graph, call.args[0], inner):
        return None
    flat, weight = product.args
    flattened = graph.definition(flat, "relax.reshape")
    if flattened is None or flat.ty.ndim != 2 or weight.ty.ndim != 2:
        return None
    source, result, rows, columns = map(extents, (flattened.args[0], call, flat, product))
    if source is None or not result or rows is None or columns is None:
        return None
    if not _same_extents([*source, columns[-1]], [*result[:-1], rows[-1], result[-1]]):
        return None
    value = relax.op.matmul(flattened.args[0], weight, product.attrs.out_dtype or None)
    return value if bias is None else relax.op.add(graph.emit(value), bias)


def _product_and_bias(graph: Graph, value: relax.Expr) -> tuple[relax.Expr, relax.Expr | None]:
    """The product and the vector that ``value`` is the sum of; else ``value`` itself."""
    add = graph.definition(value, "relax.add")
    for product, bias in () if add is None else (add.args, reversed(add.args)):
        if graph.definition(product, "relax.matmul") is not None and bias.ty.ndim <= 1:
            return product, bias
    return value, None


def _are_used_once(graph: Graph, *values: relax.Expr) -> bool:
    return all(graph.has_one_use(value) for value in values)


def _has_few_rows(call: relax.Expr) -> bool:
    """Whether the last reshape makes small groups of many rows."""
    rows, result = extents(call.args[0]), extents(call)
    if not rows or not result or len(result) < 2:
        return False
    are_many = isinstance(rows[0], tirx.IntImm) and not _is_small(rows[0])
    return are_many and _is_small(result[-2])


def _is_small(extent: tirx.Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) < PACKED_ROWS


def _same_extents(first: list, second: list) -> bool:
    return len(first) == len(second) and all(map(tvm_ffi.structural_equal, first, second))


_ELEMENTWISE = {
    "relax.sum": relax.op.add,
    "relax.max": relax.op.maximum,
    "relax.min": relax.op.minimum,
}


def unstack_reduction(graph: Graph, call: relax.Expr) -> Value:
    """Replacement of a reduction over a stack of tensors by a chain of element-wise ops.

    ::

        sum(stack((a, b, c), axis=0), axis=[0])   ->   (a + b) + c
        max(stack((a, b), axis=0), axis=[0])      ->   maximum(a, b)        min likewise

    TVM's ONNX importer writes Sum, Max and Min in this way. The stack must have no other reader.
    """
    stack = graph.definition(call.args[0], "relax.stack")
    if stack is None or call.attrs.keepdims or not graph.has_one_use(call.args[0]):
        return None
    axes = call.attrs.axis
    if axes is None or [int(axis) for axis in axes] != [int(stack.attrs.axis or 0)]:
        return None
    if not isinstance(stack.args[0], relax.Tuple):
        return None
    tensors = sorted(stack.args[0].fields, key=lambda t: isinstance(t, GenericConst))
    result = tensors[0]
    for index, tensor in enumerate(tensors[1:], start=2):
        combined = _ELEMENTWISE[call.op.name](result, tensor)
        result = combined if index == len(tensors) else graph.emit(combined)
    return result
