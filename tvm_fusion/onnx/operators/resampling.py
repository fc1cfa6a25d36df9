# SPDX-License-Identifier: Apache-2.0
"""Resize and GridSample.

TVM's converter of Resize gets the sizes of all dimensions. Nodes that it gets wrong are written as
weighted sums of slices, axis by axis::

    y[i] = sum over t of weights[i, t] * x[places[i, t]]

The places and the weights are constants: any scale, any number of axes, antialiasing. The formulas
are those of ONNX's specification of Resize.

Images that a GridSample reads are cast to float32 or float64. Where it reflects at the centres of
corner pixels, and an axis has one pixel, the distance of the corners is 0, by which TVM divides.
With the pixel twice the axis has the same value everywhere::

    y = GridSample(x[n,c,1,w], grid)      ->      y = GridSample(Concat(x, x), grid)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..model.expansion import HALVES, Expansion
from ..model.graph_edits import attribute, set_attributes
from ..model.tensor_facts import INTEGER_TYPES, GraphFacts
from .casts import widen_resize, widen_sum
from .operator import Operator

SAMPLED = frozenset({"bicubic", "bilinear", "cubic", "linear", "nearest"})
"""Modes of GridSample, by the names of all versions."""

METHODS = ("nearest", "linear", "cubic")
MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize")


def _name_sizes(expansion: Expansion) -> None:
    """Give a Resize that :func:`resize_problem` accepts its sizes, and drop ``axes``."""
    node, facts = expansion.node, expansion.facts
    single = _single_corners(node, facts)
    if single:
        expansion.nodes += [node, _first_of_two(node, single, facts)]
    sizes = np.array(facts.shape(node.output[0]), np.int64)
    region = node.input[1] if len(node.input) > 1 else ""
    inputs = [node.input[0], region, "", facts.add_constant(f"{node.output[0]}/sizes", sizes)]
    del node.input[:]
    node.input.extend(inputs)
    set_attributes(node, ("axes", "keep_aspect_ratio_policy"))


def _single_corners(node: onnx.NodeProto, facts: GraphFacts) -> list[int]:
    """Axes of one pixel with aligned corners: TVM divides by the corners' distance."""
    if attribute(node, "coordinate_transformation_mode") != "align_corners":
        return []
    sizes = facts.shape(node.output[0]) or ()
    return [axis for axis, size in enumerate(sizes) if axis >= 2 and size == 1]


def _first_of_two(node: onnx.NodeProto, axes: list[int], facts: GraphFacts) -> onnx.NodeProto:
    """Resize some axes to two pixels; return the node that takes the first."""
    result = node.output[0]
    shape = [2 if axis in axes else size for axis, size in enumerate(facts.shape(result) or ())]
    node.output[0] = facts.add_tensor(f"{result}/corners", facts.dtype(result), shape)
    ends = np.ones(len(axes), np.int64)
    places = [
        facts.add_constant(f"{result}/{name}", value)
        for name, value in (
            ("starts", 0 * ends),
            ("ends", ends),
            ("axes", np.array(axes, np.int64)),
        )
    ]
    return helper.make_node("Slice", [node.output[0], *places], [result], name=node.name)


def resize_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why TVM's converter would translate a Resize wrongly, if any."""
    before, after = facts.shape(node.input[0]), facts.shape(node.output[0])
    if before is None or after is None:
        return "its sizes are only known at run time"
    if not 3 <= len(before) <= 5 or before[:2] != after[:2]:
        return f"it resizes {before} to {after}; only the last one to three dimensions can change"
    method, rounding = attribute(node, "mode", "nearest"), attribute(node, "nearest_mode")
    if method not in METHODS or rounding not in (None, *ROUNDINGS):
        return f"its mode is {method!r} with nearest_mode {rounding!r}"
    mode = attribute(node, "coordinate_transformation_mode", "half_pixel")
    if mode not in MODES:
        return f"its coordinate_transformation_mode is {mode!r}"
    if attribute(node, "antialias", 0):
        return "it uses antialias"
    axes = attribute(node, "axes")
    if mode == "tf_crop_and_resize" and axes is not None:
        return "it has axes and crops"
    scales = find_scales(node, facts, before, list(axes or range(len(before))))
    if scales is None:
        return "its scales are only known at run time"
    for size, scale, result in zip(before, scales, after, strict=True):
        if not math.isclose(size * scale, result, rel_tol=1e-5):
            return f"scale {scale:g} makes {size} pixels {size * scale:g}; expected a whole number"
    return None


