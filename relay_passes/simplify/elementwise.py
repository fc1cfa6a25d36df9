# SPDX-License-Identifier: Apache-2.0
"""Rules for element-wise ops: identities, broadcasts, bounds, activations and quantised numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GenericConst

from ..core.constants import FLOATS, array_of, numbers, scaled, shifted, tensor_constant, uniform
from ..core.expressions import ELEMENTWISE, MOVES, TUPLE_GET_ITEM, Value, op_name
from ..core.graph import Graph
from ..op.elementwise import bounds_of, hardswish, round_clip
from .tir_patterns import bound_of, zero_padding


def remove_broadcast(graph: Graph, call: relax.Expr) -> Value:
    """Removal of ``broadcast_to`` in front of element-wise ops, which broadcast by themselves.

    ::

        add(x, broadcast_to(c, shape))   ->   add(x, c)        x having that shape already
    """
    for index in (1, 0):
        source = graph.definition(call.args[index], "relax.broadcast_to")
        if source is not None and call.ty.is_base_of(call.args[1 - index].ty):
            operands = list(call.args)
            operands[index] = source.args[0]
            return relax.Call(call.op, operands, call.attrs, call.ty_args, call.span)
    return None


def is_broadcast_by_readers(graph: Graph, var: relax.Var) -> bool:
    """Return whether only element-wise ops and stacks of them read ``var``."""
    names = (*ELEMENTWISE, "relax.stack", "relax.broadcast_to")
    return all(op_name(user) in names for user in graph.users(var))


SAME_TYPE_IS_SAME_VALUE = ("relax.reshape", "relax.broadcast_to", "relax.astype")


def remove_identity(graph: Graph, call: relax.Expr) -> Value:
    """Removal of ops that return their input.

    ::

        (x, y)[0], dropout(x)[0], x + 0, x - 0, x * 1, x / 1, pad(x, 0), concat((x,))   ->   x
        reshape, broadcast_to, astype, permute_dims: the same shape, type, order   ->   x
    """
    source = _source(graph, call)
    if source is None or not (call.ty.is_base_of(source.ty) and source.ty.is_base_of(call.ty)):
        return None
    return source


def _source(graph: Graph, call: relax.Expr) -> Value:
    name = op_name(call)
    if name == TUPLE_GET_ITEM:
        whole = graph.definition(call.tuple_value)
        if isinstance(whole, relax.Tuple):
            return whole.fields[call.index]
        return whole.args[0] if op_name(whole) == "relax.nn.dropout" and call.index == 0 else None
    if name in SAME_TYPE_IS_SAME_VALUE:
        return call.args[0]
    if name == "relax.permute_dims":
        axes = call.attrs.axes
        return call.args[0] if axes is not None and list(axes) == list(range(len(axes))) else None
    if name == "relax.concat":
        parts = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else []
        return parts[0] if len(parts) == 1 else None
    padding = zero_padding(graph, call)
    if padding is not None:
        return padding[0] if not any((*padding[1], *padding[2])) else None
    for match, neutral in ((shifted(call), 0), (scaled(call), 1)):
        if match is not None and uniform(match[1]) == neutral:
            return match[0]
    return None


_BEYOND_INT64 = 2**63
"""Whole numbers from here on, such as the least float32, are no integers of TVM's."""


@dataclass(frozen=True)
class Clip:
    """``low <= element <= high`` for the elements of ``data``."""

    data: relax.Expr
    low: float
    high: float

    def then(self, outer: Clip) -> Clip:
        """Return the one clip that does this and then ``outer``."""
        low, high = (min(max(bound, outer.low), outer.high) for bound in (self.low, self.high))
        return Clip(self.data, low, high)


def canonicalize_clip(graph: Graph, call: relax.Expr) -> Value:
    """Normal form of bounds on the elements of a tensor: one relu, one relu6 or one clip.

    ::

        maximum(x, 0)              ->   relu(x)
        minimum(maximum(x, 0), 6)  ->   clip(x, 0, 6), which is what relax.op.nn.relu6 builds
        clip(clip(x, a, b), c, d)  ->   clip(x, e, f)        the inner one having no other reader
        minimum(x, 6)              ->   clip(x, -inf, 6)
        clip(x, -inf, inf)         ->   x

    The bounds come from ``relax.clip``, ``relax.nn.relu``, ``relax.maximum`` and ``relax.minimum``
    with a constant, and the PrimFuncs that TVM's ONNX importer emits for Clip. Whole bounds become
    integers, as ``relax.op.nn.relu6`` writes them. Left alone: integer tensors, bounds that differ
    between elements, NaN bounds, and a clip with its bounds the wrong way round.
    """
    clip = clip_of(graph, call)
    if clip is None:
        return None
    if graph.has_one_use(clip.data):
        inner = clip_of(graph, graph.definition(clip.data))
        clip = clip if inner is None else inner.then(clip)
    normal = _normal_form(clip)
    is_normal = op_name(normal) == op_name(call) and all(
        tvm_ffi.structural_equal(new, old) for new, old in zip(normal.args, call.args, strict=True)
    )
    return None if is_normal else normal


