# SPDX-License-Identifier: Apache-2.0
"""Rules of normalisations, variances, p-norms and pooling of whole images, in float32.

Mean and variance are two reductions of one chain::

    mean       = R.mean(x, axes, keepdims=True)
    difference = R.subtract(x, mean)
    squares    = R.multiply(difference, difference)
    variance   = R.mean(squares, axes, keepdims=True)

The mean of squares minus the square of the mean would need one pass over the data and lose all
digits where the mean is large; a kernel that holds a row on chip also reads the data once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst

from schedules.tir.extents import constant
from schedules.workload.reduce import FLOATS, normal_axes

from ..core.constants import array_of, numbers, tensor_constant, uniform
from ..core.expressions import Value
from ..core.graph import Graph

NARROW = ("float16", "bfloat16")


def extents(expr: relax.Expr) -> list[tirx.Expr] | None:
    """The extents of a tensor of floats without an empty axis; None for anything else."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    if ty.dtype is None or str(ty.dtype) not in FLOATS:
        return None
    shape = list(ty.shape.values)
    return shape if shape and all(constant(extent) != 0 for extent in shape) else None


def widen(graph: Graph, expr: relax.Expr) -> relax.Expr:
    """``expr``, in float32 if it has 16 bits."""
    if str(expr.ty.dtype) not in NARROW:
        return expr
    if isinstance(expr, GenericConst):
        return tensor_constant(array_of(expr), "float32")
    return graph.emit_once(relax.op.astype(expr, "float32"))


def narrow(graph: Graph, value: relax.Expr, dtype: object) -> relax.Expr:
    """``value``, not yet bound, rounded to ``dtype`` if that has 16 bits."""
    if str(dtype) not in NARROW:
        return value
    return relax.op.astype(graph.emit(value), str(dtype))


def number(value: float, like: relax.Expr) -> relax.Expr:
    """A scalar constant of the type of ``like``."""
    return tensor_constant(np.asarray(value), like.ty.dtype)


def spread(graph: Graph, vector: relax.Expr, shape: Sequence, axes: Sequence[int]) -> relax.Expr:
    """``vector`` of the extents of ``axes``, ascending, shaped to broadcast against ``shape``."""
    ndim = len(shape)
    if list(axes) == list(range(ndim - len(axes), ndim)):
        return vector
    return reshape(graph, vector, [n if axis in axes else 1 for axis, n in enumerate(shape)])


def reshape(graph: Graph, expr: relax.Expr, shape: Sequence) -> relax.Expr:
    """``expr`` in another shape; a constant stays a constant."""
    if isinstance(expr, GenericConst) and all(constant(extent) is not None for extent in shape):
        values = array_of(expr).reshape([int(extent) for extent in shape])
        return tensor_constant(values, expr.ty.dtype)
    return graph.emit_once(relax.op.reshape(expr, shape))


@dataclass(frozen=True)
class Moments:
    """Bindings of the chain; ``difference`` has the data's shape, the others extent 1 in ``axes``.

    ``variance`` is not bound yet.
    """

    mean: relax.Var
    difference: relax.Var
    variance: relax.Expr


def emit_moments(
    graph: Graph, data: relax.Expr, axes: Sequence[int], *, keepdims: bool = True
) -> Moments:
    """Bind the chain of ``data``; existing bindings of it are reused."""
    mean = graph.emit_once(relax.op.mean(data, list(axes), keepdims=True))
    difference = graph.emit_once(relax.op.subtract(data, mean))
    squares = graph.emit_once(relax.op.multiply(difference, difference))
    return Moments(mean, difference, relax.op.mean(squares, list(axes), keepdims=keepdims))


def normalized(
    graph: Graph, difference: relax.Expr, variance: relax.Expr, epsilon: float
) -> relax.Expr:
    """``difference / sqrt(variance + epsilon)``, not bound yet, with one root a row."""
    shifted = graph.emit_once(relax.op.add(variance, number(epsilon, difference)))
    return relax.op.multiply(difference, graph.emit_once(relax.op.rsqrt(shifted)))


def scale_and_shift(
    graph: Graph, value: relax.Expr, gamma: relax.Expr | None, beta: relax.Expr | None
) -> relax.Expr:
    """``value * gamma + beta``, not bound yet; operands that are None are left out."""
    if gamma is not None:
        value = relax.op.multiply(graph.emit(value), gamma)
    if beta is not None:
        value = relax.op.add(graph.emit(value), beta)
    return value


