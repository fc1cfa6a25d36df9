# SPDX-License-Identifier: Apache-2.0
"""Normal form of bounds on the elements of a tensor: one relu, one relu6 or one clip.

::

    maximum(x, 0)              ->   relu(x)
    minimum(maximum(x, 0), 6)  ->   clip(x, 0, 6), which is what relax.op.nn.relu6 builds
    clip(clip(x, a, b), c, d)  ->   clip(x, e, f)        the inner one having no other reader
    minimum(x, 6)              ->   clip(x, -inf, 6)
    clip(x, -inf, inf)         ->   x

The bounds come from ``relax.clip``, ``relax.nn.relu``, ``relax.maximum`` and ``relax.minimum`` with
a constant, and the PrimFuncs that TVM's ONNX importer emits for Clip. Whole bounds become integers,
as ``relax.op.nn.relu6`` writes them. Left alone: integer tensors, bounds that differ between
elements, NaN bounds, and a clip with its bounds the wrong way round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm_ffi
from tvm import relax, tirx

from ...core.constants import FLOATS, numbers, uniform
from ...core.expressions import Value, op_name
from ...core.graph import Graph
from .. import tir_patterns

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
    """Merge the bounds of ``call`` with those in front of it into the normal form."""
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
        match = tir_patterns.bound_of(graph, call)
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