def clip_of(graph: Graph, call: Value) -> Clip | None:
    """The bounds that ``call`` applies to a floating-point tensor, if that is all it does."""
    if call is None or str(getattr(call.ty, "dtype", "")) not in FLOATS:
        return None
    clip = _read(graph, call)
    return clip if clip is not None and clip.low <= clip.high else None


def _read(graph: Graph, call: relax.Expr) -> Clip | None:
    name = op_name(call)
    if name == "relax.nn.relu":
        return Clip(call.args[0], 0.0, math.inf)
    if name == "relax.clip":
        low, high = call.args[1:]
        if not all(isinstance(bound, tirx.IntImm | tirx.FloatImm) for bound in (low, high)):
            return None
        return Clip(call.args[0], float(low.value), float(high.value))
    match: tuple[relax.Expr, bool, float] | None = None
    if name in ("relax.maximum", "relax.minimum"):
        match = _bound_by_constant(call)
    elif name == "relax.call_tir":
        match = bound_of(graph, call)
    if match is None:
        return None
    data, is_lower, value = match
    return Clip(data, value, math.inf) if is_lower else Clip(data, -math.inf, value)


def _bound_by_constant(call: relax.Call) -> tuple[relax.Expr, bool, float] | None:
    for data, other in (call.args, reversed(call.args)):
        value = uniform(numbers(other))
        if value is not None and call.ty.is_base_of(data.ty):
            return data, call.op.name == "relax.maximum", value
    return None


def _normal_form(clip: Clip) -> relax.Expr:
    if (clip.low, clip.high) == (-math.inf, math.inf):
        return clip.data
    if (clip.low, clip.high) == (0, math.inf):
        return relax.op.nn.relu(clip.data)
    low, high = (
        int(bound) if bound.is_integer() and abs(bound) < _BEYOND_INT64 else bound
        for bound in (clip.low, clip.high)
    )
    return relax.op.clip(clip.data, low, high)


def canonicalize_activation(graph: Graph, call: relax.Expr) -> Value:
    """Fusion of a product of a tensor and its own gate into one activation.

    ::

        x * clip(x + 3, 0, 6) / 6             ->   tvm_fusion.hardswish(x)
        x * clip(x * (1 / 6) + 0.5, 0, 1)     ->   tvm_fusion.hardswish(x)
        x * sigmoid(x)                        ->   nn.silu(x)
        x * (erf(x / sqrt(2)) + 1) / 2        ->   nn.gelu(x)

    The factors may come in any order and the division may stand at any of them; the values between
    ``x`` and the product must have no other reader. Left alone: gates with other slopes and bounds.
    """
    if str(getattr(call.ty, "dtype", "")) not in FLOATS:
        return None
    product = _factors(graph, call)
    if product is None:
        return None
    first, second, factor = product
    for data, gate in ((first, second), (second, first)):
        if not graph.has_one_use(gate) or not call.ty.is_base_of(data.ty):
            continue
        value = graph.definition(gate)
        if op_name(value) == "relax.sigmoid" and value.args[0].same_as(data) and factor == 1:
            return relax.op.nn.silu(data)
        if _is_hard_gate(graph, value, data, factor):
            return hardswish(data)
        if _is_erf_gate(graph, value, data, factor):
            return relax.op.nn.gelu(data)
    return None


def _factors(graph: Graph, call: relax.Expr) -> tuple[relax.Expr, relax.Expr, float] | None:
    """``(a, b, c)`` if ``call`` is a * b * c with tensors a, b and a number c."""
    outer, factor = _without_factor(call)
    if outer is not None:
        if not graph.has_one_use(outer):
            return None
        call = graph.definition(outer, "relax.multiply")
    if op_name(call) != "relax.multiply" or scaled(call) is not None:
        return None
    operands = []
    for operand in call.args:
        inner, inner_factor = _without_factor(graph.definition(operand))
        takes_part = inner is not None and graph.has_one_use(operand)
        operands.append(inner if takes_part else operand)
        factor *= inner_factor if takes_part else 1.0
    return operands[0], operands[1], factor