def layer_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``layer_norm`` over ascending axes."""
    shape = extents(call.args[0])
    if shape is None:
        return None
    axes = [int(axis) % len(shape) for axis in call.attrs.axes]
    if axes != sorted(axes):
        return None  # gamma and beta would have to be transposed
    return _affine_norm(graph, call, axes, axes)


def instance_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``instance_norm``: every channel of every image has its own mean and variance."""
    shape = extents(call.args[0])
    if shape is None:
        return None
    channel = int(call.attrs.channel_axis) % len(shape)
    return _affine_norm(graph, call, normal_axes(call.attrs.axes, len(shape)), [channel])


def _affine_norm(
    graph: Graph, call: relax.Call, axes: Sequence[int], scaled: Sequence[int]
) -> relax.Expr:
    """A norm over ``axes`` whose gamma and beta have the extents of the axes ``scaled``."""
    data, gamma, beta = call.args
    wide = widen(graph, data)
    moments = emit_moments(graph, wide, axes)
    result = normalized(
        graph, moments.difference, graph.emit_once(moments.variance), float(call.attrs.epsilon)
    )
    weights = [
        spread(graph, widen(graph, weight), list(data.ty.shape.values), scaled) if is_used else None
        for weight, is_used in ((gamma, call.attrs.scale), (beta, call.attrs.center))
    ]
    return narrow(graph, scale_and_shift(graph, result, *weights), data.ty.dtype)


def rms_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``rms_norm`` over ascending axes."""
    data, weight = call.args
    shape = extents(data)
    if shape is None:
        return None
    axes = [int(axis) % len(shape) for axis in call.attrs.axes]
    if axes != sorted(axes):
        return None  # the weight would have to be transposed
    wide = widen(graph, data)
    squares = graph.emit_once(relax.op.multiply(wide, wide))
    mean = graph.emit_once(relax.op.mean(squares, axes, keepdims=True))
    scale = spread(graph, widen(graph, weight), shape, axes)
    result = graph.emit(normalized(graph, wide, mean, float(call.attrs.epsilon)))
    return narrow(graph, relax.op.multiply(result, scale), data.ty.dtype)


def group_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``group_norm`` with a known number of channels.

    ::

        g = R.reshape(x, [N, G, C // G, H, W])
        R.reshape((g - mean) * rsqrt(variance + epsilon) * gamma + beta, [N, C, H, W])

    with mean and variance over the channels of a group and the axes named.
    """
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


def written_out_norm(graph: Graph, divide: relax.Call) -> Value:
    """Rewrite the quotient as which TVM's ONNX importer emits InstanceNormalization.

    ::

        (x - mean(x)) / sqrt(variance(x) + epsilon)   ->   the same with one mean and one root a row
    """
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


