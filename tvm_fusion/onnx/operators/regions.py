# SPDX-License-Identifier: Apache-2.0
"""RoiAlign: regions of images, each divided into bins whose samples lie between the pixels.

A bin is the mean of its samples, each of which is interpolated from four pixels; or, with mode
``max``, the largest of the pixels of all samples, each times its weight in the interpolation. The
latter is what ONNX defines by its reference and its tests.

A bin of MaxRoiPool is the largest of the whole pixels in it; the corners of a region are rounded to
pixels, both of which are inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from tvm import relax, te, tirx

from ..model.expansion import Expansion
from ..model.graph_edits import attribute, set_attributes
from ..model.tensor_facts import GraphFacts
from .casts import widen_sum
from .operator import Operator

HALF_PIXELS = 16
"""First opset that places pixels at their centres by default."""


def translate_roi_align(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Means or maxima of the bins of regions; an image out of range is the nearest one."""
    data, regions, images = inputs
    first, last = (relax.const(i, str(images.ty.dtype)) for i in (0, int(data.ty.shape[0]) - 1))
    images = relax.op.minimum(relax.op.maximum(images, first), last)
    bins = _Bins(
        (attributes.get("output_height", 1), attributes.get("output_width", 1)),
        float(attributes.get("spatial_scale", 1.0)),
        attributes.get("sampling_ratio", 0),
        attributes["coordinate_transformation_mode"] == b"half_pixel",
    )
    if attributes.get("mode", b"avg") == b"avg":
        return bins.means(data, regions, images)
    arguments = [data, regions, builder.normalize(images)]
    return builder.emit_te(bins.maxima, *arguments, primfunc_name_hint="roi_maxima")