def _without_factor(call: Value) -> tuple[relax.Expr | None, float]:
    match = scaled(call)
    factor = None if match is None else uniform(match[1])
    return (None, 1.0) if match is None or factor is None else (match[0], factor)


def _is_hard_gate(graph: Graph, gate: Value, data: relax.Expr, factor: float) -> bool:
    """Return whether ``factor * gate`` is ``clip(data / 6 + 1 / 2, 0, 1)``."""
    clip = clip_of(graph, gate)
    if clip is None or clip.low != 0 or not graph.has_one_use(clip.data):
        return False
    line = shifted(graph.definition(clip.data))
    offset = None if line is None else uniform(line[1])
    if line is None or offset is None:
        return False
    slope = _slope(graph, line[0], data)
    found = (factor * slope, factor * offset, factor * clip.high)
    return _all_close(found, (1 / 6, 1 / 2, 1.0), data)


def _is_erf_gate(graph: Graph, gate: Value, data: relax.Expr, factor: float) -> bool:
    """Return whether ``factor * gate`` is ``(erf(data / sqrt(2)) + 1) / 2``."""
    line = shifted(gate)
    offset = None if line is None else uniform(line[1])
    if line is None or offset is None or not graph.has_one_use(line[0]):
        return False
    erf = graph.definition(line[0], "relax.erf")
    if erf is None:
        return False
    found = (factor, factor * offset, _slope(graph, erf.args[0], data))
    return _all_close(found, (1 / 2, 1 / 2, math.sqrt(1 / 2)), data)


def _slope(graph: Graph, value: relax.Expr, data: relax.Expr) -> float:
    """``a`` if ``value`` is ``a * data`` and has no other reader, or ``data`` itself; else 0."""
    if value.same_as(data):
        return 1.0
    inner, slope = _without_factor(graph.definition(value))
    found = inner is not None and inner.same_as(data) and graph.has_one_use(value)
    return slope if found else 0.0


def _all_close(found: Sequence[float], expected: Sequence[float], data: relax.Expr) -> bool:
    """Return whether numbers are equal up to rounding in the type of ``data``."""
    near = 4 * float(ml_dtypes.finfo(np.dtype(str(data.ty.dtype))).eps)
    return all(math.isclose(f, e, rel_tol=near) for f, e in zip(found, expected, strict=True))


QUANTIZED = ("int8", "uint8", "int16", "uint16")
_MAX_POOL = "relax.nn.max_pool2d"
CHOICES = (*MOVES, _MAX_POOL, "relax.strided_slice")
"""Ops whose results are elements of their first operand."""


class _Grid(NamedTuple):
    """The numbers ``i * scale`` with whole ``i`` from ``low`` to ``high``."""

    scale: float
    low: float
    high: float


def fold_quantization(graph: Graph, call: relax.Expr) -> Value:
    """Computation of quantised tensors inside of a network in floats, by what they stand for.

    ::

        dequantize(quantize(x, s, z), s, z)   ->   round_clip(x / s, a - z, b - z) * s
        dequantize(move(quantize(x, s, z)), s, z)   ->   move(dequantize(quantize(x, s, z), s, z))
        round_clip(clip(x, c, d) / s, ...)    ->   round_clip(x / s, ...)  where that bounds as much

    ``a`` and ``b`` are the limits of the quantised type. The division joins the weight of a
    convolution in front, the product that of one behind (``fold_scale``, ``fold_input_affine``), so
    between convolutions only the rounding is left, which ends the kernel of the first. A tensor
    that was quantised in the same way before, and since then only moved or compared, stays as it
    is.

    Left alone: scales for each channel, other types than float32 and integers of up to 16 bits, and
    what is stored quantised at the ends of a network.
    """
    quantized = graph.definition(call.args[0], "relax.quantize")
    if quantized is None:
        return _before_move(graph, call)
    if str(call.ty.dtype) != "float32":
        return None
    data, grid = quantized.args[0], _grid(quantized)
    if grid is None or grid != _grid(call) or str(data.ty.dtype) != "float32":
        return None
    if _is_on(graph, data, grid):
        return data
    scale = tensor_constant(np.array(grid.scale), "float32")
    units = graph.emit_once(relax.op.divide(_unbounded(graph, data, grid), scale))
    whole = graph.emit_once(round_clip(units, grid.low, grid.high))
    return relax.op.multiply(whole, scale)


