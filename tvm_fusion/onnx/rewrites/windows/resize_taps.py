# SPDX-License-Identifier: Apache-2.0
"""Write the Resize nodes that TVM's importer gets wrong as weighted sums of slices, axis by axis.

::

    y[i] = sum over t of weights[i, t] * x[places[i, t]]

The places and the weights are constants: any scale, any number of axes, antialiasing. The formulas
are those of ONNX's specification of Resize.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...model.graph_edits import attribute
from ...model.tensor_facts import GraphFacts
from ..expansion import Expansion
from .resize import METHODS, find_scales, resize_problem

MOST_TAPS = 64
"""Most terms of a sum; an antialiased reduction by 16 has so many in cubic mode."""

REGION = "tf_crop_and_resize"


_WIDE = frozenset(
    getattr(TensorProto, name) for name in ("DOUBLE", "INT32", "INT64", "UINT32", "UINT64")
)
"""Types of which the importer's own resizing, in float32, loses digits."""


def expand_resize(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a Resize of known sizes that :func:`resize_problem` refuses, or of wide numbers."""
    facts = expansion.facts
    if resize_problem(node, facts) is None and facts.dtype(node.input[0]) not in _WIDE:
        return
    axes = _resized_axes(node, facts)
    if axes is None:
        return
    x, kind = node.input[0], facts.dtype(node.input[0])
    is_nearest = attribute(node, "mode", "nearest") == "nearest"
    is_wide = is_nearest or kind in (TensorProto.FLOAT, TensorProto.DOUBLE)
    working = kind if is_wide else TensorProto.FLOAT
    x = x if is_wide else expansion.emit("Cast", x, to=working)
    shape = list(facts.shape(node.input[0]) or ())
    for axis in axes:
        facts.declare(x, working, shape)
        x = _sum_of_slices(expansion, x, axis, len(shape), working)
        shape[axis.axis] = len(axis.places)
    expansion.finish(x if is_wide else expansion.emit("Cast", x, to=kind))


@dataclass(frozen=True)
class _Axis:
    """Resizing of one axis.

    Parameters
    ----------
    axis : int
        Its number.
    places : np.ndarray
        Elements that are read, [results, terms].
    weights : np.ndarray or None
        Their weights, [results, terms]; None for one term of weight 1.
    outside : np.ndarray
        Which results lie outside and have the value ``fill``.
    fill : float
        That value.
    """

    axis: int
    places: np.ndarray
    weights: np.ndarray | None
    outside: np.ndarray
    fill: float


def _resized_axes(node: onnx.NodeProto, facts: GraphFacts) -> list[_Axis] | None:
    """The axes that change; None if a size or a mode is not known, or a sum is too long."""
    before, after = facts.shape(node.input[0]), facts.shape(node.output[0])
    mode = attribute(node, "coordinate_transformation_mode", "half_pixel")
    method = attribute(node, "mode", "nearest")
    if before is None or after is None or method not in METHODS or 0 in before + after:
        return None
    given = list(attribute(node, "axes") or range(len(before)))
    scales = find_scales(node, facts, before, given)
    if scales is None or (mode not in COORDINATES and mode != REGION):
        return None
    whole = np.tile([[0.0], [1.0]], len(given))
    region = facts.constant(node.input[1]) if mode == REGION else whole
    if region is None or region.size != 2 * len(given):
        return None
    ends = region.astype(np.float32).reshape(2, -1)
    result = []
    for index, axis in enumerate(given):
        axis %= len(before)
        is_whole = mode != REGION or (ends[:, index] == (0, 1)).all()
        if is_whole and (before[axis], scales[axis]) == (after[axis], 1):
            continue
        scale = np.float32(scales[axis])
        line = _Line(before[axis], after[axis], scale, ends[0, index], ends[1, index])
        x = line.region() if mode == REGION else COORDINATES[mode](line)
        found = _axis(node, axis, line, x)
        if found is None:
            return None
        result.append(found)
    return result


@dataclass(frozen=True)
class _Line:
    """Sizes of an axis before and after, its scale, and the ends of the region that is kept.

    Places are computed in float32, as by ONNX Runtime: a result may lie at a pixel or just below.
    """

    size: int
    result: int
    scale: np.float32
    start: np.float32
    end: np.float32

    @property
    def pixels(self) -> np.ndarray:
        """Numbers of the results."""
        return np.arange(self.result, dtype=np.float32)

    def half_pixel(self) -> np.ndarray:
        """Centres of pixels stay in proportion."""
        return (self.pixels + 0.5) / self.scale - 0.5

    def symmetric(self) -> np.ndarray:
        """As half pixels, around the centre of the results."""
        adjustment = np.float32(self.result) / (self.scale * np.float32(self.size))
        return self.size / 2 * (1 - adjustment) + self.half_pixel()

    def pytorch(self) -> np.ndarray:
        """As half pixels, but a single result is the first element."""
        return self.half_pixel() if self.result > 1 else np.zeros(1, np.float32)

    def align_corners(self) -> np.ndarray:
        """The first and the last elements stay."""
        return self.pixels * (self.size - 1) / max(1, self.result - 1)

    def asymmetric(self) -> np.ndarray:
        """The first elements stay."""
        return self.pixels / self.scale

    def first_half(self) -> np.ndarray:
        """Centres of the results, from the start of the elements."""
        return (self.pixels + 0.5) / self.scale

    def region(self) -> np.ndarray:
        """From the start of a region to its end, or the centre of it."""
        last = self.size - 1
        if self.result == 1:
            return np.array([0.5 * (self.start + self.end) * last])
        step = (self.end - self.start) * last / (self.result - 1)
        return self.start * last + self.pixels * step


COORDINATES: dict[str, Callable[[_Line], np.ndarray]] = {
    "align_corners": _Line.align_corners,
    "asymmetric": _Line.asymmetric,
    "half_pixel": _Line.half_pixel,
    "half_pixel_symmetric": _Line.symmetric,
    "pytorch_half_pixel": _Line.pytorch,
    "tf_half_pixel_for_nn": _Line.first_half,
}
"""Places of the results between the elements."""

ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ceil": np.ceil,
    "floor": np.floor,
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
}


def _axis(node: onnx.NodeProto, axis: int, line: _Line, x: np.ndarray) -> _Axis | None:
    """The terms of an axis whose results lie at ``x``; None if they are too many."""
    last = line.size - 1
    is_cropped = attribute(node, "coordinate_transformation_mode") == REGION
    outside = ((x < 0) | (x > last)) & is_cropped
    fill = float(attribute(node, "extrapolation_value", 0.0))
    method = attribute(node, "mode", "nearest")
    if method == "nearest":
        rounding = ROUNDINGS.get(attribute(node, "nearest_mode", "round_prefer_floor"))
        if rounding is None:
            return None
        places = np.clip(rounding(x), 0, last).astype(np.int64)[:, None]
        return _Axis(axis, places, None, outside, fill)
    factor = min(1.0, float(line.scale)) if attribute(node, "antialias", 0) else 1.0
    reach = 1 if method == "linear" else 2
    first = int(np.floor(-reach / factor)) + 1
    if 2 - 2 * first > MOST_TAPS:
        return None
    around = np.floor(x)[:, None] + np.arange(first, 2 - first)
    distances = np.abs(around - x[:, None]) * factor
    a = attribute(node, "cubic_coeff_a", -0.75)
    weights = np.maximum(0, 1 - distances) if method == "linear" else _cubic(distances, a)
    if attribute(node, "exclude_outside", 0):
        weights = np.where((around < 0) | (around > last), 0, weights)
    weights /= weights.sum(axis=1, keepdims=True)
    return _Axis(axis, np.clip(around, 0, last).astype(np.int64), weights, outside, fill)


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Weights of the cubic convolution at distances from the result."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _sum_of_slices(expansion: Expansion, x: str, axis: _Axis, rank: int, kind: int) -> str:
    """Emit the terms of an axis and add them up."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    column = [-1 if other == axis.axis else 1 for other in range(rank)]
    total = ""
    for term in range(axis.places.shape[1]):
        places = expansion.constant("places", axis.places[:, term])
        part = expansion.emit("Gather", x, places, axis=axis.axis)
        if axis.weights is not None:
            weights = axis.weights[:, term].astype(dtype).reshape(column)
            part = expansion.emit("Mul", part, expansion.constant("weights", weights))
        total = expansion.emit("Add", total, part) if total else part
    if axis.outside.any():
        outside = expansion.constant("outside", axis.outside.reshape(column))
        total = expansion.emit("Where", outside, expansion.number(axis.fill, kind), total)
    return total