def find_scales(
    node: onnx.NodeProto, facts: GraphFacts, before: tuple[int, ...], axes: list[int]
) -> list[float] | None:
    """Scale of each dimension, which sizes alone do not determine after rounding."""
    scales_name = node.input[2] if len(node.input) > 2 else ""
    constants = facts.constant(scales_name or (node.input[3] if len(node.input) > 3 else ""))
    if constants is None or len(constants) != len(axes):
        return None
    if scales_name:
        factors = [float(value) for value in constants]
    else:
        factors = [float(v) / before[axis] for v, axis in zip(constants, axes, strict=True)]
        policy = attribute(node, "keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            factors = [(min if policy == "not_larger" else max)(factors)] * len(factors)
    scales = [1.0] * len(before)
    for axis, factor in zip(axes, factors, strict=True):
        scales[axis] = factor
    return scales


MOST_TAPS = 64
"""Most terms of a sum; an antialiased reduction by 16 has so many in cubic mode."""

REGION = "tf_crop_and_resize"


_WIDE = frozenset(
    getattr(TensorProto, name) for name in ("DOUBLE", "INT32", "INT64", "UINT32", "UINT64")
)
"""Types of which TVM's own resizing, in float32, loses digits."""


def _finds_nearest(node: onnx.NodeProto, facts: GraphFacts) -> bool:
    """Return whether TVM rounds places as ONNX does: it multiplies by the inverse of the scale.

    In asymmetric mode TVM's are the exact ones, which a quotient in float32 can miss.
    """
    mode = attribute(node, "coordinate_transformation_mode", "half_pixel")
    if attribute(node, "mode", "nearest") != "nearest" or mode == "asymmetric":
        return True
    if mode == "align_corners":
        return False
    sizes = zip(facts.shape(node.input[0]) or (), facts.shape(node.output[0]) or (), strict=True)
    return all(math.frexp(after / max(before, 1))[0] in (0, 0.5) for before, after in sizes)


def expand_resize(expansion: Expansion) -> None:
    """Replace a Resize that :func:`resize_problem` refuses, or of wide numbers; name sizes else."""
    facts = expansion.facts
    is_sound = resize_problem(expansion.node, facts) is None
    is_exact = facts.dtype(expansion.input(0)) not in _WIDE
    if is_sound and is_exact and _finds_nearest(expansion.node, facts):
        _name_sizes(expansion)
        return
    axes = _resized_axes(expansion.node, facts)
    if axes is None:
        if is_sound:
            _name_sizes(expansion)
        return
    x, kind = expansion.input(0), facts.dtype(expansion.input(0))
    is_nearest = expansion.get("mode", "nearest") == "nearest"
    is_wide = is_nearest or kind in (TensorProto.FLOAT, TensorProto.DOUBLE)
    working = kind if is_wide else TensorProto.FLOAT
    x = x if is_wide else expansion.emit("Cast", x, to=working)
    shape = list(facts.shape(expansion.input(0)) or ())
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
        Value outside of the image.
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
    axes = list(attribute(node, "axes") or range(len(before)))
    scales = find_scales(node, facts, before, axes)
    if scales is None or (mode not in COORDINATES and mode != REGION):
        return None
    whole = np.tile([[0.0], [1.0]], len(axes))
    region = facts.constant(node.input[1]) if mode == REGION else whole
    if region is None or region.size != 2 * len(axes):
        return None
    ends = region.astype(np.float32).reshape(2, -1)
    result = []
    for index, axis in enumerate(axes):
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
        """Half pixels around the centre of the results."""
        adjustment = np.float32(self.result) / (self.scale * np.float32(self.size))
        return self.size / 2 * (1 - adjustment) + self.half_pixel()

    def pytorch(self) -> np.ndarray:
        """Half pixels; a single result is the first element."""
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
        """Places between the start and the end of a region, or its centre."""
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


def grid_sample_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why a grid cannot be sampled, if any."""
    mode, padding = attribute(node, "mode", "linear"), attribute(node, "padding_mode", "zeros")
    is_known = mode in SAMPLED and padding in ("zeros", "border", "reflection")
    return None if is_known else f"its mode is {mode!r} with padding_mode {padding!r}"


def expand_grid_sample(expansion: Expansion) -> None:
    """Repeat axes of one pixel between whose ends coordinates are reflected, and cast the image."""
    kind = expansion.facts.dtype(expansion.input(0))
    whole = kind in INTEGER_TYPES or kind == TensorProto.BOOL
    wide = TensorProto.FLOAT if kind in HALVES else TensorProto.DOUBLE if whole else kind
    axes = _single_pixels(expansion)
    if not axes and wide == kind:
        return
    x, grid = expansion.node.input
    if wide != kind:
        x, grid = (expansion.emit("Cast", name, to=wide) for name in expansion.node.input)
    for axis in axes:
        x = expansion.emit("Concat", x, x, axis=axis)
    result = expansion.emit("GridSample", x, grid)
    expansion.nodes[-1].attribute.extend(expansion.node.attribute)
    expansion.finish(result if wide == kind else expansion.emit("Cast", result, to=kind))


def _single_pixels(expansion: Expansion) -> list[int]:
    shape = expansion.facts.shape(expansion.input(0))
    reflects = expansion.get("padding_mode", "zeros") == "reflection"
    if shape is None or not reflects or not expansion.get("align_corners", 0):
        return []
    return [axis for axis, size in enumerate(shape) if axis > 1 and size == 1]


OPERATORS = (
    Operator("AffineGrid", is_defined=True, widen=widen_sum),
    Operator("GridSample", expand=expand_grid_sample, check=grid_sample_problem),
    Operator(
        "Resize",
        widen=widen_resize,
        expand=expand_resize,
        shape_inputs=(1, 2, 3),
        check=resize_problem,
    ),
    Operator("Upsample"),
)