def _before_move(graph: Graph, call: relax.Call) -> Value:
    """Make floats of what was quantised before its elements were only moved or compared."""
    move, grid = graph.definition(call.args[0], *CHOICES), _grid(call)
    source = move
    while op_name(source) in CHOICES:
        source = graph.definition(source.args[0], *CHOICES, "relax.quantize")
    if move is None or source is None or grid is None or grid != _grid(source):
        return None
    if any(operand.ty.ndim for operand in call.args[1:]):  # one number for each of some axis
        return None
    floats = relax.Call(call.op, [move.args[0], *call.args[1:]], call.attrs)
    moved = relax.Call(move.op, [graph.emit_once(floats), *move.args[1:]], move.attrs)
    return graph.emit_once(moved)


def is_whole(graph: Graph, expr: relax.Expr) -> bool:
    """Return whether ``expr`` holds quantised numbers without their scale."""
    value = graph.definition(expr)
    while op_name(value) in (_MAX_POOL, "relax.subtract"):
        point = 0.0 if op_name(value) == _MAX_POOL else uniform(numbers(value.args[1]))
        if point is None or not point.is_integer():
            return False
        value = graph.definition(value.args[0])
    if op_name(value) == "relax.astype":
        return str(value.args[0].ty.dtype) in QUANTIZED
    return op_name(value) == "relax.tvm_fusion.round_clip"


def stored_integers(graph: Graph, call: Value) -> tuple[relax.Expr, np.ndarray] | None:
    """The whole numbers and the scale of a dequantised tensor of the network's inputs."""
    if op_name(call) != "relax.dequantize" or str(call.ty.dtype) != "float32":
        return None
    grid = _grid(call)
    if grid is None or isinstance(call.args[0], GenericConst):
        return None
    whole = graph.emit_once(relax.op.astype(call.args[0], "float32"))
    zero = np.iinfo(str(call.args[0].ty.dtype)).min - grid.low
    if zero:
        point = tensor_constant(np.array(zero), "float32")
        whole = graph.emit_once(relax.op.subtract(whole, point))
    return whole, np.array(grid.scale)


def pool_integers(graph: Graph, call: relax.Expr) -> Value:
    """Maxima of quantised numbers before their scale, which a convolution behind may take.

    ::

        max_pool2d(x * s)   ->   max_pool2d(x) * s          x without a scale, s > 0
    """
    match = scaled(graph.definition(call.args[0]))
    factor = None if match is None else uniform(match[1])
    if match is None or factor is None or factor <= 0 or not is_whole(graph, match[0]):
        return None
    pooled = graph.emit_once(relax.Call(call.op, [match[0]], call.attrs))
    return relax.op.multiply(pooled, tensor_constant(np.array(factor), "float32"))


def _grid(call: relax.Call) -> _Grid | None:
    """The numbers that a quantised tensor can stand for; None with several scales."""
    dtype = str(call.ty.dtype if op_name(call) == "relax.quantize" else call.args[0].ty.dtype)
    scale, zero = uniform(numbers(call.args[1])), call.args[2]
    if scale is None or not 0 < scale < np.inf or dtype not in QUANTIZED:
        return None
    if not isinstance(zero, GenericConst) or (points := np.unique(array_of(zero))).size != 1:
        return None
    limits, point = np.iinfo(dtype), int(points[0])
    return _Grid(scale, float(limits.min - point), float(limits.max - point))


def _is_on(graph: Graph, data: relax.Expr, grid: _Grid) -> bool:
    """Return whether all elements of ``data`` are numbers of ``grid`` already."""
    value = graph.definition(data, *CHOICES, "relax.multiply")
    while op_name(value) in CHOICES:
        value = graph.definition(value.args[0], *CHOICES, "relax.multiply")
    if value is None or uniform(numbers(value.args[1])) != grid.scale:
        return False
    whole = graph.definition(value.args[0], _MAX_POOL, "relax.tvm_fusion.round_clip")
    while op_name(whole) == _MAX_POOL:
        whole = graph.definition(whole.args[0], _MAX_POOL, "relax.tvm_fusion.round_clip")
    return whole is not None and bounds_of(whole) == grid[1:]


def _unbounded(graph: Graph, data: relax.Expr, grid: _Grid) -> relax.Expr:
    """``data`` before a clip that the limits of the quantised type make superfluous."""
    clip = clip_of(graph, graph.definition(data))
    if clip is None or not graph.has_one_use(data):
        return data
    low, high = clip.low / grid.scale, clip.high / grid.scale
    return clip.data if _rounded(low) <= grid.low and _rounded(high) >= grid.high else data


def _rounded(number: float) -> float:
    return float(np.rint(number))