def translate_max_roi_pool(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Maxima of the bins of regions, a row of which begins with its image; 0 of an empty bin."""
    data, regions = inputs
    height, width = attributes["pooled_shape"]
    scale = float(attributes.get("spatial_scale", 1.0))

    def pooled(data: te.Tensor, regions: te.Tensor) -> te.Tensor:
        shape = (regions.shape[0], data.shape[1], height, width)

        def bounds(n: Any, index: Any, axis: int) -> tuple[tirx.Expr, tirx.Expr]:
            """First pixel of a bin along rows or columns, and the number of its pixels."""
            dtype, size = regions.dtype, data.shape[2 + axis]
            start, end = (
                tirx.Cast("int32", _rounded(regions(n, place - axis) * tirx.const(scale, dtype)))
                for place in (2, 4)
            )
            length = tirx.Cast(dtype, tirx.max(end - start + 1, 1))
            length = length / tirx.const((height, width)[axis], dtype)
            low = tirx.Cast("int32", tirx.floor(tirx.Cast(dtype, index) * length)) + start
            high = tirx.Cast("int32", tirx.ceil(tirx.Cast(dtype, index + 1) * length)) + start
            low, high = (tirx.min(tirx.max(place, 0), size) for place in (low, high))
            return low, tirx.max(high - low, 0)

        def largest(n: Any, c: Any, i: Any, j: Any) -> tirx.Expr:
            (top, rows), (left, columns) = bounds(n, i, 0), bounds(n, j, 1)
            row, column = te.reduce_axis((0, rows), "row"), te.reduce_axis((0, columns), "column")
            image = tirx.max(tirx.min(tirx.Cast("int32", regions(n, 0)), data.shape[0] - 1), 0)
            return te.max(data(image, c, top + row, left + column), axis=[row, column])

        found = te.compute(shape, largest, name="largest_pixel")

        def shown(n: Any, c: Any, i: Any, j: Any) -> tirx.Expr:
            has_any = tirx.all(bounds(n, i, 0)[1] > 0, bounds(n, j, 1)[1] > 0)
            return tirx.Select(has_any, found(n, c, i, j), tirx.const(0, data.dtype))

        return te.compute(shape, shown, name="roi_pool")

    return builder.emit_te(pooled, data, regions, primfunc_name_hint="roi_pool")


def _rounded(value: tirx.Expr) -> tirx.Expr:
    """The nearest whole number, of two the one away from zero."""
    half, zero = (tirx.const(number, str(value.ty.dtype)) for number in (0.5, 0))
    return tirx.Select(value < zero, tirx.ceil(value - half), tirx.floor(value + half))


@dataclass(frozen=True)
class _Bins:
    """Bins of a region: their number, and where they are sampled.

    Parameters
    ----------
    size : tuple of int
        Rows and columns of bins.
    scale : float
        Size of an image over that of what the regions are given for.
    samples : int
        Samples along each axis of a bin; 0 for one a pixel.
    is_aligned : bool
        Whether pixels are at their centres. If not, regions have a pixel at least.
    """

    size: tuple[int, int]
    scale: float
    samples: int
    is_aligned: bool

    def means(self, data: relax.Expr, regions: relax.Expr, images: relax.Expr) -> relax.Expr:
        """The mean of each bin, [regions, channels, rows, columns]."""
        dtype = str(regions.ty.dtype)
        if self.is_aligned:
            # TVM scales regions after this, ONNX before.
            regions = relax.op.subtract(regions, relax.const(0.5 / self.scale, dtype))
        column = relax.op.expand_dims(relax.op.astype(images, dtype), 1)
        averaged = relax.op.vision.roi_align(
            data,
            relax.op.concat([column, regions], axis=1),
            pooled_size=self.size,
            spatial_scale=self.scale,
            sample_ratio=self.samples,
            aligned=self.is_aligned,
            layout="NCHW",
            mode="avg",
        )
        if self.samples or not self.is_aligned:
            return averaged
        # A region without an extent has no samples, and TVM divides by their number.
        corners = relax.op.split(regions, 2, axis=1)
        extents = relax.op.subtract(corners[1], corners[0])
        smallest = relax.op.min(extents, axis=1)
        has_any = relax.op.greater(smallest, relax.const(0, dtype))
        has_any = relax.op.expand_dims(has_any, [1, 2, 3])
        return relax.op.where(has_any, averaged, relax.const(0, str(data.ty.dtype)))

    def maxima(self, data: te.Tensor, regions: te.Tensor, images: te.Tensor) -> te.Tensor:
        """The largest weighted pixel of each bin, [regions, channels, rows, columns]."""
        shape = (regions.shape[0], data.shape[1], *self.size)

        def largest(n: Any, c: Any, i: Any, j: Any) -> tirx.Expr:
            axes = [self._axis(regions, n, axis) for axis in (0, 1)]
            steps = [te.reduce_axis((0, count), f"step{k}") for k, (*_, count) in enumerate(axes)]
            dtype = regions.dtype
            places = [
                _place(
                    start + (tirx.Cast(dtype, index) + _middle(step, count, dtype)) * length,
                    data.shape[2 + axis],
                )
                for axis, (index, step, (start, length, count)) in enumerate(
                    zip((i, j), steps, axes, strict=True)
                )
            ]
            rows, columns = places
            pixels = [
                row_share * share * data(tirx.Cast("int32", images(n)), c, row, column)
                for row, row_share in rows.pixels
                for column, share in columns.pixels
            ]
            value = tirx.max(tirx.max(*pixels[:2]), tirx.max(*pixels[2:]))
            inside = tirx.all(rows.is_inside, columns.is_inside)
            return te.max(tirx.Select(inside, value, tirx.const(0, data.dtype)), axis=steps)

        computed = te.compute(shape, largest, name="largest_pixel")

        def shown(n: Any, c: Any, i: Any, j: Any) -> tirx.Expr:
            # A region without an extent has no samples.
            counts = [self._axis(regions, n, axis)[2] for axis in (0, 1)]
            has_any = tirx.all(*(count > 0 for count in counts))
            return tirx.Select(has_any, computed(n, c, i, j), tirx.const(0, data.dtype))

        return te.compute(shape, shown, name="roi_maxima")

    def _axis(
        self, regions: te.Tensor, n: Any, axis: int
    ) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
        """Start of a region along rows or columns, length of a bin, and its number of samples."""
        dtype = regions.dtype
        offset = 0.5 if self.is_aligned else 0.0
        start, end = (
            regions(n, place - axis) * tirx.const(self.scale, dtype) - tirx.const(offset, dtype)
            for place in (1, 3)
        )
        length = end - start
        if not self.is_aligned:
            length = tirx.max(length, tirx.const(1, dtype))
        length = length / tirx.const(self.size[axis], dtype)
        if self.samples > 0:
            return start, length, tirx.const(self.samples, "int32")
        return start, length, tirx.Cast("int32", tirx.ceil(length))


def _middle(step: Any, count: Any, dtype: str) -> tirx.Expr:
    """The middle of one of some equal steps from 0 to 1."""
    return (tirx.Cast(dtype, step) + tirx.const(0.5, dtype)) / tirx.Cast(dtype, count)


@dataclass(frozen=True)
class _Place:
    """Two pixels around a place on an axis and their shares; whether it is in the image."""

    pixels: tuple[tuple[tirx.Expr, tirx.Expr], ...]
    is_inside: tirx.Expr


def _place(position: tirx.Expr, size: Any) -> _Place:
    dtype = str(position.ty.dtype)
    zero, last = tirx.const(0, dtype), tirx.Cast(dtype, size - 1)
    is_inside = tirx.all(position >= tirx.const(-1, dtype), position <= tirx.Cast(dtype, size))
    position = tirx.min(tirx.max(position, zero), last)
    final = tirx.Cast("int32", size - 1)
    # What is no number becomes no index outside of the image.
    low = tirx.max(tirx.min(tirx.Cast("int32", position), final), 0)
    share = position - tirx.Cast(dtype, low)
    one = tirx.const(1, dtype)
    return _Place(((low, one - share), (tirx.min(low + 1, final), share)), is_inside)


def name_pixels(expansion: Expansion) -> None:
    """Name the mode of a RoiAlign, whose default depends on the version of the operators."""
    name = "coordinate_transformation_mode"
    default = "half_pixel" if expansion.opset >= HALF_PIXELS else "output_half_pixel"
    set_attributes(expansion.node, **{name: expansion.get(name, default)})


def roi_align_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why regions cannot be pooled, if any."""
    for name in node.input[:2]:
        if facts.dims(name) is None or (name == node.input[0] and facts.shape(name) is None):
            return f"the shape of {name!r} is only known at run time"
    if node.op_type == "MaxRoiPool":
        return None
    mode = attribute(node, "mode", "avg")
    return None if mode in ("avg", "max") else f"its mode is {mode!r}; expected 'avg' or 'max'"


OPERATORS = (
    Operator("MaxRoiPool", check=roi_align_problem, translate=translate_max_roi_pool),
    Operator(
        "RoiAlign",
        widen=widen_sum,
        expand=name_pixels,
        check=roi_align_problem,
        translate=translate_roi_align,
    ),
)
