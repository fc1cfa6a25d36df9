# SPDX-License-Identifier: Apache-2.0
"""Tensors of floats that are made of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from ...core.constants import array_of, numbers, scaled, shifted, tensor_constant, uniform
from ...core.expressions import MOVES, Value, op_name
from ...core.graph import Graph
from ...op.elementwise import BYTE, bounds_of, in_bytes

DEQUANTIZE = "relax.dequantize"
ROUND_CLIP, MAX_POOL = "relax.tvm_fusion.round_clip", "relax.nn.max_pool2d"


class ByteTensor(NamedTuple):
    """The numbers ``scale * (data + low - zero)``.

    Parameters
    ----------
    data : relax.Expr
        uint8, or int8 where that was asked for.
    scale, low : float
        Constants; ``low`` is whole.
    zero : relax.Expr | None
        A scalar in float32 that is known only at run time; None for 0.
    """

    data: relax.Expr
    scale: float = 1.0
    low: float = 0.0
    zero: relax.Expr | None = None

    def floats(self, graph: Graph) -> relax.Expr:
        """The numbers that the bytes stand for."""
        value = relax.op.astype(self.data, "float32")
        if self.low:
            low = tensor_constant(np.array(self.low), "float32")
            value = relax.op.add(graph.emit(value), low)
        if self.zero is not None:
            value = relax.op.subtract(graph.emit(value), self.zero)
        if self.scale != 1:
            scale = tensor_constant(np.array(self.scale), "float32")
            value = relax.op.multiply(graph.emit(value), scale)
        return value


def rounding_of(graph: Graph, expr: relax.Expr) -> relax.Var | None:
    """The rounded numbers, few enough for bytes, that the elements of ``expr`` are multiples of."""
    value = graph.definition(expr)
    while True:
        factor = _uniform(scaled(value))
        if factor is None and op_name(value) not in (MAX_POOL, *MOVES):
            break
        expr = value.args[0] if factor is None else factor[0]
        value = graph.definition(expr)
    if op_name(value) != ROUND_CLIP or in_bytes(value):
        return None
    low, high = bounds_of(value)
    return expr if high - low <= BYTE else None


def bytes_of(
    graph: Graph, expr: relax.Expr, kinds: Sequence[str] = ("uint8",)
) -> ByteTensor | None:
    """The bytes that ``expr`` is made of; moved ones are bound in front of the current variable."""
    value = graph.definition(expr)
    if op_name(value) in ("relax.astype", DEQUANTIZE):
        if str(value.args[0].ty.dtype) not in kinds:
            return None
        return _dequantized(value) if op_name(value) == DEQUANTIZE else ByteTensor(value.args[0])
    if op_name(value) in MOVES:
        source = bytes_of(graph, value.args[0], kinds)
        if source is None:
            return None
        moved = relax.Call(value.op, [source.data, *value.args[1:]], value.attrs)
        return source._replace(data=graph.emit_once(moved))
    if op_name(value) == "relax.subtract" and _is_scalar(value.args[1]):
        source = bytes_of(graph, value.args[0], kinds)
        is_plain = source is not None and source.scale == 1 and source.zero is None
        return source._replace(zero=value.args[1]) if source is not None and is_plain else None
    factor, offset = _uniform(scaled(value)), _uniform(shifted(value))
    if factor is not None:
        source = bytes_of(graph, factor[0], kinds)
        return None if source is None else source._replace(scale=source.scale * factor[1])
    source = None if offset is None else bytes_of(graph, offset[0], kinds)
    if source is None or offset is None or source.scale != 1 or not offset[1].is_integer():
        return None
    return source._replace(low=source.low + offset[1])


def _dequantized(call: relax.Call) -> ByteTensor | None:
    """The bytes of an input or constant, if all have one scale and zero point."""
    data, scale, zero = call.args
    factor = uniform(numbers(scale))
    point = uniform(array_of(zero)) if isinstance(zero, GenericConst) else None
    if factor is None or point is None or str(call.ty.dtype) != "float32":
        return None
    return ByteTensor(data, factor, -point)


def pool_bytes(graph: Graph, call: relax.Call) -> Value:
    """Take maxima of bytes in place of those of the numbers they stand for."""
    source = bytes_of(graph, call.args[0])
    if source is None or source.scale <= 0:
        return None
    pooled = graph.emit_once(relax.Call(call.op, [source.data], call.attrs))
    return source._replace(data=pooled).floats(graph)


def _uniform(match: tuple[relax.Expr, np.ndarray] | None) -> tuple[relax.Expr, float] | None:
    """The operand and the number, where a constant is one number."""
    number = None if match is None else uniform(match[1])
    return None if match is None or number is None else (match[0], number)


def _is_scalar(expr: relax.Expr) -> bool:
    return not isinstance(expr, GenericConst) and expr.ty.ndim == 0
