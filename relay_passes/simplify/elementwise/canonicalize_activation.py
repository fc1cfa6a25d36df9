# SPDX-License-Identifier: Apache-2.0
"""Fusion of a product of a tensor and its own gate into one activation.

::

    x * clip(x + 3, 0, 6) / 6             ->   tvm_fusion.hardswish(x)
    x * clip(x * (1 / 6) + 0.5, 0, 1)     ->   tvm_fusion.hardswish(x)
    x * sigmoid(x)                        ->   nn.silu(x)
    x * (erf(x / sqrt(2)) + 1) / 2        ->   nn.gelu(x)

The factors may come in any order and the division may stand at any of them; the values between
``x`` and the product must have no other reader. Left alone: gates with other slopes and bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from tvm import relax

from ...core.constants import FLOATS, scaled, shifted, uniform
from ...core.expressions import Value, op_name
from ...core.graph import Graph
from ...op.elementwise import hardswish
from .canonicalize_clip import clip_of


def canonicalize_activation(graph: Graph, call: relax.Expr) -> Value:
    """Recognise the product ``call`` as hardswish, SiLU or GELU."""
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
