# SPDX-License-Identifier: Apache-2.0
"""Folding of ops on constants, by numpy.

``relax.transform.FoldConstant`` builds and runs a kernel for each op that it folds, and a network
has hundreds of weights to reshape. So the ops in front of weights are computed by numpy, and others
are left to that pass. A ``broadcast_to`` that only element-wise ops read stays: they broadcast the
small constant themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst, GlobalVar

from schedules.errors import InvalidModelError

from ..core.constants import FLOATS, array_of, tensor_constant
from ..core.expressions import Value, op_name
from ..core.graph import Graph
from ..op.widen_weight import NAME as WIDEN_WEIGHT
from ..op.widen_weight import widened
from .elementwise import is_broadcast_by_readers

SHAPES = ("relax.shape_of", "relax.shape_to_tensor")
_SHAPE_OPS = (*SHAPES, "relax.tensor_to_shape")
_DTYPES = (*FLOATS, "int8", "int32", "int64", "uint8", "bool")


def _shape(call: relax.Call) -> tuple[int, ...]:
    return tuple(int(extent) for extent in call.ty.shape.values)


def _permute(call: relax.Call, x: np.ndarray) -> np.ndarray:
    axes = call.attrs.axes
    return np.transpose(x, None if axes is None else [int(axis) for axis in axes])


def _concat(call: relax.Call, *parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts, int(call.attrs.axis or 0))


def _check_indices(call: relax.Call, x: np.ndarray) -> np.ndarray:
    bounds = np.array([int(extent) for extent in call.args[1].values])
    if call.attrs["message"] and ((x < -bounds) | (x >= bounds)).any():
        raise InvalidModelError(str(call.attrs["message"]))
    return np.clip(np.where(x < 0, x + bounds, x), 0, np.maximum(bounds - 1, 0))


def _along(call: relax.Call, numbers: np.ndarray) -> np.ndarray:
    """A scale or zero point for all elements, or one for each slice of the call's axis."""
    if numbers.size == 1:
        return numbers.reshape(())
    rank = call.args[0].ty.ndim
    shape = [1] * rank
    shape[int(call.attrs.axis) % rank] = -1
    return numbers.reshape(shape)


