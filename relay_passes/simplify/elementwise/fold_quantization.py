# SPDX-License-Identifier: Apache-2.0
"""Computation of quantised tensors inside of a network in floats, by the numbers they stand for.

::

    dequantize(quantize(x, s, z), s, z)   ->   round_clip(x / s, a - z, b - z) * s
    dequantize(move(quantize(x, s, z)), s, z)   ->   move(dequantize(quantize(x, s, z), s, z))
    round_clip(clip(x, c, d) / s, ...)    ->   round_clip(x / s, ...)     where that bounds as much

``a`` and ``b`` are the limits of the quantised type. The division joins the weight of a convolution
in front, the product that of one behind (``fold_scale``, ``fold_input_affine``), so between
convolutions only the rounding is left, which ends the kernel of the first. A tensor that was
quantised in the same way before, and since then only moved or compared, stays as it is.

Left alone: scales for each channel, other types than float32 and integers of up to 16 bits, and
what is stored quantised at the ends of a network.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from ...core.constants import array_of, numbers, tensor_constant, uniform
from ...core.expressions import MOVES, Value, op_name
from ...core.graph import Graph
from ...op.elementwise import bounds_of, round_clip
from .canonicalize_clip import clip_of

QUANTIZED = ("int8", "uint8", "int16", "uint16")
CHOICES = (*MOVES, "relax.nn.max_pool2d", "relax.strided_slice")
"""Ops whose results are elements of their first operand."""


class _Grid(NamedTuple):
    """The numbers ``i * scale`` with whole ``i`` from ``low`` to ``high``."""

    scale: float
    low: float
    high: float


def fold_quantization(graph: Graph, call: relax.Expr) -> Value:
    """Round the floats that were quantised, where ``call`` makes them floats again."""
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
    return graph.definition(expr, "relax.tvm_fusion.round_clip") is not None


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
    whole = graph.definition(value.args[0], "relax.tvm_fusion.round_clip")
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