def batch_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite ``batch_norm`` with ``training=True``; the other form holds no reduction.

    ::

        batch_norm(x, gamma, beta, running_mean, running_variance, training=True)
        ->
        ((x - mean) * rsqrt(variance + epsilon) * gamma + beta,
         (1 - momentum) * running_mean + momentum * mean,
         (1 - momentum) * running_variance + momentum * variance)

    with mean and variance over all axes but the channel axis.
    """
    data, gamma, beta, *running = call.args
    attrs = call.attrs
    shape = extents(data)
    if shape is None or not attrs.training or len(shape) < 2:
        return None
    channel = int(attrs.axis) % len(shape)
    wide = widen(graph, data)
    moments = emit_moments(graph, wide, [axis for axis in range(len(shape)) if axis != channel])
    variance = graph.emit_once(moments.variance)
    weights = [
        spread(graph, widen(graph, weight), shape, [channel]) if is_used else None
        for weight, is_used in ((gamma, attrs.scale), (beta, attrs.center))
    ]
    result = normalized(graph, moments.difference, variance, float(attrs.epsilon))
    result = scale_and_shift(graph, result, *weights)
    results = [narrow(graph, result, data.ty.dtype)]
    for old, new in zip(running, (moments.mean, variance), strict=True):
        results.append(_updated(graph, old, new, float(attrs.momentum)))
    return relax.Tuple([graph.emit(result) for result in results])


def tuple_field(graph: Graph, item: relax.TupleGetItem) -> Value:
    """The field itself, where the tuple is constructed here."""
    value = graph.definition(item.tuple_value)
    return value.fields[item.index] if isinstance(value, relax.Tuple) else None


def _updated(graph: Graph, old: relax.Expr, new: relax.Expr, momentum: float) -> relax.Expr:
    """``(1 - momentum) * old + momentum * new`` in the shape and type of ``old``."""
    wide = widen(graph, old)
    new = graph.emit(relax.op.reshape(new, old.ty.shape))
    kept = graph.emit(relax.op.multiply(number(1 - momentum, wide), wide))
    added = graph.emit(relax.op.multiply(number(momentum, wide), new))
    return narrow(graph, relax.op.add(kept, added), old.ty.dtype)


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


POOLS = tuple(
    f"relax.nn.{kind}_pool{rank}d" for kind in ("adaptive_avg", "avg", "max") for rank in (1, 2, 3)
)


def global_pool(graph: Graph, call: relax.Call) -> Value:
    """Rewrite a pooling with one output a channel.

    ::

        adaptive_avg_pool2d(x, [1, 1])            ->   R.mean(x, axis=[2, 3], keepdims=True)
        avg_pool2d(x, pool_size=[H, W])           ->   R.mean(x, axis=[2, 3], keepdims=True)
        max_pool2d(x, pool_size=[H, W])           ->   R.max(x, axis=[2, 3], keepdims=True)

    likewise in one and three dimensions, in every layout whose spatial axes are not split.
    """
    data, attrs = call.args[0], call.attrs
    shape = extents(data)
    axes = _spatial_axes(str(attrs.layout))
    if shape is None or axes is None or attrs.layout != attrs.out_layout:
        return None
    if any(constant(call.ty.shape.values[axis]) != 1 for axis in axes):
        return None
    if "adaptive" not in call.op.name and not _covers_all(attrs, [shape[axis] for axis in axes]):
        return None
    reduce = relax.op.max if "max_pool" in call.op.name else relax.op.mean
    return reduce(data, axes, keepdims=True)


def _spatial_axes(layout: str) -> list[int] | None:
    """Positions of depth, height and width; None if one of them is split."""
    letters = [letter for letter in layout if letter.isalpha()]
    if any(letter in "dhw" for letter in letters):
        return None
    return [position for position, letter in enumerate(letters) if letter in "DHW"]


def _covers_all(attrs: Value, image: list) -> bool:
    """Return whether one window without padding or holes is as large as the image."""
    window = [int(extent) for extent in attrs.pool_size]
    is_dense = not any(attrs.padding) and all(int(step) == 1 for step in attrs.dilation)
    return is_dense and window == [constant(extent) for extent in image]


_LIFTS = ("relax.abs", "relax.multiply", "relax.square", "relax.power")


def p_norm(graph: Graph, call: relax.Call) -> Value:
    """Rewrite a root, power or logarithm of a sum.

    ::

        sqrt(sum(x * x))             ReduceL2
        log(sum(x))                  ReduceLogSum
        power(sum(power(abs(x), p)), 1 / p)      GlobalLpPool

    Their sums may overflow although the norms do not: they are computed in float32 and rounded
    once. Wider data stay: their sums are reductions already.
    """
    total = graph.definition(call.args[0], "relax.sum")
    if total is None or not _is_unary(call):
        return None
    if str(call.ty.dtype) not in NARROW or extents(total.args[0]) is None:
        return None
    terms = _widened(graph, total.args[0])
    wide = graph.emit(relax.op.sum(terms, total.attrs.axis, total.attrs.keepdims))
    return narrow(graph, _of(graph, call, wide), call.ty.dtype)


def _widened(graph: Graph, data: relax.Expr) -> relax.Expr:
    """``data`` and the unary ops before it in float32."""
    value = graph.definition(data, *_LIFTS)
    if value is None or not _is_unary(value):
        return widen(graph, data)
    return graph.emit_once(_of(graph, value, _widened(graph, value.args[0])))


def _is_unary(call: relax.Call) -> bool:
    """Return whether ``call`` is a function of the elements of its first operand alone."""
    if call.op.name == "relax.multiply":
        return call.args[0].same_as(call.args[1])
    if call.op.name == "relax.power":
        return isinstance(call.args[1], GenericConst) and call.args[1].ty.ndim == 0
    return True


def _of(graph: Graph, call: relax.Call, data: relax.Expr) -> relax.Expr:
    """The function ``call``, of ``data`` in float32."""
    if call.op.name == "relax.multiply":
        return relax.op.multiply(data, data)
    if call.op.name == "relax.power":
        return relax.op.power(data, widen(graph, call.args[1]))
    return relax.Call(call.op, [data])