def _dequantize(call: relax.Call, x: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    return (x.astype("int64") - _along(call, zero)).astype("float32") * _along(call, scale)


def _quantize(call: relax.Call, x: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    limits = np.iinfo(str(call.ty.dtype))
    whole = np.rint(x / _along(call, scale)) + _along(call, zero)
    return np.clip(whole, limits.min, limits.max)


def _widen(call: relax.Call, x: np.ndarray, scale: np.ndarray, *zero: np.ndarray) -> np.ndarray:
    block, axis = int(call.attrs["block"]), int(call.attrs["axis"])
    return widened(x, scale, zero[0] if zero else None, block, axis)


def _strided_slice(call: relax.Call, x: np.ndarray) -> np.ndarray:
    axes, begin, end, *steps = ([int(number) for number in part.fields] for part in call.args[1:])
    places = [slice(None)] * x.ndim
    strides = steps[0] if steps else [1] * len(axes)
    for axis, first, last, step in zip(axes, begin, end, strides, strict=True):
        places[axis] = slice(first, last, step)
    return x[tuple(places)]


def _take(call: relax.Call, x: np.ndarray, indices: np.ndarray) -> np.ndarray | None:
    axis = call.attrs.axis
    if str(call.attrs.mode) not in ("clip", "fast") or not x.size:
        return None
    return np.take(x, indices, None if axis is None else int(axis), mode="clip")


def _reduced(reduce: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A reduction, whose floats are computed in float64."""

    def compute(call: relax.Call, x: np.ndarray) -> np.ndarray:
        wide = x.astype("float64") if str(call.ty.dtype) in FLOATS else x
        axes = call.attrs.axis
        places = None if axes is None or not len(axes) else tuple(int(axis) for axis in axes)
        return reduce(wide, axis=places, keepdims=bool(call.attrs.keepdims))

    return compute


_COMPUTE: dict[str, Callable[..., Any]] = {
    "relax.add": lambda call, x, y: x + y,
    "relax.subtract": lambda call, x, y: x - y,
    "relax.multiply": lambda call, x, y: x * y,
    "relax.divide": lambda call, x, y: x / y,
    "relax.maximum": lambda call, x, y: np.maximum(x, y),
    "relax.minimum": lambda call, x, y: np.minimum(x, y),
    "relax.negative": lambda call, x: -x,
    "relax.sqrt": lambda call, x: np.sqrt(x),
    "relax.rsqrt": lambda call, x: 1 / np.sqrt(x),
    "relax.isnan": lambda call, x: np.isnan(x),
    "relax.where": lambda call, condition, x, y: np.where(condition, x, y),
    "relax.dequantize": _dequantize,
    "relax.quantize": _quantize,
    "relax.astype": lambda call, x: x,
    "relax.reshape": lambda call, x: x.reshape(_shape(call)),
    "relax.squeeze": lambda call, x: x.reshape(_shape(call)),
    "relax.expand_dims": lambda call, x: x.reshape(_shape(call)),
    "relax.broadcast_to": lambda call, x: np.broadcast_to(x, _shape(call)),
    "relax.permute_dims": _permute,
    "relax.concat": _concat,
    "relax.abs": lambda call, x: np.abs(x),
    "relax.ceil": lambda call, x: np.ceil(x),
    "relax.cos": lambda call, x: np.cos(x),
    "relax.exp": lambda call, x: np.exp(x),
    "relax.floor": lambda call, x: np.floor(x),
    "relax.flip": lambda call, x: np.flip(x, int(call.attrs.axis)),
    "relax.greater": lambda call, x, y: x > y,
    "relax.greater_equal": lambda call, x, y: x >= y,
    "relax.less_equal": lambda call, x, y: x <= y,
    "relax.log": lambda call, x: np.log(x),
    "relax.logical_and": lambda call, x, y: np.logical_and(x, y),
    "relax.logical_not": lambda call, x: np.logical_not(x),
    "relax.logical_or": lambda call, x, y: np.logical_or(x, y),
    "relax.max": _reduced(np.max),
    "relax.mean": _reduced(np.mean),
    "relax.min": _reduced(np.min),
    "relax.not_equal": lambda call, x, y: x != y,
    "relax.sin": lambda call, x: np.sin(x),
    "relax.stack": lambda call, *parts: np.stack(parts, int(call.attrs.axis or 0)),
    "relax.strided_slice": _strided_slice,
    "relax.sum": _reduced(np.sum),
    "relax.take": _take,
    "relax.tanh": lambda call, x: np.tanh(x),
    "relax.tile": lambda call, x: np.tile(x, [int(count) for count in call.attrs.repeats]),
    "relax.tril": lambda call, x: np.tril(x, int(call.args[1])),
    "relax.triu": lambda call, x: np.triu(x, int(call.args[1])),
    "relax.less": lambda call, x, y: x < y,
    "relax.equal": lambda call, x, y: x == y,
    "relax.tvm_fusion.checked_indices": _check_indices,
    WIDEN_WEIGHT: _widen,
}

FOLDED = tuple(_COMPUTE)


def fold_constant(graph: Graph, call: relax.Expr) -> Value:
    """The value of ``call`` if all its tensors are constants, or it asks for a known shape."""
    name = op_name(call)
    if name in SHAPES:
        return _fold_shape(call)
    if name == "relax.broadcast_to" and is_broadcast_by_readers(graph, graph.current):
        return None
    tensors = _tensors(call)
    if not tensors or not all(isinstance(tensor, GenericConst) for tensor in tensors):
        return None
    if not _is_static(call.ty) or not all(_is_static(tensor.ty) for tensor in tensors):
        return None
    shapes = [shape.values for shape in call.args if isinstance(shape, relax.ShapeExpr)]
    if not all(isinstance(extent, tirx.IntImm) for shape in shapes for extent in shape):
        return None
    dtype = str(call.ty.dtype)
    if name == "relax.divide" and dtype not in FLOATS:
        return None  # integers are rounded differently
    if name in _QUANTIZING and not _is_quantizing(call):
        return None
    with np.errstate(all="ignore"):
        result = _COMPUTE[str(name)](call, *(array_of(tensor) for tensor in tensors))
    if result is None or np.shape(result) != _shape(call):
        return None
    return tensor_constant(result, dtype)


def _fold_shape(call: relax.Expr) -> Value:
    """The value of a shape as a tensor, and of a tensor's shape, if they are known."""
    ty = call.args[0].ty
    shape = ty if isinstance(ty, relax.ShapeType) else getattr(ty, "shape", None)
    values = getattr(shape, "values", None)
    if values is None or not all(isinstance(value, tirx.IntImm) for value in values):
        return None
    if op_name(call) == "relax.shape_of":
        return relax.ShapeExpr(values)
    return tensor_constant(np.array([int(value) for value in values]), "int64")


_QUANTIZING = ("relax.dequantize", "relax.quantize")


def _is_quantizing(call: relax.Call) -> bool:
    """Return whether a call is between float32 and whole numbers."""
    types = sorted([str(call.ty.dtype), str(call.args[0].ty.dtype)])
    return types[0] == "float32" and "int" in types[1]


def needs_kernel(call: relax.Expr) -> bool:
    """Return whether ``call`` still computes with constants after the rule has run."""
    name = op_name(call)
    if name in (None, "relax.broadcast_to") or not isinstance(call, relax.Call):
        return False
    if name in _SHAPE_OPS:
        return True
    known = (GenericConst, relax.ShapeExpr, tirx.IntImm, tirx.FloatImm)
    operands = [arg for arg in _flattened(call) if not isinstance(arg, GlobalVar)]
    return bool(call.op.get_attr("FPurity")) and all(isinstance(arg, known) for arg in operands)


def _tensors(call: relax.Call) -> list[relax.Expr]:
    numbers = (relax.ShapeExpr, tirx.IntImm)
    return [arg for arg in _flattened(call) if not isinstance(arg, numbers)]


def _flattened(call: relax.Call) -> list[relax.Expr]:
    """The operands of ``call``, tuples replaced by their fields."""
    operands: list[relax.Expr] = []
    for argument in call.args:
        operands.extend(argument.fields if isinstance(argument, relax.Tuple) else [argument])
    return operands


def _is_static(ty: relax.Type) -> bool:
    """Return whether ``ty`` is a tensor of known extents and of an element type that numpy has."""
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) not in _DTYPES:
        return False
    values = getattr(ty.shape, "values", None)
    return values is not None and all(isinstance(value, tirx.IntImm) for value in values)
